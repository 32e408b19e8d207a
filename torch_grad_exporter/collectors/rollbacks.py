"""Collector `rollbacks`: copies of the training on the host, and the times that it went back to one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, LabelledRows, scalar

ROLLBACKS = Section("Rollbacks")

ROLLBACKS_DONE = ROLLBACKS.counter(
    "torch_train_rollbacks_total", "Times that Rollback took the training back to a copy, by reason.", "reason", opt_in="rollback"
)
ROLLBACK_STEP = ROLLBACKS.gauge(
    "torch_train_rollback_step",
    "Optimizer step whose copy Rollback last went back to; absent before the first time.",
    opt_in="rollback",
)
ROLLBACK_GOOD_STEP = ROLLBACKS.gauge(
    "torch_train_rollback_good_step",
    "Optimizer step of the latest copy that Rollback knows to be good, which it would go back to; on rank 0, which decides.",
    opt_in="rollback",
)
ROLLBACK_LOST_STEPS = ROLLBACKS.counter(
    "torch_train_rollback_lost_steps_total", "Optimizer steps that were undone by Rollback.", opt_in="rollback"
)
ROLLBACK_LOST_SECONDS = ROLLBACKS.counter(
    "torch_train_rollback_lost_seconds_total",
    "Time between the copies that Rollback went back to and its going back.",
    unit="seconds",
    opt_in="rollback",
)
ROLLBACK_COPIES = ROLLBACKS.counter("torch_train_rollback_copies_total", "Copies that Rollback has made.", opt_in="rollback")
ROLLBACK_COPY_SECONDS = ROLLBACKS.counter(
    "torch_train_rollback_copy_seconds_total",
    "Time that Rollback's copies took of the training thread; on CUDA, without the transfer itself.",
    unit="seconds",
    opt_in="rollback",
)
ROLLBACK_COPY_BYTES = ROLLBACKS.gauge(
    "torch_train_rollback_copy_bytes",
    "Memory of the host that Rollback's copies take; of a sharded model, of this rank's parts.",
    unit="bytes",
    opt_in="rollback",
)


class RollbackTotals:
    """What `Rollback` has done: written by it, read by the collector. From any thread: values are replaced, never changed.

    Attributes:
        in_use: Whether there is such an action; only then there are metrics of it.
        done: The times that the training went back, by reason.
        step: The step gone back to last.
        good_step: That of the latest copy which is known to be good.
        lost_steps, lost_seconds: What was undone.
        copies, copy_seconds, copy_bytes: The copies made, what they took, and what they hold.
    """

    def __init__(self) -> None:
        self.in_use = False
        self.step: int | None = None
        self.good_step: int | None = None
        self.lost_steps, self.lost_seconds = 0, 0.0
        self.copies, self.copy_seconds, self.copy_bytes = 0, 0.0, 0
        self.done: Mapping[str, int] = {}

    def know(self, reason: str) -> None:
        """Show a reason from now on."""
        self.done = {reason: 0, **self.done}

    def went_back(self, reason: str, step: int, steps: int, seconds: float) -> None:
        """Count going back to a step, by which these steps and this time were lost."""
        self.done = {**self.done, reason: self.done.get(reason, 0) + 1}
        self.step = step
        self.lost_steps += steps
        self.lost_seconds += seconds

    def copied(self, seconds: float, held: int) -> None:
        """Count a copy, which took this long; `held`: the bytes of all."""
        self.copies += 1
        self.copy_seconds += seconds
        self.copy_bytes = held


class RollbackCollector:
    """Families of `Rollback`, none without one."""

    def __init__(self, totals: RollbackTotals) -> None:
        self._totals = totals
        self._rows = LabelledRows()

    def collect(self) -> Iterator[Family]:
        """Yield the families of now."""
        totals = self._totals
        if not totals.in_use:
            return
        yield self._rows.by_label(ROLLBACKS_DONE, totals.done)
        yield scalar(ROLLBACK_STEP, totals.step)
        yield scalar(ROLLBACK_GOOD_STEP, totals.good_step)
        yield scalar(ROLLBACK_LOST_STEPS, totals.lost_steps)
        yield scalar(ROLLBACK_LOST_SECONDS, totals.lost_seconds)
        yield scalar(ROLLBACK_COPIES, totals.copies)
        yield scalar(ROLLBACK_COPY_SECONDS, totals.copy_seconds)
        yield scalar(ROLLBACK_COPY_BYTES, totals.copy_bytes)


COLLECTOR = Declaration("rollbacks", (ROLLBACKS,), lambda context: RollbackCollector(context.rollbacks), place=26, judged=False)
