"""Families as what was added since the last export that arrived, for receivers that take differences."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np

from torch_grad_exporter.metrics.families import REMOVED, BoolArray, Exemplar, Family, FloatArray, IntArray, Kind, LabelRows, Spec

_Sent = tuple[IntArray, IntArray, Callable[[IntArray], None]]
"""Of a difference: since when each row counts, the numbers of its present rows, and what notes some of these as arrived."""


class Deltas:
    """Subtracts what has arrived. What was not known to have arrived is part of the next difference.

    `kinds`: the kinds of metrics that are differences; the others pass as they are. `began`: when everything began to be counted.
    Times are in nanoseconds since 1970. A row of a counter that is older than the exporter begins with its second export: what it
    counted before the first one is in no difference. What has arrived of removed layers counts as arrived of their remainder, so
    that all differences add up to what was counted, each thing once.
    """

    def __init__(self, kinds: Collection[Kind], *, began: int) -> None:
        self._kinds = kinds
        self._at = began
        self._tables: dict[Spec, _Table] = {}
        self._sent: dict[Family, _Sent] = {}

    def of(self, families: Iterable[Family], *, at: int) -> list[Family]:
        """The families to be sent, with the numbers as of `at`."""
        self._sent = {}
        found = [self._difference(family, at) if family.spec.kind in self._kinds else family for family in families]
        self._at = at
        return found

    def since(self, family: Family) -> IntArray:
        """From when on each row of a difference that `of` gave last counts: the time of its last export that arrived.

        If none has, that of the last export before it was there.
        """
        since, _, _ = self._sent[family]
        return since

    def arrived(self, family: Family, rows: slice) -> None:
        """Notes that rows of a family have arrived, by their numbers among the present ones.

        Without effect for a family that `of` has not given last, or not as a difference.
        """
        if family in self._sent:
            _, there, take = self._sent[family]
            take(there[rows])

    def _difference(self, family: Family, at: int) -> Family:
        table = self._tables.setdefault(family.spec, _Table(len(family.spec.buckets) + 2))
        places, now = table.places(family.labels, self._at), _numbers(family)
        if "layer" in family.spec.labels:
            table.settle_removed(family.labels, family.spec.labels.index("layer"), places, now)
        present: BoolArray = np.ones(len(now), dtype=np.bool_) if family.present is None else family.present.copy()
        known, before = table.known[places], table.numbers[places]
        if family.spec.older:
            table.take(family, places, now, at, np.flatnonzero(present & ~known))
            present &= known
        goes_on = known & (before[:, :-1] <= now[:, :-1]).all(axis=1)  # else it began anew
        added = np.subtract(now, before, out=now.copy(), where=goes_on[:, None])
        difference = replace(
            family,
            values=added[:, :-1].reshape(family.values.shape),
            sums=None if family.sums is None else added[:, -1],
            present=present,
            exponential=None if family.exponential is None else tuple(table.exponential_since(family.exponential, places, goes_on)),
            exemplars=None if family.exemplars is None else tuple(table.exemplars_since(family.exemplars, places)),
        )
        take = functools.partial(table.take, family, places, now, at)
        self._sent[difference] = table.since[places], np.flatnonzero(present), take
        return difference


class _Table:
    """What has arrived of a metric. A row keeps its place, whatever `LabelRows` it is in, until its layer is removed.

    `known`: which places have arrived; `numbers`: values and sum of each; `since`: when that was, and before it has, from when on
    it counts.
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
        """Where the rows are; those that are new count since then."""
        found = self._places.get(labels)
        if found is None:
            new = list(dict.fromkeys(row for row in labels.rows if row not in self._rows))
            free, self._free = self._free[: len(new)], self._free[len(new) :]
            more = len(new) - len(free)
            taken = [*free, *range(len(self.known), len(self.known) + more)]
            self._rows.update(zip(new, taken, strict=True))
            self.known = np.pad(self.known, (0, more))
            self.numbers = np.pad(self.numbers, ((0, more), (0, 0)))
            self.since = np.pad(self.since, (0, more))
            self.since[taken] = since
            found = self._places[labels] = np.array([self._rows[row] for row in labels.rows], dtype=np.int64)
        return found

    def settle_removed(self, labels: LabelRows, layer: int, places: IntArray, now: FloatArray) -> None:
        """Counts what has arrived of removed layers as arrived of the remainder, and forgets these layers.

        Removed is a layer whose row is gone, or has begun anew. `layer`: which of the labels is the layer. `now`: the numbers of
        the present rows.
        """
        if all(row[layer] != REMOVED for row in labels.rows):
            return
        here = dict(zip(labels.rows, range(len(labels)), strict=True))
        anew = self.known[places] & (self.numbers[places, :-1] > now[:, :-1]).any(axis=1)
        removed = [row for row in self._rows if row not in here] + [labels.rows[row] for row in np.flatnonzero(anew).tolist()]
        for row in removed:
            remainder = (*row[:layer], REMOVED, *row[layer + 1 :])
            if remainder in here and row != remainder:
                # At most the remainder of now: sums of the same parts may differ in their last digits.
                self._add(self._rows[row], self._rows[remainder], most=now[here[remainder]])
                self._forget(row, gone=row not in here)

    def _add(self, place: int, into: int, *, most: FloatArray) -> None:
        self.numbers[into] = np.minimum(self.numbers[into] + self.numbers[place], most)
        self.known[into] |= self.known[place]
        both = Counter(self._exponential.get(into, {}))
        both.update(self._exponential.get(place, {}))
        self._exponential[into] = both

    def _forget(self, row: tuple[str, ...], *, gone: bool) -> None:
        place = self._rows[row]
        self.known[place], self.numbers[place] = False, 0
        self._exponential.pop(place, None)
        self._exemplars.pop(place, None)
        if gone:
            del self._rows[row]
            self._free.append(place)
            self._places.clear()

    def take(self, family: Family, places: IntArray, numbers: FloatArray, at: int, rows: IntArray) -> None:
        """Notes rows of an export as arrived; `places`, `numbers`: of all its rows."""
        self.known[places[rows]] = True
        self.numbers[places[rows]] = numbers[rows]
        self.since[places[rows]] = at
        for kept, found in ((self._exponential, family.exponential), (self._exemplars, family.exemplars)):
            if found is not None:
                kept.update((place, found[row]) for place, row in zip(places[rows].tolist(), rows.tolist(), strict=True))

    def exponential_since(
        self, now: Iterable[Mapping[int, int]], places: IntArray, goes_on: BoolArray
    ) -> Iterable[Mapping[int, int]]:
        """What was added to exponential counts."""
        for counts, place, subtract in zip(now, places.tolist(), goes_on.tolist(), strict=True):
            before = self._exponential.get(place, {}) if subtract else {}
            yield {i: more for i, n in counts.items() if (more := n - before.get(i, 0)) > 0}

    def exemplars_since(self, now: Iterable[Mapping[int, Exemplar]], places: IntArray) -> Iterable[Mapping[int, Exemplar]]:
        """The exemplars that are new."""
        for found, place in zip(now, places.tolist(), strict=True):
            before = self._exemplars.get(place, {})
            yield {bucket: one for bucket, one in found.items() if before.get(bucket) != one}


def _numbers(family: Family) -> FloatArray:
    """The numbers of each row, and its sum, 0 where there is none."""
    rows = len(family.labels)
    sums = np.zeros(rows) if family.sums is None else family.sums
    return np.column_stack((family.values.reshape(rows, len(family.spec.buckets) + 1), sums))
