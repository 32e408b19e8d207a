"""WatchTotals: what sampled rounds have shown of the gradients of watched tensors, by name."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import numpy as np

from torch_grad_exporter.inspection.tallies import ActivationSample, OfOutput, SentTallies
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.statistics.combine import length
from torch_grad_exporter.store.records import Inspected

NAMES = 100
"""Names that are shown, at most."""

FOLDED = "(folded)"
"""The name of all that come after those."""

COUNTED = 10_000
"""Folded names that are counted, at most."""


@dataclass(frozen=True, slots=True)
class WatchedGradient:
    """What is shown of a name; None where it is unknown. `clipped`: gradients that were clipped, if they may be."""

    nans: float = 0.0
    infs: float = 0.0
    norm: float | None = None
    zero_ratio: float | None = None
    clipped: float | None = None


@dataclass(frozen=True, slots=True)
class ClipCounts:
    """The data of a record of how often gradients were clipped since the start: for each device the labels."""

    labels: tuple[tuple[str, ...], ...]


class WatchTotals:
    """From any thread."""

    def __init__(self) -> None:
        # Reentrant: a signal's handler may close the exporter while its own thread is in here.
        self._lock = threading.RLock()
        self._names: dict[str, WatchedGradient] = {}
        self._folded: set[str] = set()

    def label(self, name: str) -> str:
        """Return under which name it is shown: its own, or that of the rest where there are too many."""
        with self._lock:
            if name in self._names:
                return name
            if len(self._names) - (FOLDED in self._names) < NAMES and name != FOLDED:
                self._names[name] = WatchedGradient()
                return name
            self._names.setdefault(FOLDED, WatchedGradient())
            if len(self._folded) < COUNTED:
                self._folded.add(name)
            return FOLDED

    def take(self, record: Inspected, values: tuple[FloatArray, ...]) -> None:
        """Take what was measured in a sampled round, or how often gradients were clipped."""
        if isinstance(record.data, ClipCounts):
            self._take_counts(record.data, values)
        elif isinstance(record.data, SentTallies):
            self._take_sample(record.data.sample(values))

    def _take_sample(self, sample: ActivationSample) -> None:
        """Count the gradients of a sampled round, in which a name may have had several."""
        with self._lock:
            for label in dict.fromkeys(sample.layers):
                own = np.array([layer == label for layer in sample.layers])
                values: FloatArray = sample.values[own]
                known, before = not np.isnan(sample.scale), self._names.get(label, WatchedGradient())
                self._names[label] = replace(
                    before,
                    nans=before.nans + float(values[:, OfOutput.NANS].sum()),
                    infs=before.infs + float(values[:, OfOutput.INFS].sum()),
                    norm=length(values[:, OfOutput.NORM]) / sample.scale if known else None,
                    zero_ratio=float(values[:, OfOutput.ZEROS].sum() / sample.elements[own].sum()),
                )

    def _take_counts(self, sent: ClipCounts, counts: tuple[FloatArray, ...]) -> None:
        """Take a count for each label of each device."""
        totals: dict[str, float] = {}
        for of_device, vector in zip(sent.labels, counts, strict=True):
            for label, count in zip(of_device, vector.tolist(), strict=True):
                totals[label] = totals.get(label, 0.0) + count
        with self._lock:
            for label, total in totals.items():
                self._names[label] = replace(self._names.get(label, WatchedGradient()), clipped=total)

    def snapshot(self) -> tuple[dict[str, WatchedGradient], int]:
        """Return the values by name, and how many names are folded."""
        with self._lock:
            return dict(self._names), len(self._folded)

    def after_fork_in_child(self) -> None:
        """The child has none of the threads that may hold the lock."""
        self._lock = threading.RLock()
