"""RunTable: steps, durations, losses and what else is counted once per step."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from torch_grad_exporter.metrics.buckets import STEP_SECONDS
from torch_grad_exporter.metrics.exponential import Exponential
from torch_grad_exporter.metrics.families import Exemplar, FloatArray
from torch_grad_exporter.store.baselines import Baseline
from torch_grad_exporter.store.cursors import Cursor, entered
from torch_grad_exporter.store.exponential import ExponentialRows
from torch_grad_exporter.store.records import Observed, StepsTaken
from torch_grad_exporter.store.surprises import Surprises

RATIO_STEPS, SLOWEST_STEPS = 1000, 128  # over which the overhead ratio and the slowest step are taken


@dataclass(slots=True, eq=False)
class TotalsSnapshot:
    """The totals at one moment; None where there is no value yet. Durations in seconds."""

    duration_buckets: FloatArray = field(default_factory=lambda: np.zeros(len(STEP_SECONDS) + 1))
    duration_sum: float = 0.0
    duration_exponential: Exponential = field(default_factory=lambda: ExponentialRows(1).of([0]))
    exemplars: dict[int, Exemplar] = field(default_factory=dict)  # of the last step of each bucket within a trace
    slowest: float | None = None
    overhead_ratio: float | None = None
    lent_ratio: float = 0.0  # the part of it that the first samples took
    overhead_seconds: float = 0.0
    last: dict[str, float] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    loss_nonfinite: int = 0
    loss_spikes: int = 0
    learning_rates: dict[tuple[str, str], float] = field(default_factory=dict)


class RunTable:
    """Adds up what happens every step. `cursors`: consumers of losses and of single values; `surprises`: of bad losses."""

    def __init__(self, cursors: Collection[Cursor], surprises: Surprises) -> None:
        self._cursors, self._surprises = cursors, surprises
        self.on_steps: Callable[[Sequence[float]], object] = len  # is given the ends of further steps
        self._totals = TotalsSnapshot()
        self._loss_baseline = Baseline(loss=True)
        self._buckets = [0] * (len(STEP_SECONDS) + 1)  # into an array a single step takes several times as long
        self._exponential = ExponentialRows(1)
        # Of the last steps: their seconds, and the exporter's own in them.
        self._seconds, self._own = deque[float](maxlen=RATIO_STEPS), deque[float](maxlen=RATIO_STEPS)
        self._timed = 0  # steps with a duration, and of the first samples how many there were until each, and its own seconds
        self._lent: list[tuple[int, float]] = []
        self._steps: StepsTaken | None = None  # the last record, until its rounds are over
        self._taken = 0  # rounds of it that were counted

    def take_steps(self, following: StepsTaken | None = None) -> int:
        """Count the rounds that have come to the last record, and then those of the following one; return how many."""
        if following is not None:
            rounds = self.take_steps()
            self._steps, self._taken = following, 0
            return rounds + self.take_steps()
        record, totals = self._steps, self._totals
        if record is None:
            return 0
        own = record.own_seconds  # read first: once it is set, no more rounds come
        new = record.moments[self._taken :]
        before, durations = record.moments[self._taken - 1] if self._taken else record.since, list[float]()
        for moment in new:
            self._taken += 1
            if before is not None:
                seconds = moment - before
                durations.append(seconds)
                self._own.append(0.0)
                self._timed += 1
                bucket = bisect.bisect_left(STEP_SECONDS, seconds)
                self._buckets[bucket] += 1
                totals.duration_sum += seconds
                if record.step is not None:
                    entered(self._cursors, "step_seconds", record.step + self._taken, seconds, moment + record.offset)
                if record.trace is not None:
                    totals.exemplars[bucket] = Exemplar(seconds, moment + record.offset, *record.trace)
            before = moment
        self._seconds.extend(durations)
        if durations:
            self._exponential.enter(np.zeros(len(durations), dtype=np.int64), np.array(durations))
        if own is not None:
            self._steps = None
            totals.overhead_seconds += own
            timed = 0 if record.since is None else self._taken
            for place in range(1, min(timed, RATIO_STEPS) + 1):
                self._own[-place] = own / timed
            if record.lent and timed:
                self._lent.append((self._timed, own))
        self.on_steps(new)
        return len(new)

    def observed(self, record: Observed, value: float) -> None:
        """Take an observed value; `samples` and `tokens` add up, the others replace the value before."""
        totals = self._totals
        if record.labels:
            totals.learning_rates[record.labels] = value
            if record.labels == next(iter(totals.learning_rates)):
                entered(self._cursors, "learning_rate", record.step, value)
            return
        if record.name in ("samples", "tokens"):
            total = totals.sums.get(record.name, 0.0) + value
            if value >= 0 and math.isfinite(total):
                totals.sums[record.name] = total
            return
        totals.last[record.name] = value
        if record.name != "loss":
            return
        single = entered(self._cursors, "loss", record.step, value)
        if not math.isfinite(value):
            totals.loss_nonfinite += 1
            self._surprises.seen()
            return
        for cursor in self._cursors:
            if cursor not in single:
                cursor.losses = cursor.losses.with_one(value)
        totals.loss_spikes += self._loss_baseline.is_spike(value)

    def snapshot(self, *, recent: bool) -> TotalsSnapshot:
        """Return a copy of all values. `recent`: with those over the last steps."""
        totals = self._totals
        training = sum(self._seconds) if recent else 0.0
        return replace(
            totals,
            duration_buckets=np.array(self._buckets, dtype=np.float64),
            duration_exponential=self._exponential.of([0]),
            exemplars=dict(totals.exemplars),
            slowest=max(islice(reversed(self._seconds), SLOWEST_STEPS), default=None) if recent else None,
            overhead_ratio=sum(self._own) / training if training else None,
            lent_ratio=sum(own for step, own in self._lent if step > self._timed - RATIO_STEPS) / training if training else 0.0,
            last=dict(totals.last),
            sums=dict(totals.sums),
            learning_rates=dict(totals.learning_rates),
        )
