"""The row of a gradient: which column stands where, and how rows that were sent are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeVar

import numpy as np
import torch

from torch_grad_exporter.metrics.families import FloatArray, IntArray
from torch_grad_exporter.statistics.combine import Combine
from torch_grad_exporter.statistics.declared import MOMENTS, NORM, TOGETHER, ColumnSpec, Statistic

_Values = TypeVar("_Values", torch.Tensor, FloatArray)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The columns of a row: those of `statistics`, in this order.

    Attributes:
        statistics: All statistics that have columns.
        apart: Those among them that are measured by measures of their own.
        columns: Their columns.
        keys: Name of each column, after that of its statistic where it is measured apart.
    """

    statistics: tuple[Statistic, ...]
    apart: tuple[Statistic, ...] = ()
    columns: tuple[ColumnSpec, ...] = field(init=False)
    keys: tuple[str, ...] = field(init=False)
    _by_way: tuple[tuple[Combine, IntArray], ...] = field(init=False)

    def __post_init__(self) -> None:
        pairs = [(one, column) for one in self.statistics for column in one.columns]
        columns = tuple(column for _, column in pairs)
        keys = tuple(column.name if one in TOGETHER else f"{one.name}.{column.name}" for one, column in pairs)
        places = ((way, [i for i, one in enumerate(columns) if one.combine is way]) for way in Combine)
        by_way = tuple((way, np.array(some, dtype=np.int64)) for way, some in places if some)
        for name, value in (("columns", columns), ("keys", keys), ("_by_way", by_way)):
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, chosen: Sequence[Statistic] = ()) -> Self:
        """Return the layout of what is always measured and the chosen ones."""
        more = tuple(one for one in chosen if one is not MOMENTS)
        # The sum of the moments has its place in any case: it is a column of the package's own.
        return cls((*TOGETHER, MOMENTS, *more), (MOMENTS, *more) if MOMENTS in chosen else more)

    @property
    def width(self) -> int:
        """Columns of a row."""
        return len(self.columns)

    @property
    def float64(self) -> bool:
        """Whether a statistic needs blocks in float64 on the CPU."""
        return any(one.float64 for one in self.apart)

    def places(self, statistic: Statistic) -> slice:
        """Return where the columns of a statistic stand."""
        before = self.statistics[: self.statistics.index(statistic)]
        start = sum(len(one.columns) for one in before)
        return slice(start, start + len(statistic.columns))

    def proportional(self) -> Iterator[tuple[int, int]]:
        """Return the places of what contains the loss scale, with its power."""
        return ((place, column.power) for place, column in enumerate(self.columns) if column.power)

    def scaled(self) -> Iterator[tuple[int, int]]:
        """Return the places of what devices without float64 divide by a scale, with its power."""
        for one in self.statistics:
            if one is NORM or (one in self.apart and homogeneous(one)):
                start = self.places(one).start
                yield from ((start + at, column.power) for at, column in enumerate(one.columns))

    def of_zeros(self, count: int) -> FloatArray:
        """Return the row of a gradient of this many zeros, shape (width,)."""
        row = np.zeros(self.width)
        row[self.keys.index("zeros")] = count
        for one in self.apart:
            if one.host is not None:
                values = one.host(np.zeros((1, 1)))[0].tolist()
                pairs = zip(one.columns, values, strict=True)
                row[self.places(one)] = [column.combine.repeated(value, count) for column, value in pairs]
        return row

    def runs(self, rows: FloatArray, group: IntArray, starts: IntArray) -> FloatArray:
        """Combine the rows of each group, which stand next to each other; see `Combine.runs`."""
        found = np.empty((len(starts), self.width))
        for way, places in self._by_way:
            found[:, places] = way.runs(rows[:, places], group, starts)
        return found

    def combined(self, rows: FloatArray, group: IntArray, groups: int) -> FloatArray:
        """Like `runs` for groups in any order."""
        order = np.argsort(group, kind="stable")
        ascending = group[order]
        return self.runs(rows[order], ascending, np.searchsorted(ascending, np.arange(groups)))


def expected(statistic: Statistic, values: _Values) -> _Values:
    """Return what a statistic's own measure gave; raises `ValueError` for a wrong shape."""
    if values.ndim != 2 or values.shape[1] != len(statistic.columns):
        wanted = f"(gradients, {len(statistic.columns)})"
        raise ValueError(f"statistic {statistic.name!r}: expected shape {wanted}, got {tuple(values.shape)}")
    return values


def homogeneous(statistic: Statistic) -> bool:
    """Return whether all of a statistic is proportional to a power of the gradient."""
    return all(column.power for column in statistic.columns)


ORDINARY = Layout.of()
NORMS = Layout((NORM,))


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """How rows are packed into one vector.

    Attributes:
        layout: The columns.
        pieces: Rows of each gradient, shape (gradients,); None: one each.
        scaled: Whether a scale follows each row, by whose power some columns are to be multiplied:
            devices without float64 could not hold the products.
        implied: Zeros that were not measured with each gradient, shape (gradients,), such as those
            that a sparse gradient does not store; None: none.
    """

    layout: Layout
    pieces: IntArray | None = None
    scaled: bool = False
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
            if self.implied is not None:
                sparse = np.flatnonzero(self.implied)
                zeros = [self.layout.of_zeros(count) for count in self.implied[sparse].tolist()]
                rows = self.layout.combined(np.stack([*rows, *zeros]), np.append(group, sparse), gradients)
        return rows
