"""How the magnitudes of weights spread: counts equal those of numpy on float64 for every type, size and device path."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from torch_grad_exporter.metrics.buckets import WEIGHT_MAGNITUDES
from torch_grad_exporter.statistics.batches import Batch
from torch_grad_exporter.statistics.magnitudes import CHUNK_ELEMENTS, WIDTH, magnitudes

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def awkward(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers over many decades: all bounds and their neighbours, zeros, tiny ones, NaN and infinities."""
    generator = torch.Generator().manual_seed(size)
    numbers = torch.randn(size, generator=generator, dtype=torch.float64) * 10 ** (8 * torch.rand(size, generator=generator) - 6)
    bounds = torch.tensor(WEIGHT_MAGNITUDES, dtype=torch.float64).to(dtype)
    edges = [bounds, -bounds]
    if dtype in (torch.float32, torch.float64):
        edges += [torch.nextafter(bounds, torch.zeros_like(bounds)), torch.nextafter(bounds, torch.full_like(bounds, math.inf))]
    special = torch.tensor([0.0, -0.0, 1e-45, math.nan, math.inf, -math.inf], dtype=torch.float64).to(dtype)
    return torch.cat([numbers.to(dtype), *edges, special])


def reference(tensor: torch.Tensor) -> tuple[list[int], float]:
    """Return the elements of each bucket and the sum of magnitudes by float64, without NaN and infinities."""
    values = np.abs(tensor.double().numpy().reshape(-1))
    values = values[np.isfinite(values)]
    up_to = [int((values <= bound).sum()) for bound in WEIGHT_MAGNITUDES] + [values.size]
    return [up_to[0], *(after - before for before, after in itertools.pairwise(up_to))], math.fsum(values.tolist())


def compared(rows: torch.Tensor, tensor: torch.Tensor) -> None:
    """Check counts exactly and the sum to 1e-5."""
    counts, total = reference(tensor)
    found = rows.sum(dim=0)
    assert found[:-1].tolist() == counts
    assert float(found[-1]) == pytest.approx(total, rel=1e-5)


class Elsewhere(torch.Tensor):
    """A CPU tensor that says it is on a device; what is computed from it is an ordinary one."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # private: the documented way to get plain tensors from a subclass
    device = property(lambda _: torch.device("xpu"))  # type: ignore[assignment]


def measured(tensors: Sequence[torch.Tensor], accumulate: torch.dtype = torch.float64, *, elsewhere: bool = False) -> torch.Tensor:
    """Return the rows of a batch, on the CPU or in the way of other devices."""
    batch = tuple(tensor.as_subclass(Elsewhere) for tensor in tensors) if elsewhere else tuple(tensors)
    return magnitudes(Batch.of(tuple(range(len(batch))), batch), accumulate)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 12_288, 200_000])
def test_the_counts_are_those_of_float64(dtype: torch.dtype, size: int) -> None:
    """Counts are exact in all buckets, on the bounds and beside them, on the CPU and on devices with and without float64."""
    tensor = awkward(size, dtype)
    compared(measured([tensor]), tensor)
    compared(measured([tensor], elsewhere=True), tensor)
    compared(measured([tensor], torch.float32, elsewhere=True), tensor)


def test_tensors_of_a_batch_have_a_row_each() -> None:
    """Small tensors of one shape are measured together and not added up."""
    tensors = [awkward(50, torch.float32), awkward(50, torch.float32) * 3, torch.zeros(108)]
    assert len({tensor.shape for tensor in tensors}) == 1
    for rows in (measured(tensors), measured(tensors, elsewhere=True)):
        assert rows.shape == (3, WIDTH)
        for row, tensor in zip(rows, tensors, strict=True):
            compared(row[None], tensor)


def test_nothing_is_read_from_a_device() -> None:
    """On the device `meta`, where any reading raises, a large tensor is measured in parts."""
    for dtype in DTYPES:
        tensor = torch.empty(5 * CHUNK_ELEMENTS, dtype=dtype, device="meta")
        rows = magnitudes(Batch.of((0,), (tensor,)), torch.float32)
        assert rows.shape[1] == WIDTH
        assert len(rows) >= 5
