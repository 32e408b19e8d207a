"""A row of a measurement: which column stands where, and how rows that were sent are read. All of it follows from declarations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeVar

import numpy as np
import torch

from torch_grad_exporter.metrics.families import FloatArray, IntArray
from torch_grad_exporter.statistics import moments
from torch_grad_exporter.statistics.combine import Combine
from torch_grad_exporter.statistics.declared import ColumnSpec, Statistic
from torch_grad_exporter.statistics.together import NORM, TOGETHER


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The columns of a row, one row for each gradient: those of `statistics`, in this order.

    `apart`: the statistics among them that are measured by their own measures, one after the other. The columns of one that is
    in neither are 0.
    """

    statistics: tuple[Statistic, ...]
    apart: tuple[Statistic, ...] = ()
    columns: tuple[ColumnSpec, ...] = field(init=False)
    keys: tuple[str, ...] = field(init=False)
    """The name of each column, with that of its statistic before it where it is measured apart."""
    _places: dict[str, int] = field(init=False)
    _by_way: tuple[tuple[Combine, IntArray], ...] = field(init=False)
    """The places of the columns that combine in the same way."""

    def __post_init__(self) -> None:
        columns = [(one, column) for one in self.statistics for column in one.columns]
        keys = tuple(column.name if one in TOGETHER else f"{one.name}.{column.name}" for one, column in columns)
        object.__setattr__(self, "columns", tuple(column for _, column in columns))
        object.__setattr__(self, "keys", keys)
        object.__setattr__(self, "_places", {key: place for place, key in enumerate(keys)})
        places = {way: [place for place, one in enumerate(self.columns) if one.combine is way] for way in Combine}
        by_way = tuple((way, np.array(found, dtype=np.int64)) for way, found in places.items() if found)
        object.__setattr__(self, "_by_way", by_way)

    @classmethod
    def of(cls, chosen: Sequence[Statistic] = ()) -> Self:
        """What is always measured and the chosen ones. The sum of the moments has its place in any case."""
        more = tuple(one for one in chosen if one is not moments.STATISTIC)
        apart = (moments.STATISTIC, *more) if moments.STATISTIC in chosen else more
        return cls((*TOGETHER, moments.STATISTIC, *more), apart)

    @property
    def width(self) -> int:
        """Columns of a row."""
        return len(self.columns)

    @property
    def float64(self) -> bool:
        """Whether a statistic needs blocks on the CPU in float64."""
        return any(one.float64 for one in self.apart)

    def places(self, statistic: Statistic) -> slice:
        """Where the columns of a statistic stand."""
        start = self._places[f"{statistic.name}.{statistic.columns[0].name}"]
        return slice(start, start + len(statistic.columns))

    def proportional(self) -> Iterator[tuple[int, int]]:
        """The places of what contains the loss scale, and its power in it."""
        return ((place, column.power) for place, column in enumerate(self.columns) if column.power)

    def scaled(self) -> Iterator[tuple[int, int]]:
        """The places of what devices without float64 measure of a gradient divided by its largest magnitude, and its power."""
        for one in self.statistics:
            if one is NORM:
                yield self._places["norm"], 1
            elif one in self.apart and homogeneous(one):
                start = self.places(one).start
                yield from ((start + at, column.power) for at, column in enumerate(one.columns))

    def of_zeros(self, count: int) -> FloatArray:
        """The row of a gradient of so many elements that are zero, shape (width,)."""
        row = np.zeros(self.width)
        row[self._places["zeros"]] = count
        for one in self.apart:
            if one.host is not None:
                values = one.host(np.zeros((1, 1)))[0].tolist()
                row[self.places(one)] = [c.combine.repeated(v, count) for c, v in zip(one.columns, values, strict=True)]
        return row

    def combined(self, rows: FloatArray, group: IntArray, groups: int) -> FloatArray:
        """The rows of each group combined to one, shape (n, width) to (groups, width). No group is empty."""
        columns = zip(self.columns, rows.T, strict=True)
        return np.stack([column.combine.groups(values, group, groups) for column, values in columns], axis=1)

    def runs(self, rows: FloatArray, group: IntArray, starts: IntArray) -> FloatArray:
        """The same where the rows of a group stand next to each other; `starts`: where each begins."""
        found = np.empty((len(starts), self.width))
        for way, places in self._by_way:
            found[:, places] = way.runs(rows[:, places], group, starts)
        return found


_Values = TypeVar("_Values", torch.Tensor, FloatArray)


def expected(statistic: Statistic, values: _Values) -> _Values:
    """What a statistic's own measure gave, if its shape is that of its columns; raises `ValueError` otherwise."""
    if values.ndim != 2 or values.shape[1] != len(statistic.columns):
        wanted = f"(gradients, {len(statistic.columns)})"
        raise ValueError(f"statistic {statistic.name!r}: expected values of shape {wanted}, got {tuple(values.shape)}")
    return values


def homogeneous(statistic: Statistic) -> bool:
    """Whether all of a statistic is proportional to a power of the gradient."""
    return all(column.power for column in statistic.columns)


ORDINARY = Layout.of()
"""What is always measured."""

NORMS = Layout((NORM,))
"""The norm alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """How rows are packed into one vector.

    `pieces`: shape (gradients,), how many rows follow each other for each gradient, which were measured piece by piece; `None`: one
    for each. `scaled`: each row is followed by a number by whose power what is proportional to the gradient is to be
    multiplied: devices without float64 could not hold the products. `implied`: shape (gradients,), elements of zero that were not
    measured with each, as those that a sparse gradient does not store; `None`: none of any.
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
        """The rows of so many gradients, shape (gradients, columns), from a vector that begins with them; float64."""
        count = gradients if self.pieces is None else int(self.pieces.sum())
        rows = vector[: count * self.width].reshape(count, self.width)
        with np.errstate(all="ignore"):  # NaN and overflow are detected here
            if self.scaled:
                rows, scale = rows[:, :-1].astype(np.float64), rows[:, -1]
                for place, power in self.layout.scaled():
                    rows[:, place] *= scale**power
            if self.pieces is not None:
                rows = self.layout.combined(rows, np.repeat(np.arange(gradients), self.pieces), gradients)
            if self.implied is not None:
                missing = np.flatnonzero(self.implied)
                zeros = [self.layout.of_zeros(count) for count in self.implied[missing].tolist()]
                rows = self.layout.combined(np.stack([*rows, *zeros]), np.append(np.arange(gradients), missing), gradients)
            return rows
