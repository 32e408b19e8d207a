"""Differences: families with the increase since the last export that arrived, for receivers that want it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from torch_grad_exporter.metrics.exponential import Exponential
from torch_grad_exporter.metrics.families import REMOVED, BoolArray, Family, FloatArray, IntArray, Kind, Spec


class Deltas:
    """Subtracts the values that have arrived. A value that is not known to have arrived is part of the next difference.

    A row of a counter that is older than the exporter begins with its second export: its count before the first one is in no
    difference. The arrived counts of removed layers become those of their remainder, so that all differences add up to the totals.
    Exemplars come with each export, new or not.

    Args:
        kinds: The kinds of metrics that are differences; the others pass as they are.
        began: When counting began, in nanoseconds since 1970, like all times here.
    """

    def __init__(self, kinds: Collection[Kind], *, began: int) -> None:
        self.kinds = kinds
        self._at = began
        self._tables: dict[Spec, _Table] = {}
        self._sent: dict[Family, _SentRows] = {}

    def of(self, families: Iterable[Family], *, at: int) -> list[Family]:
        """Return the families to be sent, with the numbers at this time."""
        self._sent = {}
        differences = [self._difference(family, at) if family.spec.kind in self.kinds else family for family in families]
        self._at = at
        return differences

    def since(self, family: Family) -> IntArray:
        """Return the start time of each row of a difference that `of` returned last.

        It is the time of the row's last export that arrived, else of the last export before the row existed.
        """
        return self._sent[family].since

    def arrived(self, family: Family, rows: slice) -> None:
        """Note that rows of a family have arrived, by their numbers among the present ones.

        No effect for a family that `of` did not return last, or not as a difference.
        """
        if (sent := self._sent.get(family)) is not None:
            sent.take(sent.present[rows])

    def _difference(self, family: Family, at: int) -> Family:
        spec, labels, count = family.spec, family.labels.rows, len(family.labels)
        sums = np.zeros(count) if family.sums is None else family.sums
        now: FloatArray = np.column_stack((family.values.reshape(count, len(spec.buckets) + 1), sums))
        table = self._tables.setdefault(spec, {})
        if "layer" in spec.labels:
            _fold_removed(table, spec.labels.index("layer"), dict(zip(labels, now, strict=True)))
        for row in labels:
            if row not in table:
                table[row] = _Arrived(np.zeros(now.shape[1]), self._at)
        rows = [table[row] for row in labels]
        known: BoolArray = np.array([row.known for row in rows], dtype=np.bool_)
        before = np.array([row.numbers for row in rows]).reshape(now.shape)
        present: BoolArray = np.ones(count, dtype=np.bool_) if family.present is None else family.present.copy()
        since = np.array([row.since for row in rows], dtype=np.int64)
        if spec.older:
            first = np.flatnonzero(present & ~known)
            _SentRows(family, rows, now, at, first, since).take(first)
            present &= known
        goes_on = known & (before[:, :-1] <= now[:, :-1]).all(axis=1)  # else it began again
        added = np.subtract(now, before, out=now.copy(), where=goes_on[:, None])
        exponential = family.exponential
        if exponential is not None:
            earlier = [row.exponential if subtract else {} for row, subtract in zip(rows, goes_on.tolist(), strict=True)]
            exponential = Exponential.of([_increase(*both) for both in zip(exponential, earlier, strict=True)])
        difference = replace(
            family,
            values=added[:, :-1].reshape(family.values.shape),
            sums=None if family.sums is None else added[:, -1],
            present=present,
            exponential=exponential,
        )
        self._sent[difference] = _SentRows(family, rows, now, at, np.flatnonzero(present), since)
        return difference


@dataclass(slots=True, eq=False)
class _Arrived:
    """What has arrived of a row: values and sum, and when; `since` is the start time until something is `known` to have arrived."""

    numbers: FloatArray
    since: int
    known: bool = False
    exponential: Mapping[int, int] = field(default_factory=dict)


# The rows of a metric, until their layer is removed.
_Table = dict[tuple[str, ...], _Arrived]


@dataclass(frozen=True, slots=True, eq=False)
class _SentRows:
    """A family on its way: its rows, `numbers` and start times, which of them are `present`, and the time of the numbers."""

    family: Family
    rows: list[_Arrived]
    numbers: FloatArray
    at: int
    present: IntArray
    since: IntArray

    def take(self, places: IntArray) -> None:
        """Note rows as arrived."""
        for place in places.tolist():
            row = self.rows[place]
            row.known, row.numbers, row.since = True, self.numbers[place], self.at
            if self.family.exponential is not None:
                row.exponential = self.family.exponential[place]


def _fold_removed(table: _Table, layer: int, now: Mapping[tuple[str, ...], FloatArray]) -> None:
    """Count the arrived numbers of removed layers as arrived of the remainder, and forget these layers.

    A layer is removed if its row is gone, or has begun again. `layer`: which of the labels is the layer. `now`: the present rows.
    """
    if all(row[layer] != REMOVED for row in now):
        return
    for row, gone in list(table.items()):
        remainder = (*row[:layer], REMOVED, *row[layer + 1 :])
        begun_again = row in now and gone.known and bool((gone.numbers[:-1] > now[row][:-1]).any())
        if remainder in now and row != remainder and (row not in now or begun_again):
            into = table.setdefault(remainder, _Arrived(np.zeros_like(gone.numbers), gone.since))
            # At most the present remainder: sums of the same parts may differ in their last digits.
            into.numbers = np.minimum(into.numbers + gone.numbers, now[remainder])
            into.known |= gone.known
            into.exponential = Counter(into.exponential) + Counter(gone.exponential)
            del table[row]


def _increase(now: Mapping[int, int], before: Mapping[int, int]) -> dict[int, int]:
    return {bucket: more for bucket, count in now.items() if (more := count - before.get(bucket, 0)) > 0}
