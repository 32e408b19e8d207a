"""Devices other than the CPU: temporaries are small however large the gradient is, and float64 is used only where there is one."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from tests.statistics.test_statistics import INF, NAN, Bare, plan_of, some, sparse
from tests.support.models import Conv1D
from tests.support.statistics import WITH_MOMENTS, Made, by_position
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.units import UnitLayout
from torch_grad_exporter.statistics import Column, device, single
from torch_grad_exporter.statistics.batches import STACKED_ELEMENTS
from torch_grad_exporter.statistics.blocks import Scratch
from torch_grad_exporter.statistics.eager import EagerStatistics

ON_DEVICE = functools.partial(EagerStatistics, on_host=frozenset())
"""Statistics that measure CPU tensors in the way of other devices."""

NARROW = functools.partial(ON_DEVICE, wide=lambda _device: torch.float32)
"""The same for a device that has no float64, as MPS."""

EXACT = [Column.ZEROS, Column.NANS, Column.INFS, Column.MIN, Column.MAX, Column.ZERO_UNITS, Column.DEAD_UNITS]


def row_of(statistics: EagerStatistics, module: torch.nn.Module, gradient: torch.Tensor, sample: int = 1) -> np.ndarray:
    """The columns of the gradient of a module's only parameter."""
    return by_position(statistics.measure(plan_of(module), [(0, gradient)], sample))[0]


def truth(gradient: torch.Tensor, layout: UnitLayout | None = None) -> list[float]:
    """The columns by numpy in float64, of a sample with a window of one."""
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
    """Counts and extremes are exact, the norm within its bound, the sum within that of its largest possible value."""
    assert np.array_equal(row[EXACT], np.array(expected)[EXACT], equal_nan=True)
    assert row[Column.NORM] == pytest.approx(expected[Column.NORM], rel=rel, nan_ok=True)
    largest = max(abs(expected[Column.MIN]), abs(expected[Column.MAX]))
    bound = rel * largest * elements if math.isfinite(largest) else 0.0
    assert row[Column.SUM] == pytest.approx(expected[Column.SUM], rel=rel, abs=bound, nan_ok=True)


# Chunks


class Largest(Made):
    """Notes the bytes of the largest tensor that was made. `look` says what counts of it."""

    def __init__(self, *known: torch.Tensor) -> None:
        self.bytes = 0
        super().__init__(self._note, *known)

    def _note(self, made: torch.Tensor) -> None:
        self.bytes = max(self.bytes, made.untyped_storage().nbytes())


