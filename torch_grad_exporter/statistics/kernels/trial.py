"""Compares what the programs have read of gradients with what torch's own operations have, once both have arrived on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.device import GroupReading
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
