"""Windows: the last values of one series, by their number or by their age."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LONGEST_SECONDS, MOST_SAMPLES = 86_400.0, 100_000  # the largest windows


class ConditionError(ValueError):
    """A condition asks for something that can never be there: it is disabled at once."""


@dataclass(frozen=True, slots=True)
class WindowSize:
    """The length of a window, either in seconds or in samples."""

    seconds: float | None
    samples: int | None

    @classmethod
    def of(cls, seconds: float | None, samples: int | None) -> WindowSize:
        """Return the size.

        Raises:
            ConditionError: Unless exactly one of both is given, within bounds.
        """
        if (seconds is None) == (samples is None):
            raise ConditionError("give the window as seconds= or as samples=, one of both")
        if seconds is not None and not 0 < seconds <= LONGEST_SECONDS:
            raise ConditionError(f"seconds={seconds!r}: expected a number above 0, up to {LONGEST_SECONDS:g}")
        if samples is not None and not (isinstance(samples, int) and 0 < samples <= MOST_SAMPLES):
            raise ConditionError(f"samples={samples!r}: expected a whole number above 0, up to {MOST_SAMPLES}")
        return cls(seconds, samples)

    def __str__(self) -> str:
        return f"samples={self.samples}" if self.seconds is None else f"seconds={self.seconds:g}"


@dataclass(frozen=True, slots=True)
class _Span:
    """Values that came together: one, or all between two evaluations."""

    at: float
    count: int
    mean: float
    low: float
    high: float
    last: float


class SeriesWindow:
    """The values of one series over a window, and the last one before it. Each answer is NaN until the window is full.

    A window in seconds keeps one summary per evaluation, so that memory does not grow with the number of samples a second.

    Attributes:
        last: The newest value.
    """

    def __init__(self, size: WindowSize) -> None:
        self._size = size
        self._spans: deque[_Span] = deque(maxlen=None if size.samples is None else size.samples + 1)
        self.last: float | None = None

    def add(self, values: Sequence[float], now: float) -> None:
        """Add the values since the last call, oldest first."""
        self.last = values[-1] if values else self.last
        if self._size.seconds is None:
            self._spans.extend(_Span(now, 1, value, value, value, value) for value in values)
            return
        if values:
            low, high = float(np.min(values)), float(np.max(values))  # of NumPy: NaN if one of them is
            self._spans.append(_Span(now, len(values), mean(values), low, high, values[-1]))
        while len(self._spans) > 1 and self._spans[1].at <= now - self._size.seconds:
            self._spans.popleft()

    def mean(self, now: float) -> float:
        """Return the mean."""
        spans = self._inside(now)
        total = sum(span.count for span in spans)
        return _sum([span.mean * (span.count / total) for span in spans]) if spans else math.nan

    def max(self, now: float) -> float:
        """Return the largest value; NaN if one of them is NaN."""
        highs = [span.high for span in self._inside(now)]
        return float(np.max(highs)) if highs else math.nan

    def min(self, now: float) -> float:
        """Return the smallest value; NaN if one of them is NaN."""
        lows = [span.low for span in self._inside(now)]
        return float(np.min(lows)) if lows else math.nan

    def before(self, now: float) -> float:
        """Return the value right before the window."""
        return self._spans[0].last if self._has_older(now) else math.nan

    def _has_older(self, now: float) -> bool:
        """Return whether the first span is the one before the window."""
        if self._size.seconds is None:
            return len(self._spans) == self._spans.maxlen
        return bool(self._spans) and self._spans[0].at <= now - self._size.seconds

    def _inside(self, now: float) -> list[_Span]:
        """Return the spans of the window, none unless it is full."""
        older = self._has_older(now)
        full = older or len(self._spans) == self._size.samples
        return [*self._spans][1 if older else 0 :] if full else []


def mean(values: Sequence[float]) -> float:
    """Return the mean of the values, NaN if there are none."""
    # The sum of the values may be more than a float holds.
    return _sum([value / len(values) for value in values]) if values else math.nan


def _sum(parts: Sequence[float]) -> float:
    # `fsum` raises for infinities of both signs.
    return math.fsum(parts) if all(map(math.isfinite, parts)) else sum(parts)
