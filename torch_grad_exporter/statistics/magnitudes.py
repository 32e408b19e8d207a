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
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.statistics.batches import Batch
from torch_grad_exporter.statistics.device import chunks, joined
from torch_grad_exporter.statistics.host import blocks, count

# Columns of a row: the elements in each bucket, the last of which has no bound, and the sum.
WIDTH = len(WEIGHT_MAGNITUDES) + 2

# Elements of a chunk on a device: the comparisons with all bounds, the largest temporary, are then
# 26 MiB, and float32 counts as many exactly.
CHUNK_ELEMENTS = 1 << 21


class Magnitudes:
    """Measures tensors. For one thread at a time; the bounds stay on each device that it has seen."""

    def __init__(self) -> None:
        self._bounds: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def of(self, batch: Batch, accumulate: torch.dtype) -> torch.Tensor:
        """Return rows of shape (parts * tensors, `WIDTH`), which add up to those of the tensors."""
        if batch.tensors[0].device.type != "cpu":
            parts = chunks(batch, CHUNK_ELEMENTS)
            return joined([self._on_device(part.reshape(len(part), -1), accumulate) for part in parts])
        rows = np.zeros((len(batch.tensors), WIDTH))
        with np.errstate(all="ignore"):  # a sum beyond the type is infinite
            for block in blocks(batch):
                magnitudes = np.abs(block.reshape(len(rows), -1))
                bounds = _bounds_in(float64=magnitudes.dtype == np.float64)
                up_to = [count(magnitudes <= bound) for bound in (*bounds, np.finfo(magnitudes.dtype).max)]
                total = magnitudes.sum(axis=1, dtype=np.float64)
                if not np.isfinite(total).all():
                    total = np.where(np.isfinite(magnitudes), magnitudes, 0.0).sum(axis=1, dtype=np.float64)
                rows += np.column_stack([np.diff(np.stack(up_to, axis=1), prepend=0), total])
        return torch.from_numpy(rows).to(accumulate)

    def _on_device(self, flat: torch.Tensor, accumulate: torch.dtype) -> torch.Tensor:
        magnitudes = (flat if flat.dtype in (torch.float32, torch.float64) else flat.float()).abs()
        key = magnitudes.device, magnitudes.dtype
        if key not in self._bounds:
            # Filled there, one by one: a copy from the host would wait for the device.
            values = _bounds_in(float64=magnitudes.dtype is torch.float64).tolist()
            self._bounds[key] = torch.stack([magnitudes.new_full((), value) for value in values])
        finite = magnitudes.isfinite()
        up_to = (magnitudes[:, None] <= self._bounds[key][:, None]).sum(dim=2, dtype=accumulate)
        known = finite.sum(dim=1, keepdim=True, dtype=accumulate)
        total = torch.where(finite, magnitudes, 0).sum(dim=1, keepdim=True, dtype=accumulate)
        counts = torch.diff(torch.cat([torch.zeros_like(total), up_to, known], dim=1))
        return torch.cat([counts, total], dim=1)


@functools.cache
def _bounds_in(*, float64: bool) -> FloatArray:
    """The bounds in float64, or each as the largest float32 that is not above it."""
    exact = np.array(WEIGHT_MAGNITUDES)
    if float64:
        return exact
    nearest = exact.astype(np.float32)
    return np.where(nearest.astype(np.float64) > exact, np.nextafter(nearest, np.float32(0)), nearest)
