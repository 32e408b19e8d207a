"""On a GPU: phases are in its time, and nothing waits for it. Needs a CUDA device (`-m cuda`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.capture.test_cuda import nothing_waits, spin
from tests.support.models import Perceptron
from tests.support.scrape import errors, value
from torch_grad_exporter import Exporter, start_exporter

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # CUDA libraries warn of what is theirs
]

CYCLES = {"forward": 10_000_000, "backward": 20_000_000, "optimizer": 40_000_000}
"""What the GPU is made to spin in each phase: some milliseconds, far more than everything else in it."""

ROUNDS = 12


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield
    torch.cuda.synchronize()


class Spins(torch.autograd.Function):
    """The identity, whose backward spins."""

    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - autograd's own
        return x.clone()

    @staticmethod
    def backward(_context: Any, *gradients: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - autograd's own
        spin(CYCLES["backward"])
        return gradients[0]


class Slow(Perceptron):
    """A model that keeps the GPU busy in its forward and backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spin(CYCLES["forward"])
        return Spins.apply(super().forward(x))  # type: ignore[no-any-return,no-untyped-call]


def slow() -> tuple[Slow, torch.optim.Optimizer]:
    """Return the model, and an optimizer with a slow step."""
    model = Slow()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
    optimizer.register_step_pre_hook(lambda *_: spin(CYCLES["optimizer"]))
    return model, optimizer


def shown(exporter: Exporter) -> dict[str, float]:
    """Return the seconds of each phase."""
    phases = ("outside", "data", "forward", "backward", "optimizer")
    return {phase: value(exporter, "torch_train_phase_seconds_total", phase=phase) or 0.0 for phase in phases}


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Train one step."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("every", [1, 1000])
def test_phases_are_those_of_the_gpu(every: int) -> None:
    """Time that the GPU spins in the forward, backward and step is in these phases, in its proportion, and nothing waits."""
    model, optimizer = slow()
    x = torch.randn(5, 6)
    with start_exporter(model, None, every=every, overhead_budget=0.9) as exporter:
        for _ in range(3):
            step(model, optimizer, x)  # libraries initialise themselves
        torch.cuda.synchronize()
        step(model, optimizer, x)
        before = shown(exporter)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        with nothing_waits():
            for _ in range(ROUNDS):
                step(model, optimizer, x)
        end.record()
        torch.cuda.synchronize()
        for _ in range(ROUNDS):  # each reads some of the rounds before it
            step(model, optimizer, x)
            torch.cuda.synchronize()
        after = shown(exporter)
        found = {phase: after[phase] - before[phase] for phase in after}
        assert found["backward"] / found["forward"] == pytest.approx(2.0, rel=0.1)
        assert found["optimizer"] / found["forward"] == pytest.approx(4.0, rel=0.1)
        assert found["data"] == 0
        assert sum(found[phase] for phase in CYCLES) >= begin.elapsed_time(end) / 1000
        assert value(exporter, "torch_grad_exporter_untimed_steps_total", what="phases") == 0
        assert errors(exporter) == {}


def test_a_slow_loader_is_in_the_phase_data() -> None:
    """A slow loader is in the phase `data` if the GPU waits for it, and not if work on the GPU hides it."""
    seconds = 0.05
    spins = [0]

    def batches() -> Iterator[torch.Tensor]:
        while True:
            time.sleep(seconds)
            yield torch.randn(5, 6)

    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.register_step_post_hook(lambda *_: spin(spins[0]))
    with start_exporter(model, None, every=1, overhead_budget=0.9) as exporter:
        loader = iter(exporter.watch_loader(batches()))
        shares = []
        for cycles in (0, 1_000_000_000):  # half a second, more or less
            spins[0] = cycles
            step(model, optimizer, next(loader))
            before = shown(exporter)
            for _ in range(6):
                step(model, optimizer, next(loader))
            torch.cuda.synchronize()
            for _ in range(3):
                step(model, optimizer, torch.randn(5, 6))
                torch.cuda.synchronize()
            shares.append((shown(exporter)["data"] - before["data"]) / (6 * seconds))
        assert shares[0] > 0.7
        assert shares[1] < 0.5
        assert errors(exporter) == {}
