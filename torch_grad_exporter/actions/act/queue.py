"""ActionQueue: runs the user's functions, one after the other, in a thread of its own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from torch_grad_exporter.actions.act.reports import SOURCE, ActionReports
from torch_grad_exporter.actions.act.step_actions import StepAction
from torch_grad_exporter.actions.act.trigger import Event, Trigger
from torch_grad_exporter.actions.users_code import contained
from torch_grad_exporter.collectors.outcomes import ActionOutcome
from torch_grad_exporter.lifecycle import BackgroundLoop

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
        self._loop = BackgroundLoop("action", self._work, guard=self._guard, last=self._flush)

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

    # The thread

    def _next(self) -> tuple[Trigger, Event] | None:
        try:
            return self._waiting.popleft()
        except IndexError:  # another thread may have taken the last one
            return None

    def _work(self) -> None:
        while not self._loop.stopping and (following := self._next()) is not None:
            self._guard(self._run, *following)

    def _flush(self) -> None:
        while self._clock() < self._give_up_at and (following := self._next()) is not None:
            self._guard(self._run, *following)

    def _run(self, trigger: Trigger, event: Event) -> None:
        if trigger.off or isinstance(trigger.action, StepAction):
            return
        succeeded = trigger.actions(contained, trigger.action, event)
        self._reports.note(trigger, ActionOutcome.DONE if succeeded else ActionOutcome.FAILED)
