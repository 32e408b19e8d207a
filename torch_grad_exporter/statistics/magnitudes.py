"""How the magnitudes of a tensor's elements spread: exact counts by bucket, and their sum, without synchronising.

Elements that are NaN or infinite are left out. A bucket's upper bound belongs to it. Elements are compared in their own type, or in
float32 where that is wider, with the largest number of the type that is not above the bound: so the counts are those of float64.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import torch

from torch_grad_exporter.metrics.buckets import WEIGHT_MAGNITUDES
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.statistics.batches import Batch
from torch_grad_exporter.statistics.device import chunks, joined
from torch_grad_exporter.statistics.host import blocks

WIDTH = len(WEIGHT_MAGNITUDES) + 2
"""Columns of a row: the elements in each bucket, the last of which has no bound, and the sum of their magnitudes."""

CHUNK_ELEMENTS = 1 << 21
"""Of a chunk on a device: the comparisons with all bounds are then 26 MiB, the largest temporary, and float32 counts as many."""

SMALL = 1 << 12
"""Elements up to which all bounds are compared in one call: a loop over the bounds would cost more than it saves."""


@dataclass(slots=True)
class Magnitudes:
    """Measures tensors. For one thread at a time; the bounds stay on each device that it has seen."""

    _bounds: dict[tuple[torch.device, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def of(self, batch: Batch, accumulate: torch.dtype) -> torch.Tensor:
        """Rows of shape (parts * tensors, `WIDTH`) on the batch's device, in this type; those of a tensor add up to it."""
        if batch.tensors[0].device.type == "cpu":
            return torch.from_numpy(self._on_host(batch)).to(accumulate)
        parts = chunks(batch, CHUNK_ELEMENTS)
        return joined([self._on_device(part.reshape(len(part), -1), accumulate) for part in parts])

    def _on_host(self, batch: Batch) -> FloatArray:
        rows = np.zeros((len(batch.tensors), WIDTH))
        with np.errstate(all="ignore"):  # NaN and infinities are left out, a sum beyond the type is infinite
            for block in blocks(batch):
                rows += _rows(block.reshape(len(batch.tensors), -1))
        return rows

    def _on_device(self, flat: torch.Tensor, accumulate: torch.dtype) -> torch.Tensor:
        magnitudes = (flat if flat.dtype in (torch.float32, torch.float64) else flat.float()).abs()
        bounds = self._on(magnitudes.device, magnitudes.dtype)
        finite = magnitudes.isfinite()
        up_to = (magnitudes[:, None] <= bounds[:, None]).sum(dim=2, dtype=accumulate)
        all_of_them = finite.sum(dim=1, keepdim=True, dtype=accumulate)
        total = torch.where(finite, magnitudes, torch.zeros_like(magnitudes)).sum(dim=1, keepdim=True, dtype=accumulate)
        counts = torch.diff(torch.cat([torch.zeros_like(total), up_to, all_of_them], dim=1))
        return torch.cat([counts, total], dim=1)

    def _on(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """The bounds on a device. Filled there, one by one: a copy from the host would wait for the device."""
        if (device, dtype) not in self._bounds:
            bounds = bounds_in(float64=dtype is torch.float64).tolist()
            self._bounds[device, dtype] = torch.stack([torch.full((), bound, dtype=dtype, device=device) for bound in bounds])
        return self._bounds[device, dtype]


def _rows(flat: FloatArray) -> FloatArray:
    """Of one block, float32 or float64, shape (tensors, elements)."""
    magnitudes = np.abs(flat)
    bounds = bounds_in(float64=magnitudes.dtype == np.float64)
    if magnitudes.shape[1] <= SMALL:
        up_to = (magnitudes[:, None] <= bounds[:, None]).sum(axis=2)
    else:
        mask = np.empty(magnitudes.shape[1], dtype=np.bool_)  # numpy counts a whole array ten times as fast as along an axis
        up_to = np.array([[np.count_nonzero(np.less_equal(row, bound, out=mask)) for bound in bounds] for row in magnitudes])
    total, finite = magnitudes.sum(axis=1, keepdims=True, dtype=np.float64), np.full((len(flat), 1), flat.shape[1])
    if not np.isfinite(total).all():
        known = np.isfinite(magnitudes)
        finite = np.count_nonzero(known, axis=1, keepdims=True)
        total = np.where(known, magnitudes, 0.0).sum(axis=1, keepdims=True, dtype=np.float64)
    return np.concatenate([np.diff(np.concatenate([up_to, finite], axis=1), prepend=0), total], axis=1)


@functools.cache
def bounds_in(*, float64: bool) -> FloatArray:
    """The bounds in float64, or each as the largest float32 that is not above it."""
    exact = np.array(WEIGHT_MAGNITUDES)
    if float64:
        return exact
    nearest = exact.astype(np.float32)
    return np.where(nearest.astype(np.float64) > exact, np.nextafter(nearest, np.float32(0)), nearest)
