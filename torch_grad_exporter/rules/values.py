"""The families of one scrape, by metric and labels, as rules use them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np

from torch_grad_exporter.collectors.training import TRAIN_STATE
from torch_grad_exporter.metrics.families import REMOVED, Family, FloatArray, Spec, by_spec

Rows = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The rows of a gauge or counter, by their labels, and the number of each; NaN for a row without a number."""

    rows: Rows = ()
    numbers: FloatArray = field(default_factory=lambda: np.zeros(0))

    def at(self, rows: Rows) -> FloatArray:
        """Return the numbers of these rows, shape (rows,); NaN for rows that are not here."""
        if rows is self.rows or rows == self.rows:  # a collector keeps its rows, so this is the usual case
            return self.numbers
        numbers = dict(zip(self.rows, self.numbers.tolist(), strict=True))
        return np.array([numbers.get(row, np.nan) for row in rows], dtype=np.float64)

    def items(self) -> Iterator[tuple[tuple[str, ...], float]]:
        """Yield the rows that have a number."""
        return ((row, number) for row, number in zip(self.rows, self.numbers.tolist(), strict=True) if not math.isnan(number))

    def since(self, before: Table) -> Table:
        """Return by how much the rows have grown; a new row has grown from nothing."""
        then = before.at(self.rows)
        return Table(self.rows, self.numbers - np.where(np.isnan(then), 0.0, then))

    def largest(self) -> float | None:
        """Return the largest finite number."""
        finite = self.numbers[np.isfinite(self.numbers)]
        return float(finite.max()) if len(finite) else None


class Values:
    """Families by metric and labels, indexed when first used. From any thread."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._by_spec = by_spec(families)
        self._indexes: dict[Spec, dict[tuple[str, ...], Any]] = {}
        self._tables: dict[Spec, Table] = {}

    def _index(self, spec: Spec) -> dict[tuple[str, ...], Any]:
        """Return numbers, or the counts of a histogram, by the labels of their rows. Builds the index only once."""
        if spec not in self._indexes:
            families = self._by_spec.get(spec, ())
            self._indexes[spec] = {family.labels.rows[row]: family.values[row] for family in families for row in family.row_numbers}
        return self._indexes[spec]

    def rows(self, spec: Spec) -> Iterator[tuple[tuple[str, ...], float]]:
        """Yield the labels and the value of each present row of a gauge or counter."""
        return ((labels, float(value)) for labels, value in self._index(spec).items())

    def one(self, spec: Spec, *labels: str) -> float | None:
        """Return the value of the row with these labels, or of the first row; None if it is absent."""
        index = self._index(spec)
        value = index.get(labels) if labels else next(iter(index.values()), None)
        return None if value is None else float(value)

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The metrics that are present, in their order."""
        return tuple(self._by_spec)

    def table(self, spec: Spec) -> Table:
        """Return all rows of a gauge or counter, except the remainder of removed layers, whose growth is not the training's."""
        if spec not in self._tables:
            tables = [_without_removed(family) for family in self._by_spec.get(spec, ())]
            rows = tuple(row for table in tables for row in table.rows)
            # Of one table its own rows: what is the same object is compared at once.
            several = Table(rows, np.concatenate([np.zeros(0), *(table.numbers for table in tables)]))
            self._tables[spec] = tables[0] if len(tables) == 1 else several
        return self._tables[spec]

    def histogram(self, spec: Spec, *labels: str) -> FloatArray | None:
        """Return the counts by bucket of the row with these labels; None if it is absent."""
        return self._index(spec).get(labels)

    def state(self) -> str | None:
        """Return the state of the run; None if the collector `training` is off or has failed."""
        return next((labels[0] for labels, value in self.rows(TRAIN_STATE) if value), None)


def _without_removed(family: Family) -> Table:
    rows, labels = family.labels.rows, family.spec.labels
    numbers = family.values if family.present is None else np.where(family.present, family.values, np.nan)
    kept = [row[labels.index("layer")] != REMOVED for row in rows] if "layer" in labels else []
    return Table(rows, numbers) if all(kept) else Table(tuple(compress(rows, kept)), numbers[kept])
