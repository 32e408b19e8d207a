"""What a loop made of an optimizer's gradients between their backward and the step, as their norms tell, and what it did lately."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np

from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.statistics.combine import length

AGREE = 4e-3
"""Largest relative difference of factors that are taken for one: rounding to bfloat16 moves a norm less."""

UNTOUCHED = 1e-6
"""A factor this close to 1 is none: both norms were rounded alike, so that of an untouched gradient is 1."""

COARSE = 1e-5
"""Factors of one optimizer that differ by more are of gradients that are rounded to fewer digits than float32 has."""

REMEMBERED = 16
"""Samples of each optimizer that are remembered."""

_One = TypeVar("_One")


@dataclass(frozen=True, eq=False)
class Edit:
    """Norms of an optimizer's gradients, unscaled, before and after; both of shape (parameters,), 0 after where none was left."""

    before: FloatArray
    after: FloatArray

    @cached_property
    def whole(self) -> float:
        """The norm of all before."""
        return length(self.before)

    @cached_property
    def seen(self) -> float:
        """The norm of all after."""
        return length(self.after)

    @cached_property
    def ratios(self) -> FloatArray:
        """After over before, of each gradient that was not zero; infinite where it was and is not any more."""
        there = (self.before > 0) | (self.after > 0)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratios: FloatArray = self.after[there] / self.before[there]
        return ratios

    @property
    def ratio(self) -> float:
        """After over before, of all."""
        return self.seen / self.whole

    @property
    def untouched(self) -> bool:
        """Whether no gradient has changed its norm."""
        return bool((np.abs(self.ratios - 1) <= UNTOUCHED).all())

    @property
    def alike(self) -> bool:
        """Whether all gradients have changed by one common factor."""
        least, most = float(self.ratios.min()), float(self.ratios.max())
        if not most < np.inf:
            return False
        some_untouched = least < 1 - UNTOUCHED and bool((np.abs(self.ratios - 1) <= UNTOUCHED).any())
        return most - least <= AGREE * most and not some_untouched

    @property
    def coarse(self) -> bool:
        """Whether the factors of gradients that changed alike differ by what only rounding to few digits makes."""
        return bool(self.ratios.max() - self.ratios.min() > COARSE * self.ratios.max())


@dataclass(slots=True)
class Lately(Generic[_One]):
    """What an optimizer's last samples have come to. One that is judged again, as when more of its step is known, enters once."""

    _found: dict[int, _One] = field(default_factory=dict)

    def enter(self, sample: int, one: _One) -> None:
        """`sample`: its number."""
        self._found.pop(sample, None)
        self._found[sample] = one
        if len(self._found) > REMEMBERED:
            del self._found[next(iter(self._found))]

    def all(self) -> list[_One]:
        """In their order."""
        return [*self._found.values()]

    def before(self, sample: int) -> list[_One]:
        """Those of other samples."""
        return [one for number, one in self._found.items() if number != sample]
