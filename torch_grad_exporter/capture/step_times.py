"""StepTimes: how long rounds lately took, the exporter's own time left out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

REMEMBERED = 32


class StepTimes:
    """Seconds of the last rounds."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)

    def __bool__(self) -> bool:
        return bool(self._seconds)

    def add(self, seconds: Sequence[float]) -> None:
        """Takes in rounds, in their order."""
        self._seconds.extend(seconds[-REMEMBERED:])

    @property
    def typical(self) -> float:
        """The median, since a step that compiles or writes a checkpoint is not typical; above 0."""
        return max(median(self._seconds), 1e-9)
