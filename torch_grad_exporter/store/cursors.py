"""Cursors: each consumer reads what is new since its own last read, and takes nothing from the others.

A cursor holds summaries (a count, a mean, the largest values), to which the host's side adds while things happen. So a consumer
that has not read for days gets the largest of all these days, and memory grows with the number of cursors, never with time. They
are referenced weakly: one that its consumer has dropped is forgotten.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from torch_grad_exporter.metrics.families import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Losses:
    """Finite losses: how many, and their mean, which is not known of none. A sum of losses may be more than a float holds."""

    count: int = 0
    mean: float = 0.0

    def with_one(self, loss: float) -> Losses:
        """These and another one."""
        count = self.count + 1
        return Losses(count, self.mean * (self.count / count) + loss / count)


class Peaks:
    """Per row, the values of two quantities that were farthest from zero; NaN where none that is finite was entered."""

    def __init__(self, rows: int = 0) -> None:
        self._values = np.full((2, rows), np.nan)

    def enter(self, rows: IntArray | Sequence[int], first: FloatArray, second: FloatArray) -> None:
        """Takes a value of each quantity for each of `rows`; what is not finite is none."""
        values, kept = np.stack((first, second)), self._values[:, rows]
        self._values[:, rows] = np.where(np.isfinite(values) & ~(np.abs(values) <= np.abs(kept)), values, kept)

    def moved(self, index: IntArray) -> Peaks:
        """Those of the rows with these numbers, in this order; -1 is a new one, which is empty."""
        found = Peaks()
        found._values = np.pad(self._values, ((0, 0), (0, 1)), constant_values=np.nan)[:, index]
        return found

    def take(self) -> FloatArray:
        """The peaks, shape (2, rows); from now on all rows are empty."""
        found, self._values = self._values, np.full_like(self._values, np.nan)
        return found


class NormSums:
    """Per row, what was entered since the last `take`: the sum of the norms, how many, and how many gradients were not finite."""

    def __init__(self, rows: int = 0) -> None:
        self._values = np.zeros((3, rows))

    def enter(self, rows: IntArray, norms: FloatArray, nonfinite: BoolArray) -> None:
        """Takes a norm for each of `rows`; one that is not finite is none. `nonfinite`: where the gradient itself is not."""
        known = np.isfinite(norms)
        self._values[:, rows] += np.stack((np.where(known, norms, 0.0), known, nonfinite))

    def moved(self, index: IntArray) -> NormSums:
        """Those of the rows with these numbers, in this order; -1 is a new one, which is empty."""
        found = NormSums()
        found._values = np.pad(self._values, ((0, 0), (0, 1)))[:, index]
        return found

    def take(self) -> FloatArray:
        """The sums, shape (3, rows); from now on all rows are empty."""
        found, self._values = self._values, np.zeros_like(self._values)
        return found


@dataclass(frozen=True, slots=True)
class Single:
    """A value by itself, with the number of the optimizer step that it is of, and its Unix time. Infinity: it is not finite."""

    name: str
    step: int
    at: float
    value: float


class Singles:
    """The first values of each quantity, `most` of each, by themselves. `now`: Unix time."""

    def __init__(self, most: int, now: Callable[[], float]) -> None:
        self._most = most
        self._now = now
        self._count: Counter[str] = Counter()
        self._values: list[Single] = []

    def enter(self, name: str, step: int | None, value: float, at: float | None = None) -> bool:
        """Takes a value, if its step is known and there have not been too many of its name; whether it did. `at`: when it was."""
        if step is None or self._count[name] >= self._most:
            return False
        self._count[name] += 1
        self._values.append(Single(name, step, self._now() if at is None else at, value if math.isfinite(value) else math.inf))
        return True

    def take(self) -> Sequence[Single]:
        """Those since the last call, in the order in which they came."""
        found, self._values = self._values, []
        return found


@dataclass(eq=False, slots=True, weakref_slot=True)
class Cursor:
    """What one consumer has not read yet: losses, the peaks of layers and those of optimizers.

    `samples`: how many it has read; `changes`: up to which change of the gradients.
    `norms`: of layers, only for a consumer that asks for them. `singles`: the same; what is there is in no mean and no peak.
    """

    samples: int = 0
    changes: int = -1
    losses: Losses = field(default_factory=Losses)
    layers: Peaks = field(default_factory=Peaks)
    optimizers: Peaks = field(default_factory=Peaks)
    norms: NormSums | None = None
    singles: Singles | None = None
