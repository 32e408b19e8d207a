"""The families of one scrape, by metric and labels, as rules use them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np

from torch_grad_exporter.collectors.training import TRAIN_STATE
from torch_grad_exporter.metrics.families import REMOVED, Family, FloatArray, Spec, by_spec

Rows = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The rows of a gauge or counter, by their labels, and the number of each; NaN: it has none."""

    rows: Rows = ()
    numbers: FloatArray = field(default_factory=lambda: np.zeros(0))

    def at(self, rows: Rows) -> FloatArray:
        """The numbers of these rows; NaN for those that are not here."""
        if rows is self.rows or rows == self.rows:  # a collector keeps its rows, so this is the usual case
            return self.numbers
        found = dict(zip(self.rows, self.numbers.tolist(), strict=True))
        return np.array([found.get(row, np.nan) for row in rows], dtype=np.float64)

    def items(self) -> Iterator[tuple[tuple[str, ...], float]]:
        """The rows that have a number."""
        return ((row, number) for row, number in zip(self.rows, self.numbers.tolist(), strict=True) if not math.isnan(number))

    def since(self, before: Table) -> Table:
        """By how much the rows have grown; what is new has grown from nothing."""
        then = before.at(self.rows)
        return Table(self.rows, self.numbers - np.where(np.isnan(then), 0.0, then))

    def largest(self) -> float | None:
        """The largest finite number."""
        finite = self.numbers[np.isfinite(self.numbers)]
        return float(finite.max()) if len(finite) else None


_NOTHING = Table()


class Values:
    """Families by metric and labels, indexed when first used. From any thread."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._by_spec = by_spec(families)
        self._found: dict[Spec, dict[tuple[str, ...], Any]] = {}
        self._tables: dict[Spec, Table] = {}

    def _index(self, spec: Spec) -> dict[tuple[str, ...], Any]:
        """Numbers, or the counts of a histogram, by the labels of their rows. All rows are gone through only once."""
        if spec not in self._found:
            families = self._by_spec.get(spec, ())
            self._found[spec] = {family.labels.rows[row]: family.values[row] for family in families for row in family.row_numbers}
        return self._found[spec]

    def rows(self, spec: Spec) -> Iterator[tuple[tuple[str, ...], float]]:
        """The labels and the value of each present row of a gauge or counter."""
        return ((labels, float(value)) for labels, value in self._index(spec).items())

    def one(self, spec: Spec, *labels: str) -> float | None:
        """The value of the row with these labels, or of the first one; `None` if it is absent."""
        found = self._index(spec)
        value = found.get(labels) if labels else next(iter(found.values()), None)
        return None if value is None else float(value)

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The metrics that are there, in their order."""
        return tuple(self._by_spec)

    def table(self, spec: Spec) -> Table:
        """All rows of a gauge or counter, but for the remainder of removed layers, whose growth says nothing about the training."""
        if spec not in self._tables:
            self._tables[spec] = _together([_without_removed(family) for family in self._by_spec.get(spec, ())])
        return self._tables[spec]

    def histogram(self, spec: Spec, *labels: str) -> FloatArray | None:
        """The counts by bucket of the row with these labels; `None` if it is absent."""
        return self._index(spec).get(labels)

    def state(self) -> str | None:
        """The state of the run; `None` where it is not shown, since the collector `training` is off or has failed."""
        return next((labels[0] for labels, value in self.rows(TRAIN_STATE) if value), None)


def _together(tables: Sequence[Table]) -> Table:
    if len(tables) == 1:
        return tables[0]
    rows = tuple(row for table in tables for row in table.rows)
    return Table(rows, np.concatenate([table.numbers for table in tables])) if tables else _NOTHING


def _without_removed(family: Family) -> Table:
    rows, numbers, labels = family.labels.rows, _numbers(family), family.spec.labels
    kept = [row[labels.index("layer")] != REMOVED for row in rows] if "layer" in labels else []
    return Table(rows, numbers) if all(kept) else Table(tuple(compress(rows, kept)), numbers[kept])


def _numbers(family: Family) -> FloatArray:
    return family.values if family.present is None else np.where(family.present, family.values, np.nan)