MILLIONS = 10_500_000
LARGE: dict[str, Callable[[], torch.Tensor]] = {
    "float32": lambda: some((3000, 3500)),
    "a vector": lambda: some((MILLIONS,)),
    "bfloat16": lambda: some((3000, 3500), torch.bfloat16),
    "float64": lambda: some((3000, 3500)).double() * 1e200,
    "transposed": lambda: some((3500, 3000)).t(),
    "strided": lambda: some((3000, 7000))[:, ::2],
    "expanded": lambda: some((1, 3500)).expand(3000, 3500),
    "units larger than a chunk": lambda: some((2, 10_000_000)),
    "units larger than a chunk, transposed": lambda: some((10_000_000, 2)).t(),
    "channels last": lambda: some((1100, 1100, 3, 3)).to(memory_format=torch.channels_last),
    "a type of one byte": lambda: some((3000, 3500)).to(torch.float8_e5m2),
    "conjugated": lambda: some((3000, 2000), torch.complex64).conj(),
    "negated": lambda: torch.complex(torch.zeros(3000, 3500), some((3000, 3500))).conj().imag,
    "not finite": lambda: some((3000, 3500)).index_fill_(1, torch.tensor([7]), NAN).index_fill_(1, torch.tensor([9]), -INF),
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_large_gradient_is_measured_in_chunks_as_it_is_in_one_go(kind: str) -> None:
    """No operation makes a tensor of more than 64 MiB, whatever the type and the strides, and the numbers are those of numpy."""
    gradient = LARGE[kind]()
    module = Bare(gradient.shape, dtype=torch.complex64 if gradient.is_complex() else torch.float32)
    table, statistics = plan_of(module), ON_DEVICE(1, WITH_MOMENTS)
    unprepared = kind in ("a type of one byte", "conjugated", "negated")  # for CPU tensors these are made ready as a whole
    with Largest(gradient) as spy:
        measured = statistics.measure(table, [(0, gradient)], 1)
        again = statistics.norms(table, [(0, gradient)])
    assert unprepared or 1 << 20 < spy.bytes <= device.TEMPORARY_BYTES
    elements = gradient.numel() * (2 if gradient.is_complex() else 1)
    assert measured[0].packing.pieces is not None
    assert measured[0].elements.tolist() == [elements]
    row = by_position(measured)[0]
    assert_true(row, truth(gradient, table.tracked[0].units), elements)
    assert np.array_equal(by_position(again)[0], row[:1], equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "make", "side"),
    [
        (torch.float32, ON_DEVICE, 1 << 15),
        (torch.float32, NARROW, 1 << 13),
        (torch.float8_e5m2, ON_DEVICE, 1 << 14),
        (torch.complex64, ON_DEVICE, 1 << 14),
    ],
    ids=["float32", "no float64", "one byte", "complex"],
)
def test_temporaries_of_a_gradient_of_gigabytes(dtype: torch.dtype, make: Callable[..., EagerStatistics], side: int) -> None:
    """For a gradient of 4 GiB, without data, and others, contiguous, transposed or conjugated, no tensor exceeds 64 MiB."""
    shape = (side, side)
    table = plan_of(Bare(shape, dtype=dtype if dtype.is_complex else torch.float32, where="meta"))
    whole = torch.empty(shape, dtype=dtype, device="meta")
    statistics = make(9, WITH_MOMENTS)
    for gradient in (whole, whole.conj() if dtype.is_complex else whole.t()):
        with Largest(whole) as spy:
            (measured,) = statistics.measure(table, [(0, gradient)], 1)
            (norms,) = statistics.norms(table, [(0, gradient)])
        assert 1 << 20 < spy.bytes <= device.TEMPORARY_BYTES
        assert measured.packing.pieces is not None
        assert norms.packing.pieces is not None
        assert measured.vector.shape == (measured.packing.pieces.sum() * measured.packing.width,)


def test_temporaries_of_a_large_transposed_convolution() -> None:
    """Its units are not the first dimension; the last two dimensions, transposed in memory, cannot be viewed as one."""
    layer = torch.nn.ConvTranspose2d(4096, 2048, 3, groups=2, bias=False, device="meta")
    gradient = torch.empty_like(layer.weight).transpose(2, 3)
    with Largest(gradient) as spy:
        (measured,) = ON_DEVICE(9).measure(plan_of(layer), [(0, gradient)], 1)
    assert measured.units.tolist() == [2048]
    assert 1 << 20 < spy.bytes <= device.TEMPORARY_BYTES


def test_a_sum_of_gigabytes_is_made_in_chunks() -> None:
    """The local norm of two gradients of 2**30 elements that are to be added makes no tensor of more than 64 MiB."""
    first, second = torch.empty(2, 1 << 15, 1 << 15, device="meta")
    for pair in ((first, second), (first.t(), second.t()), (first.t(), None)):
        with Largest(first) as spy:
            norms = list(single.norms(*pair, Scratch()))
        assert len(norms) >= 128
        assert {tuple(norm.shape) for norm in norms if isinstance(norm, torch.Tensor)} == {(1,)}
        assert (1 << 20 if pair[1] is not None else 0) < spy.bytes <= device.TEMPORARY_BYTES


