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
        first: The bucket of the first column.
        counts: Shape (rows, buckets); never written to.
    """

    first: int
    counts: NDArray[np.uint32]

    @classmethod
    def of(cls, rows: Sequence[Mapping[int, int]]) -> Exponential:
        """Return counts that are given by bucket, one mapping per row."""
        buckets = [bucket for row in rows for bucket in row] or [0]
        counts = np.zeros((len(rows), max(buckets) - min(buckets) + 1), dtype=np.uint32)
        for number, row in enumerate(rows):
            for bucket, count in row.items():
                counts[number, bucket - min(buckets)] = count
        return cls(min(buckets), counts)

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, row: int) -> Mapping[int, int]:
        """Return the counts of a row by bucket, without those that are 0."""
        columns = np.flatnonzero(self.counts[row])
        return dict(zip((columns + self.first).tolist(), self.counts[row, columns].tolist(), strict=True))

    def __iter__(self) -> Iterator[Mapping[int, int]]:
        return (self[row] for row in range(len(self)))
