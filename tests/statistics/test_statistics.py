"""The statistics against their definitions in float64, on every path that a gradient may take."""

from __future__ import annotations

import functools
import itertools
import math
import sys
import types
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from tests.support.models import Conv1D
from tests.support.statistics import WITH_MOMENTS, by_definition, by_position
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics import Column, device
from torch_grad_exporter.statistics.batches import STACKED_ELEMENTS, batches
from torch_grad_exporter.statistics.blocks import BLOCK_ELEMENTS
from torch_grad_exporter.statistics.eager import EagerStatistics

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float64: 1e-12, torch.complex128: 1e-12}
NAN, INF = math.nan, math.inf


class Bare(torch.nn.Module):
    """A module with parameters of the given shapes and nothing else."""

    def __init__(self, *shapes: Sequence[int], dtype: torch.dtype = torch.float32, where: str = "cpu") -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            setattr(self, f"p{number:03}", torch.nn.Parameter(torch.zeros(tuple(shape), dtype=dtype, device=where)))


def plan_of(module: torch.nn.Module) -> ParameterTable:
    """The table over one model."""
    return LayerIndex({"": module}).table


def rows_of(
    statistics: EagerStatistics, table: ParameterTable, gradients: Sequence[torch.Tensor], sample: int = 1
) -> dict[int, np.ndarray]:
    """The measured columns of each position."""
    (measured,) = statistics.measure(table, list(enumerate(gradients)), sample)
    rows = measured.packing.rows(measured.vector.numpy(), len(measured.positions))
    return dict(zip(measured.positions.tolist(), rows, strict=True))


def assert_agrees(row: np.ndarray, gradient: torch.Tensor, table: ParameterTable, position: int, rel: float | None = None) -> None:
    """The measured row says what the reference says: counts exactly, values within the type's rounding."""
    expected = by_definition(gradient, table.tracked[position].units)
    rel = TOLERANCE.get(gradient.dtype, 1e-6) if rel is None else rel
    counts = [int(row[c]) for c in (Column.ZEROS, Column.NANS, Column.INFS, Column.ZERO_UNITS)]
    assert counts == [expected.zeros, expected.nans, expected.infs, expected.zero_units]
    assert row[Column.NORM] == pytest.approx(expected.norm, rel=rel, abs=0, nan_ok=True)
    assert row[Column.MIN] == pytest.approx(expected.min, rel=0, abs=0, nan_ok=True)
    assert row[Column.MAX] == pytest.approx(expected.max, rel=0, abs=0, nan_ok=True)
    rounding = 1e-12 * expected.elements * max(abs(expected.min), abs(expected.max))
    rounding = rounding if math.isfinite(rounding) else 0
    assert row[Column.SUM] == pytest.approx(expected.sum, rel=1e-9, abs=rounding, nan_ok=True)


def assert_measured(module: torch.nn.Module, gradients: Sequence[torch.Tensor], rel: float | None = None) -> None:
    """One gradient for each parameter of the module, measured together, agrees with the reference one by one."""
    table = plan_of(module)
    rows = rows_of(EagerStatistics(100, WITH_MOMENTS), table, gradients)
    assert sorted(rows) == list(range(len(gradients)))
    for position, gradient in enumerate(gradients):
        assert_agrees(rows[position], gradient, table, position, rel)


def some(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0, zeros: float = 0.2) -> torch.Tensor:
    """Random values, some of which are zero, and the second row all of it."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tuple(shape), generator=generator, dtype=dtype if dtype.is_complex else torch.float32)
    values = values * (torch.rand(tuple(shape), generator=generator) >= zeros)
    if values.dim() > 1 and values.shape[0] > 1:
        values[1] = 0
    return values.to(dtype)


def sparse(indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A sparse gradient, not coalesced."""
    return torch.sparse_coo_tensor(indices, values, tuple(shape), check_invariants=True)


# The reference itself


def test_the_reference_agrees_with_numpy() -> None:
    """The float64 definitions give what numpy gives, for real, complex and non-finite gradients."""
    gradient = some((7, 5), torch.complex64)
    array = gradient.numpy().astype(np.complex128)
    found = by_definition(gradient)
    assert found.norm == pytest.approx(np.linalg.norm(array), rel=1e-12)
    assert found.elements == 70
    assert found.zeros == int((array.real == 0).sum() + (array.imag == 0).sum())
    assert found.sum == pytest.approx(array.real.sum() + array.imag.sum(), rel=1e-9)
    assert by_definition(torch.tensor([1e-200, 1e-200], dtype=torch.float64)).norm == pytest.approx(
        math.sqrt(2) * 1e-200, rel=1e-12
    )
    assert math.isnan(by_definition(torch.tensor([INF, NAN])).norm)


# Types and shapes


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_types_of_one_byte_are_measured_as_float32(dtype: torch.dtype) -> None:
    """A gradient of an 8-bit type, with which torch hardly computes, is measured by its values, among others."""
    gradients = [some((4, 7)).to(dtype), some((4, 7), seed=1), some((300, 200), seed=2).to(dtype)]
    table = plan_of(Bare((4, 7), (4, 7), (300, 200)))
    rows = rows_of(EagerStatistics(9, WITH_MOMENTS), table, gradients)
    for position, gradient in enumerate(gradients):
        assert_agrees(rows[position], gradient.float(), table, position)


