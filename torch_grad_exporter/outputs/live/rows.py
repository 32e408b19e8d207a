"""StepRows: values of the run that come one by one, put together to a row for each step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from torch_grad_exporter.metrics.families import IntArray
from torch_grad_exporter.outputs.live.track import Flags, Values, farther

SCALARS = ("loss", "norm", "norm_after_clip", "step_seconds", "learning_rate")
"""What is kept of the run: the first optimizer's norms, and its first learning rate."""

OF_SAMPLES = np.array([name in ("norm", "norm_after_clip") for name in SCALARS])
"""Which of these are of samples, and not of each step."""

LASTING = np.array([name == "learning_rate" for name in SCALARS])
"""Which have a value though nothing happens."""


def scalars(**values: float) -> Values:
    """Those that are named, shape (scalars,); NaN for the others. What 32 bits cannot hold becomes their largest number."""
    most = float(np.finfo(np.float32).max)
    found = np.array([values.get(name, np.nan) for name in SCALARS])
    return np.where(np.isfinite(found), np.clip(found, -most, most), found).astype(np.float32)


@dataclass(slots=True, eq=False)
class Row:
    """The values of a step, shape (scalars,): of several the mean, of norms the largest; NaN where there is none.

    `at`: Unix time of the first one. `nonfinite`: which were not finite.
    """

    step: int
    at: float
    values: Values = field(default_factory=scalars)
    nonfinite: Flags = field(default_factory=lambda: np.zeros(len(SCALARS), dtype=np.bool_))
    _count: IntArray = field(default_factory=lambda: np.zeros(len(SCALARS), dtype=np.int64))

    def add(self, values: Values, nonfinite: Flags | None) -> None:
        """Takes more values of the step; infinity is one that is not finite."""
        self.nonfinite |= np.isinf(values) if nonfinite is None else np.isinf(values) | nonfinite
        known = np.isfinite(values)
        self._count += known
        first = np.where(np.isnan(self.values), 0.0, self.values).astype(np.float64)
        mean = first + (np.where(known, values, 0.0) - first) / np.maximum(self._count, 1)
        both = np.where(OF_SAMPLES, farther(self.values, values), mean)
        self.values = np.where(known, both, self.values).astype(np.float32)


class StepRows:
    """The rows of steps of which more may be known soon: a loss, a norm and a time come on ways of their own.

    A row is complete once it was there at two looks. For one thread at a time.
    """

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}
        self._newest = -1
        """The last step that was known at the look before."""
        self._last = (0, float("-inf"))
        """Step and time of the last row that was taken."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, step: int, at: float, values: Values, nonfinite: Flags | None = None) -> None:
        """Takes values of a step, if there are any; one whose row was taken before is of the last step that was."""
        if np.isnan(values).all() and (nonfinite is None or not nonfinite.any()):
            return
        step = max(step, self._last[0])
        self._rows.setdefault(step, Row(step, at)).add(values, nonfinite)

    def take(self, *, every: bool) -> list[Row]:
        """The complete rows, or every one, in the order of their steps; neither steps nor times fall from call to call."""
        steps = sorted(step for step in self._rows if every or step <= self._newest)
        self._newest = max(self._rows, default=self._newest)
        found = [self._rows.pop(step) for step in steps]
        for row in found:
            row.at = max(row.at, self._last[1])
            self._last = row.step, row.at
        return found

    def shift(self, seconds: float) -> None:
        """Moves all times."""
        self._last = self._last[0], self._last[1] + seconds
        for row in self._rows.values():
            row.at += seconds
