"""Measuring on any device but the CPU, without ever looking at the data.

Nothing here branches on a value, copies to the host or waits; it runs on `device="meta"`, where any of
those would raise. Norms accumulate in float64, in which the square of no float32 over- or underflows, so
that no row has to be measured a second time.
"""

from __future__ import annotations

import torch

from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.batches import Batch


def wide(device: torch.device) -> torch.dtype:
    """The type to accumulate in: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def measure(batch: Batch, *, moments: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Statistics of each tensor, shape (tensors, columns), and the largest magnitude of each row, (rows,).

    A row's magnitude is NaN where it has a NaN.
    """
    values = batch.values
    accumulate = wide(values.device)
    low, high = values.aminmax(dim=2)
    smallest, largest = low.amin(dim=1).to(accumulate), high.amax(dim=1).to(accumulate)
    zeros = (values == 0).sum(dim=(1, 2), dtype=accumulate)
    if batch.implied_zeros:
        zeros, smallest, largest = zeros + batch.implied_zeros, smallest.clamp(max=0), largest.clamp(min=0)
    nothing = torch.zeros_like(zeros)
    columns = {
        Column.NORM: _norms(values),
        Column.ZEROS: zeros,
        Column.NANS: values.isnan().sum(dim=(1, 2), dtype=accumulate),
        Column.INFS: values.isinf().sum(dim=(1, 2), dtype=accumulate),
        Column.MIN: smallest,
        Column.MAX: largest,
        Column.SUM: values.sum(dim=(1, 2), dtype=accumulate) if moments else nothing,
    }
    # All of one type, so that they become one table in one launch.
    return torch.stack([columns.get(column, nothing) for column in Column], dim=1), torch.maximum(-low, high).reshape(-1)


def norms(batch: Batch) -> torch.Tensor:
    """Only the norm of each tensor, shape (tensors,), bit-equal to that of `measure` on equal gradients."""
    return _norms(batch.values)


def _norms(values: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor
    if values.dtype is not torch.float64:
        found = torch.linalg.vector_norm(values, dim=(1, 2), dtype=wide(values.device))
        return found
    largest = values.abs().amax(dim=(1, 2), keepdim=True)
    scale = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
    found = torch.linalg.vector_norm(values / scale, dim=(1, 2))
    return found * scale.reshape(-1)
