"""The row of a gradient: which column stands where, and how rows that were sent are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from torch_grad_exporter.metrics.families import FloatArray, IntArray
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.combine import Combine
from torch_grad_exporter.statistics.declared import MOMENTS, ColumnSpec, Statistic

# The package's own columns, in the order of `Column`. `host.py` and `device.py` measure them
# together, but for the sum, which is that of the moments and 0 unless they are enabled.
OWN = (
    ColumnSpec("norm", Combine.ROOT_OF_SQUARES, power=1, whole_only=True),
    *(ColumnSpec(name, Combine.SUM) for name in ("zeros", "nans", "infs")),
    ColumnSpec("min", Combine.MIN, power=1),
    ColumnSpec("max", Combine.MAX, power=1),
    *(ColumnSpec(name, Combine.SUM) for name in ("zero_units", "dead_units")),
    *MOMENTS.columns,
)


class Layout:
    """The columns of a row: the package's own, then those of the chosen statistics.

    Args:
        chosen: What is measured besides, by measures of its own.
        norms_only: Whether a row has the norm alone. It has then the same bits as beside the chosen.
    """

    def __init__(self, chosen: Sequence[Statistic] = (), *, norms_only: bool = False) -> None:
        self.norms_only = norms_only
        self.float64 = any(statistic.float64 for statistic in chosen)
        self.apart: dict[Statistic, slice] = {}  # where the columns of each chosen one stand
        pairs = [(column.name, column) for column in (OWN[:1] if norms_only else OWN)]
        for statistic in () if norms_only else chosen:
            start = Column.SUM if statistic is MOMENTS else len(pairs)
            self.apart[statistic] = here = slice(start, start + len(statistic.columns))
            pairs[here] = [(f"{statistic.name}.{column.name}", column) for column in statistic.columns]
        self.keys = tuple(key for key, _ in pairs)
        self.columns = tuple(column for _, column in pairs)
        self.width = len(pairs)
        # The powers of the scale by which devices without float64 divide what they measure.
        self.divided = np.zeros(self.width)
        self.divided[Column.NORM] = 1
        for statistic, here in self.apart.items():
            self.divided[here] = [column.power if statistic.homogeneous else 0 for column in statistic.columns]
        self._places = {way: [i for i, column in enumerate(self.columns) if column.combine is way] for way in Combine}

    def proportional(self) -> Iterator[tuple[int, int]]:
        """Return the places of what contains the loss scale, with its power."""
        return ((place, column.power) for place, column in enumerate(self.columns) if column.power)

    def of_zeros(self, count: int) -> FloatArray:
        """Return the row of a gradient of this many zeros, shape (width,)."""
        row = np.zeros(self.width)
        row[Column.ZEROS] = 1
        for statistic, here in self.apart.items():
            row[here] = statistic.on_host(np.zeros((1, 1)))[0]
        row[self._places[Combine.SUM]] *= count
        row[self._places[Combine.ROOT_OF_SQUARES]] *= np.sqrt(count)
        return row

    def runs(self, rows: FloatArray, group: IntArray, starts: IntArray) -> FloatArray:
        """Combine the rows of each group, which stand next to each other; see `Combine.runs`."""
        combined = np.empty((len(starts), self.width))
        for way, places in self._places.items():
            combined[:, places] = way.runs(rows[:, places], group, starts)
        return combined


ORDINARY = Layout()


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """How rows are packed into one vector.

    Attributes:
        layout: The columns of a row.
        pieces: Rows of each gradient, shape (gradients,); None: one each.
        scaled: Whether a scale follows each row, by whose power some columns are to be multiplied:
            devices without float64 could not hold the products.
        implied: Zeros that were not measured with each gradient, such as those that a sparse one
            does not store.
        counted: The gradients whose zero and dead units follow the rows; None: no unit is zero.
    """

    layout: Layout
    pieces: IntArray | None = None
    scaled: bool = False
    implied: IntArray | None = None
    counted: IntArray | None = None

    def rows(self, vector: FloatArray, gradients: int) -> FloatArray:
        """Return the rows of the gradients, shape (gradients, columns), of a vector that begins so."""
        layout, width = self.layout, self.layout.width + self.scaled
        count = gradients if self.pieces is None else int(self.pieces.sum())
        rows = vector[: count * width].reshape(count, width)
        with np.errstate(all="ignore"):  # NaN and overflow are values like others
            if self.scaled:
                rows = rows[:, :-1] * rows[:, -1:].astype(np.float64) ** layout.divided
            if self.pieces is not None:
                group = np.repeat(np.arange(gradients), self.pieces)
                rows = layout.runs(rows, group, np.cumsum(self.pieces) - self.pieces)
            if self.implied is not None or self.counted is not None:
                rows = rows.copy()
            if self.implied is not None:
                for place in np.flatnonzero(self.implied).tolist():
                    both = np.stack([rows[place], layout.of_zeros(int(self.implied[place]))])
                    rows[place] = layout.runs(both, np.zeros(2, dtype=np.int64), np.zeros(1, dtype=np.int64))
            if self.counted is not None:
                units = vector[count * width :][: 2 * len(self.counted)].reshape(-1, 2)
                rows[self.counted, Column.ZERO_UNITS : Column.DEAD_UNITS + 1] = units
        return rows
