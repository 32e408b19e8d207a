"""Windows: the last values of one series, by their number or by their age."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

# The largest windows.
LONGEST_SECONDS, MOST_SAMPLES = 86_400.0, 100_000


class ConditionError(ValueError):
    """A condition asks for something that can never be there: it is switched off at once."""


@dataclass(frozen=True, slots=True)
class Size:
    """The length of a window, either in seconds or in samples."""

    seconds: float | None
    samples: int | None

    @classmethod
    def of(cls, seconds: float | None, samples: int | None) -> Size:
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

    def window(self) -> SeriesWindow:
        """Return an empty window of this size."""
        if self.samples is not None:
            return SampleWindow(self.samples)
        return TimeWindow(self.seconds or 0.0)

    def __str__(self) -> str:
        return f"samples={self.samples}" if self.seconds is None else f"seconds={self.seconds:g}"


class SeriesWindow(Protocol):
    """The values of one series over a window. Each answer is NaN until the window is full."""

    last: float | None
    """The newest value."""

    def add(self, values: Sequence[float], now: float) -> None:
        """Add the values since the last call, oldest first."""

    def mean(self, now: float) -> float:
        """Return the mean."""

    def max(self, now: float) -> float:
        """Return the largest value; NaN if one of them is NaN."""

    def min(self, now: float) -> float:
        """Return the smallest value; NaN if one of them is NaN."""

    def before(self, now: float) -> float:
        """Return the value right before the window."""


class SampleWindow:
    """The last `samples` values, and the one before them."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._values: deque[float] = deque(maxlen=samples + 1)
        self.last: float | None = None

    def add(self, values: Sequence[float], _now: float) -> None:
        """See `SeriesWindow`."""
        if values:
            self._values.extend(values)
            self.last = values[-1]

    def mean(self, _now: float) -> float:
        """See `SeriesWindow`."""
        return mean(self._inside())

    def max(self, _now: float) -> float:
        """See `SeriesWindow`."""
        return extreme(max, self._inside())

    def min(self, _now: float) -> float:
        """See `SeriesWindow`."""
        return extreme(min, self._inside())

    def before(self, _now: float) -> float:
        """See `SeriesWindow`."""
        return self._values[0] if len(self._values) > self._samples else math.nan

    def _inside(self) -> list[float]:
        values = [*self._values]
        return values[-self._samples :] if len(values) >= self._samples else []


@dataclass(frozen=True, slots=True)
class _Span:
    """The values between two evaluations."""

    at: float
    count: int
    mean: float
    low: float
    high: float
    last: float


class TimeWindow:
    """The values of the last `seconds`.

    They are kept as one summary per evaluation, so that memory does not grow with the number of
    samples a second. The oldest summary is the last one before the window.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._spans: deque[_Span] = deque()
        self.last: float | None = None

    def add(self, values: Sequence[float], now: float) -> None:
        """See `SeriesWindow`."""
        if not values:
            return
        low, high, self.last = extreme(min, values), extreme(max, values), values[-1]
        self._spans.append(_Span(now, len(values), mean(values), low, high, self.last))
        while len(self._spans) > 1 and self._spans[1].at <= now - self._seconds:
            self._spans.popleft()

    def mean(self, now: float) -> float:
        """See `SeriesWindow`."""
        spans = self._inside(now)
        if all(span.count == 1 for span in spans):
            return mean([span.mean for span in spans])
        total = sum(span.count for span in spans)
        return _sum([span.mean * (span.count / total) for span in spans])

    def max(self, now: float) -> float:
        """See `SeriesWindow`."""
        return extreme(max, [span.high for span in self._inside(now)])

    def min(self, now: float) -> float:
        """See `SeriesWindow`."""
        return extreme(min, [span.low for span in self._inside(now)])

    def before(self, now: float) -> float:
        """See `SeriesWindow`."""
        full = self._spans and self._spans[0].at <= now - self._seconds
        return self._spans[0].last if full else math.nan

    def _inside(self, now: float) -> list[_Span]:
        first = now - self._seconds
        if not self._spans or self._spans[0].at > first:
            return []
        return [span for span in self._spans if span.at > first]


def mean(values: Sequence[float]) -> float:
    """Return the mean of the values, NaN if there are none."""
    # The sum of the values may be more than a float holds.
    return _sum([value / len(values) for value in values]) if values else math.nan


def extreme(of: Callable[[Sequence[float]], float], values: Sequence[float]) -> float:
    """Return the extreme of the values; NaN if there are none or one of them is NaN."""
    return of(values) if values and not any(map(math.isnan, values)) else math.nan


def _sum(parts: Sequence[float]) -> float:
    # `fsum` raises for infinities of both signs.
    return math.fsum(parts) if all(map(math.isfinite, parts)) else sum(parts)
