"""Which rounds are sampled, also with several optimizers, and samples that are lost."""

from __future__ import annotations

import pytest
import torch

from tests.capture.scenes import (
    BACKWARDS,
    CAPTURES,
    LAYER_CAPTURES,
    STEPS,
    Loop,
    loss_of,
    watching,
)
from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import lost, value, values
from torch_grad_exporter import Exporter

# Several optimizers


class Halves(torch.nn.Module):
    """Two layers side by side; the first output of the second layer may be left out of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, *, silent: bool) -> torch.Tensor:
        return self.left(x).square().mean() + self.right(x)[:, int(silent) :].square().mean()


def test_a_unit_is_dead_by_rounds_of_its_own_optimizer() -> None:
    """Gradients that the stepping optimizer does not use are not part of the past of the other one's units."""
    model = Halves()
    optimizers = {"left": sgd(model.left), "right": torch.optim.Adam(model.right.parameters(), lr=0.01)}

    def dead(exporter: Exporter) -> float | None:
        return value(exporter, "torch_grad_dead_ratio", layer="right")

    def train(*names: str, silent: bool) -> None:
        for name in names:
            model.zero_grad()
            model(batch(), silent=silent).backward()
            optimizers[name].step()

    with watching(model, optimizers=optimizers, dead_window=3) as exporter:
        train("right", "right", "right", silent=False)
        train("left", "left", "left", "left", "right", "right", "left", silent=True)
        assert dead(exporter) == 0
        train("left", "right", "left", silent=True)
        assert dead(exporter) == 0.25


def test_a_new_optimizer_every_epoch() -> None:
    """A run that makes its optimizer again and again does not gain series each time."""
    model = Perceptron()

    def epoch() -> None:
        optimizer = sgd(model)
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    with watching(model) as exporter:
        for _ in range(25):  # from 20 samples on there are z-scores and dead ratios too
            epoch()
        values(exporter)  # only the second scrape can say how many series the one before had
        before = len(values(exporter))
        for _ in range(25):
            epoch()
        assert len(values(exporter)) == before
        assert sum(count for (name, _), count in values(exporter).items() if name == STEPS) == 50


# Which rounds


@pytest.mark.slow
def test_numbered_runs_sample_the_same_steps() -> None:
    """Runs that number their steps alike with `step(number)` sample the same steps, wherever they began: one of each four."""

    def sampled(first: int) -> list[int]:
        loop, numbers = Loop(), []
        with watching(loop.model, every=4) as exporter:
            for number in range(first, 160):
                before = value(exporter, LAYER_CAPTURES, layer="first")
                loop.step()
                exporter.step(number)
                if value(exporter, LAYER_CAPTURES, layer="first") != before:
                    numbers.append(number)
        return [number for number in numbers if number >= 112]

    expected = sampled(101)
    assert sampled(110) == expected
    assert [number // 4 for number in expected] == list(range(28, 40))


# Samples that are lost, tensors without data, and sparse ones


def test_a_sample_that_is_lost_is_counted_once() -> None:
    """A short accumulation whose gradients were clipped before they could be read is one lost sample for two optimizers."""
    model = Perceptron()
    optimizers = [torch.optim.SGD(model.first.parameters(), lr=0.01), torch.optim.Adam(model.second.parameters(), lr=0.01)]
    with watching(model) as exporter:
        for backwards in (2, 2, 2, 1, 2, 2):
            model.zero_grad()
            for _ in range(backwards):
                loss_of(model).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            for optimizer in optimizers:
                optimizer.step()
        assert lost(exporter) == {"edited": 1}
        assert value(exporter, LAYER_CAPTURES, layer="first") == 5


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"moments": True, "weights": True}], ids=["default", "all"])
def test_no_hook_looks_at_data(options: dict[str, bool]) -> None:
    """A whole loop on `device="meta"`, where looking at data raises, runs without a failure."""
    with torch.device("meta"):
        model = torch.nn.Sequential(
            torch.nn.Embedding(10, 8), torch.nn.Conv1d(4, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(24, 3)
        )
        tokens = torch.zeros(2, 4, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(model, **options) as exporter:
        for step in range(20):
            optimizer.zero_grad()
            loss = model(tokens).square().mean()
            loss.backward()
            if step % 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            exporter.observe(loss=loss)
            optimizer.step()
        assert value(exporter, STEPS, optimizer="SGD") == 20
        assert value(exporter, BACKWARDS) == 20
        # Something was measured: copies to the host that never arrive are no reason to measure nothing.
        assert (value(exporter, CAPTURES) or 0) + sum(lost(exporter).values()) > 0
