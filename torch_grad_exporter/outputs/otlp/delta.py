"""Differences: families with the increase since the last export that arrived, for receivers that want it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np

from torch_grad_exporter.metrics.exponential import Exponential
from torch_grad_exporter.metrics.families import REMOVED, BoolArray, Exemplar, Family, FloatArray, IntArray, Kind, LabelRows, Spec


class Deltas:
    """Subtracts the values that have arrived. A value that is not known to have arrived is part of the next difference.

    A row of a counter that is older than the exporter begins with its second export: its count before the first one is in no
    difference. The arrived counts of removed layers become those of their remainder, so that all differences add up to the totals.

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
            sent.table.take(sent, sent.present[rows])

    def _difference(self, family: Family, at: int) -> Family:
        table = self._tables.setdefault(family.spec, _Table(len(family.spec.buckets) + 2))
        places, rows = table.places(family.labels, self._at), len(family.labels)
        sums = np.zeros(rows) if family.sums is None else family.sums
        now: FloatArray = np.column_stack((family.values.reshape(rows, len(family.spec.buckets) + 1), sums))
        if "layer" in family.spec.labels:
            table.fold_removed(family.labels, family.spec.labels.index("layer"), places, now)
        present: BoolArray = np.ones(len(now), dtype=np.bool_) if family.present is None else family.present.copy()
        known, before = table.known[places], table.numbers[places]
        if family.spec.older:
            first = np.flatnonzero(present & ~known)
            table.take(_SentRows(table, family, places, now, at, first, table.since[places]), first)
            present &= known
        goes_on = known & (before[:, :-1] <= now[:, :-1]).all(axis=1)  # else it began again
        added = np.subtract(now, before, out=now.copy(), where=goes_on[:, None])
        difference = replace(
            family,
            values=added[:, :-1].reshape(family.values.shape),
            sums=None if family.sums is None else added[:, -1],
            present=present,
            exponential=None if family.exponential is None else table.exponential_since(family.exponential, places, goes_on),
            exemplars=None if family.exemplars is None else tuple(table.exemplars_since(family.exemplars, places)),
        )
        self._sent[difference] = _SentRows(table, family, places, now, at, np.flatnonzero(present), table.since[places])
        return difference


@dataclass(frozen=True, slots=True, eq=False)
class _SentRows:
    """A family on its way.

    Attributes:
        table: Of its metric.
        family: With its totals.
        places: Of its rows in the table.
        numbers: Values and sum of its rows.
        at: The time of these.
        present: The numbers of the rows that are sent.
        since: The start time of each row.
    """

    table: _Table
    family: Family
    places: IntArray
    numbers: FloatArray
    at: int
    present: IntArray
    since: IntArray


class _Table:
    """The arrived numbers of a metric. A row keeps its place, whatever `LabelRows` it is in, until its layer is removed.

    `known`: which places have arrived; `numbers`: values and sum of each; `since`: the time of that, and before it the start time.
    """

    def __init__(self, width: int) -> None:
        self.known: BoolArray = np.zeros(0, dtype=np.bool_)
        self.numbers: FloatArray = np.zeros((0, width))
        self.since: IntArray = np.zeros(0, dtype=np.int64)
        self._exponential: dict[int, Mapping[int, int]] = {}
        self._exemplars: dict[int, Mapping[int, Exemplar]] = {}
        self._rows: dict[tuple[str, ...], int] = {}
        self._free: list[int] = []
        self._places: WeakKeyDictionary[LabelRows, IntArray] = WeakKeyDictionary()

    def places(self, labels: LabelRows, since: int) -> IntArray:
        """Return the places of the rows; new ones count from `since` on."""
        places = self._places.get(labels)
        if places is None:
            new = list(dict.fromkeys(row for row in labels.rows if row not in self._rows))
            free, self._free = self._free[: len(new)], self._free[len(new) :]
            more = len(new) - len(free)
            taken = [*free, *range(len(self.known), len(self.known) + more)]
            self._rows.update(zip(new, taken, strict=True))
            self.known = np.pad(self.known, (0, more))
            self.numbers = np.pad(self.numbers, ((0, more), (0, 0)))
            self.since = np.pad(self.since, (0, more))
            self.since[taken] = since
            places = self._places[labels] = np.array([self._rows[row] for row in labels.rows], dtype=np.int64)
        return places

    def fold_removed(self, labels: LabelRows, layer: int, places: IntArray, now: FloatArray) -> None:
        """Count the arrived numbers of removed layers as arrived of the remainder, and forget these layers.

        A layer is removed if its row is gone, or has begun again. `layer`: which of the labels is the layer. `now`: the numbers of
        the present rows.
        """
        if all(row[layer] != REMOVED for row in labels.rows):
            return
        here = dict(zip(labels.rows, range(len(labels)), strict=True))
        restarted = self.known[places] & (self.numbers[places, :-1] > now[:, :-1]).any(axis=1)
        removed = [row for row in self._rows if row not in here] + [labels.rows[row] for row in np.flatnonzero(restarted).tolist()]
        for row in removed:
            remainder = (*row[:layer], REMOVED, *row[layer + 1 :])
            if remainder in here and row != remainder:
                place, into = self._rows[row], self._rows[remainder]
                # At most the present remainder: sums of the same parts may differ in their last digits.
                self.numbers[into] = np.minimum(self.numbers[into] + self.numbers[place], now[here[remainder]])
                self.known[into] |= self.known[place]
                both = Counter(self._exponential.get(into, {}))
                both.update(self._exponential.pop(place, {}))
                self._exponential[into] = both
                self._exemplars.pop(place, None)
                self.known[place], self.numbers[place] = False, 0
                if row not in here:
                    del self._rows[row]
                    self._free.append(place)
                    self._places.clear()

    def take(self, sent: _SentRows, rows: IntArray) -> None:
        """Note rows of an export as arrived."""
        places = sent.places[rows]
        self.known[places] = True
        self.numbers[places] = sent.numbers[rows]
        self.since[places] = sent.at
        exponential, exemplars = sent.family.exponential, sent.family.exemplars
        for place, row in zip(places.tolist(), rows.tolist(), strict=True):
            if exponential is not None:
                self._exponential[place] = exponential[row]
            if exemplars is not None:
                self._exemplars[place] = exemplars[row]

    def exponential_since(self, now: Exponential, places: IntArray, goes_on: BoolArray) -> Exponential:
        """Return the increase of exponential counts."""
        rows = []
        for counts, place, subtract in zip(now, places.tolist(), goes_on.tolist(), strict=True):
            before = self._exponential.get(place, {}) if subtract else {}
            rows.append({i: more for i, n in counts.items() if (more := n - before.get(i, 0)) > 0})
        return Exponential.of(rows)

    def exemplars_since(self, now: Iterable[Mapping[int, Exemplar]], places: IntArray) -> Iterable[Mapping[int, Exemplar]]:
        """Yield the exemplars that are new."""
        for exemplars, place in zip(now, places.tolist(), strict=True):
            before = self._exemplars.get(place, {})
            yield {bucket: exemplar for bucket, exemplar in exemplars.items() if before.get(bucket) != exemplar}
