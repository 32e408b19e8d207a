"""Rows of norms, each with a histogram: classic buckets in the row, and exponential ones for OTLP beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np

from torch_grad_exporter.metrics.families import SCALE, BoolArray, FloatArray, IntArray
from torch_grad_exporter.store.cursors import Cursor

Records = np.ndarray[tuple[int], np.dtype[np.void]]
"""A structured array: one record per row of a table."""

Counts = Mapping[int, int]
"""Observations by bucket, as in `Family.exponential`."""

NEW = np.array([[np.nan], [np.nan], [0.0], [0.0], [0.0]])  # of a row that has nothing new, see `NormRows.take`


class NormRows:
    """The rows of a table, with what is new of their norms to each consumer.

    Args:
        new: One record with the values of a new row; its columns `buckets` and `bucket_sum` are a histogram.
        bounds: The upper bounds of the buckets, each included.
        exponential: Whether norms are counted by exponential bucket as well.
    """

    def __init__(self, new: Records, bounds: Sequence[float], *, exponential: bool) -> None:
        self.values = new[:0]
        self._empty, self._bounds = new, np.array(bounds)
        self._exponential: list[Counter[int]] | None = [] if exponential else None
        self._new: WeakKeyDictionary[Cursor, FloatArray] = WeakKeyDictionary()

    def arrange(self, index: IntArray) -> None:
        """Keep the rows with these numbers, in this order; -1 stands for a new one."""
        values = np.concatenate([self.values, self._empty])[index]
        new = {cursor: np.hstack([counts, NEW])[:, index] for cursor, counts in self._new.items()}
        if self._exponential is not None:
            self._exponential = [Counter() if row < 0 else self._exponential[row] for row in index.tolist()]
        self.values = values
        self._new.update(new)

    def enter(self, rows: IntArray, norms: FloatArray) -> None:
        """Enter one norm for each row into its histograms, but what is not finite or would make the sum overflow."""
        sums = self.values["bucket_sum"][rows] + norms
        fits = np.isfinite(sums)
        if not fits.all():
            rows, norms, sums = rows[fits], norms[fits], sums[fits]
        self.values["buckets"][rows, np.searchsorted(self._bounds, norms, side="left")] += 1
        self.values["bucket_sum"][rows] = sums
        if self._exponential is not None:
            positive = norms > 0  # a 0 is in no exponential bucket
            for row, bucket in zip(rows[positive].tolist(), buckets(norms[positive]).tolist(), strict=True):
                self._exponential[row][bucket] += 1

    def add_exponential(self, row: int, to: int) -> None:
        """Add the exponential counts of a row to those of another."""
        if self._exponential is not None:
            self._exponential[to].update(self._exponential[row])

    def exponential(self, rows: Collection[int]) -> tuple[Counts, ...] | None:
        """Return a copy of the exponential counts of these rows, None if nothing is counted."""
        return None if self._exponential is None else tuple(dict(self._exponential[row]) for row in rows)

    # What is new to consumers

    def follow(self, cursor: Cursor) -> None:
        """Begin with a consumer: what comes from now on is new to it."""
        self._new[cursor] = np.repeat(NEW, len(self.values), axis=1)

    def note(self, rows: IntArray, norms: FloatArray, others: FloatArray, known: BoolArray, but: Collection[Cursor] = ()) -> None:
        """Note a norm of each row, and another value, for consumers `but` some; what is not finite is none.

        `known`: the gradient itself is finite.
        """
        values, finite = np.stack((norms, others)), np.isfinite(norms)
        for cursor, new in self._new.items():
            if cursor in but:
                continue
            peaks = new[:2, rows]
            new[:2, rows] = np.where(np.isfinite(values) & ~(np.abs(values) <= np.abs(peaks)), values, peaks)
            if cursor.norms:
                new[2:, rows] += np.stack((np.where(finite, norms, 0.0), finite, ~known))

    def take(self, cursor: Cursor) -> FloatArray:
        """Return what is new to a consumer, shape (5, rows), which is nothing new from now on.

        The norm and the other value that were farthest from zero, NaN if there was none; then, if it asks for them, the
        sum of the norms, how many, and how many gradients were not finite.
        """
        new = self._new[cursor]
        self.follow(cursor)
        return new


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
