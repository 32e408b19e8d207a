"""Track: records of numbers over a whole run, in memory of a fixed size.

The recent part is kept as it was; the whole run in bins of equal numbers of records, of which two become one when there is
no space left, so that a run of any length has between half of the bins and all of them.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from torch_grad_exporter.metrics.families import FloatArray, IntArray

RECENT = 600
"""Records that are kept as they were, at most."""

WHOLE = 480
"""Bins of the whole run, at most."""

Values = NDArray[np.float32]
Flags = NDArray[np.bool_]
_Rows = NDArray[np.void]


class Together(enum.Enum):
    """How the finite values of records become one of a bin. NaN means that there is no value, and goes into none."""

    LARGEST = "largest"
    """The one that is farthest from zero."""
    MEAN = "mean"


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Records or bins in the order of time.

    `times`: Unix time of each end, shape (n,). `steps`: the optimizer step then. `values`: shape (n, width), what is finite, or
    else infinity where something was not, or else NaN. `nonfinite`: shape (n, width), whether any of the records was not finite.
    `first`: the number of the first one, counted from the start of the run; `stride`: how many records are in one.
    """

    times: FloatArray
    steps: FloatArray
    values: Values
    nonfinite: Flags
    first: int
    stride: int

    def columns(self, chosen: slice) -> Part:
        """The same of some of the values."""
        return replace(self, values=self.values[:, chosen], nonfinite=self.nonfinite[:, chosen])


def _rows(count: int, width: int, *, weighted: bool) -> _Rows:
    """Empty ones: time and step, finite values, which were not finite, eight to a byte, and for means of how many each value is."""
    found = np.zeros(count, dtype=_row(width, weighted))
    found["values"] = np.nan
    return found


