"""Track: records of numbers over a whole run, in memory of a fixed size.

The recent records are kept as they were; the whole run is kept in bins of equal numbers of records. When there is no space left,
two bins become one, so that a run of any length has between half of the bins and all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from torch_grad_exporter.metrics.families import FloatArray, IntArray

# Records that are kept as they were, and bins of the whole run, at most.
RECENT, WHOLE = 600, 480

Values = NDArray[np.float32]
Flags = NDArray[np.bool_]
_Rows = NDArray[np.void]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Records or bins in the order of time: Unix time and optimizer steps at the end of each, shape (n,).

    Attributes:
        values: Shape (n, width): the finite value; infinity if there were only values that are not finite; NaN if there was none.
        nonfinite: Shape (n, width): whether any of the records was not finite.
        first: Number of the first record or bin, counted from the start of the run.
        stride: Records in each.
    """

    times: FloatArray
    steps: FloatArray
    values: Values
    nonfinite: Flags
    first: int
    stride: int

    def columns(self, chosen: slice) -> Part:
        """Return the part with only these columns of values."""
        return replace(self, values=self.values[:, chosen], nonfinite=self.nonfinite[:, chosen])


def _rows(count: int, width: int, *, weighted: bool) -> _Rows:
    """Return empty rows: time and step, finite values, bits of those that were not, and for means the number of values in each."""
    rows = np.zeros(count, dtype=_row(width, weighted))
    rows["values"] = np.nan
    return rows


@functools.lru_cache(maxsize=64)
def _row(width: int, weighted: bool) -> np.dtype[np.void]:
    flags, weights = ("nonfinite", "u1", (-(-width // 8),)), ("weights", "f4", (weighted * width,))
    return np.dtype([("at", "f8", (2,)), ("values", "f4", (width,)), flags, weights], align=True)


class Track:
    """Records of `width` values each. `recent`, `whole`: how many records and bins are kept; `whole` is even.

    Finite values of records become one of a bin: their mean if it has `means`, else the one farthest from zero. NaN does not count.
    """

    def __init__(self, width: int, *, means: bool, recent: int = RECENT, whole: int = WHOLE) -> None:
        self._weighted = means
        self.width = width
        self.count = 0
        self._recent, self._whole = (_rows(count, width, weighted=self._weighted) for count in (recent, whole))
        self._stride = 1
        self._moved = 0  # records whose order of values has changed since they were taken

    @property
    def nbytes(self) -> int:
        """The memory in bytes, which does not change."""
        return self._recent.nbytes + self._whole.nbytes

    def extend(self, times: Sequence[float], steps: Sequence[float], values: Values, nonfinite: Flags | None = None) -> None:
        """Take records in their order; `values` and `nonfinite` of shape (n, width)."""
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
            return
        for number in range(len(records)):
            record = records[number : number + 1]
            if self.count == len(self._whole) * self._stride:
                self._halve()
            place, within = divmod(self.count, self._stride)
            if within:
                self._merge(self._whole[place : place + 1], record)
            self._whole[place : place + 1] = record
            self.count += 1

    def _merge(self, earlier: _Rows, later: _Rows) -> None:
        """Merge the earlier rows into the later ones, elementwise; time and step of the later ones stay."""
        later["nonfinite"] |= earlier["nonfinite"]
        if self._weighted:
            later["values"], later["weights"] = _mean(earlier["values"], later["values"], earlier["weights"], later["weights"])
        else:
            later["values"] = farther(earlier["values"], later["values"])

    def _halve(self) -> None:
        """Make one bin of two."""
        half = len(self._whole) // 2
        even, odd = self._whole[0 : 2 * half : 2], self._whole[1 : 2 * half : 2]
        self._merge(even, odd)
        self._whole[:half] = odd
        self._stride *= 2

    def arrange(self, columns: IntArray) -> None:
        """Rearrange the values of all records to these columns; -1 stands for a new column, which earlier records do not have.

        Unless earlier columns stay where they are, the next reader of new records gets all of them.
        """
        if not np.array_equal(columns[: self.width], np.arange(self.width)):
            self._moved = self.count
        self._recent, self._whole = (self._arranged(rows, columns) for rows in (self._recent, self._whole))
        self.width = len(columns)

    def _arranged(self, rows: _Rows, columns: IntArray) -> _Rows:
        arranged = _rows(len(rows), len(columns), weighted=self._weighted)
        arranged["at"] = rows["at"]
        new, old = np.flatnonzero(columns >= 0), columns[columns >= 0]
        arranged["values"][:, new] = rows["values"][:, old]
        flags = np.zeros((len(rows), len(columns)), dtype=np.bool_)
        flags[:, new] = np.unpackbits(rows["nonfinite"], axis=1, count=self.width)[:, old]
        arranged["nonfinite"] = np.packbits(flags, axis=1)
        if self._weighted:
            arranged["weights"][:, new] = rows["weights"][:, old]
        return arranged

    def shrink(self, recent: int, whole: int) -> None:
        """Keep fewer records and bins; the whole run stays covered."""
        if recent < len(self._recent):
            numbers = np.arange(max(0, self.count - recent), self.count)
            kept = self._recent[numbers % len(self._recent)]
            self._recent = _rows(recent, self.width, weighted=self._weighted)
            self._recent[numbers % recent] = kept
        while (used := -(-self.count // self._stride)) > whole:
            # Bins that two became one of are empty again.
            self._whole[used:] = _rows(1, self.width, weighted=self._weighted)
            self._whole["at"][used:] = self._whole["at"][used - 1]
            self._halve()
        self._whole = self._whole[:whole].copy()

    def recent(self, since: int = 0) -> Part:
        """Return the records from number `since` on that are still kept."""
        since = since if since > self._moved else 0
        first = min(max(since, self.count - len(self._recent), 0), self.count)
        return self._part(self._recent[np.arange(first, self.count) % len(self._recent)], first, 1)

    def whole(self, since: int = 0, stride: int = 0) -> Part:
        """Return the bins of the whole run, from `since` on if they still have `stride` records. The last one may not be full."""
        used = -(-self.count // self._stride)
        first = min(since, used) if stride == self._stride and since * stride >= self._moved else 0
        return self._part(self._whole[first:used], first, self._stride)

    def _part(self, rows: _Rows, first: int, stride: int) -> Part:
        flags = np.unpackbits(rows["nonfinite"], axis=1, count=self.width).view(np.bool_)
        values = np.where(flags & np.isnan(rows["values"]), np.float32(np.inf), rows["values"])
        return Part(rows["at"][:, 0].copy(), rows["at"][:, 1].copy(), values, flags, first, stride)


def farther(first: Values, second: Values) -> Values:
    """Return elementwise the value farther from zero; if one is NaN, the other."""
    values: Values = np.where(np.isnan(first) | (np.abs(second) > np.abs(first)), second, first)
    return values


def _mean(first: Values, second: Values, weight: Values, more: Values) -> tuple[Values, Values]:
    """Return elementwise the mean of two means of `weight` and `more` values, NaN if there are none, and their number."""
    weights = weight + more
    share = np.divide(more, weights, out=np.zeros_like(weights), where=weights > 0)
    # A difference may not fit into 32 bits.
    a, b = np.where(weight > 0, first, 0.0).astype(np.float64), np.where(more > 0, second, 0.0)
    return np.where(weights > 0, a + (b - a) * share, np.nan).astype(np.float32), weights
