"""How the magnitudes of a tensor's elements spread: counts by bucket, and their sum.

NaN and infinite elements are left out. A bucket's upper bound belongs to it. Elements are compared
in their own type, or in float32 where that is wider, with the largest number of the type that is
not above the bound: so the counts are those of float64. Nothing is read from a device.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from torch_grad_exporter.metrics.buckets import WEIGHT_MAGNITUDES
from torch_grad_exporter.statistics.batches import Batch
from torch_grad_exporter.statistics.device import CHUNK_ELEMENTS, joined
from torch_grad_exporter.statistics.host import blocks, count

# Columns of a row: the elements in each bucket, the last of which has no bound, and the sum.
WIDTH = len(WEIGHT_MAGNITUDES) + 2


def magnitudes(batch: Batch, accumulate: torch.dtype) -> torch.Tensor:
    """Return rows of shape (parts * tensors, `WIDTH`), which add up to those of the tensors."""
    if batch.tensors[0].device.type != "cpu":
        return joined([_on_device(chunk.reshape(len(chunk), -1), accumulate) for chunk in batch.cut(CHUNK_ELEMENTS)])
    rows = np.zeros((len(batch.tensors), WIDTH))
    with np.errstate(all="ignore"):  # a sum beyond the type is infinite
        for block in blocks(batch):
            values = np.abs(block.reshape(len(rows), -1))
            up_to = np.empty((len(rows), WIDTH - 1))
            for place, bound in enumerate(_bounds(float64=values.dtype == np.float64)):
                up_to[:, place] = count(values <= bound)
            total = values.sum(axis=1, dtype=np.float64)
            if not np.isfinite(total).all():
                total = np.where(np.isfinite(values), values, 0.0).sum(axis=1, dtype=np.float64)
            rows += np.column_stack([np.diff(up_to, prepend=0), total])
    return torch.from_numpy(rows).to(accumulate)


def _on_device(flat: torch.Tensor, accumulate: torch.dtype) -> torch.Tensor:
    values = (flat if flat.dtype in (torch.float32, torch.float64) else flat.float()).abs()
    bounds = _bounds(float64=values.dtype is torch.float64).tolist()  # numbers of the launches, which copy nothing
    up_to = torch.stack([(values <= bound).sum(dim=1, dtype=accumulate) for bound in bounds], dim=1)
    total = torch.where(values.isfinite(), values, 0).sum(dim=1, keepdim=True, dtype=accumulate)
    return torch.cat([torch.diff(up_to, prepend=torch.zeros_like(total)), total], dim=1)


@functools.cache
def _bounds(*, float64: bool) -> np.ndarray[tuple[int], np.dtype[np.float32 | np.float64]]:
    """Return the bounds in float64, or each as the largest float32 that is not above it; then the largest finite number."""
    exact = np.array([*WEIGHT_MAGNITUDES, np.finfo(np.float64).max])
    if float64:
        return exact
    with np.errstate(over="ignore"):
        nearest = exact.astype(np.float32)
    return np.where(nearest.astype(np.float64) > exact, np.nextafter(nearest, np.float32(0)), nearest)
