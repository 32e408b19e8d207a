"""What rules have to remember: counters of some minutes ago, gauges since then, the slowest step of a day."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from torch_grad_exporter.collectors import clipping, cuda_memory, exporter, gpu, gradients, training, weights
from torch_grad_exporter.metrics.families import Spec
from torch_grad_exporter.rules.context import HOUR, MINUTES_10, MINUTES_30
from torch_grad_exporter.rules.values import Table, Values

DAY = 86400.0

OFTEN, SELDOM = 15.0, 60.0
"""Seconds between two memories."""

REMEMBERED: Mapping[Spec, float] = {
    **dict.fromkeys(
        (
            training.TRAIN_STATE, training.TRAIN_SAMPLES, training.TRAIN_TOKENS, training.TRAIN_PHASE_SECONDS,
            training.TRAIN_LOSS_NONFINITE, training.TRAIN_LOSS_SPIKES, gradients.GRAD_GLOBAL_NORM_SPIKES,
            clipping.GRAD_CLIP_COEFFICIENT, gradients.GRAD_SAMPLE_STEP, gradients.GRAD_NORM_SPIKES, gradients.GRAD_CAPTURES,
            gradients.GRAD_NORM_RECENT_MAX, gradients.GRAD_NORM, gradients.GRAD_SHARD_NORM, gradients.GRAD_NONFINITE_ELEMENTS,
            cuda_memory.CUDA_OOMS, cuda_memory.CUDA_ALLOC_RETRIES, gpu.GPU_THROTTLED, gpu.GPU_UTILIZATION,
            exporter.EXPORTER_OVERHEAD_SECONDS, exporter.EXPORTER_ERRORS, exporter.EXPORTER_ACTIONS,
            exporter.EXPORTER_NOTIFICATIONS,
        ),
        MINUTES_10,
    ),
    **dict.fromkeys(
        (weights.WEIGHT_UPDATE_RATIO, weights.WEIGHT_CAPTURES, training.TRAIN_LEARNING_RATE),
        MINUTES_30,
    ),
    **dict.fromkeys(
        (
            training.TRAIN_STEPS, training.TRAIN_SKIPPED_STEPS, gradients.GRAD_NONFINITE_STEPS, gpu.GPU_ECC_ERRORS,
            exporter.EXPORTER_CAPTURES, exporter.EXPORTER_CAPTURES_SKIPPED,
        ),
        HOUR,
    ),
}  # fmt: skip
"""The metrics whose past the package's rules need, and for how many seconds."""

Moment = tuple[float, Table]


class Memory:
    """What a metric was: all its rows, now and then, for `seconds` and a little longer. `now` is Unix time.

    Metrics of layers that the package's own rules need have many rows: they are remembered seldom, and in half as many bits.
    """

    def __init__(self, spec: Spec, seconds: float) -> None:
        layers = "layer" in spec.labels and spec in REMEMBERED
        self._spec = spec
        self._seconds = seconds
        self._every = SELDOM if layers or seconds > HOUR else OFTEN
        self._kind: type[np.floating] = np.float32 if layers else np.float64
        self._moments: deque[Moment] = deque()

    def remember(self, values: Values, now: float) -> None:
        """Takes the numbers as of now, unless it did so just now."""
        if self._moments and now < self._moments[-1][0]:  # the clock was set back
            back = self._moments[-1][0] - now
            self._moments = deque((at - back, table) for at, table in self._moments)
        if self._moments and now - self._moments[-1][0] < self._every:
            return
        table = values.table(self._spec)
        if table.rows:
            with np.errstate(over="ignore"):  # a copy: the original may be a view of much more
                table = Table(table.rows, table.numbers.astype(self._kind))
        self._moments.append((now, table))
        while len(self._moments) > 1 and self._moments[1][0] <= now - self._seconds:
            self._moments.popleft()

    def before(self, at: float) -> Moment | None:
        """The last moment up to then, and what the metric was."""
        return next((moment for moment in reversed(self._moments) if moment[0] <= at), None)

    def oldest(self) -> Moment | None:
        """The first moment that is remembered, and what the metric was."""
        return self._moments[0] if self._moments else None

    def between(self, first: float, last: float) -> list[Table]:
        """What the metric was after the first time and before the last, the oldest one first."""
        return [table for at, table in self._moments if first < at < last and table.rows]


class Longest:
    """The slowest step of the last 24 hours, and of the hour in which they began."""

    def __init__(self) -> None:
        self._hours: dict[int, float] = {}

    def remember(self, values: Values, now: float) -> None:
        """Takes that of the last steps."""
        slowest, hour = values.one(training.TRAIN_SLOWEST_STEP), int(now // HOUR)
        if slowest is not None:
            self._hours[hour] = max(slowest, self._hours.get(hour, 0.0))
        self._hours = {then: longest for then, longest in self._hours.items() if hour - DAY / HOUR <= then <= hour}

    def seconds(self) -> float | None:
        """It, if there was any."""
        return max(self._hours.values(), default=None)
