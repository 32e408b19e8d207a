"""RunTable: steps, durations, losses and what else is counted once per step."""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from torch_grad_exporter.metrics.buckets import STEP_SECONDS
from torch_grad_exporter.metrics.families import Exemplar, FloatArray
from torch_grad_exporter.store.baselines import LossBaseline
from torch_grad_exporter.store.cursors import Cursor
from torch_grad_exporter.store.records import Counting, Observed, StepsTaken

RATIO_STEPS, SLOWEST_STEPS = 1000, 128
"""Steps over which the overhead ratio and the slowest step are taken."""


@dataclass(slots=True, eq=False)
class TotalsSnapshot:
    """The totals at one moment; None where there is no value yet. Durations in seconds."""

    duration_buckets: FloatArray = field(default_factory=lambda: np.zeros(len(STEP_SECONDS) + 1))
    duration_sum: float = 0.0
    exemplars: dict[int, Exemplar] = field(default_factory=dict)  # of the last step of each bucket within a trace
    slowest: float | None = None
    overhead_ratio: float | None = None
    overhead_seconds: float = 0.0
    last: dict[str, float] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    loss_nonfinite: int = 0
    loss_spikes: int = 0
    learning_rates: dict[tuple[str, str], float] = field(default_factory=dict)


class RunTable:
    """Adds up what happens every step. `cursors`: consumers of losses and of single values."""

    def __init__(self, cursors: Collection[Cursor]) -> None:
        self._cursors = cursors
        self._totals = TotalsSnapshot()
        self._loss_baseline = LossBaseline()
        # Plain lists: into an array a single step takes several times as long.
        self._buckets = [0] * (len(STEP_SECONDS) + 1)
        self._own, self._seconds = [0.0] * RATIO_STEPS, [0.0] * RATIO_STEPS  # of the last steps, as rings
        self._count = 0
        self._ahead: Counting | None = None  # rounds that were shown before their record came
        self._stretch = 0  # of the last record of counted rounds

    def steps_taken(self, record: StepsTaken) -> None:
        """Count rounds."""
        if record.stretch:
            self._end_before(record.stretch + 1, came=record.stretch)
            self._stretch = record.stretch
        self._totals.overhead_seconds += record.own_seconds
        if not record.seconds:
            return
        bucket = self._add(record.seconds, record.own_seconds)
        if record.step is not None:
            step, at = record.step - len(record.seconds), record.at - sum(record.seconds)
            for seconds in record.seconds:
                step, at = step + 1, at + seconds
                self._enter_single("step_seconds", step, seconds, at)
        if record.trace is not None:
            self._totals.exemplars[bucket] = Exemplar(record.seconds[-1], record.at, *record.trace)

    def _add(self, durations: tuple[float, ...], own_seconds: float) -> int:
        """Add durations; return the bucket of the last one."""
        share, bucket = own_seconds / len(durations), 0
        for seconds in durations:
            place, self._count = self._count % RATIO_STEPS, self._count + 1
            self._own[place], self._seconds[place] = share, seconds
            bucket = bisect.bisect_left(STEP_SECONDS, seconds)
            self._buckets[bucket] += 1
        self._totals.duration_sum += sum(durations)
        return bucket

    def counting(self, now: Counting | None) -> None:
        """Take note of rounds whose record is yet to come, after what has come before, so that snapshots show them.

        They are shown until the record comes, which has as many or more: totals never fall, and have none twice.
        """
        if now is not None and now.seconds and now.stretch > self._stretch:
            self._end_before(now.stretch)
            self._ahead = now

    def _end_before(self, stretch: int, *, came: int | None = None) -> None:
        """End what was shown of earlier stretches. `came`: the one whose record is here; those of others are lost."""
        ahead = self._ahead
        if ahead is not None and ahead.stretch < stretch:
            self._ahead = None
            if ahead.stretch != came:
                self._add(ahead.seconds, 0.0)

    def observed(self, record: Observed, value: float) -> None:
        """Take an observed value; `samples` and `tokens` add up, the others replace the value before."""
        totals = self._totals
        if record.labels:
            totals.learning_rates[record.labels] = value
            if record.labels == next(iter(totals.learning_rates)):
                self._enter_single("learning_rate", record.step, value)
        elif record.name in ("samples", "tokens"):
            total = totals.sums.get(record.name, 0.0) + value
            if value >= 0 and math.isfinite(total):
                totals.sums[record.name] = total
        else:
            totals.last[record.name] = value
            if record.name == "loss":
                self._judge_loss(value, record.step)

    def _judge_loss(self, loss: float, step: int | None) -> None:
        single = self._enter_single("loss", step, loss)
        if not math.isfinite(loss):
            self._totals.loss_nonfinite += 1
            return
        for cursor in self._cursors:
            if cursor not in single:
                cursor.losses = cursor.losses.with_one(loss)
        self._totals.loss_spikes += self._loss_baseline.is_spike(loss)

    def _enter_single(self, name: str, step: int | None, value: float, at: float | None = None) -> list[Cursor]:
        """Enter a value of a step for consumers of single values; return those that took it."""
        if step is None:
            return []
        return [c for c in self._cursors if c.singles is not None and c.singles.enter(name, step, value, at)]

    def snapshot(self, *, recent: bool = True) -> TotalsSnapshot:
        """Return a copy of all values. `recent`: with those over the last steps."""
        totals, ahead = self._totals, () if self._ahead is None else self._ahead.seconds
        buckets, training = list(self._buckets), sum(self._seconds) if recent else 0.0
        for seconds in ahead:
            buckets[bisect.bisect_left(STEP_SECONDS, seconds)] += 1
        return replace(
            totals,
            duration_buckets=np.array(buckets, dtype=np.float64),
            duration_sum=totals.duration_sum + sum(ahead),
            exemplars=dict(totals.exemplars),
            slowest=self._slowest(ahead) if recent else None,
            overhead_ratio=sum(self._own) / training if training else None,
            last=dict(totals.last),
            sums=dict(totals.sums),
            learning_rates=dict(totals.learning_rates),
        )

    def _slowest(self, ahead: Sequence[float]) -> float | None:
        """Return the longest of the last `SLOWEST_STEPS`, of which those ahead came last."""
        more = min(max(SLOWEST_STEPS - len(ahead), 0), self._count)
        end = self._count % RATIO_STEPS
        last = [*self._seconds[RATIO_STEPS - max(0, more - end) :], *self._seconds[max(0, end - more) : end]]
        return max((*ahead[-SLOWEST_STEPS:], *last), default=None)
