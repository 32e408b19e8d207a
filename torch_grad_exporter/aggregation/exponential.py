"""Distributions of norms by exponential buckets, for outputs that use them; the classic buckets are in `tables`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from torch_grad_exporter.metrics.families import SCALE, FloatArray, IntArray

Counts = Mapping[int, int]
"""Observations by bucket, as in `Family.exponential`."""


@dataclass(slots=True)
class ExponentialCounts:
    """Counts observations by row and bucket. A row takes only the memory that it needs: norms of a layer are similar."""

    _rows: dict[int, dict[int, int]] = field(default_factory=dict)

    def observe(self, rows: IntArray, values: FloatArray) -> None:
        """Enters one finite value for each row; a 0 is in no bucket."""
        positive = values > 0
        for row, bucket in zip(rows[positive].tolist(), buckets(values[positive]).tolist(), strict=True):
            counts = self._rows.setdefault(row, {})
            counts[bucket] = counts.get(bucket, 0) + 1

    def forget(self, rows: IntArray) -> None:
        """Empties rows, which are assigned to something else."""
        for row in rows.tolist():
            self._rows.pop(row, None)

    def snapshot(self, rows: Iterable[int]) -> tuple[Counts, ...]:
        """A copy of these rows."""
        return tuple(dict(self._rows.get(row, {})) for row in rows)


@dataclass(slots=True)
class Exponentials:
    """What is counted so: norms of layers, of the parameters of optimizers, and those that the user observed."""

    layers: ExponentialCounts = field(default_factory=ExponentialCounts)
    optimizers: ExponentialCounts = field(default_factory=ExponentialCounts)
    observed: ExponentialCounts = field(default_factory=ExponentialCounts)


def buckets(values: FloatArray) -> IntArray:
    """The bucket of `SCALE` for each value above 0; a power of two is the upper bound of its own.

    OpenTelemetry, metrics data model, section ExponentialHistogram: bucket i is over (base ** i, base ** (i + 1)] with
    base = 2 ** (2 ** -SCALE).
    """
    # Mantissa and exponent separately, and log1p, so that a power of two and its next neighbour fall into the right buckets.
    mantissas, exponents = np.frexp(values)
    within = np.ceil((1 << SCALE) * np.log1p(2 * mantissas - 1) / np.log(2))
    found: IntArray = (exponents.astype(np.int64) - 1 << SCALE) + within.astype(np.int64) - 1
    return found