@pytest.mark.parametrize("shape", [(30, 40), (7,), (300, 400)], ids=str)
def test_norms_are_exact_enough_for_a_spread(shape: tuple[int, ...]) -> None:
    """Where moments are wanted, what is left of a norm without its mean is right to a millionth of it."""
    for constant, spread in ((1.0, 0.0), (0.3, 0.0), (0.3, 1e-3)):
        gradient = constant + spread * some(shape)
        statistics = EagerStatistics(9, WITH_MOMENTS)
        (row,) = rows_of(statistics, plan_of(Bare(shape)), [gradient]).values()
        rms, mean = row[Column.NORM] / math.sqrt(gradient.numel()), row[Column.SUM] / gradient.numel()
        found = rms * math.sqrt(max(0.0, 1 - (mean / rms) ** 2))
        assert found == pytest.approx(float(gradient.double().std(correction=0)), abs=1e-6 * rms)
        (again,) = statistics.norms(plan_of(Bare(shape)), [(0, gradient)])
        assert again.vector.tolist() == [row[Column.NORM]]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128], ids=str
)
@pytest.mark.parametrize("shape", [(), (1,), (9,), (4, 7), (6, 3, 2, 2), (1, 50), (50, 1)], ids=str)
def test_every_type_and_shape_agrees_with_the_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A small gradient of any floating type and any shape, 0-dimensional ones too, is measured as defined."""
    assert_measured(Bare(shape, dtype=dtype), [some(shape, dtype)])


def test_float16_does_not_overflow_in_its_own_precision() -> None:
    """The norm of finite float16 values is right where its square is beyond float16."""
    gradient = torch.full((100, 100), 6e4, dtype=torch.float16)
    (row,) = rows_of(EagerStatistics(9), plan_of(Bare((100, 100))), [gradient]).values()
    assert row[Column.NORM] == pytest.approx(100 * float(gradient[0, 0]), rel=1e-6)
    assert row[Column.INFS] == 0


def test_stacks_keep_the_gradients_of_one_shape_apart() -> None:
    """Many gradients of equal shapes, which share their calls, are measured as if each were alone."""
    shapes = [(8, 6)] * 40 + [(48,)] * 30 + [(6, 8)] * 5
    assert_measured(Bare(*shapes), [some(shape, seed=seed) for seed, shape in enumerate(shapes)])


def test_a_stack_is_split_where_it_leaves_the_cache() -> None:
    """More gradients of a shape than one stack holds are all measured, each in its own place."""
    shape = (STACKED_ELEMENTS // 8,)
    gradients = [torch.full(shape, float(2**number)) for number in range(20)]
    rows = rows_of(EagerStatistics(9), plan_of(Bare(*[shape] * 20)), gradients)
    norms = [rows[number][Column.NORM] for number in range(20)]
    assert norms == pytest.approx([2**number * math.sqrt(shape[0]) for number in range(20)], rel=1e-6)


def test_types_in_one_model_do_not_mix() -> None:
    """Gradients of one shape and several types are measured side by side."""
    module = torch.nn.Module()
    types = [torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float16, torch.complex64]
    for number, dtype in enumerate(types):
        module.register_parameter(f"p{number}", torch.nn.Parameter(torch.zeros(4, 4, dtype=dtype)))
    assert_measured(module, [some((4, 4), dtype, seed=number) for number, dtype in enumerate(types)])


def test_gradients_that_are_not_contiguous() -> None:
    """Transposed, strided, expanded, channels_last and conjugated gradients are measured as defined."""
    assert_measured(Bare((40, 30)), [some((30, 40)).t()])
    assert_measured(Bare((40, 30)), [some((40, 60))[:, ::2]])
    assert_measured(Bare((40, 30)), [torch.tensor(0.25).expand(40, 30)])
    assert_measured(torch.nn.Conv2d(5, 6, 3, bias=False), [some((6, 5, 3, 3)).to(memory_format=torch.channels_last)])
    assert_measured(Bare((4, 3), dtype=torch.complex64), [some((4, 3), torch.complex64).conj()])
    assert_measured(Bare((300, 400)), [some((400, 300)).t()])


def test_empty_gradients_beside_others() -> None:
    """A gradient without elements is left out and disturbs no other."""
    table = plan_of(Bare((0, 3), (4, 3), (0,)))
    assert sorted(rows_of(EagerStatistics(9), table, [torch.zeros(0, 3), some((4, 3)), torch.zeros(0)])) == [1]


def test_nothing_but_empty_gradients() -> None:
    """A model whose only gradient has no elements is measured without an exception, and yields no row."""
    table, statistics = plan_of(Bare((0, 3))), EagerStatistics(9)
    assert sum(len(m.positions) for m in statistics.measure(table, [(0, torch.zeros(0, 3))], 1)) == 0
    assert sum(len(m.positions) for m in statistics.norms(table, [(0, torch.zeros(0, 3))])) == 0


def test_a_gradient_with_a_graph_is_detached() -> None:
    """A gradient made with create_graph=True is measured, and the measurement carries no graph."""
    weight = torch.ones(3, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
    assert gradient.requires_grad
    (measured,) = EagerStatistics(9).measure(plan_of(Bare((3, 2))), [(0, gradient)], 1)
    assert not measured.vector.requires_grad
    assert measured.vector[Column.NORM].item() == pytest.approx(3 * math.sqrt(6))


# Sparse gradients


def test_an_uncoalesced_gradient_is_added_up_before_it_is_squared() -> None:
    """Entries that stand twice are one element: the norm is 3.873, where the stored values would give 3.0."""
    gradient = sparse(torch.tensor([[0, 0, 1]]), torch.ones(3, 3), (5, 3))
    module = torch.nn.Embedding(5, 3, sparse=True)
    (row,) = rows_of(EagerStatistics(9), plan_of(module), [gradient]).values()
    assert row[Column.NORM] == pytest.approx(math.sqrt(15), rel=1e-6)
    assert_measured(module, [gradient])
    assert_measured(module, [gradient.coalesce()])


def test_sparse_gradients_count_what_they_do_not_store() -> None:
    """Elements that a sparse gradient leaves out are zeros and take part in minimum and maximum."""
    module = torch.nn.Embedding(7, 2, sparse=True)
    for values in ([[1.0, 2.0], [3.0, 4.0]], [[-1.0, -2.0], [-3.0, 0.0]], [[NAN, 1.0], [-INF, 2.0]], [[0.0, 0.0], [0.0, -0.0]]):
        assert_measured(module, [sparse(torch.tensor([[4, 2]]), torch.tensor(values), (7, 2))])


def test_a_sparse_gradient_without_entries_is_all_zero() -> None:
    """A sparse gradient that stores nothing has as many zeros as it has elements."""
    nothing = sparse(torch.zeros(1, 0, dtype=torch.long), torch.zeros(0, 2), (7, 2))
    assert_measured(torch.nn.Embedding(7, 2, sparse=True), [nothing])


def test_a_sparse_gradient_counts_all_its_elements() -> None:
    """The number of elements is that of the dense tensor, whatever is stored."""
    gradient = sparse(torch.tensor([[4, 2]]), torch.ones(2, 2), (7, 2))
    (measured,) = EagerStatistics(9).measure(plan_of(torch.nn.Embedding(7, 2, sparse=True)), [(0, gradient)], 1)
    assert measured.elements.tolist() == [14]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_sparse_gradient_of_a_weight_with_units_has_units() -> None:
    """A sparse gradient of an ordinary weight is measured by its rows, stored or not."""
    gradient = sparse(torch.tensor([[0, 2, 0], [1, 1, 1]]), torch.tensor([1.0, 2.0, 3.0]), (4, 3))
    assert_measured(Bare((4, 3)), [gradient])
    assert_measured(Bare((4, 3)), [gradient.to_dense().to_sparse_csr()])


# Extreme values


@pytest.mark.parametrize(
    "rows",
    [
        [[1e-24] * 3, [0.0] * 3, [1.0] * 3],
        [[2e19] * 3, [0.0] * 3, [1.0] * 3],
        [[1e-24] * 3, [2e19] * 3, [1e-3, 1e3, 0.0]],
        [[1e-24, 0.0, 0.0], [1e-24] * 3, [0.0] * 3],
        [[3e-22] * 3, [1e-21, 2e-22, 0.0], [0.0] * 3],
        [[1e-44] * 3, [1e-40, 0.0, 0.0], [0.0, -0.0, 0.0]],
        [[-0.0] * 3, [0.0] * 3, [-0.0, 0.0, -0.0]],
        [[3e38] * 3, [-3e38] * 3, [1e-45] * 3],
        [[NAN, 1.0, 0.0], [0.0] * 3, [1.0] * 3],
        [[INF, 1.0, 0.0], [-INF, 0.0, 1.0], [0.0] * 3],
        [[NAN, INF, -INF], [NAN] * 3, [INF] * 3],
        [[-5.0, -6.0, -7.0], [-8.0, -5.0, -9.0], [-1.0] * 3],
        [[0.0] * 3] * 3,
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_extreme_rows_are_measured_exactly(rows: list[list[float]], dtype: torch.dtype) -> None:
    """Tiny, huge, subnormal, negative-zero and non-finite rows: counts exact, norms without under- or overflow."""
    gradient = torch.tensor(rows, dtype=torch.float64).to(dtype)
    assert_measured(Bare((3, 3)), [gradient])
    assert_measured(Bare((9,)), [gradient.reshape(-1)])


def test_values_that_only_float64_can_hold() -> None:
    """Float64 gradients of 1e-200 and 1e200 have their norms, though their squares are 0 and infinite."""
    gradient = torch.tensor([[1e-200, 1e-200], [1e200, 3e200], [0.0, 0.0]], dtype=torch.float64)
    assert_measured(Bare((3, 2), dtype=torch.float64), [gradient])
    assert_measured(Bare((2,), dtype=torch.float64), [gradient[0]])


def test_an_infinite_row_beside_a_huge_one_raises_no_warning() -> None:
    """An Inf beside float64 values whose squares overflow gives an infinite norm, silently."""
    gradient = torch.tensor([[INF, 1.0], [1e200, 1e200]], dtype=torch.float64)
    assert_measured(Bare((2, 2), dtype=torch.float64), [gradient])


def test_infinities_of_both_signs_in_different_blocks_raise_no_warning() -> None:
    """A big gradient with +Inf in one block and -Inf in another is counted, silently."""
    gradient = torch.ones(3 * BLOCK_ELEMENTS)
    gradient[5], gradient[-5] = INF, -INF
    (row,) = rows_of(EagerStatistics(9, WITH_MOMENTS), plan_of(Bare(gradient.shape)), [gradient]).values()
    assert (row[Column.INFS], row[Column.MIN], row[Column.MAX]) == (2, -INF, INF)
    assert math.isnan(row[Column.SUM])


# Big tensors


@pytest.mark.parametrize(
    ("size", "border"),
    [
        (BLOCK_ELEMENTS, BLOCK_ELEMENTS // 2),  # none
        (BLOCK_ELEMENTS + 1, BLOCK_ELEMENTS),  # none
        (3 * BLOCK_ELEMENTS // 2 + 3, 3 * BLOCK_ELEMENTS // 4 + 2),
        (2 * BLOCK_ELEMENTS, BLOCK_ELEMENTS),
    ],
)
def test_a_vector_of_several_blocks(size: int, border: int) -> None:
    """Zeros, NaN and Inf on both sides of the border of two blocks of a big vector are each counted once."""
    gradient = some((size,), seed=size)
    assert_measured(Bare((size,)), [gradient])
    gradient[border - 1], gradient[border] = 0.0, -0.0
    assert_measured(Bare((size,)), [gradient])
    gradient[border - 1], gradient[border], gradient[-1] = NAN, INF, -INF
    assert_measured(Bare((size,)), [gradient])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_matrix_of_several_blocks(dtype: torch.dtype) -> None:
    """Zero, tiny and non-finite rows on both sides of the border of two blocks of a big matrix are each counted once."""
    columns = 333
    border = BLOCK_ELEMENTS // columns
    rows = 2 * border
    gradient = some((rows, columns), dtype)
    gradient[border - 1], gradient[border] = 0.0, -0.0
    gradient[0], gradient[-1] = 0.0, 0.0
    assert_measured(Bare((rows, columns)), [gradient])
    gradient[border - 2, 0], gradient[border + 1, -1] = NAN, -INF
    assert_measured(Bare((rows, columns)), [gradient])


def test_rows_wider_than_a_block() -> None:
    """Units of more elements than a block holds are still whole units, with norms to six digits."""
    gradient = some((3, 400_000), seed=3)
    for layout in (gradient, gradient.t().contiguous().t(), gradient.reshape(3, 2, 200_000)):
        (row,) = rows_of(EagerStatistics(9), plan_of(Bare(layout.shape)), [layout]).values()
        assert row[Column.NORM] == pytest.approx(float(gradient.double().norm()), rel=1e-6)
        assert row[Column.ZERO_UNITS] == 1
    gradient[1, -1], gradient[2] = 1e-30, 0
    (row,) = rows_of(EagerStatistics(9), plan_of(Bare(gradient.shape)), [gradient]).values()
    assert row[Column.ZERO_UNITS] == 1


def test_a_nan_in_one_part_of_a_wide_row() -> None:
    """A unit that is larger than a block, with a NaN anywhere in it, counts neither as silent nor as alive."""
    statistics, table = EagerStatistics(2), plan_of(Bare((2, 700_000)))
    found = []
    for sample, places in enumerate([(slice(None),), (0, 350_000), (), ()]):
        gradient = torch.zeros(2, 700_000)
        if places:
            gradient[places] = 1 if sample == 0 else NAN
        found.append(int(rows_of(statistics, table, [gradient], sample)[0][Column.DEAD_UNITS]))
    assert found == [0, 0, 1, 2]


def test_a_large_transposed_convolution() -> None:
    """Output channels of a large grouped transposed convolution are its units, wherever in memory their elements are."""
    layer = torch.nn.ConvTranspose2d(64, 96, 11, groups=2, bias=False)
    gradient = some(layer.weight.shape)
    gradient[:, 5] = 0
    gradient[:32, 7] = 0
    assert gradient.numel() > BLOCK_ELEMENTS
    assert_measured(layer, [gradient])
    assert_measured(layer, [gradient.contiguous(memory_format=torch.channels_last)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("sizes", [(4, 3), (700, 900), (3, 400_000), (400_000, 3)])
@pytest.mark.parametrize("experts", [0, 2])
def test_weights_with_the_inputs_first(sizes: tuple[int, int], experts: int, dtype: torch.dtype) -> None:
    """Columns of GPT-2's weights, and of each expert, are the units, be they small or larger than a block."""
    inputs, outputs = sizes
    layer = Conv1D(outputs, inputs)
    if experts:
        layer = Bare((experts, inputs, outputs))
        layer.is_transposed = True
    shape = (experts, inputs, outputs) if experts else sizes
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    gradient[..., -1] = 0
    gradient[..., 0, :] = 0
    gradient[..., 1] = 0
    gradient[..., -1, 1] = 1e-30
    (row, *_) = rows_of(EagerStatistics(9), plan_of(layer), [gradient]).values()
    columns = gradient.reshape(-1, inputs, outputs).to(torch.complex128)
    assert row[Column.ZERO_UNITS] == int((columns == 0).all(dim=1).sum()) == max(1, experts)
    assert row[Column.NORM] == pytest.approx(float(columns.abs().square().sum().sqrt()), rel=1e-6)


