"""Extremes and zeros in blocks, and in every fourth sample; and sums of squares over many blocks."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.statistics.test_statistics import Bare, plan_of, rows_of
from tests.support.scrape import value
from torch_grad_exporter import start_exporter
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.eager import SMALL, EagerStatistics
from torch_grad_exporter.statistics.host import BLOCK_ELEMENTS

NAN, INF = math.nan, math.inf


def same(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> bool:
    """Return whether they are equal; a NaN equals a NaN."""
    return np.array_equal(np.array(found), np.array(expected), equal_nan=True)


# Of large gradients, block by block

LARGE = (5 * BLOCK_ELEMENTS // 2 // 512, 512)


def ordinary() -> torch.Tensor:
    """Return a gradient of several blocks of both signs without any zero."""
    values = torch.randn(LARGE, generator=torch.Generator().manual_seed(0))
    return values.where(values.abs() > 1e-6, torch.ones(()))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [None, -0.0, NAN, -INF, 1e-7], ids=str)
def test_one_unusual_element_in_one_block(value: float | None, dtype: torch.dtype) -> None:
    """In a gradient without zeros, a single unusual element in any of its blocks is seen and counted once."""
    table = plan_of(Bare(LARGE, dtype=dtype))
    for base in (ordinary(), ordinary().abs(), -ordinary().abs()):
        for place in (0, LARGE[0] // 2, LARGE[0] - 1):
            gradient = base.to(dtype, copy=True)
            if value is not None:
                gradient[place, 7] = value
            (row,) = rows_of(EagerStatistics(9), table, [gradient]).values()
            values = gradient.double()
            assert row[Column.ZEROS] == (value == 0)
            assert row[Column.NANS] == (value is not None and math.isnan(value))
            assert row[Column.INFS] == (value is not None and math.isinf(value))
            assert row[Column.MIN] == pytest.approx(float(values.min()), rel=0, abs=0, nan_ok=True)
            assert row[Column.MAX] == pytest.approx(float(values.max()), rel=0, abs=0, nan_ok=True)
            assert row[Column.NORM] == pytest.approx(float(values.norm()), rel=1e-7, nan_ok=True)
            assert row[Column.ZERO_UNITS] == 0


def test_a_unit_of_zeros_in_one_block_alone() -> None:
    """A unit of zeros of both signs after blocks without zeros is counted, and one that lacks an element is not."""
    gradient = ordinary()
    gradient[-2] = -0.0
    gradient[-2, ::3] = 0.0
    gradient[-3, 1:] = 0.0
    gradient[-1, 0] = 0.0
    table = plan_of(Bare(LARGE))
    for one in (gradient, gradient.t().contiguous().t(), torch.stack([gradient, gradient], dim=2)[..., 0]):
        (row,) = rows_of(EagerStatistics(1), table, [one]).values()
        assert row[Column.ZEROS] == 2 * LARGE[1]
        assert row[Column.ZERO_UNITS] == row[Column.DEAD_UNITS] == 1


# Every fourth sample


MANY = (SMALL // 512 + 1, 512)


def sample_of(statistics: EagerStatistics, gradient: torch.Tensor, number: int) -> np.ndarray:
    """Return the row of one gradient of a large model."""
    (row,) = rows_of(statistics, plan_of_many(), [gradient], number).values()
    return row


@functools.cache
def plan_of_many() -> ParameterTable:
    """Return the table of a model that is not small, and keep the model."""
    module = Bare(MANY)
    table = plan_of(module)
    KEPT.append(module)
    return table


KEPT: list[torch.nn.Module] = []


def test_zeros_are_counted_in_every_fourth_sample() -> None:
    """Of a large model zeros and extremes are measured in the first sample and then in every fourth, all else in each."""
    statistics, gradient = EagerStatistics(9), torch.randn(MANY, generator=torch.Generator().manual_seed(0))
    gradient[3], gradient[4, 0] = 0, 7
    rows = [sample_of(statistics, gradient, number) for number in range(0, 300, 10)]
    counted = [number for number, row in enumerate(rows) if not math.isnan(row[Column.ZEROS])]
    assert counted[0] == 0
    assert [number for number in counted if number > 1] == [4, 8, 12, 16, 20, 24, 28]
    for number in counted:
        assert (rows[number][Column.ZEROS], rows[number][Column.MAX]) == (512, 7)
    assert {row[Column.NORM] for row in rows} == {rows[0][Column.NORM]}
    assert {row[Column.ZERO_UNITS] for row in rows} == {1}
    assert not any(row[Column.NANS : Column.INFS + 1].any() for row in rows)


def test_a_sample_captured_again_is_counted_again() -> None:
    """Where each sample is captured several times, as while gradients accumulate, the last capture of a fourth has zeros."""
    statistics, gradient = EagerStatistics(9), torch.ones(MANY)
    for number in range(13):
        last = [sample_of(statistics, gradient, number) for _ in range(3)][-1]
        # The last capture of the sample before is counted as well: it might have been the first of this one.
        assert math.isnan(last[Column.ZEROS]) == (number % 4 in (1, 2))


@pytest.mark.parametrize(("value", "column"), [(NAN, Column.NANS), (INF, Column.INFS), (-INF, Column.INFS)])
def test_what_is_not_finite_is_counted_in_any_sample(value: float, column: Column) -> None:
    """A NaN or Inf anywhere in any sample is counted, and with it zeros and extremes."""
    statistics, gradient = EagerStatistics(9), torch.ones(MANY)
    gradient[-1, -1], gradient[0, 0] = value, 0
    for number in range(9):
        row = sample_of(statistics, gradient, number)
        assert (row[column], row[Column.ZEROS]) == (1, 1)
        assert row[Column.MAX] == pytest.approx(float(gradient.max()), nan_ok=True)


def test_a_scrape_shows_the_last_counts() -> None:
    """Between two samples that count, the zero ratio stays; the norm is that of each sample."""
    model = torch.nn.Linear(600, 500, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    shown = []
    with start_exporter(model, port=None, every=1, moments=True) as exporter:
        assert value(exporter, "torch_grad_zero_ratio", layer="weight") is None
        for number in range(9):
            optimizer.zero_grad()
            inputs = torch.ones(1, 600)
            inputs[0, :number] = 0
            (model(inputs).sum() * (number + 1)).backward()
            optimizer.step()
            names = ("torch_grad_zero_ratio", "torch_grad_max", "torch_grad_norm")
            shown.append([value(exporter, name, layer="weight") for name in names])
    for number, (zeros, largest, norm) in enumerate(shown):
        counted = number - number % 4 if number >= 4 else min(number, 1)
        assert zeros == pytest.approx(counted / 600)
        assert largest == counted + 1
        assert norm == pytest.approx((number + 1) * math.sqrt(500 * (600 - number)))


# Sums of squares
