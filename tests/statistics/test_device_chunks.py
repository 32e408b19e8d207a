"""Devices other than the CPU: small temporaries for gradients of any size, and float64 only where it exists."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from tests.statistics.test_statistics import INF, NAN, Bare, plan_of, some, sparse
from tests.support.statistics import WITH_MOMENTS, Made, by_position
from torch_grad_exporter.model.units import UnitLayout
from torch_grad_exporter.statistics import Column, device, single
from torch_grad_exporter.statistics.batches import STACKED_ELEMENTS
from torch_grad_exporter.statistics.eager import EagerStatistics

ON_DEVICE = functools.partial(EagerStatistics, on_host=frozenset())
"""Statistics that measure CPU tensors in the way of other devices."""

NARROW = functools.partial(ON_DEVICE, wide=lambda _device: torch.float32)
"""The same for a device that has no float64, as MPS."""

EXACT = [Column.ZEROS, Column.NANS, Column.INFS, Column.MIN, Column.MAX, Column.ZERO_UNITS, Column.DEAD_UNITS]


def row_of(statistics: EagerStatistics, module: torch.nn.Module, gradient: torch.Tensor, sample: int = 1) -> np.ndarray:
    """Return the columns of the gradient of a module's only parameter."""
    return by_position(statistics.measure(plan_of(module), [(0, gradient)], sample))[0]


def truth(gradient: torch.Tensor, layout: UnitLayout | None = None) -> list[float]:
    """Return the columns by numpy in float64, of a sample with a window of one."""
    dense = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    values = dense.resolve_neg().double().numpy().reshape(-1)
    units = 0 if layout is None else int((layout.rows(dense.double()).numpy() == 0).all(axis=1).sum())
    scale = np.abs(values[np.isfinite(values)]).max(initial=0.0) or 1.0
    with np.errstate(all="ignore"):
        norm = np.sqrt(np.square(values / scale).sum()) * scale
        total = values.sum()
    counts = [(values == 0).sum(), np.isnan(values).sum(), np.isinf(values).sum()]
    return [norm, *counts, values.min(), values.max(), units, units, total]


def assert_true(row: np.ndarray, expected: Sequence[float], elements: int, rel: float = 1e-6) -> None:
    """Check counts and extremes exactly, the norm within its bound and the sum within that of its largest possible value."""
    assert np.array_equal(row[EXACT], np.array(expected)[EXACT], equal_nan=True)
    assert row[Column.NORM] == pytest.approx(expected[Column.NORM], rel=rel, nan_ok=True)
    largest = max(abs(expected[Column.MIN]), abs(expected[Column.MAX]))
    bound = rel * largest * elements if math.isfinite(largest) else 0.0
    assert row[Column.SUM] == pytest.approx(expected[Column.SUM], rel=rel, abs=bound, nan_ok=True)


# Chunks


class Largest(Made):
    """Notes the bytes of the largest tensor that an operation made."""

    def __init__(self, *known: torch.Tensor) -> None:
        self.bytes = 0
        super().__init__(self._note, *known)

    def _note(self, made: torch.Tensor) -> None:
        self.bytes = max(self.bytes, made.untyped_storage().nbytes())