def test_equal_elements_do_not_add_up_a_rounding_error() -> None:
    """A big gradient of equal elements, whose rounding errors all have one sign, has its norm to five digits."""
    gradient = torch.full((4 * BLOCK_ELEMENTS,), 0.3)
    (row,) = rows_of(EagerStatistics(9), plan_of(Bare(gradient.shape)), [gradient]).values()
    assert row[Column.NORM] == pytest.approx(float(gradient.double().norm()), rel=1e-5)


# Units


def test_transposed_convolutions_count_output_channels() -> None:
    """Output channels of a grouped transposed convolution that the loss ignores are its zero units."""
    torch.manual_seed(0)
    layer = torch.nn.ConvTranspose2d(4, 6, 3, groups=2)
    ignored = [1, 4, 5]
    output = layer(torch.randn(2, 4, 5, 5))
    output[:, [c for c in range(6) if c not in ignored]].square().sum().backward()
    assert layer.weight.grad is not None
    assert layer.bias is not None
    assert layer.bias.grad is not None
    table = plan_of(layer)
    statistics = EagerStatistics(9, WITH_MOMENTS)
    (measured,) = statistics.measure(table, [(0, layer.weight.grad), (1, layer.bias.grad)], 1)
    found = measured.packing.rows(measured.vector.numpy(), len(measured.positions))
    rows = dict(zip(measured.positions.tolist(), found, strict=True))
    assert rows[0][Column.ZERO_UNITS] == len(ignored)
    assert dict(zip(measured.positions.tolist(), measured.units.tolist(), strict=True)) == {0: 6, 1: 0}
    assert_agrees(rows[0], layer.weight.grad, table, 0)


