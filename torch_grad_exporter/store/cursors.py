"""Cursors: each consumer reads what is new since its own last read, and takes nothing from the others.

A cursor holds summaries (a count, a mean, the largest values), to which the worker adds. So memory grows with the
number of cursors, never with time. They are referenced weakly: one that its consumer has dropped is forgotten.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from torch_grad_exporter.metrics.families import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Losses:
    """Finite losses: how many, and their mean, since a sum of losses may be more than a float holds."""

    count: int = 0
    mean: float = 0.0

    def with_one(self, loss: float) -> Losses:
        """Return these and another one."""
        count = self.count + 1
        return Losses(count, self.mean * (self.count / count) + loss / count)


class _PerRow:
    """Several numbers per row, `empty` until something is entered."""

    quantities, empty = 2, math.nan

    def __init__(self, rows: int = 0) -> None:
        self._values = np.full((self.quantities, rows), self.empty)

    def moved(self, index: IntArray) -> Self:
        """Return those of the rows with these numbers, in this order; -1 is a new one."""
        others = type(self)()
        others._values = np.pad(self._values, ((0, 0), (0, 1)), constant_values=self.empty)[:, index]
        return others

    def take(self) -> FloatArray:
        """Return the values, shape (quantities, rows); from now on all rows are empty."""
        values, self._values = self._values, np.full_like(self._values, self.empty)
        return values


class Peaks(_PerRow):
    """The values of two quantities that were farthest from zero; NaN where none that is finite was entered."""

    def enter(self, rows: IntArray | Sequence[int], first: FloatArray, second: FloatArray) -> None:
        """Enter a value of each quantity for each of `rows`; what is not finite is none."""
        values, kept = np.stack((first, second)), self._values[:, rows]
        self._values[:, rows] = np.where(np.isfinite(values) & ~(np.abs(values) <= np.abs(kept)), values, kept)


class NormSums(_PerRow):
    """The sum of the norms, how many, and how many gradients were not finite."""

    quantities, empty = 3, 0.0

    def enter(self, rows: IntArray, norms: FloatArray, nonfinite: BoolArray) -> None:
        """Enter a norm for each of `rows`; one that is not finite is none. `nonfinite`: the gradient itself is not."""
        known = np.isfinite(norms)
        self._values[:, rows] += np.stack((np.where(known, norms, 0.0), known, nonfinite))


@dataclass(frozen=True, slots=True)
class Single:
    """A value by itself, with the number of its optimizer step and its Unix time. Infinity: it is not finite."""

    name: str
    step: int
    at: float
    value: float


class Singles:
    """The first values of each quantity, `most` of each, by themselves."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count: Counter[str] = Counter()
        self._values: list[Single] = []

    def enter(self, name: str, step: int | None, value: float, at: float | None = None) -> bool:
        """Enter a value if its step is known and there have not been too many of its name; return whether it was."""
        if step is None or self._count[name] >= self._most:
            return False
        self._count[name] += 1
        moment = time.time() if at is None else at
        self._values.append(Single(name, step, moment, value if math.isfinite(value) else math.inf))
        return True

    def take(self) -> Sequence[Single]:
        """Return those since the last call, in the order in which they came."""
        values, self._values = self._values, []
        return values


@dataclass(eq=False, slots=True, weakref_slot=True)
class Cursor:
    """What one consumer has not read yet."""

    samples: int = 0  # how many it has read
    losses: Losses = field(default_factory=Losses)
    layers: Peaks = field(default_factory=Peaks)
    optimizers: Peaks = field(default_factory=Peaks)
    norms: NormSums | None = None  # of layers, for a consumer that asks for them
    singles: Singles | None = None  # likewise; what is in them is in no mean and no peak
