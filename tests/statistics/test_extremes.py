"""Extremes by the bits of the elements, the zeros of blocks without extremes at zero, and sums of squares over many blocks."""

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

from tests.statistics.test_statistics import Bare, assert_agrees, plan_of, rows_of
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.blocks import BLOCK_ELEMENTS
from torch_grad_exporter.statistics.eager import EagerStatistics
from torch_grad_exporter.statistics.extremes import Extremes
from torch_grad_exporter.statistics.squares import Sums

NAN, INF = math.nan, math.inf
TINY = {np.float32: 1e-45, np.float64: 5e-324}
"""The smallest subnormal numbers."""

VALUES: dict[str, list[float]] = {
    "one": [3.5],
    "one, negative": [-3.5],
    "a zero": [0.0],
    "a negative zero": [-0.0],
    "zeros": [0.0, 0.0, 0.0],
    "negative zeros": [-0.0, -0.0],
    "zeros of both signs": [0.0, -0.0, 0.0],
    "and the other way round": [-0.0, 0.0, -0.0],
    "mixed": [1.5, -2.0, 0.25, -0.125],
    "positive": [3.0, 1.0, 2.0],
    "negative": [-3.0, -1.0, -2.0],
    "positive and a zero": [3.0, 0.0, 2.0],
    "positive and a negative zero": [3.0, -0.0, 2.0],
    "negative and a zero": [-3.0, 0.0, -2.0],
    "negative and a negative zero": [-3.0, -0.0, -2.0],
    "infinite": [INF, 1.0, -1.0],
    "negative infinite": [-INF, 1.0, -1.0],
    "infinite on both sides": [INF, -INF],
    "nothing but infinite": [INF, INF],
    "nothing but negative infinite": [-INF, -INF],
    "a NaN": [1.0, NAN, -1.0],
    "a negative NaN": [1.0, -NAN, -1.0],
    "a NaN among positive ones": [1.0, NAN, 2.0],
    "a negative NaN among positive ones": [1.0, -NAN, 2.0],
    "a NaN among negative ones": [-1.0, NAN, -2.0],
    "a negative NaN among negative ones": [-1.0, -NAN, -2.0],
    "a NaN beside Inf": [-INF, NAN, INF],
    "a negative NaN beside Inf": [-INF, -NAN, INF],
    "nothing but NaN": [NAN, NAN],
    "nothing but negative NaN": [-NAN, -NAN],
    "NaN of both signs": [NAN, -NAN],
}


def truth(values: Sequence[float]) -> list[float]:
    """The smallest and the largest by a loop; a negative zero is smaller than a positive one."""
    if any(map(math.isnan, values)):
        return [NAN, NAN]
    ordered = sorted(values, key=lambda value: (value, math.copysign(1.0, value)))
    return [ordered[0], ordered[-1]]


def found_in(*blocks: np.ndarray) -> list[list[float]]:
    """The smallest and the largest of each tensor of these blocks."""
    extremes = Extremes()
    for block in blocks:
        extremes.look(block)
    return np.stack(extremes.low_and_high(), axis=1).tolist()  # type: ignore[no-any-return]


