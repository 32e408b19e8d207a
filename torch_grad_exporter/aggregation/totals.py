"""TrainingTotals: steps, durations, losses and what else is counted once per step, on the host."""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from torch_grad_exporter.aggregation.baseline import LossBaseline
from torch_grad_exporter.aggregation.cursor import Cursor, Unread
from torch_grad_exporter.metrics.buckets import STEP_SECONDS
from torch_grad_exporter.metrics.families import Exemplar, FloatArray
from torch_grad_exporter.transfer.events import Counted, Observed, Stepped

RATIO_STEPS = 1000
"""Steps over which the overhead ratio is taken."""

SLOWEST_STEPS = 128
"""Steps over which the slowest is taken."""


@dataclass(frozen=True, slots=True, eq=False)
class TotalsSnapshot:
    """The totals at one moment; `None` where there is no value yet. Durations in seconds.

    `exemplars`: of durations, the last one of each bucket that was sampled within a trace.
    """

    duration_buckets: FloatArray
    duration_sum: float
    exemplars: dict[int, Exemplar]
    slowest: float | None
    overhead_ratio: float | None
    overhead_seconds: float
    last: dict[str, float]
    sums: dict[str, float]
    loss_nonfinite: int
    loss_spikes: int
    learning_rates: dict[tuple[str, str], float]


@dataclass(frozen=True, slots=True)
class Losses:
    """Finite losses: how many, and their mean, which is not known of none. A sum of losses may be more than a float holds."""

    count: int = 0
    mean: float = 0.0

    def __add__(self, other: Losses) -> Losses:
        count = self.count + other.count
        if not count:
            return self
        return Losses(count, self.mean * (self.count / count) + other.mean * (other.count / count))


@dataclass(slots=True)
class TrainingTotals:
    """Adds up what happens every step. Fed by `worker.HostSide`."""

    _buckets: FloatArray = field(default_factory=lambda: np.zeros(len(STEP_SECONDS) + 1))
    _duration_sum: float = 0.0
    _exemplars: dict[int, Exemplar] = field(default_factory=dict)
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=SLOWEST_STEPS))
    _recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RATIO_STEPS))
    _own_seconds: float = 0.0
    _last: dict[str, float] = field(default_factory=dict)
    _sums: dict[str, float] = field(default_factory=dict)
    _latest_losses: Losses = field(default_factory=Losses)
    """Since the last read of any consumer."""
    _unread_losses: Unread[Losses] = field(default_factory=lambda: Unread(Losses, Losses.__add__))
    _loss_nonfinite: int = 0
    _loss_spikes: int = 0
    _loss_baseline: LossBaseline = field(default_factory=LossBaseline)
    _learning_rates: dict[tuple[str, str], float] = field(default_factory=dict)

    def stepped(self, event: Stepped) -> None:
        """Counts a round's first step."""
        self._own_seconds += event.own_seconds
        if event.seconds is None:
            return
        self._recent.append((event.own_seconds, event.seconds))
        self._durations.append(event.seconds)
        bucket = bisect.bisect_left(STEP_SECONDS, event.seconds)
        self._buckets[bucket] += 1
        self._duration_sum += event.seconds
        if event.trace is not None:
            self._exemplars[bucket] = Exemplar(event.seconds, event.at, *event.trace)

    def counted(self, event: Counted) -> None:
        """Counts rounds of which only the steps were seen."""
        share = event.own_seconds / len(event.seconds)
        self._own_seconds += event.own_seconds
        self._recent.extend((share, seconds) for seconds in event.seconds)
        self._durations.extend(event.seconds)
        self._buckets += np.bincount(np.searchsorted(STEP_SECONDS, event.seconds), minlength=len(self._buckets))
        self._duration_sum += sum(event.seconds)

    def observed(self, event: Observed, value: float) -> None:
        """Takes an observed value; `samples` (training examples) and `tokens` add up, the others replace the value before."""
        if event.labels:
            self._learning_rates[event.labels] = value
        elif event.name in ("samples", "tokens"):
            total = self._sums.get(event.name, 0.0) + value
            if value >= 0 and math.isfinite(total):
                self._sums[event.name] = total
        else:
            self._last[event.name] = value
            if event.name == "loss":
                self._judge_loss(value)

    def _judge_loss(self, value: float) -> None:
        if not math.isfinite(value):
            self._loss_nonfinite += 1
            return
        self._latest_losses = self._latest_losses + Losses(1, value)
        self._loss_spikes += self._loss_baseline.is_spike(value)

    def snapshot(self) -> TotalsSnapshot:
        """A copy of all values."""
        training = sum(seconds for _, seconds in self._recent)
        return TotalsSnapshot(
            duration_buckets=self._buckets.copy(),
            duration_sum=self._duration_sum,
            exemplars=dict(self._exemplars),
            slowest=max(self._durations, default=None),
            overhead_ratio=sum(own for own, _ in self._recent) / training if training else None,
            overhead_seconds=self._own_seconds,
            last=dict(self._last),
            sums=dict(self._sums),
            loss_nonfinite=self._loss_nonfinite,
            loss_spikes=self._loss_spikes,
            learning_rates=dict(self._learning_rates),
        )

    def follow(self, cursor: Cursor) -> None:
        """Begins with a consumer: losses from now on are new to it."""
        self._unread_losses.follow(cursor, self._closed_losses())

    def take_losses(self, cursor: Cursor) -> Losses:
        """The losses that are new to a consumer."""
        return self._unread_losses.take(cursor, self._closed_losses())

    def _closed_losses(self) -> Losses:
        latest, self._latest_losses = self._latest_losses, Losses()
        return latest