CHUNK = 1 << 18
SIDES = (700, 1000)
LARGE: dict[str, Callable[[], torch.Tensor]] = {
    "float64": lambda: some(SIDES).double() * 1e200,
    "transposed": lambda: some(SIDES).t(),
    "units larger than a chunk, transposed": lambda: some((300_000, 2)).t(),
    "a unit that is zero but for its second chunk": lambda: some((2, 300_000)).index_fill_(1, torch.arange(290_000), 0),
    "strided": lambda: some((SIDES[0], 2 * SIDES[1]))[:, ::2],
    "channels last": lambda: some((300, 300, 3, 3)).to(memory_format=torch.channels_last),
    "a type of one byte": lambda: some(SIDES).to(torch.float8_e5m2),
    "conjugated": lambda: some(SIDES, torch.complex64).conj(),
    "not finite": lambda: some(SIDES).index_fill_(1, torch.tensor([7]), NAN).index_fill_(1, torch.tensor([9]), -INF),
}
SELDOM = ("strided", "channels last", "a type of one byte", "conjugated")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.full] * (kind in SELDOM)) for kind in LARGE])
def test_a_large_gradient_is_measured_in_chunks(kind: str) -> None:
    """No operation makes a tensor larger than a chunk for any type or strides, and the numbers are those of numpy."""
    gradient = LARGE[kind]()
    module = Bare(gradient.shape, dtype=torch.complex64 if gradient.is_complex() else torch.float32)
    table, statistics = plan_of(module), ON_DEVICE(1, WITH_MOMENTS, chunk_elements=CHUNK)
    unprepared = kind in ("a type of one byte", "conjugated")  # for CPU tensors these are made ready as a whole
    with Largest(gradient) as spy:
        measured = statistics.measure(table, [(0, gradient)], 1)
        again = statistics.norms(table, [(0, gradient)])
    assert unprepared or 1 << 16 < spy.bytes <= 8 * CHUNK
    elements = gradient.numel() * (2 if gradient.is_complex() else 1)
    assert measured[0].packing.pieces is not None
    assert measured[0].elements.tolist() == [elements]
    row = by_position(measured)[0]
    assert_true(row, truth(gradient, table.tracked[0].units), elements)
    assert np.array_equal(by_position(again)[0], row[:1], equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.complex64, marks=pytest.mark.full)])
def test_temporaries_of_a_gradient_of_gigabytes(dtype: torch.dtype) -> None:
    """For a gradient of 1 or 2 GiB without data, contiguous, transposed or conjugated, no tensor exceeds 64 MiB."""
    shape = (1 << 14, 1 << 14)
    table = plan_of(Bare(shape, dtype=dtype, where="meta"))
    whole = torch.empty(shape, dtype=dtype, device="meta")
    statistics = ON_DEVICE(9, WITH_MOMENTS)
    for gradient in (whole, whole.conj() if dtype.is_complex else whole.t()):
        with Largest(whole) as spy:
            (measured,) = statistics.measure(table, [(0, gradient)], 1)
            (norms,) = statistics.norms(table, [(0, gradient)])
        assert 1 << 20 < spy.bytes <= device.TEMPORARY_BYTES
        assert measured.packing.pieces is not None
        assert norms.packing.pieces is not None
        units = 2 * (measured.units > 0).sum()  # how many are zero and dead follows the rows
        assert measured.vector.shape == (measured.packing.pieces.sum() * measured.packing.layout.width + units,)


def test_chunks_in_several_readings() -> None:
    """Large and small gradients, with units and without, read in any parts or one by one: each has its own row and dead units."""
    shapes = [(400, 500), (7,), (8, 5), (300_000,), (3, 100_000), (8, 5)]
    gradients = [some(shape, seed=seed) for seed, shape in enumerate(shapes)]
    gradients[2][3:6] = gradients[5][4:] = 0  # each has zero units of its own number
    table, statistics = plan_of(Bare(*shapes)), ON_DEVICE(1, WITH_MOMENTS, chunk_elements=STACKED_ELEMENTS)
    pairs = list(enumerate(gradients))
    cuts = [[pairs[:cut], pairs[cut:]] for cut in range(len(pairs))] + [[[pair] for pair in pairs]]
    for number, parts in enumerate(cuts):
        readings = [reading for part in parts for reading in statistics.read(table, part)]
        rows = by_position(statistics.finish(readings, number))
        for position, gradient in pairs:
            assert_true(rows[position], truth(gradient, table.tracked[position].units), gradient.numel())


# Without float64


class NoFloat64(Made):
    """Fails where a float64 tensor is made."""

    def __init__(self, kind: str) -> None:
        def look(made: torch.Tensor) -> None:
            assert made.dtype is not torch.float64 or made.device.type != kind

        super().__init__(look)


