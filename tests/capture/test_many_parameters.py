"""What the exporter does for each parameter, counted in calls: with thousands of parameters that is what it costs.

A pass over all parameters that runs within a built-in, such as `map`, counts as one call.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch

from tests.capture.scenes import COUNTED
from tests.support.scrape import OFF
from torch_grad_exporter import Exporter, start_exporter

pytestmark = pytest.mark.slow

SIZES = 50, 250
"""Layers, of two parameters each, of two models: what the second one takes beyond the first is linear in the parameters."""


class Training:
    """A model of many small layers with its optimizer, which has stepped before."""

    def __init__(self, layers: int) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(layers)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 2)).square().mean().backward()
        self.optimizer.step()

    def start(self, **options: object) -> Exporter:
        return start_exporter(self.model, port=None, optimizers=self.optimizer, collectors=OFF, **{"every": 1, **options})


def calls(action: Callable[[], object]) -> int:
    """Return the calls of functions and built-ins that this thread makes from lines of Python."""
    count = itertools.count()

    def called(_frame: FrameType, event: str, _argument: object) -> None:
        if event in ("call", "c_call"):
            next(count)

    sys.setprofile(called)
    try:
        action()
    finally:
        sys.setprofile(None)
    return next(count)


def of_a_run(layers: int) -> dict[str, float]:
    """Return the calls of the start, and of steps beyond a plain step."""
    training = Training(layers)
    plain = calls(training.step)
    exporters: list[Exporter] = []
    work = {"start": calls(lambda: exporters.append(training.start()))}
    with exporters[0]:
        return work | {name: calls(training.step) - plain for name in ("first step", "second step", "later step")}


def test_calls_for_each_parameter() -> None:
    """A start walks through the modules a few times; a sample passes through all parameters, but hardly by lines of Python."""
    _, few, many = (of_a_run(layers) for layers in (SIZES[0], *SIZES))
    for name, most in {"start": 145, "first step": 45, "second step": 12, "later step": 9}.items():
        assert (many[name] - few[name]) / (2 * (SIZES[1] - SIZES[0])) <= most, name


def test_a_counted_step_takes_few_calls() -> None:
    """A step that is only counted takes as many calls for 100 parameters as for 6, and few."""

    def beyond(parameters: int) -> int:
        training = Training(parameters // 2)
        plain = calls(training.step)
        with training.start(**COUNTED):
            for _ in range(60):
                training.step()
            return min(calls(training.step) - plain for _ in range(40))

    few, many = beyond(6), beyond(100)
    assert 0 < few == many <= 64
