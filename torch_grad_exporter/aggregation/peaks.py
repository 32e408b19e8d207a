"""Peaks: what was largest since a consumer's last read, so that no spike between two reads is missed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from torch_grad_exporter.aggregation.cursor import Cursor, Unread
from torch_grad_exporter.metrics.families import FloatArray, IntArray


def _none() -> FloatArray:
    return np.full((2, 0), np.nan)


@dataclass(slots=True)
class Peaks:
    """Per row, the values of two quantities that were farthest from zero; NaN where none that is finite was entered."""

    _latest: FloatArray = field(default_factory=_none)
    _unread: Unread[FloatArray] = field(default_factory=lambda: Unread(_none, _farther))

    def grow(self, rows: int) -> None:
        """Grows to `rows` rows; new ones are empty."""
        self._latest = _widened(self._latest, rows)

    def enter(self, rows: IntArray | Sequence[int], first: FloatArray, second: FloatArray) -> None:
        """Takes a value of each quantity for each of `rows`; what is not finite is none."""
        values, kept = np.stack((first, second)), self._latest[:, rows]
        self._latest[:, rows] = np.where(np.isfinite(values) & ~(np.abs(values) <= np.abs(kept)), values, kept)

    def forget(self, rows: IntArray) -> None:
        """Empties rows for all consumers; they are assigned to something else."""
        for values in (self._latest, *self._unread.summaries()):
            values[:, rows[rows < values.shape[1]]] = np.nan

    def follow(self, cursor: Cursor) -> None:
        """Begins with a consumer: what is entered from now on is new to it."""
        self._unread.follow(cursor, self._closed())

    def take(self, cursor: Cursor, rows: IntArray | Sequence[int]) -> FloatArray:
        """The peaks of these rows that are new to a consumer, shape (2, rows); of a row -1, which is none, NaN.

        Those of all other rows count as read, too.
        """
        found = _widened(self._unread.take(cursor, self._closed()), self._latest.shape[1] + 1)
        return found[:, rows]  # the last one, which is row -1, is empty

    def _closed(self) -> FloatArray:
        """What was entered since the last read of any consumer; from now on another array is filled."""
        latest, self._latest = self._latest, np.full_like(self._latest, np.nan)
        return latest


def _widened(values: FloatArray, rows: int) -> FloatArray:
    more = rows - values.shape[1]
    return np.pad(values, ((0, 0), (0, more)), constant_values=np.nan) if more > 0 else values


def _farther(one: FloatArray, other: FloatArray) -> FloatArray:
    """Elementwise the one that is farther from zero, or that is there at all."""
    width = max(one.shape[1], other.shape[1])
    one, other = _widened(one, width), _widened(other, width)
    return np.where(np.isnan(one) | (np.abs(other) > np.abs(one)), other, one)
