"""TrainingTotals: steps, durations, losses and what else is counted once per step, on the host."""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from torch_grad_exporter.baseline import Baselines
from torch_grad_exporter.catalogue import STEP_SECONDS
from torch_grad_exporter.events import Counted, Observed
from torch_grad_exporter.families import FloatArray

RATIO_STEPS = 1000
"""Steps over which the overhead ratio is taken."""

SLOWEST_STEPS = 128
"""Steps among which the slowest is looked for."""


@dataclass(frozen=True, slots=True, eq=False)
class TotalsSnapshot:
    """The totals at one moment; `None` where there is no value yet. Durations in seconds."""

    duration_buckets: FloatArray
    duration_sum: float
    slowest: float | None
    overhead_ratio: float | None
    overhead_seconds: float
    last: dict[str, float]
    sums: dict[str, float]
    loss_nonfinite: int
    loss_spikes: int
    learning_rates: dict[tuple[str, str], float]


@dataclass(slots=True)
class TrainingTotals:
    """Adds up what happens every step. Fed by `host.HostSide`."""

    _buckets: FloatArray = field(default_factory=lambda: np.zeros(len(STEP_SECONDS) + 1))
    _duration_sum: float = 0.0
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=SLOWEST_STEPS))
    _recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RATIO_STEPS))
    _own_seconds: float = 0.0
    _last: dict[str, float] = field(default_factory=dict)
    _sums: dict[str, float] = field(default_factory=dict)
    _loss_nonfinite: int = 0
    _loss_spikes: int = 0
    _loss_baseline: Baselines = field(default_factory=lambda: Baselines(log=False))
    _learning_rates: dict[tuple[str, str], float] = field(default_factory=dict)

    def stepped(self, seconds: float | None, own_seconds: float) -> None:
        """Counts a round's first step: `seconds` since that of the round before, and what the exporter took of them."""
        self._own_seconds += own_seconds
        if seconds is None:
            return
        self._recent.append((own_seconds, seconds))
        self._durations.append(seconds)
        self._buckets[bisect.bisect_left(STEP_SECONDS, seconds)] += 1
        self._duration_sum += seconds

    def counted(self, event: Counted) -> None:
        """Counts rounds of which only the steps were seen."""
        share = event.own_seconds / len(event.seconds)
        self._own_seconds += event.own_seconds
        self._recent.extend((share, seconds) for seconds in event.seconds)
        self._durations.extend(event.seconds)
        self._buckets += np.bincount(np.searchsorted(STEP_SECONDS, event.seconds), minlength=len(self._buckets))
        self._duration_sum += sum(event.seconds)

    def observed(self, event: Observed, value: float) -> None:
        """Takes an observed value; `samples` and `tokens` add up, the others replace the value before."""
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
        self._loss_baseline.grow(1)
        self._loss_spikes += int(self._loss_baseline.judge(np.zeros(1, dtype=np.int64), np.array([value])).spike[0])

    def snapshot(self) -> TotalsSnapshot:
        """A copy of all values."""
        training = sum(seconds for _, seconds in self._recent)
        return TotalsSnapshot(
            duration_buckets=self._buckets.copy(),
            duration_sum=self._duration_sum,
            slowest=max(self._durations, default=None),
            overhead_ratio=sum(own for own, _ in self._recent) / training if training else None,
            overhead_seconds=self._own_seconds,
            last=dict(self._last),
            sums=dict(self._sums),
            loss_nonfinite=self._loss_nonfinite,
            loss_spikes=self._loss_spikes,
            learning_rates=dict(self._learning_rates),
        )
