"""Peaks: what was largest since somebody looked last, so that a look now and then misses no spike between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from torch_grad_exporter.metrics.families import FloatArray, IntArray


@dataclass(slots=True)
class Peaks:
    """Per row, the values of two quantities that were farthest from zero; NaN where none that is finite was entered."""

    _values: FloatArray = field(default_factory=lambda: np.full((2, 0), np.nan))

    def grow(self, rows: int) -> None:
        """Makes room for `rows` rows; new ones are empty."""
        more = rows - self._values.shape[1]
        if more > 0:
            self._values = np.pad(self._values, ((0, 0), (0, more)), constant_values=np.nan)

    def enter(self, rows: IntArray | Sequence[int], first: FloatArray, second: FloatArray) -> None:
        """Takes a value of each quantity for each of `rows`; what is not finite is none."""
        values, kept = np.stack((first, second)), self._values[:, rows]
        self._values[:, rows] = np.where(np.isfinite(values) & ~(np.abs(values) <= np.abs(kept)), values, kept)

    def of(self, rows: IntArray | Sequence[int]) -> FloatArray:
        """Those of these rows, shape (2, rows); of a row -1, which is none, NaN."""
        found = self._values[:, rows] if self._values.size else np.full((2, len(rows)), np.nan)
        found[:, np.asarray(rows, dtype=np.int64) < 0] = np.nan
        return found

    def forget(self) -> None:
        """Begins anew."""
        self._values[:] = np.nan