def test_convolutions_count_output_channels() -> None:
    """A convolution's units are the first dimension of its weight, of a linear layer the rows."""
    gradient = some((6, 5, 3, 3))
    gradient[4] = 0
    (measured,) = EagerStatistics(9).measure(plan_of(torch.nn.Conv2d(5, 6, 3, bias=False)), [(0, gradient)], 1)
    assert measured.units.tolist() == [6]
    assert measured.vector[Column.ZERO_UNITS] == 2


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_embeddings_have_no_units(kind: type[torch.nn.Module]) -> None:
    """Rows of an embedding are no units: an absent token is not dead."""
    (measured,) = EagerStatistics(1).measure(plan_of(kind(5, 3)), [(0, torch.zeros(5, 3))], 1)
    assert measured.units.tolist() == [0]
    assert measured.vector[Column.ZERO_UNITS : Column.DEAD_UNITS + 1].tolist() == [0, 0]
    assert measured.vector[Column.ZEROS] == 15


# What belongs to the whole


def test_moments_are_summed_only_when_asked_for() -> None:
    """The column of sums stays 0 unless moments are on."""
    gradient = some((6, 5))
    (row,) = rows_of(EagerStatistics(9), plan_of(Bare((6, 5))), [gradient]).values()
    assert row[Column.SUM] == 0
    (row,) = rows_of(EagerStatistics(9, WITH_MOMENTS), plan_of(Bare((6, 5))), [gradient]).values()
    assert row[Column.SUM] == pytest.approx(math.fsum(gradient.double().reshape(-1).tolist()), rel=1e-12)


