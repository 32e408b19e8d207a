"""ActivationTotals: what sampled rounds have shown of the outputs of inner modules, by layer."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import numpy as np

from torch_grad_exporter.inspection.tallies import ActivationSample, OfOutput, SentTallies
from torch_grad_exporter.metrics.families import REMOVED, BoolArray, FloatArray, IntArray
from torch_grad_exporter.statistics.combine import root_of_squares
from torch_grad_exporter.store.records import Inspected

KEPT = 8
"""Samples without any call of a layer's modules after which its gauges vanish."""


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """What is shown of a layer; None where it is unknown. Totals are over `captures` samples."""

    captures: int = 0
    nans: float = 0.0
    infs: float = 0.0
    rms: float | None = None
    max_magnitude: float | None = None
    zero_ratio: float | None = None
    dead_ratio: float | None = None
    grad_norm: float | None = None
    sample: int = 0

    def only_counts(self) -> LayerActivations:
        """Return the same without what is of a single sample."""
        return LayerActivations(self.captures, self.nans, self.infs, sample=self.sample)

    def and_counts(self, other: LayerActivations) -> LayerActivations:
        """Return the counts of both."""
        return LayerActivations(self.captures + other.captures, self.nans + other.nans, self.infs + other.infs)


@dataclass(frozen=True, slots=True)
class ActivationSnapshot:
    """All values at one moment. `samples`: how many there were; `folded`: modules; `left_out`: modules by the reason."""

    layers: dict[str, LayerActivations]
    samples: int
    folded: int
    left_out: dict[str, int]


class ActivationTotals:
    """From any thread. `most`: layers that are kept at most; the counts of those that are gone go on in one remainder."""

    def __init__(self, most: int) -> None:
        self._most = most
        # Reentrant: a signal's handler may close the exporter while its own thread is in here.
        self._lock = threading.RLock()
        self._layers: dict[str, LayerActivations] = {}
        self._samples = 0
        self._folded = 0
        self._left_out: dict[str, int] = {}

    def modules(self, folded: int, left_out: dict[str, int]) -> None:
        """Take how many modules share a row, and how many are left out."""
        with self._lock:
            self._folded, self._left_out = folded, dict(left_out)

    def take(self, record: Inspected, values: tuple[FloatArray, ...]) -> None:
        """Count a sample; gauges of layers that were not called for a while vanish."""
        assert isinstance(record.data, SentTallies)  # noqa: S101 - only `Activations` sends records of this name
        layers = _by_layer(record.data.sample(values))
        with self._lock:
            self._samples += 1
            for label, new in layers.items():
                counts = self._layers.get(label, LayerActivations()).and_counts(new)
                self._layers[label] = LayerActivations(
                    counts.captures, counts.nans, counts.infs, new.rms, new.max_magnitude, new.zero_ratio, new.dead_ratio,
                    new.grad_norm, self._samples,
                )  # fmt: skip
            for label, layer in self._layers.items():
                if layer.rms is not None and self._samples - layer.sample >= KEPT:
                    self._layers[label] = layer.only_counts()
            self._make_room()

    def snapshot(self) -> ActivationSnapshot:
        """Return all values as of now."""
        with self._lock:
            return ActivationSnapshot(dict(self._layers), self._samples, self._folded, dict(self._left_out))

    def after_fork_in_child(self) -> None:
        """The child has none of the threads that may hold the lock."""
        self._lock = threading.RLock()

    def _make_room(self) -> None:
        """Add the layers that were called least recently to the remainder, while there are too many."""
        while len(self._layers) - (REMOVED in self._layers) > self._most:
            known = (label for label in self._layers if label != REMOVED)
            label = min(known, key=lambda label: self._layers[label].sample)
            rest = self._layers.get(REMOVED, LayerActivations())
            self._layers[REMOVED] = rest.and_counts(self._layers.pop(label))


def _by_layer(sample: ActivationSample) -> dict[str, LayerActivations]:
    """Return the values of each layer, of all its modules together."""
    labels = list(dict.fromkeys(sample.layers))
    place = {label: number for number, label in enumerate(labels)}
    group = np.array([place[label] for label in sample.layers], dtype=np.int64)
    count, columns = len(labels), sample.values.T

    def sums(column: FloatArray | IntArray | BoolArray) -> list[float]:
        return np.bincount(group, column, count).tolist()  # type: ignore[no-any-return]

    with np.errstate(all="ignore"):  # a NaN stays one
        norms = root_of_squares(columns[OfOutput.NORM], group, count)
        peaks = np.full(count, -np.inf)
        np.maximum.at(peaks, group, columns[OfOutput.PEAK])
        gradients = root_of_squares(np.where(sample.graded, columns[OfOutput.GRADIENT], 0.0), group, count) / sample.scale
    elements, zeros, units, dead = (
        sums(one) for one in (sample.elements, columns[OfOutput.ZEROS], sample.units, columns[OfOutput.DEAD])
    )
    nans, infs = sums(columns[OfOutput.NANS]), sums(columns[OfOutput.INFS])
    graded = sums(sample.graded) if not math.isnan(sample.scale) else [0.0] * count
    return {
        label: LayerActivations(
            captures=1,
            nans=nans[i],
            infs=infs[i],
            rms=float(norms[i]) / math.sqrt(elements[i]),
            max_magnitude=float(peaks[i]),
            zero_ratio=zeros[i] / elements[i],
            dead_ratio=dead[i] / units[i] if units[i] else None,
            grad_norm=float(gradients[i]) if graded[i] else None,
        )
        for i, label in enumerate(labels)
    }
