"""ActionReports: what becomes of conditions and actions of `exporter.on`, for metrics, the live page, the journal and the log."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from torch_grad_exporter.actions.act.trigger import StepTrigger, Trigger
from torch_grad_exporter.capture.progress import StepClock, active_trace
from torch_grad_exporter.collectors.outcomes import ActionMark, ActionOutcome, ActionTotals
from torch_grad_exporter.errors import LIMIT, ErrorLog, Guard, warn, without_addresses
from torch_grad_exporter.store.journal import JournalEvent

SOURCE = "action"  # of the failures of actions and conditions


class ActionReports:
    """Reports what becomes of conditions and actions. From any thread.

    Args:
        errors: Counts failures.
        totals: Counts what became of actions.
        clock: Counts optimizer steps.
        now: Returns Unix time.
    """

    def __init__(self, errors: ErrorLog, totals: ActionTotals, clock: StepClock, now: Callable[[], float] = time.time) -> None:
        self.errors = errors
        self.totals = totals
        self.now = now
        self._clock = clock
        self._logged: set[object] = set()

    @property
    def steps(self) -> int:
        """Optimizer steps so far."""
        return self._clock.number

    def guard(self, name: str) -> Guard:
        """Return a guard of the user's code, which disables it after ten failures in a row."""
        key = object()  # several may have the same name
        gave_up = functools.partial(self.errors.gave_up, f"{SOURCE} ({name})")
        return Guard(lambda error: self.failed(name, error, key), limit=LIMIT, gave_up=gave_up)

    def failed(self, name: str, error: Exception, key: object = None) -> None:
        """Count a failure, and log the first one of the name, or of the key."""
        if (key or name) in self._logged:
            self.errors.count(SOURCE, error)
            return
        self._logged.add(key or name)
        reason = f"{type(error).__name__}: {without_addresses(str(error))}"
        self.errors.report(SOURCE, RuntimeError(f"{name}: {reason}; further failures of it are only counted"))

    def disabled(self, name: str, reason: object) -> None:
        """Count and log what is disabled at once: a condition that can never be judged, an action in which ranks differ."""
        self.errors.report(SOURCE, RuntimeError(f"{name}: {reason}; it is switched off"))

    def note(self, trigger: Trigger, outcome: ActionOutcome) -> None:
        """Count the outcome of an action, and mark it on the live page."""
        self.totals.count(trigger.label, outcome)
        if outcome is ActionOutcome.DROPPED:
            return
        changes_training = isinstance(trigger, StepTrigger)
        action = repr(trigger.action) if changes_training else trigger.label
        mark = ActionMark(self.now(), self.steps, trigger.name, action, outcome.value)
        self.totals.marks.add(mark, trigger.label)
        if (journal := self.totals.journal) is not None:
            severity = "info" if outcome is ActionOutcome.DONE and not changes_training else "warning"
            text = f"{mark.name}: {action} {mark.result} at step {mark.step}"
            facts = {"action": action, "condition": mark.name, "result": mark.result}
            journal.add(JournalEvent(mark.time, "torch.action", severity, text, {**facts, "step": mark.step}, active_trace()))
        if changes_training and outcome is ActionOutcome.DONE:
            warn("%s: %s changed the training at step %d", trigger.name, action, self.steps)
