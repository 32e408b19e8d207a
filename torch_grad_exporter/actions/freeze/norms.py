"""LayerNorms: the mean norms of layers over the last steps, from the exporter's own samples."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from torch_grad_exporter.store.worker import Worker

SAMPLES = 10  # that a window has at least: of fewer the mean says little, where steps are sampled rarely
PARTS = 16  # in which a window is remembered


class NormPart(NamedTuple):
    """A part of a window: the steps it spans, and of its samples the sum of norms, their number, and how many were not finite."""

    steps: float
    total: float
    samples: float
    bad: float


@dataclass(slots=True)
class NormWindow:
    """The last `after` steps of one layer, or more if they have less than `SAMPLES` samples.

    It is remembered in parts of a sixteenth each, so it may be too long by one of them.
    """

    after: int
    parts: list[NormPart] = field(default_factory=list)

    def add(self, part: NormPart) -> None:
        """Add the next part, and forget what the window no longer needs."""
        parts = self.parts
        if parts and not (parts[-1].steps >= self.after / PARTS and parts[-1].samples):
            parts[-1] = NormPart(*map(sum, zip(parts[-1], part, strict=True)))
        else:
            parts.append(part)
        while len(parts) > 1 and self._is_full(parts[1:]):
            parts.pop(0)

    def _is_full(self, parts: Sequence[NormPart]) -> bool:
        return sum(part.steps for part in parts) >= self.after and sum(part.samples for part in parts) >= SAMPLES

    @property
    def mean(self) -> float:
        """The mean norm; NaN while the window is not full, and if a gradient in it was not finite."""
        if not self._is_full(self.parts) or any(part.bad for part in self.parts):
            return math.nan
        return sum(part.total for part in self.parts) / sum(part.samples for part in self.parts)


class LayerNorms:
    """The windows of all layers that are trained, from now on. For one thread. `after`: steps of a window."""

    def __init__(self, after: int, worker: Worker) -> None:
        self._after = after
        self._worker = worker
        self._cursor = worker.cursor(norms=True)  # what it reads is not taken from others
        self._windows: dict[str, NormWindow] = {}
        self._step: float | None = None

    def read(self, without: Collection[str], restarted: Collection[str]) -> None:
        """Add what is new to the windows.

        Args:
            without: Layers that have no norms of their own now.
            restarted: Layers whose windows begin now.

        Raises:
            BusyError: The worker is busy; what is new is then still new.
        """
        reading = self._worker.read(self._cursor)
        gradients = reading.snapshot.gradients
        sampled = gradients.totals["sample_step"][gradients.totals["seen"]]
        step = max(self._step or 0.0, float(sampled.max()) if len(sampled) else 0.0)
        span, self._step = 0.0 if self._step is None else step - self._step, step
        layers, norms = gradients.table.layers, reading.gradients.norms
        rows = (np.zeros((3, len(layers))) if norms is None else norms).T.tolist()
        windows: dict[str, NormWindow] = {}
        for layer, row in zip(layers, rows, strict=True):
            if layer in without:
                continue
            known = None if layer in restarted else self._windows.get(layer)
            window = windows[layer] = known or NormWindow(self._after)
            if layer not in restarted and (span or any(row)):
                window.add(NormPart(span, *row))
        self._windows = windows

    def below(self, threshold: float) -> dict[str, float]:
        """Return the layers whose mean norm is below the threshold, each with its mean."""
        means = {layer: window.mean for layer, window in self._windows.items()}
        return {layer: mean for layer, mean in means.items() if mean < threshold}
