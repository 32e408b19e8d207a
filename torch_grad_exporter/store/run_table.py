"""TrainingTotals: steps, durations, losses and what else is counted once per step, on the host."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakSet

import numpy as np

from torch_grad_exporter.aggregation.baseline import LossBaseline
from torch_grad_exporter.aggregation.cursor import Cursor
from torch_grad_exporter.metrics.buckets import STEP_SECONDS
from torch_grad_exporter.metrics.families import Exemplar, FloatArray
from torch_grad_exporter.transfer.events import Counted, Counting, Observed, Stepped

RATIO_STEPS = 1000
"""Steps over which the overhead ratio is taken."""

SLOWEST_STEPS = 128
"""Steps over which the slowest is taken."""


@dataclass(slots=True, eq=False)
class TotalsSnapshot:
    """The totals at one moment; `None` where there is no value yet. Durations in seconds.

    `exemplars`: of durations, the last one of each bucket that was sampled within a trace.
    """

    duration_buckets: FloatArray = field(default_factory=lambda: np.zeros(len(STEP_SECONDS) + 1))
    duration_sum: float = 0.0
    exemplars: dict[int, Exemplar] = field(default_factory=dict)
    slowest: float | None = None
    overhead_ratio: float | None = None
    overhead_seconds: float = 0.0
    last: dict[str, float] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    loss_nonfinite: int = 0
    loss_spikes: int = 0
    learning_rates: dict[tuple[str, str], float] = field(default_factory=dict)


class _Recent:
    """Of the last `RATIO_STEPS` steps, what the exporter took and how long each was, in seconds."""

    def __init__(self) -> None:
        # Plain lists: a step is entered by itself, and into an array that takes several times as long.
        self._own, self._seconds = [0.0] * RATIO_STEPS, [0.0] * RATIO_STEPS
        self._count = 0

    def add(self, own: float, seconds: float) -> None:
        """Takes a step."""
        place = self._count % RATIO_STEPS
        self._own[place], self._seconds[place] = own, seconds
        self._count += 1

    @property
    def overhead_ratio(self) -> float | None:
        """What the exporter took over how long they were."""
        training = sum(self._seconds)
        return sum(self._own) / training if training else None

    def slowest(self, ahead: Sequence[float]) -> float | None:
        """The longest of the last `SLOWEST_STEPS`, of which these came last."""
        more = min(max(SLOWEST_STEPS - len(ahead), 0), self._count)
        end = self._count % RATIO_STEPS
        before = self._seconds[RATIO_STEPS - max(0, more - end) :]
        return max((*ahead[-SLOWEST_STEPS:], *before, *self._seconds[max(0, end - more) : end]), default=None)


@dataclass(slots=True)
class TrainingTotals:
    """Adds up what happens every step. Fed by `worker.HostSide`. `nonfinite`: is told of each loss that is not finite."""

    nonfinite: Callable[[], object] | None = None
    _totals: TotalsSnapshot = field(default_factory=TotalsSnapshot)
    _recent: _Recent = field(default_factory=_Recent)
    _buckets: list[int] = field(default_factory=lambda: [0] * (len(STEP_SECONDS) + 1))
    _loss_baseline: LossBaseline = field(default_factory=LossBaseline)
    _cursors: WeakSet[Cursor] = field(default_factory=WeakSet)
    _ahead: Counting | None = None
    """Rounds that were shown before their record came."""
    _stretch: int = 0
    """The number of the last such record."""

    def stepped(self, event: Stepped) -> None:
        """Counts a round's first step."""
        totals = self._totals
        totals.overhead_seconds += event.own_seconds
        if event.seconds is None:
            return
        self._recent.add(event.own_seconds, event.seconds)
        bucket = bisect.bisect_left(STEP_SECONDS, event.seconds)
        self._buckets[bucket] += 1
        totals.duration_sum += event.seconds
        self._enter("step_seconds", event.step, event.seconds, event.at)
        if event.trace is not None:
            totals.exemplars[bucket] = Exemplar(event.seconds, event.at, *event.trace)

    def counted(self, event: Counted) -> None:
        """Counts rounds of which only the steps were seen."""
        self._end_before(event.stretch + 1, came=event.stretch)
        self._stretch = event.stretch
        self._add(event.seconds, event.own_seconds)

    def _add(self, durations: tuple[float, ...], own_seconds: float) -> None:
        totals, share = self._totals, own_seconds / len(durations)
        totals.overhead_seconds += own_seconds
        for seconds in durations:
            self._recent.add(share, seconds)
            self._buckets[bisect.bisect_left(STEP_SECONDS, seconds)] += 1
        totals.duration_sum += sum(durations)

    def counting(self, now: Counting | None) -> None:
        """Takes note of rounds whose record is yet to come, so that snapshots show them. Call it behind what has come since.

        They are shown until the record comes, which has as many or more: the totals never fall, and have none twice.
        """
        if now is not None and now.seconds and now.stretch > self._stretch:
            self._end_before(now.stretch)
            self._ahead = now

    def _end_before(self, stretch: int, *, came: int | None = None) -> None:
        """Ends what was shown of earlier stretches. `came`: the one whose record is here; those of others are lost."""
        ahead = self._ahead
        if ahead is not None and ahead.stretch < stretch:
            self._ahead = None
            if ahead.stretch != came:
                self._add(ahead.seconds, 0.0)

    def observed(self, event: Observed, value: float) -> None:
        """Takes an observed value; `samples` (training examples) and `tokens` add up, the others replace the value before."""
        totals = self._totals
        if event.labels:
            totals.learning_rates[event.labels] = value
            if event.labels == next(iter(totals.learning_rates)):
                self._enter("learning_rate", event.step, value)
        elif event.name in ("samples", "tokens"):
            total = totals.sums.get(event.name, 0.0) + value
            if value >= 0 and math.isfinite(total):
                totals.sums[event.name] = total
        else:
            totals.last[event.name] = value
            if event.name == "loss":
                self._judge_loss(value, event.step)

    def _enter(self, name: str, step: int | None, value: float, at: float | None = None) -> None:
        """A value of a step, for those who want each by itself."""
        if step is None:
            return
        for cursor in self._cursors:
            if cursor.singles is not None:
                cursor.singles.enter(name, step, value, at)

    def _judge_loss(self, value: float, step: int | None) -> None:
        alone = [cursor for cursor in self._cursors if cursor.singles is not None and cursor.singles.enter("loss", step, value)]
        if not math.isfinite(value):
            self._totals.loss_nonfinite += 1
            if self.nonfinite is not None:
                self.nonfinite()
            return
        for cursor in self._cursors:
            if cursor not in alone:
                cursor.losses = cursor.losses.with_one(value)
        self._totals.loss_spikes += self._loss_baseline.is_spike(value)

    def snapshot(self, *, of_last: bool = True) -> TotalsSnapshot:
        """A copy of all values. `of_last`: with those that are of the last steps, of many together."""
        totals = self._totals
        ahead = () if self._ahead is None else self._ahead.seconds
        return replace(
            totals,
            duration_buckets=self._bucketed(ahead),
            duration_sum=totals.duration_sum + sum(ahead),
            exemplars=dict(totals.exemplars),
            slowest=self._recent.slowest(ahead) if of_last else None,
            overhead_ratio=self._recent.overhead_ratio if of_last else None,
            last=dict(totals.last),
            sums=dict(totals.sums),
            learning_rates=dict(totals.learning_rates),
        )

    def _bucketed(self, ahead: Sequence[float]) -> FloatArray:
        """How many durations each bucket has, with those ahead, shape (buckets,)."""
        found = list(self._buckets)
        for seconds in ahead:
            found[bisect.bisect_left(STEP_SECONDS, seconds)] += 1
        return np.array(found, dtype=np.float64)

    def follow(self, cursor: Cursor) -> None:
        """Begins with a consumer: losses from now on are new to it."""
        self._cursors.add(cursor)
