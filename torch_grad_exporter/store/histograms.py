"""Histograms of norms in the tables: classic buckets in a table's columns, and exponential ones for OTLP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from itertools import compress

import numpy as np

from torch_grad_exporter.metrics.families import SCALE, FloatArray, IntArray

Records = np.ndarray[tuple[int], np.dtype[np.void]]
"""A structured array: one record per row of a table."""

Counts = Mapping[int, int]
"""Observations by bucket, as in `Family.exponential`."""


def moved(rows: Records, index: IntArray, empty: Records) -> Records:
    """Return the rows with these numbers, in this order; -1 stands for a new one, like the single record `empty`."""
    return np.concatenate([rows, empty])[index]


def enter_norms(table: Records, rows: IntArray, norms: FloatArray, bounds: FloatArray) -> tuple[IntArray, FloatArray]:
    """Enter one norm for each row into its histogram; return the rows and norms that were entered.

    What is not finite is left out, and what would make the sum overflow. A bucket includes its upper bound.
    """
    sums = table["bucket_sum"][rows] + norms
    fits = np.isfinite(sums)
    if not fits.all():
        rows, norms, sums = rows[fits], norms[fits], sums[fits]
    table["buckets"][rows, np.searchsorted(bounds, norms, side="left")] += 1
    table["bucket_sum"][rows] = sums
    return rows, norms


class ExponentialCounts:
    """Counts observations by key and bucket, if `enabled`. Norms of a layer are similar, so a key takes little memory."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._counts: dict[Hashable, Counter[int]] = {}

    def observe(self, keys: Iterable[Hashable], values: FloatArray) -> None:
        """Enter one finite value for each key; a 0 is in no bucket."""
        if self._enabled:
            positive = values > 0
            for key, bucket in zip(compress(keys, positive.tolist()), buckets(values[positive]).tolist(), strict=True):
                self._counts.setdefault(key, Counter())[bucket] += 1

    def move(self, key: Hashable, to: Hashable) -> None:
        """Add the counts of a key to those of another."""
        self._counts.setdefault(to, Counter()).update(self._counts.pop(key, {}))

    def drop(self, key: Hashable) -> None:
        """Drop the counts of a key."""
        self._counts.pop(key, None)

    def of(self, keys: Iterable[Hashable]) -> tuple[Counts, ...] | None:
        """Return a copy of the counts of these keys, None if nothing is counted."""
        return tuple(dict(self._counts.get(key, {})) for key in keys) if self._enabled else None


def buckets(values: FloatArray) -> IntArray:
    """Return the exponential bucket of each value above 0; a power of two is the upper bound of its own.

    OpenTelemetry, metrics data model, section ExponentialHistogram: bucket i is over (base ** i, base ** (i + 1)]
    with base = 2 ** (2 ** -SCALE).
    """
    # Mantissa and exponent apart, and log1p, so that a power of two and its next neighbour get the right buckets.
    mantissas, exponents = np.frexp(values)
    within = np.ceil((1 << SCALE) * np.log1p(2 * mantissas - 1) / np.log(2))
    numbers: IntArray = (exponents.astype(np.int64) - 1 << SCALE) + within.astype(np.int64) - 1
    return numbers
