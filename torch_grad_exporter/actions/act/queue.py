"""ActionQueue: runs the user's functions, one after the other, in a thread of its own."""

from __future__ import annotations

import threading
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
        self._lock = threading.Lock()  # of what waits, held for moments
        self._give_up_at = 0.0
        self._guard = reports.errors.boundary(SOURCE, "running", limit=None)
        self._loop = BackgroundLoop("action", self._work, guard=self._guard, last=self._flush)

    def offer(self, trigger: Trigger, event: Event) -> None:
        """Run the action after those that wait, or drop it if there is no room. Raises `RuntimeError` without a thread."""
        with self._lock:
            fits = len(self._waiting) < ROOM and not self._closed
            if fits:
                self._waiting.append((trigger, event))
        if not fits:
            self._reports.note(trigger, ActionOutcome.DROPPED)
            return
        if not self._started:
            self._loop.start()
            self._started = True
        self._loop.wake()

    def close(self, seconds: float) -> None:
        """Run what waits for this many seconds at most, and drop the rest. One that hangs is left behind. Idempotent."""
        self._give_up_at = self._clock() + seconds
        self._loop.close(seconds)
        with self._lock:
            left, self._waiting, self._closed = self._waiting, deque(), True
        for trigger, _ in left:
            self._reports.note(trigger, ActionOutcome.DROPPED)

    # The thread

    def _work(self) -> None:
        while not self._loop.stopping and self._run_next():
            pass

    def _flush(self) -> None:
        while self._clock() < self._give_up_at and self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run the action that waits longest. Returns whether there was one."""
        with self._lock:
            if not self._waiting:
                return False
            trigger, event = self._waiting.popleft()
        self._guard(self._run, trigger, event)
        return True

    def _run(self, trigger: Trigger, event: Event) -> None:
        if trigger.off or isinstance(trigger.action, StepAction):
            return
        succeeded = trigger.actions(contained, trigger.action, event)
        self._reports.note(trigger, ActionOutcome.DONE if succeeded else ActionOutcome.FAILED)
