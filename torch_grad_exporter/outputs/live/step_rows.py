"""StepRows: puts values of the run that come one by one together to a row for each step."""

from __future__ import annotations

import math

import numpy as np

from torch_grad_exporter.outputs.live.track import Flags, Values

# Kept of the run: the first optimizer's norms, and its first learning rate.
SCALARS = ("loss", "norm", "norm_after_clip", "step_seconds", "learning_rate")

# Which of these belong to samples, not to each step, and which have a value although nothing happens.
OF_SAMPLES = np.array([name in ("norm", "norm_after_clip") for name in SCALARS])
LASTING = np.array([name == "learning_rate" for name in SCALARS])

_WIDTH = len(SCALARS)
_MOST = float(np.finfo(np.float32).max)


def scalars(**values: float) -> Values:
    """Return the named values, shape (scalars,); NaN for the others. The largest number of 32 bits stands for larger ones."""
    row = [values.get(name, math.nan) for name in SCALARS]
    return np.array([min(max(value, -_MOST), _MOST) if math.isfinite(value) else value for value in row], dtype=np.float32)


class StepRow:
    """The `values` of a step: of several the mean, of norms the largest; NaN if there is none.

    `at`: Unix time of the first. `nonfinite`: which of them were not finite.
    """

    def __init__(self, step: int, at: float) -> None:
        self.step, self.at = step, at
        # Plain numbers: arrays of few values are slow, and most rows are made of one value at a time.
        self.values, self.nonfinite, self._count = [math.nan] * _WIDTH, [False] * _WIDTH, [0] * _WIDTH

    def add(self, place: int, value: float) -> None:
        """Take a value, by its place in `SCALARS`; infinity stands for any that is not finite."""
        if math.isinf(value):
            self.nonfinite[place] = True
        elif not math.isnan(value):
            self._count[place] += 1
            before = self.values[place] if self._count[place] > 1 else value
            larger = value if abs(value) > abs(before) else before
            self.values[place] = larger if OF_SAMPLES[place] else before + (value - before) / self._count[place]


class StepRows:
    """The rows of recent steps, which may not be complete: a loss, a norm and a time arrive separately.

    A row is complete once two looks have seen it. For one thread at a time.
    """

    def __init__(self) -> None:
        self._rows: dict[int, StepRow] = {}
        self._newest = -1  # the last step that was known at the look before
        self._last = (0, float("-inf"))  # step and time of the last row that was taken

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, step: int, at: float, values: Values, nonfinite: Flags | None = None) -> None:
        """Take values of a step, if there are any. If its row was taken before, they count for the last step that was."""
        row_values = values.tolist()
        marks = [] if nonfinite is None else [place for place, bad in enumerate(nonfinite.tolist()) if bad]
        if marks or not all(map(math.isnan, row_values)):
            row = self._row(step, at)
            for place, value in [*enumerate(row_values), *((place, math.inf) for place in marks)]:
                row.add(place, value)

    def add_one(self, step: int, at: float, name: str, value: float) -> None:
        """Take a single value of a step, by its name in `SCALARS`. The times of several optimizers add up."""
        if not math.isnan(value):
            row, place = self._row(step, at), SCALARS.index(name)
            if name == "step_seconds" and not math.isnan(row.values[place]):
                row.values[place] += value
            else:
                row.add(place, value if math.isinf(value) else min(max(value, -_MOST), _MOST))

    def _row(self, step: int, at: float) -> StepRow:
        step = max(step, self._last[0])
        return self._rows.setdefault(step, StepRow(step, at))

    def take(self, *, every: bool) -> list[StepRow]:
        """Remove and return complete rows, or every one, by step. Neither steps nor times fall from call to call."""
        steps = sorted(step for step in self._rows if every or step <= self._newest)
        self._newest = max(self._rows, default=self._newest)
        rows = [self._rows.pop(step) for step in steps]
        for row in rows:
            row.at = max(row.at, self._last[1])
            self._last = row.step, row.at
        return rows