def test_norms_alone_are_bit_equal_to_those_of_the_measurement() -> None:
    """Measured again, all together or one by one, an untouched gradient has the same norm to the last bit."""
    shapes = [(8, 6), (8, 6), (8, 6), (), (5,), (5,), (700, 333), (100_000,), (32768,), (32768,), (128, 256), (128, 256)]
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64):
        table = plan_of(Bare(*shapes, dtype=dtype))
        gradients = [some(shape, dtype, seed=seed) for seed, shape in enumerate(shapes)]
        gradients[1] *= 1e-20
        statistics = EagerStatistics(9)
        before = {position: row[Column.NORM] for position, row in rows_of(statistics, table, gradients).items()}
        (together,) = statistics.norms(table, list(enumerate(gradients)))
        assert together.packing.width == 1
        assert dict(zip(together.positions.tolist(), together.vector.tolist(), strict=True)) == before
        for position, gradient in enumerate(gradients):
            (alone,) = statistics.norms(table, [(position, gradient)])
            assert alone.vector.tolist() == [before[position]], (dtype, shapes[position])


def test_norms_alone_agree_with_the_reference_on_extreme_values() -> None:
    """The second measurement handles tiny, huge and non-finite gradients as the first one does."""
    rows = [[1e-24] * 4, [2e19] * 4, [INF, 1, 0, 0], [NAN, INF, 0, 0], [0.0] * 4]
    table = plan_of(Bare(*[(4,)] * 5))
    (measured,) = EagerStatistics(9).norms(table, list(enumerate(torch.tensor(rows))))
    expected = [by_definition(torch.tensor(row)).norm for row in rows]
    assert measured.vector.tolist() == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_the_gradient_is_left_as_it_was() -> None:
    """Measuring changes no bit of a gradient, also where it measures a row again."""
    gradient = torch.cat([some((400, 300)), torch.full((3, 300), 1e-24), torch.full((2, 300), INF)])
    kept = gradient.clone()
    rows_of(EagerStatistics(9, WITH_MOMENTS), plan_of(Bare(gradient.shape)), [gradient])
    assert torch.equal(gradient, kept)


