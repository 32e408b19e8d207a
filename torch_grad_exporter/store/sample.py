"""A sample on the host: the gradients of one round by parameter, and summed up by layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from torch_grad_exporter.metrics.families import BoolArray, FloatArray, IntArray
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.layout import ORDINARY, Layout
from torch_grad_exporter.store.records import SampleRead, number_of


@dataclass(slots=True)
class Sample:
    """What was read of a round; arrays of shape (parameters,), `columns` of (parameters, columns) as `layout` says."""

    read: SampleRead
    layout: Layout
    columns: FloatArray
    present: BoolArray
    elements: IntArray
    units: IntArray
    scale: float = 1.0  # by which the loss was multiplied; divided out
    divisor: float = 1.0  # of `observe(grad_divisor=)`; divided out
    unscaled: bool = False  # the loss scale was known
    sized: bool = True  # what is proportional to the gradient is that of the unscaled one, else it is NaN

    @classmethod
    def of(cls, read: SampleRead) -> Sample:
        """Put the parts of a record together, in the order of the table; their vectors have arrived."""
        size = len(read.table.tracked)
        layout = read.parts[0].packing.layout if read.parts else ORDINARY
        columns, present = np.zeros((size, layout.width)), np.zeros(size, dtype=np.bool_)
        elements, units = np.zeros((2, size), dtype=np.int64)
        for part in read.parts:
            columns[part.positions] = part.rows()
            present[part.positions] = True
            elements[part.positions] = part.elements
            units[part.positions] = part.units
        sample = cls(read, layout, columns, present, elements, units)
        sample._multiply(1 / read.divisor)
        if read.scale is not None:
            sample.unscale(number_of(read.scale))
        return sample

    @property
    def norms(self) -> FloatArray:
        """The norm of each gradient, shape (parameters,)."""
        norms: FloatArray = self.columns[:, Column.NORM]
        return norms

    def nonfinite(self, wanted: BoolArray | None = None) -> bool:
        """Return whether any gradient, of the wanted parameters only, has a NaN or Inf."""
        columns = self.columns if wanted is None else self.columns[wanted]
        return bool(columns[:, [Column.NANS, Column.INFS]].any())

    def nonfinite_layers(self) -> tuple[str, ...]:
        """Return the names of the layers whose gradients have a NaN or Inf."""
        wrong = np.flatnonzero(self.columns[:, [Column.NANS, Column.INFS]].any(axis=1)).tolist()
        return tuple(dict.fromkeys(self.read.table.tracked[position].layer for position in wrong))

    def divide(self, divisor: float) -> None:
        """Divide by the divisor of the loop, in place of one that was known before."""
        self._multiply(self.divisor / divisor)
        self.divisor = divisor

    def unscale(self, scale: float) -> None:
        """Divide by the loss scale, in place of one that was known before; after a scale of 0 or Inf no size is known."""
        self.unscaled, self.sized = True, 0 < scale < np.inf
        if scale != self.scale:
            self._multiply(self.scale / scale if self.sized else np.nan)
            self.scale = scale

    def without_sizes(self) -> Sample:
        """Return the same without what is proportional to the gradient."""
        sample = replace(self, columns=self.columns.copy(), sized=False)
        sample._multiply(np.nan)
        return sample

    def _multiply(self, factor: float) -> None:
        if factor != 1:
            for place, power in self.layout.proportional():
                self.columns[:, place] *= factor**power


class Selection:
    """Some parameters of a table by layer: the wanted ones, shape (parameters,)."""

    def __init__(self, table: ParameterTable, wanted: BoolArray) -> None:
        chosen = np.flatnonzero(wanted)
        # The positions of the parameters, those of one layer next to each other.
        self.positions: IntArray = chosen[np.argsort(table.layer_of[chosen], kind="stable")]
        by_layer = np.unique(table.layer_of[self.positions], return_index=True, return_inverse=True)
        self.layers, self.starts, self.group = by_layer  # ascending; where each begins; the place of each position's layer
        self.counts = table.counts[self.positions]  # which count in sums over ranks
        self.all_count = bool(self.counts.all())


class LayerValues:
    """The selected parameters of a sample, combined by layer."""

    def __init__(self, sample: Sample, selection: Selection) -> None:
        self.layers, self.layout = selection.layers, sample.layout
        self._selection = selection
        self._columns = sample.columns[selection.positions]
        self._combined = sample.layout.runs(self._columns, selection.group, selection.starts)

    def combined(self, place: int, *, counted: bool = False) -> FloatArray:
        """Return what a column is in each layer, shape (layers,); `counted`: of what counts in sums over ranks."""
        selection = self._selection
        if not counted or selection.all_count:
            return self._combined[:, place]
        values = np.where(selection.counts, self._columns[:, place], 0.0)
        return self.layout.columns[place].combine.runs(values[:, None], selection.group, selection.starts)[:, 0]

    def total(self, per_parameter: IntArray) -> FloatArray:
        """Return the sum of a number per parameter in each layer, shape (layers,)."""
        return np.add.reduceat(per_parameter[self._selection.positions], self._selection.starts).astype(np.float64)
