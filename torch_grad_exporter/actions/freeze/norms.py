"""The norms of layers over the last steps, from the exporter's own samples."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.store.worker import Worker

SAMPLES = 10
"""Samples that a window has at least: of fewer the mean says little, where steps are sampled rarely."""

PARTS = 16
"""In how many parts a window is remembered."""


@dataclass(frozen=True, slots=True, eq=False)
class NormReading:
    """What is new since the reading before. `step`: of the last sample.

    `sums`: of each layer the sum of its norms, how many, and how many gradients were not finite, shape (3, layers).
    """

    step: float
    layers: Sequence[str]
    sums: FloatArray


class LayerNorms:
    """Reads the norms of all layers. One for each reader: reading takes nothing from others. For one thread."""

    def __init__(self, host: Worker) -> None:
        self._host = host
        self._cursor = host.cursor(norms=True)
        self._step = 0.0

    def read(self) -> NormReading:
        """What is new. Raises `TimeoutError` where the host's side is busy; what was new is then still new."""
        reading = self._host.read(self._cursor)
        gradients = reading.snapshot.gradients
        steps = gradients.totals["sample_step"][gradients.totals["seen"]]
        self._step = max(self._step, float(steps.max()) if len(steps) else 0.0)
        sums = reading.gradients.norms
        found = np.zeros((3, len(gradients.table.layers))) if sums is None else sums
        return NormReading(self._step, gradients.table.layers, found)


Chunk = tuple[float, float, float, float]
"""A part of a window: how many steps it spans, and of the samples in it the sum of the norms, how many, and how many bad."""


def _together(first: Chunk, second: Chunk) -> Chunk:
    return first[0] + second[0], first[1] + second[1], first[2] + second[2], first[3] + second[3]


@dataclass(slots=True)
class NormWindow:
    """The last `after` steps of one layer, or more where they have less than `SAMPLES` samples.

    It is remembered in parts, of a sixteenth of it each where there are so many: by so much it may be too long.
    """

    after: int
    _chunks: tuple[Chunk, ...] = ()
    """Replaced, never changed: the thread that trains may ask for the state meanwhile."""
    _steps: float = 0.0
    _samples: float = 0.0

    def add(self, chunk: Chunk) -> None:
        """Takes the next part, and forgets what the window does not need any more."""
        self._steps, self._samples = self._steps + chunk[0], self._samples + chunk[2]
        chunks = [*self._chunks]
        if chunks and not (chunks[-1][0] >= self.after / PARTS and chunks[-1][2]):
            chunks[-1] = _together(chunks[-1], chunk)
        else:
            chunks.append(chunk)
        while len(chunks) > 1 and self._is_full(self._steps - chunks[0][0], self._samples - chunks[0][2]):
            steps, _, samples, _ = chunks.pop(0)
            self._steps, self._samples = self._steps - steps, self._samples - samples
        self._chunks = tuple(chunks)

    def _is_full(self, steps: float, samples: float) -> bool:
        return steps >= self.after and samples >= SAMPLES

    @property
    def mean(self) -> float:
        """The mean norm; NaN while the window is not full, and where a gradient in it was not finite."""
        if not self._is_full(self._steps, self._samples) or any(bad for *_, bad in self._chunks):
            return math.nan
        return sum(total for _, total, _, _ in self._chunks) / self._samples

    def state(self) -> list[list[float]]:
        """What it remembers, as plain numbers."""
        return [[*chunk] for chunk in self._chunks]

    @classmethod
    def of(cls, after: int, state: Iterable[Sequence[float]]) -> NormWindow:
        """The one that had this state. Raises `TypeError` or `ValueError` where it is none."""
        window = cls(after)
        for numbers in state:
            steps, total, samples, bad = map(float, numbers)
            window.add((steps, total, samples, bad))
        return window


class Windows:
    """The windows of all layers that are trained. For one thread."""

    def __init__(self, after: int) -> None:
        self._after = after
        self._windows: dict[str, NormWindow] = {}
        self._step: float | None = None

    def take(self, reading: NormReading, without: Collection[str], afresh: Collection[str] = ()) -> None:
        """Takes what is new. `without`: layers that have no norms of their own now; `afresh`: those whose windows begin now."""
        span = 0.0 if self._step is None else reading.step - self._step
        self._step = reading.step
        found: dict[str, NormWindow] = {}
        for layer, numbers in zip(reading.layers, reading.sums.T.tolist(), strict=True):
            if layer in without:
                continue
            if layer in afresh:
                found[layer] = NormWindow(self._after)
                continue
            window = found[layer] = self._windows.get(layer) or NormWindow(self._after)
            if span or any(numbers):
                window.add((span, *numbers))
        self._windows = found

    def below(self, threshold: float) -> dict[str, float]:
        """The layers whose mean norm is below it, each with that."""
        means = {layer: window.mean for layer, window in self._windows.items()}
        return {layer: mean for layer, mean in means.items() if mean < threshold}

    def state(self) -> dict[str, list[list[float]]]:
        """All of them, as plain numbers."""
        return {layer: window.state() for layer, window in self._windows.items()}

    def load(self, state: Mapping[str, Iterable[Sequence[float]]]) -> None:
        """Goes on from a state."""
        self._windows = {layer: NormWindow.of(self._after, chunks) for layer, chunks in state.items()}
        self._step = None
