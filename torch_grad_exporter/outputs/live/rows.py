"""StepRows: values of the run that come one by one, put together to a row for each step."""

from __future__ import annotations

import math

import numpy as np

from torch_grad_exporter.outputs.live.track import Flags, Values

SCALARS = ("loss", "norm", "norm_after_clip", "step_seconds", "learning_rate")
"""What is kept of the run: the first optimizer's norms, and its first learning rate."""

OF_SAMPLES = np.array([name in ("norm", "norm_after_clip") for name in SCALARS])
"""Which of these are of samples, and not of each step."""

_WIDTH = len(SCALARS)
_MOST = float(np.finfo(np.float32).max)

LASTING = np.array([name == "learning_rate" for name in SCALARS])
"""Which have a value though nothing happens."""


def scalars(**values: float) -> Values:
    """Those that are named, shape (scalars,); NaN for the others. What 32 bits cannot hold becomes their largest number."""
    found = [values.get(name, math.nan) for name in SCALARS]
    return np.array([min(max(one, -_MOST), _MOST) if math.isfinite(one) else one for one in found], dtype=np.float32)


class StepRow:
    """The `values` of a step: of several the mean, of norms the largest; NaN where there is none. `at`: Unix time of the first.

    `nonfinite`: which of them were not finite.
    """

    def __init__(self, step: int, at: float) -> None:
        self.step, self.at = step, at
        # Plain numbers: of few values arrays are slow, and most rows are made of one at a time.
        self.values, self.nonfinite, self._count = [math.nan] * _WIDTH, [False] * _WIDTH, [0] * _WIDTH

    def add(self, place: int, value: float) -> None:
        """Takes one more value, by its place in `SCALARS`; infinity is one that is not finite."""
        if math.isinf(value):
            self.mark(place)
        elif not math.isnan(value):
            self._count[place] += 1
            before = self.values[place]
            if self._count[place] == 1:
                self.values[place] = value
            elif OF_SAMPLES[place]:
                self.values[place] = value if abs(value) > abs(before) else before
            else:
                self.values[place] = before + (value - before) / self._count[place]

    def mark(self, place: int) -> None:
        """One of its values was not finite."""
        self.nonfinite[place] = True


class StepRows:
    """The rows of steps of which more may be known soon: a loss, a norm and a time come on ways of their own.

    A row is complete once it was there at two looks. For one thread at a time.
    """

    def __init__(self) -> None:
        self._rows: dict[int, StepRow] = {}
        self._newest = -1
        """The last step that was known at the look before."""
        self._last = (0, float("-inf"))
        """Step and time of the last row that was taken."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, step: int, at: float, values: Values, nonfinite: Flags | None = None) -> None:
        """Takes values of a step, if there are any; one whose row was taken before is of the last step that was."""
        found = values.tolist()
        marks = [] if nonfinite is None else [place for place, bad in enumerate(nonfinite.tolist()) if bad]
        if marks or not all(map(math.isnan, found)):
            row = self._row(step, at)
            for place, value in enumerate(found):
                row.add(place, value)
            for place in marks:
                row.mark(place)

    def add_one(self, step: int, at: float, name: str, value: float) -> None:
        """Takes a single value of a step, by its name in `SCALARS`."""
        if not math.isnan(value):
            self._row(step, at).add(SCALARS.index(name), value if math.isinf(value) else min(max(value, -_MOST), _MOST))

    def _row(self, step: int, at: float) -> StepRow:
        step = max(step, self._last[0])
        if step not in self._rows:
            self._rows[step] = StepRow(step, at)
        return self._rows[step]

    def take(self, *, every: bool) -> list[StepRow]:
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
