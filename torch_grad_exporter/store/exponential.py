"""Counts by row and exponential bucket that grow with what is observed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torch_grad_exporter.metrics.exponential import SCALE, Exponential
from torch_grad_exporter.metrics.families import FloatArray, IntArray

# Values that wait, at most.
MOST = 4096

# The upper bounds of the buckets within a power of two, for mantissas from 0.5 to 1.
BOUNDS = 2.0 ** (np.arange(1 << SCALE) / (1 << SCALE) - 1)


class ExponentialRows:
    """One array for all rows, with a column for each bucket that any of them has: four bytes each, 160 for six decades.

    A value far from all others costs one column more. Values wait until they are read or many: to count a few costs nearly as
    much as to count a thousand.
    """

    def __init__(self, rows: int = 0) -> None:
        self._buckets, self._counts = np.zeros(0, dtype=np.int64), np.zeros((rows, 0), dtype=np.uint32)
        self._waiting: list[tuple[IntArray, FloatArray]] = []
        self._values = 0

    def arrange(self, index: IntArray) -> None:
        """Keep the rows with these numbers, in this order; -1 stands for a new one."""
        self._count()
        self._counts = np.pad(self._counts, ((0, 1), (0, 0)))[index]

    def enter(self, rows: IntArray, values: FloatArray) -> None:
        """Count one value for each of these rows, but what is not above 0. The arrays must not be written to afterwards."""
        self._waiting.append((rows, values))
        self._values += len(rows)
        if self._values >= MOST:
            self._count()

    def _count(self) -> None:
        if not self._waiting:
            return
        rows, values = (np.concatenate(arrays) for arrays in zip(*self._waiting, strict=True))
        self._waiting, self._values = [], 0
        positive = values > 0
        if not positive.any():
            return
        numbers = buckets(values[positive])
        new = np.setdiff1d(numbers, self._buckets)
        places = np.searchsorted(self._buckets, new)
        self._buckets, self._counts = np.insert(self._buckets, places, new), np.insert(self._counts, places, 0, axis=1)
        np.add.at(self._counts, (rows[positive], np.searchsorted(self._buckets, numbers)), 1)

    def add(self, row: int, to: int) -> None:
        """Add the counts of a row to those of another."""
        self._count()
        self._counts[to] += self._counts[row]

    def of(self, rows: Sequence[int] | IntArray) -> Exponential:
        """Return a copy of the counts of these rows."""
        self._count()
        return Exponential(self._buckets, self._counts[rows])


def buckets(values: FloatArray) -> IntArray:
    """Return the exponential bucket of each value above 0; a power of two is the upper bound of its own.

    OpenTelemetry, metrics data model, section ExponentialHistogram: bucket i is over (base ** i, base ** (i + 1)]
    with base = 2 ** (2 ** -SCALE).
    """
    # Mantissa and exponent apart, so that a power of two and its next neighbour get the right buckets.
    mantissas, exponents = np.frexp(values)
    numbers: IntArray = (exponents.astype(np.int64) - 1 << SCALE) + np.searchsorted(BOUNDS, mantissas) - 1
    return numbers
