"""What rules have to remember: counters of some minutes ago, gauges since then, the slowest step of a day."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from torch_grad_exporter.collectors.cuda_memory import CUDA_ALLOC_RETRIES, CUDA_OOMS
from torch_grad_exporter.collectors.exporter import EXPORTER_CAPTURES, EXPORTER_CAPTURES_SKIPPED, EXPORTER_OVERHEAD_SECONDS
from torch_grad_exporter.collectors.gpu import GPU_ECC_ERRORS, GPU_THROTTLED, GPU_UTILIZATION
from torch_grad_exporter.collectors.gradients import (
    GRAD_CAPTURES,
    GRAD_CLIP_COEFFICIENT,
    GRAD_GLOBAL_NORM_SPIKES,
    GRAD_NONFINITE_ELEMENTS,
    GRAD_NONFINITE_STEPS,
    GRAD_NORM,
    GRAD_NORM_RECENT_MAX,
    GRAD_NORM_SPIKES,
    GRAD_SAMPLE_STEP,
    GRAD_SHARD_NORM,
)
from torch_grad_exporter.collectors.training import (
    TRAIN_LOSS_NONFINITE,
    TRAIN_LOSS_SPIKES,
    TRAIN_PHASE_SECONDS,
    TRAIN_SAMPLES,
    TRAIN_SKIPPED_STEPS,
    TRAIN_SLOWEST_STEP,
    TRAIN_STATE,
    TRAIN_STEPS,
    TRAIN_TOKENS,
)
from torch_grad_exporter.metrics.families import Spec
from torch_grad_exporter.rules.values import Table, Values

MINUTES_5, MINUTES_10, MINUTES_15, MINUTES_30, HOUR, DAY = 300.0, 600.0, 900.0, 1800.0, 3600.0, 86400.0

OFTEN, SELDOM = 15.0, 60.0
"""Seconds between two memories."""

_MINUTES: tuple[Spec, ...] = (
    TRAIN_STATE, TRAIN_STEPS, TRAIN_SAMPLES, TRAIN_TOKENS, TRAIN_PHASE_SECONDS, TRAIN_LOSS_NONFINITE,
    TRAIN_LOSS_SPIKES, TRAIN_SKIPPED_STEPS, GRAD_NONFINITE_STEPS, GRAD_GLOBAL_NORM_SPIKES, GRAD_CLIP_COEFFICIENT,
    GRAD_SAMPLE_STEP, CUDA_OOMS, CUDA_ALLOC_RETRIES, GPU_THROTTLED, GPU_UTILIZATION, EXPORTER_OVERHEAD_SECONDS,
)  # fmt: skip

_LAYERS: tuple[Spec, ...] = (
    GRAD_NORM_SPIKES, GRAD_CAPTURES, GRAD_NORM_RECENT_MAX, GRAD_NORM, GRAD_SHARD_NORM, GRAD_NONFINITE_ELEMENTS,
)  # fmt: skip
"""Many rows each, so seldom, in half as many bits, and no more of them than minutes."""

_AN_HOUR: tuple[Spec, ...] = (
    TRAIN_STEPS, TRAIN_SKIPPED_STEPS, GRAD_NONFINITE_STEPS, GPU_ECC_ERRORS, EXPORTER_CAPTURES,
    EXPORTER_CAPTURES_SKIPPED,
)  # fmt: skip


class Memory:
    """Remembers all rows of some metrics, once in `every` seconds, for `seconds` and a little longer. `now` is Unix time."""

    def __init__(self, specs: Iterable[Spec], every: float, seconds: float, kind: type[np.floating] = np.float64) -> None:
        self.specs = frozenset(specs)
        self.seconds = seconds
        self._every = every
        self._kind = kind
        self._moments: deque[tuple[float, Mapping[Spec, Table]]] = deque()

    def remember(self, values: Values, now: float) -> None:
        """Takes the numbers as of now, unless it did so just now."""
        if self._moments and now < self._moments[-1][0]:  # the clock was set back
            back = self._moments[-1][0] - now
            self._moments = deque((at - back, tables) for at, tables in self._moments)
        if self._moments and now - self._moments[-1][0] < self._every:
            return
        tables = {spec: table for spec in self.specs if (table := values.table(spec)).rows}
        with np.errstate(over="ignore"):  # copies: the originals may be views of much more
            copies = {spec: Table(table.rows, table.numbers.astype(self._kind)) for spec, table in tables.items()}
        self._moments.append((now, copies))
        while len(self._moments) > 1 and self._moments[1][0] <= now - self.seconds:
            self._moments.popleft()

    def before(self, spec: Spec, at: float) -> tuple[float, Table] | None:
        """The last moment up to then, and what the metric was."""
        return next(((time, tables.get(spec, Table())) for time, tables in reversed(self._moments) if time <= at), None)

    def oldest(self, spec: Spec) -> tuple[float, Table] | None:
        """The first moment that is remembered, and what the metric was."""
        return next(((time, tables.get(spec, Table())) for time, tables in self._moments), None)

    def between(self, spec: Spec, first: float, last: float) -> Iterator[tuple[float, Table]]:
        """The moments after the first time and before the last, the oldest one first."""
        return ((time, tables[spec]) for time, tables in self._moments if first < time < last and spec in tables)


class Longest:
    """The slowest step of the last 24 hours, and of the hour in which they began."""

    def __init__(self) -> None:
        self._hours: dict[int, float] = {}

    def remember(self, values: Values, now: float) -> None:
        """Takes that of the last steps."""
        slowest, hour = values.one(TRAIN_SLOWEST_STEP), int(now // HOUR)
        if slowest is not None:
            self._hours[hour] = max(slowest, self._hours.get(hour, 0.0))
        self._hours = {then: longest for then, longest in self._hours.items() if hour - DAY / HOUR <= then <= hour}

    def seconds(self) -> float | None:
        """It, if there was any."""
        return max(self._hours.values(), default=None)


class Memories:
    """All that is remembered. `more`: further metrics, and for how many seconds."""

    def __init__(self, more: Mapping[Spec, float] | None = None) -> None:
        self._all: tuple[Memory, ...] = (
            Memory(_MINUTES, OFTEN, MINUTES_10),
            Memory(_LAYERS, SELDOM, MINUTES_10, np.float32),
            Memory(_AN_HOUR, SELDOM, HOUR),
            *(Memory((spec,), OFTEN if seconds <= MINUTES_10 else SELDOM, seconds) for spec, seconds in (more or {}).items()),
        )
        self.slowest_step = Longest()

    def remember(self, values: Values, now: float) -> None:
        """Takes the numbers as of now."""
        for memory in self._all:
            memory.remember(values, now)
        self.slowest_step.remember(values, now)

    def of(self, spec: Spec, seconds: float) -> Memory:
        """The one that reaches so far back for this metric."""
        return next(memory for memory in self._all if spec in memory.specs and seconds <= memory.seconds)
