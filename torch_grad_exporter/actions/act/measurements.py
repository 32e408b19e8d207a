"""Measurements: what a condition reads, the values of now and their windows.

A window is remembered from the first evaluation on in which a condition asks for it, one value at each evaluation.
"""

from __future__ import annotations

import difflib
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch_grad_exporter.collectors.clipping import CLIPPING
from torch_grad_exporter.collectors.gradients import GRAD_SAMPLE_STEP, GRADIENTS
from torch_grad_exporter.collectors.weights import WEIGHTS
from torch_grad_exporter.metrics.families import Kind, Spec
from torch_grad_exporter.rules import Values

LONGEST_SECONDS, MOST_SAMPLES = 86_400.0, 100_000
"""The largest windows."""

MOST_WINDOWS = 1000
"""Of one condition."""

_SAMPLED = frozenset((*GRADIENTS.specs, *CLIPPING.specs, *WEIGHTS.specs))
"""Metrics that change with a sample of the gradients, of which there may be none between two evaluations."""

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A metric and labels."""


class ConditionError(ValueError):
    """What a condition asks for can never be there: it is switched off at once."""


@dataclass(frozen=True, slots=True)
class Size:
    """How long a window is: in seconds, or in samples."""

    seconds: float | None
    samples: int | None

    @classmethod
    def of(cls, seconds: float | None, samples: int | None) -> Size:
        """Raises `ConditionError` unless it is one of both, within bounds."""
        if (seconds is None) == (samples is None):
            raise ConditionError("give the window as seconds= or as samples=, one of both")
        if seconds is not None and not 0 < seconds <= LONGEST_SECONDS:
            raise ConditionError(f"seconds={seconds!r}: expected a number above 0, up to {LONGEST_SECONDS:g}")
        if samples is not None and not (isinstance(samples, int) and 0 < samples <= MOST_SAMPLES):
            raise ConditionError(f"samples={samples!r}: expected a whole number above 0, up to {MOST_SAMPLES}")
        return cls(seconds, samples)

    def __str__(self) -> str:
        return f"samples={self.samples}" if self.seconds is None else f"seconds={self.seconds:g}"


@dataclass(slots=True)
class Window:
    """The values of one series that a window of this size needs, with their times; the oldest is the last one before it."""

    size: Size
    sampled: bool
    _values: deque[tuple[float, float]] = field(default_factory=deque)
    _stamp: float | None = None

    def add(self, value: float | None, now: float, stamp: float) -> None:
        """Takes the value as of now, if there is one. `stamp`: grows with each sample of the gradients."""
        if value is None:
            return
        if self.size.samples is not None and self.sampled and self._values:
            # Values that `observe` gives are new without a sample.
            before = self._values[-1][1]
            if stamp == self._stamp and (value == before or (math.isnan(value) and math.isnan(before))):
                return
        self._stamp = stamp
        self._values.append((now, value))
        if self.size.samples is not None:
            while len(self._values) > self.size.samples + 1:
                self._values.popleft()
        else:
            while len(self._values) > 1 and self._values[1][0] <= now - (self.size.seconds or 0.0):
                self._values.popleft()

    def inside(self, now: float) -> list[float]:
        """The values in the window; none while it is not full."""
        if self.size.samples is not None:
            values = [value for _, value in self._values]
            return values[-self.size.samples :] if len(values) >= self.size.samples else []
        first = now - (self.size.seconds or 0.0)
        if not self._values or self._values[0][0] > first:
            return []
        return [value for at, value in self._values if at > first]

    def before(self, now: float) -> float:
        """The value right before the window; NaN while that is not known."""
        if self.size.samples is not None:
            return self._values[0][1] if len(self._values) > self.size.samples else math.nan
        return self._values[0][1] if self._values and self._values[0][0] <= now - (self.size.seconds or 0.0) else math.nan


class Measurements:
    """The values of now and their windows, for one condition. `metrics`: all that there are, by name. For one thread.

    Every method raises `ConditionError` for a name that no metric has, for a label that the metric does not have, and where the
    labels leave several series. A value that is not there, or whose window is not full yet, is NaN.
    """

    def __init__(self, metrics: Mapping[str, Spec]) -> None:
        self._metrics = metrics
        self._windows: dict[tuple[Key, Size], Window] = {}
        self._values = Values(())
        self._now = 0.0
        self._stamp = 0.0
        self.read: dict[str, float] = {}
        """What was read since `begin`, by the call that read it."""

    def begin(self, values: Values, now: float) -> None:
        """An evaluation begins, with these values at this time."""
        self._values, self._now, self.read = values, now, {}
        self._stamp = sum(step for _, step in values.rows(GRAD_SAMPLE_STEP))
        for (key, _), window in self._windows.items():
            window.add(self._find(key), now, self._stamp)

    def last(self, metric: str, **labels: str) -> float:
        """The value of now."""
        value = self._find(self._key(metric, labels))
        return self._noted("last", metric, labels, None, math.nan if value is None else value)

    def mean(self, metric: str, *, seconds: float | None = None, samples: int | None = None, **labels: str) -> float:
        """The mean of the values in the window."""
        size = Size.of(seconds, samples)
        inside = self._window(metric, labels, size).inside(self._now)
        return self._noted("mean", metric, labels, size, _mean(inside))

    def max(self, metric: str, *, seconds: float | None = None, samples: int | None = None, **labels: str) -> float:
        """The largest value in the window; NaN if one of them is."""
        size = Size.of(seconds, samples)
        return self._noted("max", metric, labels, size, _extreme(max, self._window(metric, labels, size).inside(self._now)))

    def min(self, metric: str, *, seconds: float | None = None, samples: int | None = None, **labels: str) -> float:
        """The smallest value in the window; NaN if one of them is."""
        size = Size.of(seconds, samples)
        return self._noted("min", metric, labels, size, _extreme(min, self._window(metric, labels, size).inside(self._now)))

    def increase(self, metric: str, *, seconds: float | None = None, samples: int | None = None, **labels: str) -> float:
        """By how much the value has grown in the window."""
        size = Size.of(seconds, samples)
        before = self._window(metric, labels, size).before(self._now)
        now = self._find(self._key(metric, labels))
        return self._noted("increase", metric, labels, size, math.nan if now is None else now - before)

    # Within

    def _key(self, metric: str, labels: Mapping[str, str]) -> Key:
        spec = self._metrics.get(metric)
        if spec is None:
            raise ConditionError(f"there is no metric {metric!r}{near(metric, self._metrics)}")
        if spec.kind is Kind.HISTOGRAM:
            raise ConditionError(f"{metric} is a histogram, which has no single value; use a gauge or a counter")
        if unknown := sorted(set(labels) - set(spec.labels)):
            raise ConditionError(f"{metric} has no label {unknown[0]!r}; it has {', '.join(spec.labels) or 'none'}")
        return metric, tuple(sorted((name, str(value)) for name, value in labels.items()))

    def _find(self, key: Key) -> float | None:
        metric, labels = key
        spec, wanted = self._metrics[metric], dict(labels)
        places = [(spec.labels.index(name), value) for name, value in wanted.items()]
        found = [value for row, value in self._values.rows(spec) if all(row[place] == value for place, value in places)]
        if len(found) > 1:
            missing = [name for name in spec.labels if name not in wanted]
            raise ConditionError(f"{metric} has {len(found)} series here; choose one by {' and '.join(f'{n}=' for n in missing)}")
        return found[0] if found else None

    def _window(self, metric: str, labels: Mapping[str, str], size: Size) -> Window:
        key = self._key(metric, labels)
        window = self._windows.get((key, size))
        if window is None:
            if len(self._windows) >= MOST_WINDOWS:
                raise ConditionError(f"the condition asks for more than {MOST_WINDOWS} windows")
            window = self._windows[key, size] = Window(size, self._metrics[metric] in _SAMPLED)
            window.add(self._find(key), self._now, self._stamp)
        return window

    def _noted(self, what: str, metric: str, labels: Mapping[str, str], size: Size | None, value: float) -> float:
        more = [f"{name}={labels[name]}" for name in sorted(labels)] + ([] if size is None else [str(size)])
        self.read[f"{what}({', '.join((metric, *more))})"] = value
        return value


def near(name: str, names: Iterable[str]) -> str:
    """What a wrong name may have meant, as the end of a sentence."""
    found = difflib.get_close_matches(name, list(names), n=3)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _mean(values: list[float]) -> float:
    """NaN of none. The sum of the values may be more than a float holds."""
    if not values:
        return math.nan
    parts = [value / len(values) for value in values]
    return math.fsum(parts) if all(map(math.isfinite, parts)) else sum(parts)


def _extreme(of: Callable[[list[float]], float], values: list[float]) -> float:
    if not values or any(map(math.isnan, values)):
        return math.nan
    return of(values)
