"""A sample on the host: the arrived parts of a capture put together, and summed up by layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from torch_grad_exporter.metrics.families import BoolArray, FloatArray, IntArray
from torch_grad_exporter.model.parameters import ParameterTable
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


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Some parameters of a table by layer. `layers`: shape (groups,), ascending.

    `chosen`: the positions of the parameters, those of one layer next to each other; `group`: the place in `layers` of each;
    `starts`: where each layer's begin, shape (groups,). `counts`: which count in sums over ranks, `None` where all do.
    """

    layers: IntArray
    chosen: IntArray
    group: IntArray
    starts: IntArray
    counts: BoolArray | None

    @classmethod
    def of(cls, table: ParameterTable, wanted: BoolArray) -> Choice:
        """The wanted parameters, shape (parameters,)."""
        chosen = np.flatnonzero(wanted)
        layer_of = table.layer_of[chosen]
        order = np.argsort(layer_of, kind="stable")
        layers, starts, group = np.unique(layer_of[order], return_index=True, return_inverse=True)
        counts = table.counts[chosen[order]]
        return cls(layers, chosen[order], group, starts, None if counts.all() else counts)


class Choices:
    """Makes choices, and keeps the last ones of a table: from sample to sample the same parameters are chosen, again and again."""

    MOST = 16

    def __init__(self) -> None:
        self._table: ParameterTable | None = None
        self._known: dict[bytes, Choice] = {}

    def of(self, table: ParameterTable, wanted: BoolArray) -> Choice:
        """As `Choice.of`."""
        if table is not self._table or len(self._known) > self.MOST:
            self._table, self._known = table, {}
        key = wanted.tobytes()
        if key not in self._known:
            self._known[key] = Choice.of(table, wanted)
        return self._known[key]


class Groups:
    """The chosen parameters of a sample by layer. `layers`: shape (groups,)."""

    def __init__(self, sample: Sample, choice: Choice) -> None:
        self.layers = choice.layers
        self._choice = choice
        self.layout = sample.layout
        self._columns = sample.columns[choice.chosen]
        self._combined = sample.layout.runs(self._columns, choice.group, choice.starts)

    def combined(self, place: int, *, counted: bool = False) -> FloatArray:
        """What the column at this place is in each group, by its declaration; `counted`: of what counts in sums over ranks."""
        counts = self._choice.counts
        if not counted or counts is None:
            return self._combined[:, place]
        values = np.where(counts, self._columns[:, place], 0.0)
        return self.layout.columns[place].combine.groups(values, self._choice.group, len(self.layers))

    def total(self, per_parameter: IntArray) -> FloatArray:
        """The sum of a per-parameter number in each group."""
        return np.add.reduceat(per_parameter[self._choice.chosen], self._choice.starts).astype(np.float64)
