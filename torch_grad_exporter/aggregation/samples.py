"""A sample on the host: the arrived parts of a capture put together, and summed up by layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from torch_grad_exporter.metrics.families import BoolArray, FloatArray, IntArray
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.layout import ORDINARY, Layout
from torch_grad_exporter.transfer.events import Captured, Part


@dataclass(slots=True)
class Sample:
    """A capture on the host; per-parameter arrays of shape (parameters,), `columns` (parameters, columns) as `layout` says."""

    captured: Captured
    layout: Layout
    columns: FloatArray
    present: BoolArray
    elements: IntArray
    units: IntArray
    scale: float = 1.0
    divisor: float = 1.0
    """By what the loop has divided the gradients after the capture."""
    unscaled: bool = False
    """Whether the loss scale was known and has been divided out."""
    sized: bool = True
    """Whether what is proportional to the gradient is that of the unscaled one; else it is NaN."""

    @classmethod
    def of(cls, captured: Captured) -> Sample:
        """Puts the arrived parts of a capture together, in the order of the table."""
        size = len(captured.table.tracked)
        layout = captured.parts[0].packing.layout if captured.parts else ORDINARY
        columns, present = np.zeros((size, layout.width)), np.zeros(size, dtype=np.bool_)
        elements, units = np.zeros((2, size), dtype=np.int64)
        for part in captured.parts:
            columns[part.positions] = arrived(part)
            present[part.positions] = True
            elements[part.positions] = part.elements
            units[part.positions] = part.units
        sample = cls(captured, layout, columns, present, elements, units)
        sample.divide(captured.divisor)
        if captured.scale is not None:
            sample.unscale(float(values(captured.scale.ready())[0]))
        return sample

    @property
    def norms(self) -> FloatArray:
        """The norm of each gradient, shape (parameters,)."""
        norms: FloatArray = self.columns[:, Column.NORM]
        return norms

    def nonfinite(self, wanted: BoolArray | None = None) -> bool:
        """Whether any gradient, of the wanted parameters only, has a NaN or Inf."""
        columns = self.columns if wanted is None else self.columns[wanted]
        return bool(columns[:, [Column.NANS, Column.INFS]].any())

    def nonfinite_layers(self) -> tuple[str, ...]:
        """The names of the layers whose gradients have a NaN or Inf."""
        wrong = np.flatnonzero(self.columns[:, [Column.NANS, Column.INFS]].any(axis=1)).tolist()
        return tuple(dict.fromkeys(self.captured.table.tracked[position].layer for position in wrong))

    def divide(self, divisor: float) -> None:
        """Divides what is proportional to the gradient."""
        if divisor != 1:
            self.divisor *= divisor
            for place, power in self.layout.proportional():
                self.columns[:, place] /= divisor**power

    def unscale(self, scale: float) -> None:
        """Divides what is proportional to the gradient by the loss scale; by one that is none, nothing of it is known."""
        self.unscaled = True
        self.sized = 0 < scale < np.inf
        if scale != self.scale:  # another one than it was divided by before
            factor = self.scale / scale if self.sized else np.nan
            for place, power in self.layout.proportional():
                self.columns[:, place] *= factor**power
            self.scale = scale

    def without_sizes(self) -> Sample:
        """The same without what is proportional to the gradient, for as long as the loss scale is not known."""
        columns = self.columns.copy()
        columns[:, [place for place, _ in self.layout.proportional()]] = np.nan
        return replace(self, columns=columns, sized=False)


def arrived(part: Part) -> FloatArray:
    """The rows of a part whose ticket is ready, shape (positions, columns)."""
    return part.packing.rows(values(part.ticket.ready()), len(part.positions))  # a loss scale may follow


def values(vector: FloatArray | None) -> FloatArray:
    """The vector of a ticket that is ready."""
    if vector is None:
        raise RuntimeError("an event was applied before its vector had arrived")
    return vector


@dataclass(frozen=True, slots=True)
class Groups:
    """Some parameters of a sample by layer: `layers`, shape (groups,), and to which of them each row belongs.

    `counts`: which rows count in sums over ranks.
    """

    layers: IntArray
    chosen: IntArray
    group: IntArray
    columns: FloatArray
    counts: BoolArray
    layout: Layout

    @classmethod
    def of(cls, sample: Sample, wanted: BoolArray, *, together: bool = False) -> Groups:
        """The wanted parameters by layer, or all in one group."""
        chosen = np.flatnonzero(wanted)
        layer_of = np.zeros(len(chosen), dtype=np.int64) if together else sample.captured.table.layer_of[chosen]
        layers, group = np.unique(layer_of, return_inverse=True)
        return cls(layers, chosen, group, sample.columns[chosen], sample.captured.table.counts[chosen], sample.layout)

    def combined(self, place: int, *, counted: bool = False) -> FloatArray:
        """What the column at this place is in each group, by its declaration; `counted`: of what counts in sums over ranks."""
        values = self.columns[:, place]
        if counted:
            values = np.where(self.counts, values, 0.0)
        return self.layout.columns[place].combine.groups(values, self.group, len(self.layers))

    def total(self, per_parameter: IntArray) -> FloatArray:
        """The sum of a per-parameter number in each group."""
        return np.bincount(self.group, per_parameter[self.chosen], len(self.layers)).astype(np.float64)
