"""Compares what the programs have read of gradients with what torch's own operations have, once both have arrived on the host.

The first comparison is of a probe: gradients that take each way through the programs, before any gradient of the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.model.units import UnitLayout
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.batches import Batch, Group
from torch_grad_exporter.statistics.device import GroupReading, to_device
from torch_grad_exporter.statistics.kernels.tables import BLOCK, KINDS
from torch_grad_exporter.statistics.layout import Layout, Packing

Send = Callable[[torch.Tensor], Callable[[], FloatArray | None] | None]
"""Starts the copy of a vector to the host. What it returns gives the vector once it is there; `None` if it cannot be sent now."""

EXACT = (Column.ZEROS, Column.NANS, Column.INFS, Column.MIN, Column.MAX)
"""Columns that have to be equal."""

NORMS_WITHIN = 1e-6
"""How far a norm may be off, relatively."""

SUMS_WITHIN = 1e-9
"""How far a sum may be off, relatively to the norm times the root of the elements, the most that all magnitudes can add up to."""


class WrongNumbersError(Exception):
    """The programs have read something else than torch's operations."""


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One comparison under way. `arrived`: gives the rows of both, those of torch first, and how many flags of units differ."""

    arrived: Callable[[], FloatArray | None]
    packings: tuple[Packing, Packing]
    split: int
    elements: FloatArray

    @classmethod
    def of(cls, expected: GroupReading, found: GroupReading, layout: Layout, send: Send) -> Trial | None:
        """Send what is to be compared, without waiting; `None` if it cannot be sent now."""
        different = ((expected.zero != found.zero) | (expected.alive != found.alive)).sum(dtype=torch.float64).reshape(1)
        arrived = send(torch.cat((expected.rows.reshape(-1), found.rows.reshape(-1), different)))
        if arrived is None:
            return None
        packings = Packing(layout, np.array(expected.pieces)), Packing(layout, np.array(found.pieces))
        return cls(arrived, packings, expected.rows.numel(), expected.group.elements.astype(np.float64))

    def passed(self) -> bool | None:
        """Return whether both agree; `None` while they are under way. Raises `WrongNumbersError` with what differs most plainly."""
        values = self.arrived()
        if values is None:
            return None
        halves = values[: self.split], values[self.split : -1]
        expected, found = (packing.rows(half, len(self.elements)) for packing, half in zip(self.packings, halves, strict=True))
        if values[-1]:
            raise WrongNumbersError(f"{values[-1]:.0f} flags of units differ from those that torch's operations give")
        for column in (*EXACT, Column.NORM, Column.SUM):
            theirs, ours = expected[:, column], found[:, column]
            wrong = ~(np.isclose(ours, theirs, rtol=0, atol=self._bound(column, expected), equal_nan=True))
            if wrong.any():
                at = int(wrong.argmax())
                raise WrongNumbersError(
                    f"{column.name} of {self.elements[at]:.0f} elements: {ours[at]!r}, and {theirs[at]!r} by torch's operations"
                )
        return True

    def _bound(self, column: Column, expected: FloatArray) -> FloatArray | float:
        norms = np.nan_to_num(expected[:, Column.NORM], nan=0.0, posinf=0.0)
        if column is Column.NORM:
            return norms * NORMS_WITHIN
        return norms * np.sqrt(self.elements) * SUMS_WITHIN if column is Column.SUM else 0.0


_SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None], ...] = (
    # Shape, the view of its units, their dimensions.
    ((1,), (), None),
    ((BLOCK - 1,), (), None),
    ((2 * BLOCK + 5,), (), None),
    ((6, BLOCK + 3), (6, -1), (0,)),
    ((600, 16), (600, -1), (0,)),
    ((500, 9), (500, -1), (0,)),
    ((40, 130), (1, 40, 130, -1), (0, 2)),
    ((8, 5, 3, 3), (1, 8, 5, 3, 3, -1), (0, 2)),
)


def probe(device: torch.device) -> tuple[Group, tuple[Batch, ...]]:
    """Return a group without parameters: of each type, shapes of several kinds of units, and values that are hard to read."""
    made = [
        (tensor, None if dims is None else UnitLayout(view, dims))
        for number, kind in enumerate(KINDS)
        for place, (shape, view, dims) in enumerate(_SHAPES)
        for tensor in _of(shape, kind, 100 * number + place, device)
    ]
    parts = tuple(Batch.of((place,), (tensor,), layout) for place, (tensor, layout) in enumerate(made))
    sizes = np.array([(one.elements, 0 if one.layout is None else one.rows) for one in parts], dtype=np.int64)
    positions = np.arange(len(parts), dtype=np.int64)
    return Group(device, (), positions, sizes[:, 0], sizes[:, 1], np.zeros_like(positions), readable=False), parts


def _of(shape: tuple[int, ...], kind: torch.dtype, seed: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Two gradients of this shape: one whose address no wide load is allowed at, and one with NaNs and Infs."""
    count = math.prod(shape)
    values = np.random.default_rng(seed).standard_normal(count + 1)
    values *= 10.0 ** np.linspace(-8, 3, count + 1)
    values[:: max(2, count // 7)] = 0
    values[count // 3 : count // 2] = 0  # whole units, where there are any
    values[-1] = torch.finfo(kind).smallest_normal / 4
    odd = to_device(torch.from_numpy(values).to(kind), device)[1:].view(shape)
    hard = np.array((math.nan, -math.inf, torch.finfo(kind).max))
    values[: min(3, count)] = hard[: min(3, count)]
    return odd, to_device(torch.from_numpy(values).to(kind), device)[:-1].view(shape)
