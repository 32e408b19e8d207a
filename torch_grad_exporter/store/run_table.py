"""RunTable: steps, durations, losses and what else is counted once per step."""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np

from torch_grad_exporter.metrics.buckets import STEP_SECONDS
from torch_grad_exporter.metrics.families import Exemplar, FloatArray
from torch_grad_exporter.store.baselines import Baseline
from torch_grad_exporter.store.cursors import Cursor
from torch_grad_exporter.store.records import Observed, StepsTaken

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
        self._loss_baseline = Baseline(loss=True)
        # Plain lists: into an array a single step takes several times as long.
        self._buckets = [0] * (len(STEP_SECONDS) + 1)
        self._own, self._seconds = [0.0] * RATIO_STEPS, [0.0] * RATIO_STEPS  # of the last steps, as rings
        self._count = 0
        self._steps: StepsTaken | None = None  # the last record, until its rounds are over
        self._taken = 0  # rounds of it that were counted

    def steps_taken(self, record: StepsTaken) -> int:
        """Begin with the next record of rounds, after the rest of the one before; return how many rounds are new."""
        before = self.take_steps()
        self._steps, self._taken = record, 0
        return before + self.take_steps()

    def take_steps(self) -> int:
        """Count the rounds that have come to the last record since; return how many."""
        record, totals = self._steps, self._totals
        if record is None:
            return 0
        own = record.own_seconds  # read first: once it is set, no more rounds come
        durations = record.durations(self._taken)
        first = self._taken + (record.since is None and not self._taken)
        bucket = 0
        for index, seconds in enumerate(durations, first):
            self._own[self._count % RATIO_STEPS], self._seconds[self._count % RATIO_STEPS] = 0.0, seconds
            self._count += 1
            bucket = bisect.bisect_left(STEP_SECONDS, seconds)
            self._buckets[bucket] += 1
            totals.duration_sum += seconds
            if record.step is not None:
                self._enter_single("step_seconds", record.step + index + 1, seconds, record.moments[index] + record.offset)
        if record.trace is not None and durations:
            totals.exemplars[bucket] = Exemplar(durations[-1], record.moments[-1] + record.offset, *record.trace)
        new, self._taken = first + len(durations) - self._taken, first + len(durations)
        if own is not None:
            self._steps = None
            totals.overhead_seconds += own
            timed = self._taken - (record.since is None)
            for place in range(self._count - timed, self._count):
                self._own[place % RATIO_STEPS] = own / timed
        return new

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
        totals = self._totals
        training = sum(self._seconds) if recent else 0.0
        return replace(
            totals,
            duration_buckets=np.array(self._buckets, dtype=np.float64),
            exemplars=dict(totals.exemplars),
            slowest=self._slowest() if recent else None,
            overhead_ratio=sum(self._own) / training if training else None,
            last=dict(totals.last),
            sums=dict(totals.sums),
            learning_rates=dict(totals.learning_rates),
        )

    def _slowest(self) -> float | None:
        """Return the longest of the last `SLOWEST_STEPS`."""
        last = range(max(0, self._count - SLOWEST_STEPS), self._count)
        return max((self._seconds[place % RATIO_STEPS] for place in last), default=None)
