"""What becomes of conditions and actions, as counts, log lines and marks; and the queue that runs the user's functions."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable

from torch_grad_exporter.actions.act.step_actions import StepAction
from torch_grad_exporter.actions.act.trigger import Event, StepTrigger, Trigger
from torch_grad_exporter.capture.progress import StepClock, active_trace
from torch_grad_exporter.collectors.outcomes import ActionMark, ActionOutcome, ActionTotals
from torch_grad_exporter.errors import LIMIT, ErrorLog, Guard, contained, warn, without_addresses
from torch_grad_exporter.lifecycle import BackgroundLoop
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
        self.totals.count(trigger.counted, outcome)
        if outcome is ActionOutcome.DROPPED:
            return
        changes_training = isinstance(trigger, StepTrigger)
        action = repr(trigger.action) if changes_training else trigger.counted
        mark = ActionMark(self.now(), self.steps, trigger.name, action, outcome.value)
        self.totals.marks.add(mark, trigger.counted)
        if (journal := self.totals.journal) is not None:
            severity = "info" if outcome is ActionOutcome.DONE and not changes_training else "warning"
            text = f"{mark.name}: {action} {mark.result} at step {mark.step}"
            facts = {"action": action, "condition": mark.name, "result": mark.result}
            journal.add(JournalEvent(mark.time, "torch.action", severity, text, {**facts, "step": mark.step}, active_trace()))
        if changes_training and outcome is ActionOutcome.DONE:
            warn("%s: %s changed the training at step %d", trigger.name, action, self.steps)


ROOM = 100  # events that wait, at most


class ActionQueue:
    """Runs actions on their events until `close`. The thread starts with the first one. `offer` is for one thread at a time."""

    def __init__(self, reports: ActionReports, clock: Callable[[], float] = time.monotonic) -> None:
        self._reports = reports
        self._clock = clock
        self._waiting: deque[tuple[Trigger, Event]] = deque()
        self._started = self._closed = False
        self._give_up_at = 0.0
        self._guard = reports.errors.boundary(SOURCE, "running", limit=None)
        self._loop = BackgroundLoop("action", self._work, guard=self._guard, last=self._work)

    def offer(self, trigger: Trigger, event: Event) -> None:
        """Run the action after those that wait, or drop it if there is no room. Raises `RuntimeError` without a thread."""
        if len(self._waiting) >= ROOM or self._closed:
            self._reports.note(trigger, ActionOutcome.DROPPED)
            return
        self._waiting.append((trigger, event))
        if not self._started:
            self._loop.start()
            self._started = True
        self._loop.wake()

    def close(self, seconds: float) -> None:
        """Run what waits for this many seconds at most, and drop the rest. One that hangs is left behind. Idempotent."""
        self._give_up_at = self._clock() + seconds
        self._loop.close(seconds)
        self._closed = True
        while (left := self._next()) is not None:
            self._reports.note(left[0], ActionOutcome.DROPPED)

    def _next(self) -> tuple[Trigger, Event] | None:
        try:
            return self._waiting.popleft()
        except IndexError:  # another thread may have taken the last one
            return None

    def _work(self) -> None:
        """Run what waits, in the thread; after `close` for a limited time."""
        while (not self._loop.stopping or self._clock() < self._give_up_at) and (following := self._next()) is not None:
            self._guard(self._run, *following)

    def _run(self, trigger: Trigger, event: Event) -> None:
        if trigger.off or isinstance(trigger.action, StepAction):  # the second never is
            return
        succeeded = trigger.actions(contained, trigger.action, event)
        self._reports.note(trigger, ActionOutcome.DONE if succeeded else ActionOutcome.FAILED)
