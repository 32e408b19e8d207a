"""On a GPU: the times of layers are those of the GPU, and nothing waits for it. Needs a CUDA device (`-m cuda`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.capture.test_cuda import nothing_waits
from tests.support.scrape import errors, value, values
from torch_grad_exporter import start_exporter

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # CUDA libraries warn of what is theirs
]

CYCLES = 5_000_000
"""Some milliseconds: far more than all else that a layer does."""


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield
    torch.cuda.synchronize()


class Spins(torch.autograd.Function):
    """The identity, whose backward spins."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, cycles: int) -> torch.Tensor:  # noqa: ANN401 - autograd's own
        context.cycles = cycles
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401 - autograd's own
        torch.cuda._sleep(context.cycles)
        return gradients[0], None


class Layer(nn.Module):
    """Spins in its forward, and twice as long in its backward."""

    def __init__(self, times: int, *, owns: bool = True) -> None:
        super().__init__()
        self.cycles = times * CYCLES
        self.scale = nn.Parameter(torch.ones(4)) if owns else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(self.cycles)
        y = x if self.scale is None else x * self.scale
        return Spins.apply(y, 2 * self.cycles)  # type: ignore[no-any-return,no-untyped-call]


def test_each_layer_has_the_time_of_the_gpu() -> None:
    """Layers that spin for 1, 2 and 4 units, forward, and twice that backward; what has no parameters is in no time."""
    model = nn.Sequential(Layer(1), Layer(8, owns=False), nn.Sequential(Layer(2), nn.ReLU(inplace=True), Layer(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=True)
    x = torch.randn(3, 4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()  # libraries initialise themselves, and kernels are loaded
    with start_exporter(model, None, every=1, layer_times=True) as exporter:
        step()
        with nothing_waits():
            for _ in range(8):
                step()
        for _ in range(3):
            torch.cuda.synchronize()
            step()
        found = values(exporter)
        mean = {}
        for (metric, labels), seconds in found.items():
            if metric == "torch_layer_seconds_total":
                mean[dict(labels)["layer"], dict(labels)["pass"]] = seconds / found["torch_layer_timed_steps_total", labels]
        unit = mean["0", "forward"]
        expected = {(layer, "forward"): times * unit for layer, times in {"0": 1, "2.0": 2, "2.2": 4}.items()}
        expected |= {(layer, "backward"): 2 * seconds for (layer, _), seconds in expected.items()}
        assert mean == pytest.approx(expected, rel=0.15)
        assert value(exporter, "torch_grad_exporter_untimed_steps_total", what="layers") == 0
        assert errors(exporter) == {}


@pytest.mark.parametrize("mixed", [False, True])
def test_a_usual_model(mixed: bool) -> None:
    """A convolution, norms and linear layers, with autocast or without: all are timed, and nothing waits."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16 * 36, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True, capturable=True)
    x = torch.randn(8, 3, 8, 8)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", enabled=mixed, dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()

    with start_exporter(model, None, every=1, layer_times=True, activations=True) as exporter:
        step()
        with nothing_waits():
            for _ in range(20):
                step()
        for _ in range(3):
            torch.cuda.synchronize()
            step()
        for layer in ("0", "1", "4"):
            for name in ("forward", "backward"):
                assert (value(exporter, "torch_layer_seconds_total", **{"layer": layer, "pass": name}) or 0) > 0
                assert (value(exporter, "torch_layer_timed_steps_total", **{"layer": layer, "pass": name}) or 0) >= 20
        assert errors(exporter) == {}


def test_a_captured_step_disturbs_nothing() -> None:
    """A sampled step that is captured is not timed; its hooks are not part of the graph."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(5, 4)

    def step() -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    with start_exporter(model, None, every=1, layer_times=True) as exporter:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(4):
                optimizer.zero_grad()
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad()
        with torch.cuda.graph(graph):
            loss = step()
        before = loss.item()
        for _ in range(50):
            graph.replay()
        assert loss.item() < before
        for _ in range(4):
            optimizer.zero_grad()
            step()
            torch.cuda.synchronize()
        assert (value(exporter, "torch_layer_timed_steps_total", **{"layer": "0", "pass": "backward"}) or 0) >= 4
        assert errors(exporter) == {}
