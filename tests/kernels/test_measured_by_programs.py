"""Samples measured by the programs, from the first comparison on, with all that the package does around them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given

from tests.kernels.conftest import WHERE, decided_at_once
from tests.support.gradients import LARGE, SMALL, Drawn, close, models, true_norm, true_sum
from tests.support.statistics import WITH_MOMENTS, by_position
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.eager import EagerStatistics, Measurement
from torch_grad_exporter.statistics.kernels.choice import Kernels


@pytest.fixture(scope="module")
def trusted() -> Kernels:
    """The decision for tensors of the CPU, after the comparisons."""
    errors = ErrorLog(())
    kernels = decided_at_once(errors)
    statistics = EagerStatistics(1, WITH_MOMENTS, on_host=frozenset(), kernels=kernels)
    model = torch.nn.Linear(3, 2)
    table = LayerIndex({"": model}).table
    for sample in range(3):
        statistics.measure(table, [(0, torch.randn(model.weight.shape, device=WHERE))], sample)
    assert kernels.taken_once()
    assert errors.counts() == {}
    return kernels


def on_host(measured: Sequence[Measurement]) -> list[Measurement]:
    """What was measured, copied to the CPU."""
    return [replace(one, vector=one.vector.cpu()) for one in measured]


def test_the_probe_is_read_rightly() -> None:
    """The programs pass the comparisons, after which nothing is compared any more."""
    errors = ErrorLog(())
    model = torch.nn.Linear(30, 20)
    table = LayerIndex({"": model}).table
    kernels = decided_at_once(errors)
    statistics = EagerStatistics(1, WITH_MOMENTS, on_host=frozenset(), kernels=kernels)
    once = []
    for sample in range(4):
        statistics.measure(table, [(0, torch.randn(20, 30, device=WHERE)), (1, torch.randn(20, device=WHERE))], sample)
        once.append(kernels.taken_once())
    assert once == [True, True, False, False]
    assert errors.counts() == {}
    (norms,) = statistics.norms(table, [(0, torch.randn(20, 30, device=WHERE))])
    assert norms.vector.shape == (1,)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of older versions of torch, once in a process
@given(drawn=models(SMALL | LARGE))
def test_any_gradients_of_any_model(trusted: Kernels, drawn: Sequence[Drawn]) -> None:
    """Of whatever gradients, those for the programs and others: counts and extremes exactly, norms and sums within rounding.

    The norms have the same bits when they are measured again.
    """
    model = torch.nn.ModuleList([one.module for one in drawn])
    table = LayerIndex({"": model}).table
    statistics = EagerStatistics(1, WITH_MOMENTS, on_host=frozenset(), kernels=trusted)
    gradients = [(place, one.gradient.to(WHERE)) for place, one in enumerate(drawn)]
    found = by_position(on_host(statistics.measure(table, gradients, 1)))
    norms = by_position(on_host(statistics.norms(table, gradients)))
    for place, row in found.items():
        values = drawn[place].flat
        nans = sum(map(math.isnan, values))
        assert (row[Column.NANS], row[Column.INFS]) == (nans, sum(map(math.isinf, values)))
        assert row[Column.ZEROS] == values.count(0.0)
        assert row[Column.ZERO_UNITS] == (drawn[place].units == 0).all(axis=1).sum()
        assert close(row[Column.MIN], math.nan if nans else min(values), 0)
        assert close(row[Column.MAX], math.nan if nans else max(values), 0)
        assert close(row[Column.NORM], true_norm(values), 1e-5)
        total, error = true_sum(values)
        assert error == math.inf or close(row[Column.SUM], total, 0, error)
        assert close(norms[place][0], row[Column.NORM], 0)
    assert not trusted.taken_once()