def many(*values: float, shape: Sequence[int] = (300, 700)) -> torch.Tensor:
    """Return a gradient of random multiples of these values."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.tensor(values)[torch.randint(len(values), tuple(shape), generator=generator)]
    return chosen * torch.rand(tuple(shape), generator=generator)


NUMBERS: dict[str, Callable[[], torch.Tensor]] = {
    "ordinary": lambda: some((300, 700)),
    "all the largest": lambda: torch.full((300, 700), 3.4e38),
    "subnormal": lambda: torch.full((300, 700), 1e-44),
    "one large among small ones": lambda: torch.full((300, 700), 2.3e-4).index_fill(1, torch.tensor([0]), 1.0),
    "a NaN": lambda: many(1.0).index_fill_(0, torch.tensor([3]), NAN),
    "bfloat16": lambda: many(1e38, 1e-38).bfloat16(),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_are_right_without_float64(kind: str) -> None:
    """On a device without float64 no float64 tensor is made, and norms and sums are right to 1e-5, also beyond float32."""
    gradient = NUMBERS[kind]()
    module = Bare(gradient.shape)
    table, statistics = plan_of(module), NARROW(1, WITH_MOMENTS, chunk_elements=STACKED_ELEMENTS)
    with NoFloat64("cpu"):
        measured = statistics.measure(table, [(0, gradient)], 1)
        again = statistics.norms(table, [(0, gradient)])
    assert measured[0].vector.dtype is torch.float32
    assert (measured[0].packing.pieces is not None) == (gradient.numel() > STACKED_ELEMENTS)
    assert_true(by_position(measured)[0], truth(gradient, table.tracked[0].units), gradient.numel(), rel=1e-5)
    assert np.array_equal(by_position(again)[0], by_position(measured)[0][:1], equal_nan=True)


@pytest.mark.slow
def test_a_device_without_float64_is_asked_for_none() -> None:
    """Gradients of every kind and size, also sparse ones and sums, make no float64 tensor on a device without float64."""
    shapes = [(8, 6), (8, 6), (), (5,), (70, 333), (50_000,), (6, 3, 2, 2), (3, 20_000)]
    for dtype in (torch.bfloat16, torch.complex64):
        table = plan_of(Bare(*shapes, dtype=dtype, where="meta"))
        gradients = [(i, torch.ones(shape, dtype=dtype, device="meta")) for i, shape in enumerate(shapes)]
        statistics = NARROW(100, WITH_MOMENTS, chunk_elements=STACKED_ELEMENTS)
        with NoFloat64("meta"):
            for sample, members in enumerate((gradients, gradients[1:])):
                statistics.measure(table, members, sample)
                statistics.norms(table, members)
            norms = [*single.norms(gradients[4][1], gradients[4][1], lambda _device: torch.float32)]
            assert [norm.dtype for norm in norms] == [torch.float32]


def test_sparse_zeros_are_exact_in_float32() -> None:
    """More zeros than float32 can count one by one arrive as the exact number."""
    rows = (1 << 24) + 3
    gradient = sparse(torch.tensor([[4, rows - 1]]), torch.tensor([[-2.0, 1.0], [3.0, 0.0]]), (rows, 2))
    module = torch.nn.Embedding(rows, 2, sparse=True, device="meta")
    for make in (NARROW, ON_DEVICE):
        row = row_of(make(1, WITH_MOMENTS), module, gradient)
        assert row[Column.ZEROS] == 2 * rows - 3
        assert (row[Column.MIN], row[Column.MAX]) == (-2.0, 3.0)
        assert row[Column.SUM] == pytest.approx(2.0, rel=1e-6)
        assert row[Column.NORM] == pytest.approx(math.sqrt(14), rel=1e-6)
    positive = sparse(torch.tensor([[4]]), torch.tensor([[1.0, 2.0]]), (9, 2))
    assert row_of(NARROW(1), torch.nn.Embedding(9, 2, sparse=True), positive)[Column.MIN] == 0.0


@pytest.mark.parametrize(("first", "others"), [(0.3, 0.3), (1.0, 2.3e-4)])
def test_the_norm_of_a_whole_chunk_in_float32(first: float, others: float) -> None:
    """Over a whole chunk in float32, the norm of equal elements, and of small ones beside a large one, is right to 1e-5."""
    gradient = torch.full((device.CHUNK_ELEMENTS,), others)
    gradient[0] = first
    row = row_of(NARROW(1), Bare(gradient.shape), gradient)
    expected = math.hypot(float(gradient[0]), float(gradient[1]) * math.sqrt(len(gradient) - 1))
    assert row[Column.NORM] == pytest.approx(expected, rel=1e-5)
