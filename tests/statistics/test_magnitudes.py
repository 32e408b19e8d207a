"""How the magnitudes of weights spread: counts are those of numpy on float64, whatever the type, the size and the device's way."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from torch_grad_exporter.metrics.buckets import WEIGHT_MAGNITUDES
from torch_grad_exporter.statistics.batches import Batch
from torch_grad_exporter.statistics.magnitudes import CHUNK_ELEMENTS, SMALL, WIDTH, Magnitudes

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def awkward(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers over many decades, both signs; all bounds and their neighbours in the type, zeros, tiny ones, NaN and infinities."""
    generator = torch.Generator().manual_seed(size)
    numbers = torch.randn(size, generator=generator, dtype=torch.float64) * 10 ** (8 * torch.rand(size, generator=generator) - 6)
    bounds = torch.tensor(WEIGHT_MAGNITUDES, dtype=torch.float64).to(dtype)
    edges = [bounds, -bounds]
    if dtype in (torch.float32, torch.float64):
        edges += [torch.nextafter(bounds, torch.zeros_like(bounds)), torch.nextafter(bounds, torch.full_like(bounds, math.inf))]
    special = torch.tensor([0.0, -0.0, 1e-45, math.nan, math.inf, -math.inf], dtype=torch.float64).to(dtype)
    return torch.cat([numbers.to(dtype), *edges, special])


def reference(tensor: torch.Tensor) -> tuple[list[int], float]:
    """Plain loops over float64: the elements of each bucket, and the sum of the magnitudes; without what is not finite."""
    values = np.abs(tensor.double().numpy().reshape(-1))
    values = values[np.isfinite(values)]
    up_to = [int((values <= bound).sum()) for bound in WEIGHT_MAGNITUDES] + [values.size]
    return [up_to[0], *(after - before for before, after in itertools.pairwise(up_to))], math.fsum(values.tolist())


def compared(rows: torch.Tensor, tensor: torch.Tensor) -> None:
    """Counts are exact, the sum is right to 1e-5."""
    counts, total = reference(tensor)
    found = rows.sum(dim=0)
    assert found[:-1].tolist() == counts
    assert float(found[-1]) == pytest.approx(total, rel=1e-5)


def of_device(tensors: list[torch.Tensor], accumulate: torch.dtype = torch.float64) -> torch.Tensor:
    """What is done on devices other than the CPU, here on it."""
    return Magnitudes()._on_device(torch.stack(tensors).reshape(len(tensors), -1), accumulate)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 100, 3 * SMALL, 700_000])
def test_the_counts_are_those_of_float64(dtype: torch.dtype, size: int) -> None:
    """In all buckets, on the bounds and beside them, on the CPU and by what other devices do, in float64 and in float32."""
    tensor = awkward(size, dtype)
    compared(Magnitudes().of(Batch((0,), (tensor,), None), torch.float64), tensor)
    compared(of_device([tensor]), tensor)
    compared(of_device([tensor], torch.float32), tensor)


def test_tensors_of_a_batch_have_a_row_each() -> None:
    """Small tensors of one shape are measured together, and not added up."""
    tensors = [awkward(50, torch.float32), awkward(50, torch.float32) * 3, torch.zeros(108)]
    assert len({tensor.shape for tensor in tensors}) == 1
    for rows in (Magnitudes().of(Batch((0, 1, 2), tuple(tensors), None), torch.float64), of_device(tensors)):
        assert rows.shape == (3, WIDTH)
        for row, tensor in zip(rows, tensors, strict=True):
            compared(row[None], tensor)


def test_what_lies_in_another_order_counts_once() -> None:
    """A large transposed weight is read in parts, all of it."""
    tensor = torch.randn(600, 900).t()
    compared(Magnitudes().of(Batch((0,), (tensor,), None), torch.float64), tensor)


def test_nothing_is_read_from_a_device() -> None:
    """On the device `meta`, where any reading raises, all of it runs, a large tensor in parts that add up."""
    magnitudes = Magnitudes()
    for dtype in DTYPES:
        tensor = torch.empty(5 * CHUNK_ELEMENTS, dtype=dtype, device="meta")
        rows = magnitudes.of(Batch((0,), (tensor,), None), torch.float32)
        assert rows.shape[1] == WIDTH
        assert len(rows) >= 5
