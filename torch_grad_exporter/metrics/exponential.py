"""Exponential buckets of histograms, as OpenTelemetry's and Prometheus' native histograms have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Each bucket is 2 ** (1 / 2 ** SCALE) times as wide as the one below it, here 9 percent.
SCALE = 3


@dataclass(frozen=True, slots=True, eq=False)
class Exponential:
    """Observations above 0 by row and bucket; zeros are in none. Also a sequence of mappings, one per row.

    Bucket i is over (2 ** (i / 2 ** SCALE), 2 ** ((i + 1) / 2 ** SCALE)].

    Attributes:
        buckets: Those that have an observation in any row, in ascending order; shape (columns,).
        counts: Shape (rows, columns); never written to.
    """

    buckets: NDArray[np.int64]
    counts: NDArray[np.uint32]

    @classmethod
    def of(cls, rows: Sequence[Mapping[int, int]]) -> Exponential:
        """Return counts that are given by bucket, one mapping per row."""
        buckets = sorted({bucket for row in rows for bucket in row})
        counts = [[row.get(bucket, 0) for bucket in buckets] for row in rows]
        return cls(np.array(buckets, dtype=np.int64), np.array(counts, dtype=np.uint32).reshape(len(rows), len(buckets)))

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, row: int) -> Mapping[int, int]:
        """Return the counts of a row by bucket, without those that are 0."""
        columns = np.flatnonzero(self.counts[row])
        return dict(zip(self.buckets[columns].tolist(), self.counts[row, columns].tolist(), strict=True))

    def __iter__(self) -> Iterator[Mapping[int, int]]:
        return (self[row] for row in range(len(self)))
