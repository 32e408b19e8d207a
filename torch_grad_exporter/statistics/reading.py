"""What was read of the gradients of a group, and how torch's own operations read it on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torch_grad_exporter.metrics.families import IntArray
from torch_grad_exporter.statistics import device
from torch_grad_exporter.statistics.batches import Batch
from torch_grad_exporter.statistics.grouping import Group
from torch_grad_exporter.statistics.layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What was read of the gradients of a group, before the past of their units is considered.

    `pieces`: shape (n,), rows of each, `None`: one. `rows`: shape (all pieces, columns), with a scale after them where the device
    has no float64. `zero`, `alive`: shape (units of all members,), bool: units whose gradient is exactly zero, and those that have
    a nonzero element.
    """

    group: Group
    pieces: IntArray | None
    rows: torch.Tensor
    zero: torch.Tensor
    alive: torch.Tensor


@dataclass(frozen=True, slots=True)
class ByTorch:
    """Reads gradients of devices by ordinary operations of torch, in several passes.

    `wide`: the widest type that a device computes in. `most`: elements that are read at once.
    """

    layout: Layout
    wide: device.Wide
    most: int

    def read(self, group: Group, parts: Sequence[Batch]) -> Reading:
        """All that can be said of the gradients of one device without their past."""
        measured = [device.measure(batch, self.layout, self.wide(group.device), self.most) for batch in parts]
        rows = torch.cat([one.rows for one in measured])
        magnitudes = [one.magnitudes for batch, one in zip(parts, measured, strict=True) if batch.units]
        together = torch.cat(magnitudes or [rows.new_zeros(0)])  # in the widest of their types, which rounds none of them to zero
        return Reading(group, pieces_of(parts, [one.pieces for one in measured]), rows, together == 0, together > 0)

    def norms(self, group: Group, parts: Sequence[Batch]) -> tuple[torch.Tensor, IntArray | None]:
        """Only the norms, with the same rounding: a vector of rows of one column, and how many rows each gradient has."""
        measured = [device.norms(batch, self.wide(group.device), self.most) for batch in parts]
        return torch.cat([rows for rows, _ in measured]).reshape(-1), pieces_of(parts, [count for _, count in measured])


def pieces_of(batches: Sequence[Batch], pieces: Sequence[int]) -> IntArray | None:
    """Rows of each gradient from those of each batch; `None`: one."""
    if max(pieces) == 1:
        return None
    return np.repeat(np.array(pieces, dtype=np.int64), [len(batch.positions) for batch in batches])
