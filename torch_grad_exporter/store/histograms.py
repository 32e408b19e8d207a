"""Rows of norms, each with a histogram: classic buckets in the row, and exponential ones beside it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from weakref import WeakKeyDictionary

import numpy as np

from torch_grad_exporter.metrics.families import BoolArray, FloatArray, IntArray
from torch_grad_exporter.store.cursors import Cursor
from torch_grad_exporter.store.exponential import ExponentialRows

Records = np.ndarray[tuple[int], np.dtype[np.void]]
"""A structured array: one record per row of a table."""

NEW = np.array([[np.nan], [np.nan], [0.0], [0.0], [0.0]])  # of a row that has nothing new, see `NormRows.take`


class NormRows:
    """The rows of a table, with what is new of their norms to each consumer.

    Args:
        new: One record with the values of a new row; its columns `buckets` and `bucket_sum` are a histogram.
        bounds: The upper bounds of the buckets, each included.

    Attributes:
        exponential: The norms by exponential bucket.
    """

    def __init__(self, new: Records, bounds: Sequence[float]) -> None:
        self.values = new[:0]
        self._empty, self._bounds = new, np.array(bounds)
        self.exponential = ExponentialRows()
        self._new: WeakKeyDictionary[Cursor, FloatArray] = WeakKeyDictionary()

    def arrange(self, index: IntArray) -> None:
        """Keep the rows with these numbers, in this order; -1 stands for a new one."""
        values = np.concatenate([self.values, self._empty])[index]
        new = {cursor: np.hstack([counts, NEW])[:, index] for cursor, counts in self._new.items()}
        self.exponential.arrange(index)
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
        self.exponential.enter(rows, norms)

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