# Dead units


def dead_by_hand(history: list[str], window: int) -> bool:
    """Whether a unit is dead: `z`ero in each of its last `window` samples; those with a `n`an do not count."""
    known = [state for state in history if state != "n"]
    return bool(known) and all(state == "z" for state in known[-window:])


def unit_rows(states: str) -> torch.Tensor:
    """A weight's gradient, one row per unit: `z`ero, `a`live or with a `n`an."""
    return torch.tensor([{"z": [0.0, -0.0], "a": [0.0, 1e-30], "n": [NAN, 0.0]}[state] for state in states])


def dead_counts(samples: Sequence[str], window: int, numbers: Sequence[int] | None = None) -> list[int]:
    """The dead units after each sample of a weight whose units do what the letters say."""
    statistics, table = EagerStatistics(window), plan_of(Bare((len(samples[0]), 2)))
    found = []
    for number, states in zip(numbers or range(len(samples)), samples, strict=True):
        (row,) = rows_of(statistics, table, [unit_rows(states)], number).values()
        found.append(int(row[Column.DEAD_UNITS]))
    return found


@pytest.mark.parametrize("window", [1, 2, 5, 19, 20, 40])
def test_dead_units_are_those_silent_over_the_window(window: int) -> None:
    """Over random histories the dead units are those that were zero in each of the last samples of the window."""
    generator = np.random.default_rng(window)
    samples = ["za" * 8] + [
        "".join(generator.choice(list("zan"), p=p) for p in [(0.9, 0.05, 0.05), (0.5, 0.3, 0.2)] * 8) for _ in range(60)
    ]
    for silent in range(20, 50):  # long enough for the widest window
        samples[silent] = "zzz" + samples[silent][3:]
    histories = [[sample[unit] for sample in samples] for unit in range(16)]
    expected = [sum(dead_by_hand(h[: n + 1], window) for h in histories) for n in range(len(samples))]
    assert dead_counts(samples, window) == expected
    assert len(set(expected)) > 2


def test_a_unit_is_revived_by_one_sign_of_life() -> None:
    """One gradient that is not zero, however small, makes the count start anew."""
    assert dead_counts(["a", "z", "z", "z", "a", "z", "z", "z"], 3) == [0, 0, 0, 1, 0, 0, 0, 1]


def test_a_nan_neither_counts_nor_revives() -> None:
    """A sample in which a unit has a NaN changes nothing in how long it has been silent."""
    assert dead_counts(["a", "z", "n", "z", "n", "z", "n", "a", "n"], 3) == [0, 0, 0, 0, 0, 1, 1, 0, 0]


def test_a_unit_that_was_nothing_but_nan_is_not_dead() -> None:
    """A unit whose gradient was NaN from the first sample on was never silent, so it is not dead."""
    assert dead_counts(["nz"] * 4, 3) == [1, 1, 1, 1]


def test_a_unit_that_is_infinite_is_alive() -> None:
    """An infinite gradient is a sign of life."""
    statistics, table = EagerStatistics(2), plan_of(Bare((1, 2)))
    for number, value in enumerate([0.0, INF]):
        (row,) = rows_of(statistics, table, [torch.full((1, 2), value)], number).values()
    assert row[Column.DEAD_UNITS] == 0


def test_a_second_capture_of_a_sample_replaces_the_first() -> None:
    """A sample measured twice, as under accumulation, counts once, and only what was seen last counts."""
    assert dead_counts(["aa", "az", "za", "zz", "zz"], 2, [1, 2, 2, 3, 4]) == [0, 0, 0, 1, 2]


