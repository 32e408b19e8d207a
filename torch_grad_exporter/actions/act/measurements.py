"""Measurements: what a condition reads, the values of now and their windows.

A window is remembered from the first evaluation on in which a condition asks for it. It holds the values of all samples of the
gradients since then; of other metrics it holds one value per evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch_grad_exporter.actions.act.windows import ConditionError, SeriesWindow, WindowSize
from torch_grad_exporter.arguments import near
from torch_grad_exporter.collectors.clipping import CLIPPING
from torch_grad_exporter.collectors.gradients import GRAD_SAMPLE_STEP, GRADIENTS
from torch_grad_exporter.collectors.weights import WEIGHTS
from torch_grad_exporter.metrics.families import Kind, Spec
from torch_grad_exporter.rules.values import Values

if TYPE_CHECKING:
    from torch_grad_exporter.actions.act.sample_feed import SampleFeed, Series

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
        value = self._find(self._key(metric, labels))
        return self._noted("last", metric, labels, None, math.nan if value is None else value)

    def mean(self, metric: str, *, seconds: float | None = None, samples: int | None = None, **labels: str) -> float:
        """Return the mean of the values in the window."""
        size = WindowSize.of(seconds, samples)
        return self._noted("mean", metric, labels, size, self._window(metric, labels, size).mean(self._now))

    def max(self, metric: str, *, seconds: float | None = None, samples: int | None = None, **labels: str) -> float:
        """Return the largest value in the window; NaN if one of them is."""
        size = WindowSize.of(seconds, samples)
        return self._noted("max", metric, labels, size, self._window(metric, labels, size).max(self._now))

    def min(self, metric: str, *, seconds: float | None = None, samples: int | None = None, **labels: str) -> float:
        """Return the smallest value in the window; NaN if one of them is."""
        size = WindowSize.of(seconds, samples)
        return self._noted("min", metric, labels, size, self._window(metric, labels, size).min(self._now))

    def increase(self, metric: str, *, seconds: float | None = None, samples: int | None = None, **labels: str) -> float:
        """Return by how much the value has grown in the window."""
        size = WindowSize.of(seconds, samples)
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
        series = [value for row, value in self._values.rows(spec) if all(row[place] == label for place, label in places)]
        if len(series) > 1:
            missing = [name for name in spec.labels if name not in wanted]
            raise ConditionError(f"{metric} has {len(series)} series here; choose one by {' and '.join(f'{n}=' for n in missing)}")
        return series[0] if series else None

    def _window(self, metric: str, labels: Mapping[str, str], size: WindowSize) -> SeriesWindow:
        key = self._key(metric, labels)
        window = self._windows.get((key, size))
        if window is None:
            if len(self._windows) >= MOST_WINDOWS:
                raise ConditionError(f"the condition asks for more than {MOST_WINDOWS} windows")
            # First, since it raises where the worker is busy: the next evaluation tries again.
            if self._feed is not None and key not in self._series:
                series = self._feed.follow(self._metrics[metric], labels)
                if series is not None:
                    self._series[key] = series
            window = self._windows[key, size] = SeriesWindow(size)
            value = self._find(key)
            window.add([] if value is None else [value], self._now)
        return window

    def _noted(self, what: str, metric: str, labels: Mapping[str, str], size: WindowSize | None, value: float) -> float:
        more = [f"{name}={labels[name]}" for name in sorted(labels)] + ([] if size is None else [str(size)])
        self.read[f"{what}({', '.join((metric, *more))})"] = value
        return value


def _contains(values: Sequence[float | None], value: float) -> bool:
    """Return whether the value is one of them, where NaN equals NaN."""
    return value in values or (math.isnan(value) and any(other is not None and math.isnan(other) for other in values))
