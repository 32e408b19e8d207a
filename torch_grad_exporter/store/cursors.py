"""Cursors: each consumer reads what is new since its own last read, and takes nothing from the others.

A cursor has summaries (a count, a mean, the largest values), to which the worker adds; those of rows stand in `NormRows`.
So memory grows with the number of cursors, never with time. They are referenced weakly: one that its consumer has
dropped is forgotten.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Losses:
    """Finite losses: how many, and their mean, since a sum of losses may be more than a float holds."""

    count: int = 0
    mean: float = 0.0

    def with_one(self, loss: float) -> Losses:
        """Return these and another one."""
        count = self.count + 1
        return Losses(count, self.mean * (self.count / count) + loss / count)


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

    def enter(self, single: Single) -> bool:
        """Enter a value if there have not been too many of its name; return whether it was."""
        if self._count[single.name] >= self._most:
            return False
        self._count[single.name] += 1
        self._values.append(single)
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
    norms: bool = False  # whether it asks for sums of norms
    singles: Singles | None = None  # if it asks for them; what is in them is in no mean and no peak


def entered(cursors: Collection[Cursor], name: str, step: int | None, value: float, at: float | None = None) -> list[Cursor]:
    """Enter a value for consumers of single values, if its step is known; return those that took it."""
    if step is None:
        return []
    single = Single(name, step, time.time() if at is None else at, value if math.isfinite(value) else math.inf)
    return [cursor for cursor in cursors if cursor.singles is not None and cursor.singles.enter(single)]
