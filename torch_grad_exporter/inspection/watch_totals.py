"""WatchTotals: what sampled rounds have shown of the gradients of watched tensors, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch_grad_exporter.inspection.tallies import SentTallies
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.store.records import Inspected

# Names that are shown, at most, and the name under which all others are shown together.
NAMES, FOLDED = 100, "(folded)"

# Folded names that are counted, at most.
COUNTED = 10_000


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
    """The data of a record of how often gradients were clipped since the start: the labels of each device's vector."""

    labels: tuple[tuple[str, ...], ...]


class WatchTotals:
    """The values by name. `label` belongs to the training thread, what takes records to the worker, `snapshot` to any.

    Mappings are replaced and never changed, so there is no lock.
    """

    def __init__(self) -> None:
        self._watched: Mapping[str, WatchedGradient] = {}  # without values, of all names that are shown
        self._values: Mapping[str, WatchedGradient] = {}
        self._folded: set[str] = set()

    def label(self, name: str) -> str:
        """Return under which name it is shown: its own, or that of the rest where there are too many."""
        if name in self._watched:
            return name
        if len(self._watched) - (FOLDED in self._watched) < NAMES and name != FOLDED:
            self._watched = {**self._watched, name: WatchedGradient()}
            return name
        self._watched = {**self._watched, FOLDED: WatchedGradient()}
        if len(self._folded) < COUNTED:
            self._folded.add(name)
        return FOLDED

    def take(self, record: Inspected, values: tuple[FloatArray, ...]) -> None:
        """Take what was measured in a sampled round, or how often gradients were clipped."""
        if isinstance(record.data, ClipCounts):
            self._take_counts(record.data, values)
        elif isinstance(record.data, SentTallies):
            scale, changed = record.data.scale(values), {}
            for label, tally in record.data.by_label(values).items():
                before = self._values.get(label, WatchedGradient())
                changed[label] = replace(
                    before,
                    nans=before.nans + tally.nans,
                    infs=before.infs + tally.infs,
                    norm=None if scale is None else tally.norm / scale,
                    zero_ratio=tally.zeros / tally.elements,
                )
            self._values = {**self._values, **changed}

    def _take_counts(self, sent: ClipCounts, counts: tuple[FloatArray, ...]) -> None:
        """Take a count for each label of each device."""
        totals: dict[str, float] = {}
        for labels, vector in zip(sent.labels, counts, strict=True):
            for label, count in zip(labels, vector.tolist(), strict=True):
                totals[label] = totals.get(label, 0.0) + count
        before = self._values
        changed = {label: replace(before.get(label, WatchedGradient()), clipped=total) for label, total in totals.items()}
        self._values = {**before, **changed}

    def snapshot(self) -> tuple[dict[str, WatchedGradient], int]:
        """Return the values by name, and how many names are folded."""
        return {**self._watched, **self._values}, len(self._folded)