@functools.lru_cache(maxsize=64)
def _row(width: int, weighted: bool) -> np.dtype[np.void]:
    fields = [
        ("at", "f8", (2,)),
        ("values", "f4", (width,)),
        ("nonfinite", "u1", (-(-width // 8),)),
        ("weights", "f4", (weighted * width,)),
    ]
    return np.dtype(fields, align=True)


class Track:
    """Records of `width` values each; `whole` is even, as of two bins one is made."""

    def __init__(self, width: int, together: Together, *, recent: int = RECENT, whole: int = WHOLE) -> None:
        self._weighted = together is Together.MEAN
        self.width = width
        self.count = 0
        self._recent, self._whole = (_rows(count, width, weighted=self._weighted) for count in (recent, whole))
        self._stride = 1
        self._moved = 0
        """Records whose times, or the order of whose values, have changed after they were there."""

    @property
    def nbytes(self) -> int:
        """The memory that it takes, from its first record to its last."""
        return self._recent.nbytes + self._whole.nbytes

    def append(self, time: float, step: float, values: Values, nonfinite: Flags | None = None) -> None:
        """Takes a record; `values` of shape (width,). `nonfinite`: which were, besides, not finite within it."""
        self.extend([time], [step], values[None], None if nonfinite is None else nonfinite[None])

    def extend(self, times: Sequence[float], steps: Sequence[float], values: Values, nonfinite: Flags | None = None) -> None:
        """Takes records in their order; `values` and `nonfinite` of shape (n, width)."""
        infinite = np.isinf(values)
        records = _rows(len(values), self.width, weighted=self._weighted)
        records["at"][:, 0], records["at"][:, 1] = times, steps
        records["values"] = np.where(infinite, np.float32(np.nan), values)
        records["nonfinite"] = np.packbits(infinite if nonfinite is None else infinite | nonfinite, axis=1)
        if self._weighted:
            records["weights"] = ~np.isnan(records["values"])
        kept = records[-len(self._recent) :]
        end = self.count + len(records)
        self._recent[np.arange(end - len(kept), end) % len(self._recent)] = kept
        if self._stride == 1 and end <= len(self._whole):
            self._whole[self.count : end] = records
            self.count = end
        else:
            for place in range(len(records)):
                self._enter(records[place : place + 1])

    def _enter(self, record: _Rows) -> None:
        """Takes a record into its bin."""
        if self.count == len(self._whole) * self._stride:
            self._halve()
        place, within = divmod(self.count, self._stride)
        if within:
            self._merge(self._whole[place : place + 1], record)
        self._whole[place : place + 1] = record
        self.count += 1

    def _merge(self, one: _Rows, other: _Rows) -> None:
        """Makes of the other one, elementwise, what both are together; its time and step stay."""
        other["nonfinite"] |= one["nonfinite"]
        if self._weighted:
            other["values"], other["weights"] = _mean(one["values"], other["values"], one["weights"], other["weights"])
        else:
            other["values"] = farther(one["values"], other["values"])

    def _halve(self) -> None:
        """Makes one bin of two."""
        half = len(self._whole) // 2
        even, odd = self._whole[0 : 2 * half : 2], self._whole[1 : 2 * half : 2]
        self._merge(even, odd)
        self._whole[:half] = odd
        self._stride *= 2

    def arrange(self, columns: IntArray) -> None:
        """Makes records of these of their values, in this order; -1 stands for a new one, which no earlier record has.

        Until the next record, reading what is new gives all records, unless the values before stay where they are.
        """
        if not np.array_equal(columns[: self.width], np.arange(self.width)):
            self._moved = self.count
        self._recent, self._whole = (self._arranged(rows, columns) for rows in (self._recent, self._whole))
        self.width = len(columns)

    def _arranged(self, rows: _Rows, columns: IntArray) -> _Rows:
        found = _rows(len(rows), len(columns), weighted=self._weighted)
        found["at"] = rows["at"]
        new, old = np.flatnonzero(columns >= 0), columns[columns >= 0]
        found["values"][:, new] = rows["values"][:, old]
        flags = np.zeros((len(rows), len(columns)), dtype=np.bool_)
        flags[:, new] = np.unpackbits(rows["nonfinite"], axis=1, count=self.width)[:, old]
        found["nonfinite"] = np.packbits(flags, axis=1)
        if self._weighted:
            found["weights"][:, new] = rows["weights"][:, old]
        return found

    def shrink(self, recent: int, whole: int) -> None:
        """Keeps fewer records and bins, where there were more; the whole run stays covered."""
        if recent < len(self._recent):
            numbers = np.arange(max(0, self.count - recent), self.count)
            kept = self._recent[numbers % len(self._recent)]
            self._recent = _rows(recent, self.width, weighted=self._weighted)
            self._recent[numbers % recent] = kept
        while (used := -(-self.count // self._stride)) > whole:
            # What was there before two became one.
            self._whole[used:] = _rows(1, self.width, weighted=self._weighted)
            self._whole["at"][used:] = self._whole["at"][used - 1]
            self._halve()
        self._whole = self._whole[:whole].copy()

    def shift(self, seconds: float) -> None:
        """Moves the times of all records; until the next record, reading what is new gives all records."""
        self._recent["at"][:, 0] += seconds
        self._whole["at"][:, 0] += seconds
        self._moved = self.count

    def recent(self, since: int = 0) -> Part:
        """The records from number `since` on that are still there."""
        since = since if since > self._moved else 0
        first = min(max(since, self.count - len(self._recent), 0), self.count)
        return self._part(self._recent[np.arange(first, self.count) % len(self._recent)], first, 1)

    def whole(self, since: int = 0, stride: int = 0) -> Part:
        """The bins of the whole run, from number `since` on if they are still of `stride` records; the last one may not be full."""
        used = -(-self.count // self._stride)
        first = min(since, used) if stride == self._stride and since * stride >= self._moved else 0
        return self._part(self._whole[first:used], first, self._stride)

    def _part(self, rows: _Rows, first: int, stride: int) -> Part:
        flags = np.unpackbits(rows["nonfinite"], axis=1, count=self.width).view(np.bool_)
        values = np.where(flags & np.isnan(rows["values"]), np.float32(np.inf), rows["values"])
        return Part(rows["at"][:, 0].copy(), rows["at"][:, 1].copy(), values, flags, first, stride)


def farther(one: Values, other: Values) -> Values:
    """Elementwise the one that is farther from zero; where one is NaN, the other."""
    found: Values = np.where(np.isnan(one) | (np.abs(other) > np.abs(one)), other, one)
    return found


def _mean(one: Values, other: Values, weight: Values, more: Values) -> tuple[Values, Values]:
    """Elementwise the mean of two means of so many values each, NaN where there are none, and of how many it is."""
    weights = weight + more
    share = np.divide(more, weights, out=np.zeros_like(weights), where=weights > 0)
    # A difference may not fit into 32 bits.
    a, b = np.where(weight > 0, one, 0.0).astype(np.float64), np.where(more > 0, other, 0.0)
    return np.where(weights > 0, a + (b - a) * share, np.nan).astype(np.float32), weights
