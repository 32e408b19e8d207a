"""Extremes by the bits of the elements, zeros in blocks, and sums of squares over many blocks."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.statistics.test_statistics import Bare, plan_of, rows_of
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.host import BLOCK_ELEMENTS
from torch_grad_exporter.statistics.eager import EagerStatistics
from torch_grad_exporter.statistics.extremes import Extremes

NAN, INF = math.nan, math.inf

VALUES: list[list[float]] = [
    [0.0, 0.0, 0.0],
    [0.0, -0.0, 0.0],
    [3.0, 1.0, 2.0],
    [-3.0, -1.0, -2.0],
    [3.0, 0.0, 2.0],
    [-3.0, -0.0, -2.0],
    [INF, 1.0, -1.0],
    [1.0, NAN, -1.0],
    [1.0, -NAN, -1.0],
    [1.0, NAN, 2.0],
    [-1.0, -NAN, -2.0],
    [-INF, NAN, INF],
]


def truth(values: Sequence[float]) -> list[float]:
    """Return the smallest and the largest by a loop; a negative zero is smaller than a positive one."""
    if any(map(math.isnan, values)):
        return [NAN, NAN]
    ordered = sorted(values, key=lambda value: (value, math.copysign(1.0, value)))
    return [ordered[0], ordered[-1]]


def found_in(*blocks: np.ndarray) -> list[list[float]]:
    """Return the smallest and the largest of each tensor of these blocks."""
    extremes = Extremes()
    for block in blocks:
        extremes.look(block)
    return np.stack(extremes.low_and_high(), axis=1).tolist()  # type: ignore[no-any-return]


def same(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> bool:
    """Return whether they are equal, with the signs of zeros; a NaN equals a NaN."""
    return [[*map(repr, pair)] for pair in found] == [[*map(repr, pair)] for pair in expected]


def as_type(values: Sequence[float], dtype: type) -> np.ndarray:
    """Return one tensor of these values in which a NaN keeps its sign."""
    block = np.abs(np.array([values], dtype=dtype))
    return np.copysign(block, np.array([math.copysign(1.0, value) for value in values], dtype=dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extremes_of_tensors_of_one_block(dtype: type) -> None:
    """Each tensor of a block has its own extremes, whichever of the others have one sign, zero or NaN."""
    for some in (VALUES, VALUES[::-1], *itertools.pairwise(VALUES), VALUES[:1] * 2):
        block = np.concatenate([as_type(values, dtype) for values in some])
        assert same(found_in(block), [truth(values) for values in block.tolist()])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.integers(1, 4))
def test_extremes_of_any_bits(bits: list[int], tensors: int) -> None:
    """The extremes are right for any bits of the elements."""
    block = np.array([bits[n:] + bits[:n] for n in range(tensors)], dtype=np.uint32).view(np.float32)
    values = [struct.unpack("<f", struct.pack("<I", one))[0] for one in bits]
    assert same(found_in(block), [truth(values)] * tensors)


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


# Sums of squares


def test_the_norm_of_a_gradient_of_many_blocks() -> None:
    """The norm of more blocks than are held at once is right, and has the same bits when measured alone."""
    gradient = torch.randn(80 * BLOCK_ELEMENTS, generator=torch.Generator().manual_seed(0))
    table, statistics = plan_of(Bare(gradient.shape)), EagerStatistics(9)
    (row,) = rows_of(statistics, table, [gradient]).values()
    assert row[Column.NORM] == pytest.approx(float(gradient.double().norm()), rel=1e-8)
    (norms,) = statistics.norms(table, [(0, gradient)])
    assert norms.vector.tolist() == [row[Column.NORM]]
