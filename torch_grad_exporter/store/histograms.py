"""Distributions of norms by exponential buckets, for outputs that use them; the classic buckets are in `tables`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from torch_grad_exporter.metrics.families import SCALE, FloatArray, IntArray

Counts = Mapping[int, int]
"""Observations by bucket, as in `Family.exponential`."""


@dataclass(slots=True)
class ExponentialCounts:
    """Counts observations by key and bucket, if it is `on`. A key takes little memory: norms of a layer are similar."""

    on: bool = True
    _counts: dict[Hashable, Counter[int]] = field(default_factory=dict)

    def observe(self, keys: Iterable[Hashable], values: FloatArray) -> None:
        """Enters one finite value for each key; a 0 is in no bucket."""
        if self.on:
            positive = values > 0
            for key, bucket in zip(compress(keys, positive.tolist()), buckets(values[positive]).tolist(), strict=True):
                self._counts.setdefault(key, Counter())[bucket] += 1

    def move(self, key: Hashable, to: Hashable) -> None:
        """Adds the counts of a key to those of another."""
        self._counts.setdefault(to, Counter()).update(self._counts.pop(key, {}))

    def forget(self, key: Hashable) -> None:
        """Drops the counts of a key."""
        self._counts.pop(key, None)

    def of(self, keys: Iterable[Hashable]) -> tuple[Counts, ...] | None:
        """A copy of the counts of these keys, `None` if nothing is counted."""
        return tuple(dict(self._counts.get(key, {})) for key in keys) if self.on else None


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