def test_a_parameter_that_is_missing_keeps_its_state() -> None:
    """Samples in which a parameter got no gradient leave its counts as they were, and those of the others go on."""
    statistics, table = EagerStatistics(3), plan_of(Bare((2, 2), (2, 2)))
    alive, silent = unit_rows("aa"), unit_rows("za")

    def dead(sample: int, *positions: int, gradient: torch.Tensor = silent) -> dict[int, int]:
        (measured,) = statistics.measure(table, [(position, gradient) for position in positions], sample)
        rows = measured.vector.reshape(-1, measured.packing.width)[:, Column.DEAD_UNITS].tolist()
        return dict(zip(measured.positions.tolist(), map(int, rows), strict=True))

    assert dead(0, 0, 1, gradient=alive) == {0: 0, 1: 0}
    assert dead(1, 0, 1) == {0: 0, 1: 0}
    assert dead(2, 0) == {0: 0}
    assert dead(3, 0) == {0: 1}
    assert dead(4, 1) == {1: 0}
    assert dead(5, 1, 0) == {0: 1, 1: 1}


def test_a_replaced_capture_with_other_parameters() -> None:
    """A second capture of a sample may see more parameters than the first; each counts the sample once."""
    statistics, table = EagerStatistics(2), plan_of(Bare((1, 2), (1, 2)))
    both = [(0, unit_rows("a")), (1, unit_rows("a"))]
    silent = [(0, unit_rows("z")), (1, unit_rows("z"))]
    found = []
    for sample, gradients in ((1, both), (2, silent[:1]), (2, silent), (3, silent[1:]), (3, silent)):
        (measured,) = statistics.measure(table, gradients, sample)
        found.append(int(measured.vector.reshape(-1, measured.packing.width)[:, Column.DEAD_UNITS].sum()))
    assert found == [0, 0, 0, 1, 2]


@pytest.mark.parametrize("foreign", [[0], [1], [0, 1], []], ids=str)
def test_a_sample_that_is_forgotten_leaves_the_counts_as_they_were(foreign: list[int]) -> None:
    """Parameters whose sample was another's count on from before it, and the others from it; only the last one can be meant."""
    statistics, table = EagerStatistics(3), plan_of(Bare((2, 2), (2, 2)))
    for sample, states in enumerate(["aa", "zz", "za", "zz"]):
        rows = rows_of(statistics, table, [unit_rows(states)] * 2, sample)
        if sample == 2:
            statistics.forget(table, foreign, sample)
            statistics.forget(table, [0, 1], sample - 1)
    assert [int(rows[position][Column.DEAD_UNITS]) for position in (0, 1)] == [0 if p in foreign else 1 for p in (0, 1)]


class _Interruption(Exception):
    """What a signal's handler raises."""


def interrupted_at(line: int, action: Callable[[], object]) -> bool:
    """Runs it, and interrupts it where the statistics begin their so-manieth line; whether they came that far."""
    lines = itertools.count()

    def trace(frame: types.FrameType, event: str, _argument: object) -> object:
        ours = frame.f_globals.get("__name__", "").startswith("torch_grad_exporter.statistics")
        if ours and event == "line" and next(lines) == line:
            raise _Interruption
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except _Interruption:
        return True
    finally:
        sys.settrace(before)
    return False


def test_what_interrupts_a_measurement_costs_nothing_but_that_one() -> None:
    """Wherever a handler raises, in a sample of other parameters than the last: the same sample again is as if it never had."""
    module = Bare((3, 2), (4, 2), (2, 5))
    table = plan_of(module)
    silent = [torch.zeros(3, 2), torch.zeros(4, 2), torch.zeros(2, 5)]

    def samples(line: int | None) -> tuple[list[list[float]], bool]:
        statistics, came = EagerStatistics(3), False
        for sample, chosen in enumerate([(0, 1), (0, 1, 2), (0, 2), (1, 2)]):
            gradients = [(i, silent[i]) for i in chosen]
            measure = functools.partial(statistics.measure, table, gradients, sample)
            if line is not None and sample in (1, 2):
                came |= interrupted_at(line, measure)
            (measured,) = measure()
        return measured.vector.reshape(-1, measured.packing.width)[:, Column.DEAD_UNITS].tolist(), came

    expected, _ = samples(None)
    assert expected == [4.0, 2.0]
    lines = 0
    while True:
        found, came = samples(lines)
        assert found == expected, f"interrupted at line {lines}"
        if not came:
            break
        lines += 1
    assert lines > 50


def test_dead_units_of_a_stack_belong_to_their_parameters() -> None:
    """Parameters of equal shapes that are measured together keep their own counts."""
    statistics, table = EagerStatistics(2), plan_of(Bare(*[(2, 2)] * 3, (3, 2)))
    for sample, states in enumerate((["aa", "aa", "aa", "aaa"], ["zz", "az", "aa", "zza"], ["zz", "zz", "aa", "zaa"])):
        rows = rows_of(statistics, table, [unit_rows(s) for s in states], sample)
    assert [int(rows[position][Column.DEAD_UNITS]) for position in range(4)] == [2, 1, 0, 1]


# Other devices


