"""What is counted beside the gradients: observed norms, examples and the exporter's own time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import OFF, errors, outcomes, value
from torch_grad_exporter import Exporter, start_exporter

CAPTURES = "torch_grad_exporter_captures_total"
NORM = "torch_grad_global_norm"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def started(model: torch.nn.Module | Mapping[str, torch.nn.Module], **options: Any) -> Exporter:  # noqa: ANN401 - as `start_exporter` has them
    """Return an exporter without a server that samples every round."""
    return start_exporter(model, None, **{"every": 1, "collectors": OFF, **options})


def backward(model: torch.nn.Module, scale: float = 1.0) -> None:
    """Clear, and run one backward of the loss times the scale."""
    model.zero_grad()
    (model(batch()).square().mean() * scale).backward()


# Norms that the user observes


def test_steps_not_finite_stay_when_a_norm_is_observed() -> None:
    """Steps counted as not finite before the first observed norm stay counted, and later ones add up."""
    model = Perceptron()
    optimizer = sgd(model)
    with started(model, every=2) as exporter:

        def step(scale: float, observed: float | None = None) -> None:
            backward(model, scale)
            if observed is not None:
                exporter.observe(grad_norm=observed)
            for one in model.parameters():
                one.grad = torch.zeros_like(one)
            optimizer.step()

        for scale in (1.0, 1.0, math.nan, 1.0):
            step(scale)
        captures = value(exporter, CAPTURES)
        before = outcomes(exporter)
        while not before:
            step(math.nan)
            before = outcomes(exporter)
        step(1.0, observed=1.0)
        assert outcomes(exporter) == before
        assert value(exporter, NORM) == 1.0
        for _ in range(2):  # one is sampled, and one is not
            step(math.nan, observed=math.nan)
        assert outcomes(exporter) == {"stepped": before["stepped"] + 2}
        for _ in range(2):
            step(1.0, observed=2.0)
        assert outcomes(exporter) == {"stepped": before["stepped"] + 2}
        assert (value(exporter, CAPTURES) or 0) > (captures or 0)
        assert not errors(exporter)


def test_a_negative_norm_is_shown_as_nan() -> None:
    """A norm of -1, which DeepSpeed gives where it is not finite, shows as NaN, counts with its step and enters no histogram."""
    model = Perceptron()
    optimizer = sgd(model)
    with started(model, every=1000) as exporter:
        for given in (1.0, 2.0, -1.0):
            backward(model)
            exporter.observe(grad_norm=given)
            optimizer.step()
        assert math.isnan(value(exporter, NORM) or 0.0)
        assert outcomes(exporter) == {"stepped": 1}
        assert value(exporter, f"{NORM}_distribution_count") == 2
        assert value(exporter, f"{NORM}_distribution_sum") == pytest.approx(3.0)
        backward(model)
        exporter.observe(grad_norm=4.0)
        optimizer.step()
        assert value(exporter, NORM) == 4.0
        assert outcomes(exporter) == {"stepped": 1}


# What is observed and counted


def only_counted(exporter: Exporter) -> bool:
    """Return whether most rounds are only counted."""
    return (value(exporter, "torch_grad_exporter_timing_interval_steps") or 0) > 4


@pytest.mark.slow
def test_the_overhead_ratio_includes_counted_rounds() -> None:
    """Below a thousand steps the ratio is all that was spent after the first step over all of their time."""
    model = Perceptron()
    optimizer = sgd(model)
    exporter = started(model, every=4096, overhead_budget=0.0001)
    backward(model)
    optimizer.step()
    first = value(exporter, "torch_grad_exporter_overhead_seconds_total") or 0.0
    assert first > 0
    for _ in range(600):
        backward(model)
        optimizer.step()
    assert only_counted(exporter)
    exporter.close()
    spent = (value(exporter, "torch_grad_exporter_overhead_seconds_total") or 0.0) - first
    trained = value(exporter, "torch_train_step_duration_seconds_sum") or 0.0
    assert value(exporter, "torch_train_step_duration_seconds_count") == 600
    assert value(exporter, "torch_grad_exporter_overhead_ratio") == pytest.approx(spent / trained)


def test_counts_of_examples_never_fall() -> None:
    """Numbers of samples and tokens that are negative or not finite are left out."""
    with started(Perceptron()) as exporter:
        for given in (5.0, -3.0, math.nan, math.inf, 2.0):
            exporter.observe(samples=given, tokens=10 * given)
        assert value(exporter, "torch_train_samples_total") == 7
        assert value(exporter, "torch_train_tokens_total") == 70
