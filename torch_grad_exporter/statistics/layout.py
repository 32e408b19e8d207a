"""The row of a gradient: which column stands where, and how rows that were sent are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from torch_grad_exporter.metrics.families import FloatArray, IntArray
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.combine import Combine
from torch_grad_exporter.statistics.declared import COUNTS, MOMENTS, NORM, Statistic


class Layout:
    """The columns of a row: those of `statistics`, in this order.

    Args:
        statistics: All statistics that have columns.
        apart: Those among them that are measured by measures of their own.
    """

    def __init__(self, statistics: Sequence[Statistic], apart: Sequence[Statistic] = ()) -> None:
        self.statistics, self.apart = tuple(statistics), tuple(apart)
        pairs = [(one, column) for one in statistics for column in one.columns]
        self.columns = tuple(column for _, column in pairs)
        self.keys = tuple(column.name if one in (NORM, COUNTS) else f"{one.name}.{column.name}" for one, column in pairs)
        self.width = len(pairs)
        self.float64 = any(one.float64 for one in apart)
        self._ways = np.array([column.combine.value for column in self.columns])

    @classmethod
    def of(cls, chosen: Sequence[Statistic] = ()) -> Self:
        """Return the layout of what is always measured and the chosen ones."""
        more = tuple(one for one in chosen if one is not MOMENTS)
        # The sum of the moments has its place in any case: it is a column of the package's own.
        return cls((NORM, COUNTS, MOMENTS, *more), (MOMENTS, *more) if MOMENTS in chosen else more)

    def places(self, statistic: Statistic) -> slice:
        """Return where the columns of a statistic stand."""
        start = sum(len(one.columns) for one in self.statistics[: self.statistics.index(statistic)])
        return slice(start, start + len(statistic.columns))

    def proportional(self) -> Iterator[tuple[int, int]]:
        """Return the places of what contains the loss scale, with its power."""
        return ((place, column.power) for place, column in enumerate(self.columns) if column.power)

    def scaled(self) -> Iterator[tuple[int, int]]:
        """Return the places of what devices without float64 divide by a scale, with its power."""
        for one in self.statistics:
            if one is NORM or (one in self.apart and one.homogeneous):
                yield from enumerate((column.power for column in one.columns), self.places(one).start)

    def of_zeros(self, count: int) -> FloatArray:
        """Return the row of a gradient of this many zeros, shape (width,)."""
        row = np.zeros(self.width)
        row[Column.ZEROS] = 1
        for one in self.apart:
            row[self.places(one)] = one.on_host(np.zeros((1, 1)))[0]
        row[self._ways == Combine.SUM.value] *= count
        row[self._ways == Combine.ROOT_OF_SQUARES.value] *= np.sqrt(count)
        return row

    def runs(self, rows: FloatArray, group: IntArray, starts: IntArray) -> FloatArray:
        """Combine the rows of each group, which stand next to each other; see `Combine.runs`."""
        found = np.empty((len(starts), self.width))
        for way in Combine:
            places = self._ways == way.value
            if places.any():
                found[:, places] = way.runs(rows[:, places], group, starts)
        return found

    def combined(self, rows: FloatArray, group: IntArray, groups: int) -> FloatArray:
        """Like `runs` for groups in any order."""
        order = np.argsort(group, kind="stable")
        return self.runs(rows[order], group[order], np.searchsorted(group[order], np.arange(groups)))


ORDINARY = Layout.of()
NORMS = Layout((NORM,))


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """How rows are packed into one vector."""

    layout: Layout
    pieces: IntArray | None = None  # rows of each gradient, shape (gradients,); None: one each
    # Whether a scale follows each row, by whose power some columns are to be multiplied: devices
    # without float64 could not hold the products.
    scaled: bool = False
    # Zeros that were not measured with each gradient, such as those that a sparse one does not store.
    implied: IntArray | None = None

    @property
    def width(self) -> int:
        """Numbers of a row in the vector."""
        return self.layout.width + self.scaled

    def rows(self, vector: FloatArray, gradients: int) -> FloatArray:
        """Return the rows of the gradients, shape (gradients, columns), of a vector that begins so."""
        count = gradients if self.pieces is None else int(self.pieces.sum())
        rows = vector[: count * self.width].reshape(count, self.width)
        group = np.arange(gradients)
        with np.errstate(all="ignore"):  # NaN and overflow are values like others
            if self.scaled:
                rows, scale = rows[:, :-1].astype(np.float64), rows[:, -1]
                for place, power in self.layout.scaled():
                    rows[:, place] *= scale**power
            if self.pieces is not None:
                rows = self.layout.combined(rows, np.repeat(group, self.pieces), gradients)
            if self.implied is not None and (sparse := np.flatnonzero(self.implied)).size:
                zeros = [self.layout.of_zeros(count) for count in self.implied[sparse].tolist()]
                rows = self.layout.combined(np.stack([*rows, *zeros]), np.append(group, sparse), gradients)
        return rows
