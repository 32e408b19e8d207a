"""Adam's second moment is out of date before the loss spikes, in two trainings; in healthy ones it is not."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.support.scrape import OFF, values
from tests.support.tools import eventually
from torch_grad_exporter import start_exporter

Batch = Callable[[int], tuple[torch.Tensor, torch.Tensor]]

STEPS, BEGIN = 1160, 1100


def mlp(inputs: int) -> nn.Sequential:
    """A small regression model."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def waking(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch in which half of the inputs, nearly silent until then, begin to grow at the step `BEGIN`."""
    x = torch.randn(64, 16)
    y = torch.sin(x[:, :8].sum(1, keepdim=True)) + 0.3 * torch.randn(64, 1)
    x[:, 8:] *= 0.01 * 1.2 ** max(0, step - BEGIN) if step < BEGIN + 40 else 10.0
    return x, y


def even(_step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch like all others."""
    x = torch.randn(64, 16)
    return x, torch.sin(x[:, :8].sum(1, keepdim=True)) + 0.3 * torch.randn(64, 1)


def whole() -> Batch:
    """Return the same batch at all steps, which the model can learn to nothing."""
    x = torch.randn(256, 8)
    y = torch.sin(1.5 * x.sum(1, keepdim=True)) + 0.5 * x[:, :1] * x[:, 1:2]
    return lambda _step: (x, y)


def out_of_bounds(ratios: dict[str, float]) -> bool:
    """Return whether this is what `SpikeAhead` looks for."""
    return not 0.02 <= max(ratios.values()) <= 8


def trained(model: nn.Module, rate: float, batch: Batch) -> tuple[list[float], list[dict[str, float]], set[str]]:
    """Train, and return the losses, the ratios by layer, and the names of the problems that there ever were."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    losses: list[float] = []
    ratios: list[dict[str, float]] = []
    alerts: set[str] = set()
    with start_exporter(model, None, every=1, optimizer_state=True, collectors=OFF) as exporter:
        for step in range(STEPS):
            x, y = batch(step)
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            found = values(exporter) if step > 1000 else {}
            ratios.append({dict(labels)["layer"]: n for (name, labels), n in found.items() if name == "torch_optimizer_rms_ratio"})
            if step > 1000 and out_of_bounds(ratios[step]) and not alerts:  # the rules are judged a few times a second
                assert eventually(lambda: alerts.update(problem.alert for problem in exporter.problems()) or alerts)
    return losses, ratios, alerts


def spike(losses: list[float]) -> int:
    """Return the first step from 1051 on whose loss is three times the median of the 50 before."""
    return next(step for step in range(1051, STEPS) if losses[step] > 3 * statistics.median(losses[step - 50 : step]))


def ahead(ratios: list[dict[str, float]], before: int) -> int:
    """Return how many steps before this one a ratio was out of bounds first, 50 at most; 0 if none was."""
    wrong = [step for step in range(max(1001, before - 50), before) if out_of_bounds(ratios[step])]
    return before - wrong[0] if wrong else 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 4))])
@pytest.mark.parametrize("kind", ["waking", "whole"])
def test_it_comes_before_the_loss(kind: str, seed: int) -> None:
    """`SpikeAhead` fires in both runs, and its condition holds ten steps and more before the loss has tripled."""
    torch.manual_seed(seed)
    model, rate, batch = (mlp(16), 1e-3, waking) if kind == "waking" else (mlp(8), 1e-2, whole())
    losses, ratios, alerts = trained(model, rate, batch)
    assert ahead(ratios, spike(losses)) >= 10
    assert "SpikeAhead" in alerts


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 20))])
def test_healthy_runs_are_silent(seed: int) -> None:
    """No ratio is out of bounds at any step of a run whose batches are all alike."""
    torch.manual_seed(seed)
    _, ratios, alerts = trained(mlp(16), 1e-3, even)
    assert not any(out_of_bounds(ratios[step]) for step in range(1001, STEPS))
    assert "SpikeAhead" not in alerts