def test_everything_runs_without_looking_at_the_data() -> None:
    """On a device whose tensors have no data, where reading a value raises, all statistics still run."""
    with pytest.raises(RuntimeError):
        torch.zeros(1, device="meta").item()
    shapes = [(8, 6), (8, 6), (), (5,), (0, 3), (700, 333), (100_000,), (6, 3, 2, 2)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64):
        table = plan_of(Bare(*shapes, dtype=dtype, where="meta"))
        gradients = [(i, torch.empty(shape, dtype=dtype, device="meta")) for i, shape in enumerate(shapes)]
        statistics = EagerStatistics(100, WITH_MOMENTS)
        for sample, members in enumerate((gradients, gradients[1:], gradients[:3], gradients)):
            (measured,) = statistics.measure(table, members, sample)
            assert measured.vector.is_meta
            assert sorted(measured.positions) == [i for i, _ in members if i != 4]
            assert measured.vector.shape == (len(measured.positions) * measured.packing.width,)
        (norms,) = statistics.norms(table, gradients)
        assert norms.vector.is_meta
        assert norms.vector.shape == (len(shapes) - 1,)


def test_each_device_gets_its_own_measurement() -> None:
    """Gradients on two devices give two measurements, each on its own device, with the positions of its own."""
    table = plan_of(Bare((4, 3), (4, 3), (3,)))
    gradients = [(0, some((4, 3))), (1, torch.empty(4, 3, device="meta")), (2, some((3,)))]
    found = {m.vector.device.type: sorted(m.positions.tolist()) for m in EagerStatistics(9).measure(table, gradients, 1)}
    assert found == {"cpu": [0, 2], "meta": [1]}


DEVICE_CASES = {
    "matrix": ([(40, 30)], [some((40, 30))]),
    "stack": ([(4, 3)] * 5, [some((4, 3), seed=s) for s in range(5)]),
    "vector": ([(17,)], [some((17,))]),
    "scalar": ([()], [torch.tensor(-3.0)]),
    "bfloat16": ([(6, 5)], [some((6, 5), torch.bfloat16)]),
    "float16": ([(6, 5)], [some((6, 5), torch.float16)]),
    "float64": ([(3, 2)], [torch.tensor([[1e-200, 1e-200], [1e200, 3e200], [0.0, 0.0]], dtype=torch.float64)]),
    "complex": ([(4, 3)], [some((4, 3), torch.complex64)]),
    "tiny": ([(3, 2)], [torch.tensor([[1e-24, 0.0], [1e-40, 1e-44], [0.0, -0.0]])]),
    "huge": ([(2, 2)], [torch.tensor([[2e19, 2e19], [3e38, -3e38]])]),
    "nonfinite": ([(4, 2)], [torch.tensor([[NAN, 0.0], [INF, 1.0], [-INF, INF], [0.0, 0.0]])]),
    "infinite": ([(2, 2)], [torch.tensor([[INF, 1.0], [2.0, 0.0]])]),
}


@pytest.mark.parametrize("case", DEVICE_CASES)
def test_the_device_path_agrees_with_the_reference(case: str) -> None:
    """The path that never looks at the data, run on CPU tensors, measures as defined, unit by unit."""
    shapes, gradients = DEVICE_CASES[case]
    dtype = gradients[0].dtype if gradients[0].is_complex() else torch.float32
    table = plan_of(Bare(*shapes, dtype=dtype))
    for batch in batches(table, enumerate(gradients)):
        measured = device.measure(batch, WITH_MOMENTS, torch.float64)
        columns, magnitude = measured.rows, measured.magnitudes
        zero = (magnitude == 0).reshape(len(batch.positions), -1).sum(dim=1)
        again, _ = device.norms(batch, torch.float64)
        for row, position in enumerate(batch.positions):
            columns[row, Column.ZERO_UNITS] = zero[row] if batch.units else 0
            assert_agrees(columns[row].numpy(), gradients[position], table, position, rel=1e-6)
            assert np.array_equal(again[row, 0].numpy(), columns[row, Column.NORM].numpy(), equal_nan=True)


def test_the_device_path_agrees_on_sparse_gradients() -> None:
    """The device path counts what a sparse gradient does not store."""
    gradient = sparse(torch.tensor([[0, 0, 1]]), -torch.ones(3, 3), (5, 3))
    table = plan_of(torch.nn.Embedding(5, 3, sparse=True))
    measured = EagerStatistics(9, WITH_MOMENTS, on_host=frozenset()).measure(table, [(0, gradient)], 1)
    assert_agrees(by_position(measured)[0], gradient, table, 0)


def test_the_device_path_tells_tiny_float64_rows_from_zero_ones() -> None:
    """A float64 row of 1e-60, on any device but the CPU, is not zero."""
    gradient = torch.tensor([[1e-60, 0.0], [0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    table = plan_of(Bare((3, 2), dtype=torch.float64))
    (reading,) = EagerStatistics(9, on_host=frozenset()).read(table, [(0, gradient)])
    assert reading.zero.tolist() == [False, True, False]
    assert reading.alive.tolist() == [True, False, True]