LAYERS = [torch.nn.ConvTranspose2d(256, 96, 11, groups=2, bias=False), torch.nn.Conv2d(96, 64, 21), Conv1D(1900, 1600)]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_units_keep_their_own_in_chunks(layer: torch.nn.Module) -> None:
    """Output units of large convolutions, wherever in memory, are those of the definition, also where a chunk ends amid one."""
    gradient = some(layer.weight.shape)
    gradient[:, 5] = 0
    gradient[3] = 0
    table = LayerIndex({"": layer}).table
    other = gradient.contiguous(memory_format=torch.channels_last) if gradient.dim() == 4 else gradient.t().contiguous().t()
    for one in (gradient, other):
        measured = ON_DEVICE(1, WITH_MOMENTS, chunk_elements=STACKED_ELEMENTS).measure(table, [(0, one)], 1)
        assert measured[0].packing.pieces.tolist()[0] > 5
        assert_true(by_position(measured)[0], truth(one, table.tracked[0].units), one.numel())


def test_each_part_of_a_unit_counts() -> None:
    """A unit that comes in several chunks is zero only if it is so in each of them, and one with a NaN in any is neither."""
    gradient = torch.zeros(4, 3 * STACKED_ELEMENTS)
    gradient[0, STACKED_ELEMENTS:] = 1.0
    gradient[1, -1] = 1e-30
    gradient[2, STACKED_ELEMENTS // 3] = NAN
    statistics = ON_DEVICE(1, chunk_elements=STACKED_ELEMENTS)
    (reading,) = statistics.read(plan_of(Bare(gradient.shape)), [(0, gradient)])
    assert reading.pieces.tolist() == [24]
    assert (reading.zero.tolist(), reading.alive.tolist()) == ([False, False, False, True], [True, True, False, False])


def test_gradients_in_chunks_among_others_and_in_several_readings() -> None:
    """Large and small ones, with units and without, read in two parts: each position has its own row, and its own dead units."""
    shapes = [(400, 500), (7,), (8, 5), (300_000,), (3, 100_000), (8, 5)]
    gradients = [some(shape, seed=seed) for seed, shape in enumerate(shapes)]
    table, statistics = plan_of(Bare(*shapes)), ON_DEVICE(1, WITH_MOMENTS, chunk_elements=STACKED_ELEMENTS)
    pairs = list(enumerate(gradients))
    for cut in range(len(pairs)):
        readings = [*statistics.read(table, pairs[:cut]), *statistics.read(table, pairs[cut:])]
        rows = by_position(statistics.finish(readings, cut))
        for position, gradient in pairs:
            assert_true(rows[position], truth(gradient, table.tracked[position].units), gradient.numel())


def test_gradients_in_chunks_each_in_a_reading_of_its_own() -> None:
    """As optimizers within the backward have them: a large one without units costs nothing of those that have units."""
    shapes = [(8, 5), (300_000,), (400, 500)]
    gradients = [some(shape, seed=seed) for seed, shape in enumerate(shapes)]
    table, statistics = plan_of(Bare(*shapes)), ON_DEVICE(1, WITH_MOMENTS, chunk_elements=STACKED_ELEMENTS)
    pairs = list(enumerate(gradients))
    readings = [reading for pair in pairs for reading in statistics.read(table, [pair])]
    rows = by_position(statistics.finish(readings, 0))
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
    """A gradient of random multiples of these values."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.tensor(values)[torch.randint(len(values), tuple(shape), generator=generator)]
    return chosen * torch.rand(tuple(shape), generator=generator)


NUMBERS: dict[str, Callable[[], torch.Tensor]] = {
    "ordinary": lambda: some((300, 700)),
    "huge": lambda: many(3e38, -3e38),
    "all the largest": lambda: torch.full((300, 700), 3.4e38),
    "tiny": lambda: many(1e-30, -1e-38),
    "subnormal": lambda: torch.full((300, 700), 1e-44),
    "mixed": lambda: many(1e-38, 1.0, 1e38, 0.0),
    "one large among small ones": lambda: torch.full((300, 700), 2.3e-4).index_fill(1, torch.tensor([0]), 1.0),
    "equal": lambda: torch.full((300, 700), 0.3),
    "zero": lambda: torch.zeros(300, 700),
    "a NaN": lambda: many(1.0).index_fill_(0, torch.tensor([3]), NAN),
    "infinite": lambda: many(1e38).index_fill_(0, torch.tensor([3]), INF),
    "infinite and NaN": lambda: many(INF, -INF, NAN),
    "small": lambda: many(1e-30, 1e30, shape=(3, 5)),
    "one": lambda: torch.tensor([[-2e38]]),
    "bfloat16": lambda: many(1e38, 1e-38).bfloat16(),
    "float16": lambda: many(6e4, 1e-7).half(),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_without_float64_the_numbers_are_right_all_the_same(kind: str) -> None:
    """On a device that has none, no float64 tensor is made, and norms and sums are right to 1e-5, also beyond float32."""
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


@pytest.mark.parametrize("where", ["meta", "cpu"])
def test_a_device_without_float64_is_asked_for_none(where: str) -> None:
    """Gradients of every kind and size, sparse ones and sums among them, in several samples: each tensor there has another type."""
    shapes = [(8, 6), (8, 6), (), (5,), (700, 333), (100_000,), (6, 3, 2, 2), (3, 100_000)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.complex64):
        table = plan_of(Bare(*shapes, dtype=dtype, where=where))
        gradients = [(i, torch.ones(shape, dtype=dtype, device=where)) for i, shape in enumerate(shapes)]
        statistics = NARROW(100, WITH_MOMENTS, chunk_elements=STACKED_ELEMENTS)
        with NoFloat64(where):
            for sample, members in enumerate((gradients, gradients[1:], gradients[:3], gradients)):
                statistics.measure(table, members, sample)
                statistics.norms(table, members)
            if where == "meta":  # on the CPU a norm alone is a number
                found = [*single.norms(gradients[4][1], gradients[4][1], Scratch(), lambda _device: torch.float32)]
                assert [norm.dtype for norm in found if isinstance(norm, torch.Tensor)] == [torch.float32]


def test_zeros_that_a_sparse_gradient_does_not_store_are_counted_exactly_in_float32() -> None:
    """More of them than float32 can count one by one arrive as the number that they are."""
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
def test_the_norm_of_a_whole_chunk_without_float64_keeps_its_bound(first: float, others: float) -> None:
    """Over the most elements that are measured at once it is right to 1e-5, all equal or so small that 1 swallows their squares."""
    gradient = torch.full((device.CHUNK_ELEMENTS,), others)
    gradient[0] = first
    row = row_of(NARROW(1), Bare(gradient.shape), gradient)
    expected = math.hypot(float(gradient[0]), float(gradient[1]) * math.sqrt(len(gradient) - 1))
    assert row[Column.NORM] == pytest.approx(expected, rel=1e-5)


def test_dead_units_without_float64_are_the_same() -> None:
    """What is remembered of units needs no float64: over random samples both ways agree, unit parts in chunks included."""
    shapes = [(3, 2), (2, 200_000), (4, 3)]
    table = plan_of(Bare(*shapes))
    statistics = [make(2, chunk_elements=STACKED_ELEMENTS) for make in (ON_DEVICE, NARROW)] + [EagerStatistics(2)]
    generator = torch.Generator().manual_seed(1)
    seen = set()
    for sample in range(8):
        gradients = []
        for position, shape in enumerate(shapes):
            alive = torch.rand(shape[0], 1, generator=generator) < 0.4
            gradients.append((position, torch.where(alive, torch.full(shape, 1e-40), torch.zeros(shape))))
        rows = [by_position(one.measure(table, gradients, sample)) for one in statistics]
        dead = [[int(found[position][Column.DEAD_UNITS]) for position in range(3)] for found in rows]
        assert dead[0] == dead[1] == dead[2]
        seen |= set(dead[0])
    assert len(seen) > 2