def same(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> bool:
    """Whether they are equal, with the signs of zeros; a NaN is a NaN."""
    return [[*map(repr, pair)] for pair in found] == [[*map(repr, pair)] for pair in expected]


def as_type(values: Sequence[float], dtype: type) -> np.ndarray:
    """One tensor of these values in which a NaN keeps its sign."""
    block = np.abs(np.array([values], dtype=dtype))
    return np.copysign(block, np.array([math.copysign(1.0, value) for value in values], dtype=dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", VALUES)
def test_extremes_of_one_tensor(kind: str, dtype: type) -> None:
    """Of numbers of every kind and sign, in either type, the smallest and the largest are those of a loop."""
    values = VALUES[kind]
    for some in (values, values[::-1], [*values * 40, *[TINY[dtype], 1.0] * (kind == "mixed")]):
        block = as_type(some, dtype)
        assert same(found_in(block), [truth(block[0].tolist())])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extremes_of_subnormal_numbers(dtype: type) -> None:
    """The numbers nearest to zero are not taken for zero."""
    tiny = TINY[dtype]
    for values in ([tiny, 1.0], [-tiny, 1.0], [-1.0, -tiny], [tiny, 2 * tiny], [-tiny, -2 * tiny], [tiny, -tiny]):
        block = as_type(values, dtype)
        assert same(found_in(block), [truth(block[0].tolist())])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extremes_of_tensors_of_one_block(dtype: type) -> None:
    """Each tensor of a block has its own, whichever of the others are of one sign, zero or NaN."""
    rows = [values for values in VALUES.values() if len(values) == 3]
    for some in (rows, rows[::-1], *itertools.pairwise(rows), [VALUES["mixed"][:3]] * 2):
        block = np.concatenate([as_type(values, dtype) for values in some])
        assert same(found_in(block), [truth(values) for values in block.tolist()])


def test_blocks_of_other_sizes_and_types_in_turn() -> None:
    """Blocks that differ from the last one in their type, or in how many tensors they have, leave nothing of it behind."""
    blocks = [
        as_type([-1.0, -2.0], np.float32),
        as_type([1.0, -2.0], np.float32),
        as_type([1e300, 2e300], np.float64),
        as_type([-5.0, 4.0, 3.0], np.float64),
        np.array([[1.0, 2.0], [-1.0, 1.0], [-3.0, -2.0]], dtype=np.float32),
        as_type([9.0], np.float32),
        as_type([-7.0, NAN], np.float32),
        as_type([0.5, -0.5], np.float32),
    ]
    assert same(found_in(*blocks), [truth(row) for block in blocks for row in block.tolist()])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.integers(1, 4))
def test_extremes_of_any_bits(bits: list[int], tensors: int) -> None:
    """Whatever the bits of the elements are."""
    block = np.array([bits[n:] + bits[:n] for n in range(tensors)], dtype=np.uint32).view(np.float32)
    values = [struct.unpack("<f", struct.pack("<I", one))[0] for one in bits]
    assert same(found_in(block), [truth(values)] * tensors)


# Of large gradients, block by block

LARGE = (5 * BLOCK_ELEMENTS // 2 // 512, 512)


def ordinary() -> torch.Tensor:
    """A gradient of several blocks of both signs without any zero."""
    values = torch.randn(LARGE, generator=torch.Generator().manual_seed(0))
    return values.where(values.abs() > 1e-6, torch.ones(()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("value", [None, 0.0, -0.0, NAN, -NAN, INF, -INF, 1e-7, -1e-7], ids=str)
def test_one_unusual_element_in_one_block(value: float | None, dtype: torch.dtype) -> None:
    """In a gradient without zeros, of both signs or of one, a single element in any of its blocks is seen, and counted once."""
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
    """A zero unit in the last block, of zeros of both signs, after blocks without any zero; and one that only lacks an element."""
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


def test_small_gradients_of_one_sign_among_others() -> None:
    """Gradients that share their calls, some of which are of one sign, zero or NaN, are measured as if each were alone."""
    shape = (6, 4)
    some = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    gradients = [some, some.abs(), -some.abs(), some * 0, -(some * 0).abs(), some * NAN, some.clamp(min=0), some.clamp(max=0), some]
    table = plan_of(Bare(*[shape] * len(gradients)))
    for together in (gradients, gradients[:1] * 9):
        rows = rows_of(EagerStatistics(9), table, together)
        for position, gradient in enumerate(together):
            alone = rows_of(EagerStatistics(9), table, [gradient])[0]
            assert [*map(repr, alone)] == [*map(repr, rows[position])]
            kept = rows[position].copy()
            kept[Column.SUM] = float(gradient.double().sum())
            assert_agrees(kept, gradient, table, position)


# Sums of squares


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_over_many_blocks(dtype: type) -> None:
    """However many blocks there are, no piece is lost or counted twice, and a tensor's sum does not depend on the others."""
    generator = np.random.default_rng(0)
    blocks = [generator.standard_normal((3, size)).astype(dtype) for size in (1500, 7, 1024, 2048, 1025) * 70]
    together, alone = Sums(), [Sums() for _ in range(3)]
    for block in blocks:
        together.add(block)
        for row, sums in zip(block, alone, strict=True):
            sums.add(row.reshape(1, -1))
    exact = [math.fsum(float(x) ** 2 for block in blocks for x in block[row].tolist()) for row in range(3)]
    assert together.total().dtype == np.float64
    assert together.total().tolist() == pytest.approx(exact, rel=1e-7 if dtype is np.float32 else 1e-14)
    assert together.total().tolist() == [float(sums.total()[0]) for sums in alone]


def test_the_norm_of_a_gradient_of_many_blocks() -> None:
    """Where there are more blocks than are held at once, the norm is right, and measured alone it has the same bits."""
    gradient = torch.randn(80 * BLOCK_ELEMENTS, generator=torch.Generator().manual_seed(0))
    table, statistics = plan_of(Bare(gradient.shape)), EagerStatistics(9)
    (row,) = rows_of(statistics, table, [gradient]).values()
    assert row[Column.NORM] == pytest.approx(float(gradient.double().norm()), rel=1e-8)
    (norms,) = statistics.norms(table, [(0, gradient)])
    assert norms.vector.tolist() == [row[Column.NORM]]
