"""The statistics against their definitions in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.support.models import Conv1D
from tests.support.statistics import WITH_MOMENTS, by_definition
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.eager import EagerStatistics

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float64: 1e-12, torch.complex128: 1e-12}
NAN, INF = math.nan, math.inf


class Bare(torch.nn.Module):
    """A module with parameters of the given shapes."""

    def __init__(self, *shapes: Sequence[int], dtype: torch.dtype = torch.float32, where: str = "cpu") -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            setattr(self, f"p{number:03}", torch.nn.Parameter(torch.zeros(tuple(shape), dtype=dtype, device=where)))


def plan_of(module: torch.nn.Module) -> ParameterTable:
    """Return the parameter table of one model."""
    return LayerIndex({"": module}).table


def rows_of(
    statistics: EagerStatistics, table: ParameterTable, gradients: Sequence[torch.Tensor], sample: int = 1
) -> dict[int, np.ndarray]:
    """Return the measured columns of each position."""
    (measured,) = statistics.measure(table, list(enumerate(gradients)), sample)
    rows = measured.packing.rows(measured.vector.numpy(), len(measured.positions))
    return dict(zip(measured.positions.tolist(), rows, strict=True))


def assert_agrees(row: np.ndarray, gradient: torch.Tensor, table: ParameterTable, position: int, rel: float | None = None) -> None:
    """Check a row against the reference: counts exactly, values within the rounding of the type."""
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
    """Check one gradient for each parameter of the module, measured together, against the reference."""
    table = plan_of(module)
    rows = rows_of(EagerStatistics(100, WITH_MOMENTS), table, gradients)
    assert sorted(rows) == list(range(len(gradients)))
    for position, gradient in enumerate(gradients):
        assert_agrees(rows[position], gradient, table, position, rel)


def some(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0, zeros: float = 0.2) -> torch.Tensor:
    """Return random values with zeros among them; the second row is zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tuple(shape), generator=generator, dtype=dtype if dtype.is_complex else torch.float32)
    values = values * (torch.rand(tuple(shape), generator=generator) >= zeros)
    if values.dim() > 1 and values.shape[0] > 1:
        values[1] = 0
    return values.to(dtype)


def sparse(indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a sparse gradient that is not coalesced."""
    return torch.sparse_coo_tensor(indices, values, tuple(shape), check_invariants=True)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_sparse_gradient_has_units() -> None:
    """A sparse gradient of an ordinary weight is measured by its rows, stored or not."""
    gradient = sparse(torch.tensor([[0, 2, 0], [1, 1, 1]]), torch.tensor([1.0, 2.0, 3.0]), (4, 3))
    assert_measured(Bare((4, 3)), [gradient])
    assert_measured(Bare((4, 3)), [gradient.to_dense().to_sparse_csr()])


def test_a_nan_in_one_part_of_a_wide_row() -> None:
    """A unit larger than a block with a NaN anywhere in it counts neither as silent nor as alive."""
    statistics, table = EagerStatistics(2), plan_of(Bare((2, 700_000)))
    found = []
    for sample, places in enumerate([(slice(None),), (0, 350_000), (), ()]):
        gradient = torch.zeros(2, 700_000)
        if places:
            gradient[places] = 1 if sample == 0 else NAN
        found.append(int(rows_of(statistics, table, [gradient], sample)[0][Column.DEAD_UNITS]))
    assert found == [0, 0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("sizes", [(4, 3), (3, 400_000)], ids=str)
@pytest.mark.parametrize("experts", [0, 2])
def test_weights_with_the_inputs_first(sizes: tuple[int, int], experts: int, dtype: torch.dtype) -> None:
    """The units of GPT-2's weights, and of each expert, are the columns, whatever their size."""
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
