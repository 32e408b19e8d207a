"""Measurements: what a condition reads, the values of now and their windows.

A window is remembered from the first evaluation on in which a condition asks for it. It holds the values of all samples of the
gradients since then; of other metrics it holds one value per evaluation.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torch_grad_exporter.arguments import near
from torch_grad_exporter.collectors.clipping import CLIPPING
from torch_grad_exporter.collectors.gradients import GRAD_SAMPLE_STEP, GRADIENTS
from torch_grad_exporter.collectors.weights import WEIGHTS
from torch_grad_exporter.metrics.families import Kind, Spec
from torch_grad_exporter.rules.values import Values

if TYPE_CHECKING:
    from torch_grad_exporter.actions.act.sample_feed import SampleFeed, Series

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
            mean = _sum([value / len(values) for value in values])  # their sum may be more than a float holds
            self._spans.append(_Span(now, len(values), mean, low, high, values[-1]))
        while len(self._spans) > 1 and self._spans[1].at <= now - self._size.seconds:
            self._spans.popleft()

    def reading(self, what: str, now: float) -> float:
        """Return the mean, the largest or the smallest value; the last two are NaN if one of the values is."""
        spans = self._inside(now)
        if not spans:
            return math.nan
        if what == "mean":
            total = sum(span.count for span in spans)
            return _sum([span.mean * (span.count / total) for span in spans])
        return float(np.max([span.high for span in spans]) if what == "max" else np.min([span.low for span in spans]))

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


def _sum(parts: Sequence[float]) -> float:
    # `fsum` raises for infinities of both signs.
    return math.fsum(parts) if all(map(math.isfinite, parts)) else sum(parts)


MOST_WINDOWS = 1000  # of one condition

# Metrics that change with a sample of the gradients, of which there may be none between two evaluations.
_SAMPLED = frozenset((*GRADIENTS.specs, *CLIPPING.specs, *WEIGHTS.specs))

# A metric and labels.
Key = tuple[str, tuple[tuple[str, str], ...]]


class Measurements:
    """The values of now and their windows, for one condition. For one thread.

    A value that is absent, or whose window is not full yet, is NaN.

    Args:
        metrics: All metrics by name.
        feed: The values of each sample; None if nothing shows them.

    Raises:
        ConditionError: By each method, for a name that no metric has, for a label that the metric does not have, and if the
            labels leave several series.
    """

    def __init__(self, metrics: Mapping[str, Spec], feed: SampleFeed | None = None) -> None:
        self._metrics = metrics
        self._feed = feed
        self._series: dict[Key, Series] = {}
        self._windows: dict[tuple[Key, WindowSize], SeriesWindow] = {}
        self._values = Values(())
        self._now = 0.0
        self._stamp = 0.0
        # What was read since `begin`, by the call that read it.
        self.read: dict[str, float] = {}

    def begin(self, values: Values, now: float) -> None:
        """Begin an evaluation, with these values at this time."""
        self._values, self._now, self.read = values, now, {}
        stamp, self._stamp = self._stamp, sum(step for _, step in values.rows(GRAD_SAMPLE_STEP))
        sampled = {key: series.take() for key, series in self._series.items()}
        for (key, size), window in self._windows.items():
            fresh = sampled.get(key, [])
            value = self._find(key)
            if value is not None and self._is_new(value, key, size, (*fresh, window.last), same=stamp == self._stamp):
                fresh = [*fresh, value]
            window.add(fresh, now)

    def _is_new(self, value: float, key: Key, size: WindowSize, known: Sequence[float | None], *, same: bool) -> bool:
        """Return whether the value of now is another one than those since the last evaluation.

        `known`: those, then the newest of the window before; `same`: no sample came since the last evaluation.
        """
        if size.samples is None:
            # Without a new value the last one goes on.
            return not _contains(known[:-1], value)
        if key in self._series:
            # All samples are known, but not the norms that `observe` was given.
            return not _contains(known, value)
        if self._metrics[key[0]] in _SAMPLED:
            return not (same and _contains(known[-1:], value))
        return True

    def forget(self) -> None:
        """Drop all windows."""
        self._windows, self._series = {}, {}

    def last(self, metric: str, **labels: str) -> float:
        """Return the value of now."""
        return self._read("last", metric, labels, None)

    def mean(self, metric: str, *, seconds: float | None = None, samples: int | None = None, **labels: str) -> float:
        """Return the mean of the values in the window."""
        return self._read("mean", metric, labels, WindowSize.of(seconds, samples))

    def max(self, metric: str, *, seconds: float | None = None, samples: int | None = None, **labels: str) -> float:
        """Return the largest value in the window; NaN if one of them is."""
        return self._read("max", metric, labels, WindowSize.of(seconds, samples))

    def min(self, metric: str, *, seconds: float | None = None, samples: int | None = None, **labels: str) -> float:
        """Return the smallest value in the window; NaN if one of them is."""
        return self._read("min", metric, labels, WindowSize.of(seconds, samples))

    def increase(self, metric: str, *, seconds: float | None = None, samples: int | None = None, **labels: str) -> float:
        """Return by how much the value has grown in the window."""
        return self._read("increase", metric, labels, WindowSize.of(seconds, samples))

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
        series = [value for row, value in self._values.rows(spec) if all(row[place] == label for place, label in places)]
        if len(series) > 1:
            missing = [name for name in spec.labels if name not in wanted]
            raise ConditionError(f"{metric} has {len(series)} series here; choose one by {' and '.join(f'{n}=' for n in missing)}")
        return series[0] if series else None

    def _read(self, what: str, metric: str, labels: Mapping[str, str], size: WindowSize | None) -> float:
        key = self._key(metric, labels)
        window, now = None if size is None else self._window(key, size), self._find(key)
        if window is not None and what != "increase":
            value = window.reading(what, self._now)
        else:
            before = 0.0 if window is None else window.before(self._now)
            value = math.nan if now is None else now - before
        more = [f"{name}={labels[name]}" for name in sorted(labels)] + ([] if size is None else [str(size)])
        self.read[f"{what}({', '.join((metric, *more))})"] = value
        return value

    def _window(self, key: Key, size: WindowSize) -> SeriesWindow:
        window = self._windows.get((key, size))
        if window is None:
            if len(self._windows) >= MOST_WINDOWS:
                raise ConditionError(f"the condition asks for more than {MOST_WINDOWS} windows")
            # First, since it raises where the worker is busy: the next evaluation tries again.
            if self._feed is not None and key not in self._series:
                series = self._feed.follow(self._metrics[key[0]], dict(key[1]))
                if series is not None:
                    self._series[key] = series
            window = self._windows[key, size] = SeriesWindow(size)
            value = self._find(key)
            window.add([] if value is None else [value], self._now)
        return window


def _contains(values: Sequence[float | None], value: float) -> bool:
    """Return whether the value is one of them, where NaN equals NaN."""
    return value in values or (math.isnan(value) and any(other is not None and math.isnan(other) for other in values))
