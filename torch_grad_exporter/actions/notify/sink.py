"""Sink: the queue and the thread of one notifier, so that none holds up another."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from torch_grad_exporter.actions.notify.notification import Notification, SendError
from torch_grad_exporter.actions.notify.notifiers import Notifier
from torch_grad_exporter.collectors.outcomes import NotifyResult, NotifyTotals
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.lifecycle import BackgroundLoop

SOURCE = "notify"  # of failures, in the error counts

QUEUE = 1000
TRIES = 6

# Each pause is twice as long as the one before, and none is longer than this, whatever a receiver asks for.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0


class Sink:
    """Sends in order what it is offered, from `start` until `close`, and retries for a limited time.

    `offer` is for one thread. `name`: as in metrics and log lines; `totals`: counts what is sent, failed and dropped; `errors`:
    counts failed tries, and logs the first one; `clock`: returns seconds.
    """

    def __init__(
        self,
        name: str,
        notifier: Notifier,
        totals: NotifyTotals,
        errors: ErrorLog,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.repeats = name, notifier.repeats
        self._notifier, self._totals, self._errors, self._clock = notifier, totals, errors, clock
        self._lock = threading.Lock()  # of the queue and the batch, held for moments
        self._queue: deque[Notification] = deque()
        self._batch: Sequence[Notification] = ()  # being sent, or to be tried again
        self._tries = 0  # of the batch
        self._failures = 0  # in a row
        self._due = -math.inf
        self._give_up_at = math.inf
        self._logged = False
        guard = errors.boundary(SOURCE, limit=None)
        self._loop = BackgroundLoop(f"notify-{name}", self.work, guard=guard, pause=self._pause, last=self.work)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to send."""
        return not self._batch and not self._queue

    def start(self) -> None:
        """Start its thread. Raises `RuntimeError` if no thread can be started."""
        self._loop.start()

    def offer(self, notifications: Sequence[Notification]) -> None:
        """Queue those that are severe enough; those beyond the queue's length are dropped and counted."""
        taken = [notification for notification in notifications if self._notifier.takes(notification)]
        with self._lock:
            room = QUEUE - len(self._queue) - len(self._batch)
            self._queue.extend(taken[: max(0, room)])
        if len(taken) > room:
            self._totals.count(self.name, NotifyResult.DROPPED, len(taken) - max(0, room))
        if taken:
            self._loop.wake()

    def end(self, give_up_at: float) -> None:
        """Let it send until this time of its clock. Returns at once."""
        self._give_up_at = give_up_at
        self._loop.stop()

    def close(self) -> None:
        """Wait for its end until the time given to `end`, and drop and count what is left. Idempotent."""
        self._loop.join(self._left())
        with self._lock:
            dropped = len(self._batch) + len(self._queue)
            self._batch = ()
            self._queue.clear()
        if dropped:
            self._totals.count(self.name, NotifyResult.DROPPED, dropped)

    # The thread

    def work(self) -> None:
        """Send what is due, at the end everything, until a try fails that may succeed later. For its thread, and for tests."""
        while not self.idle and (self._left() > 0 if self._loop.stopping else self._clock() >= self._due):
            if not self._send():
                break

    def _left(self) -> float:
        return max(0.0, self._give_up_at - self._clock())

    def _pause(self) -> float:
        return math.inf if self.idle else self._due - self._clock()

    def _send(self) -> bool:
        """Try to send a batch. Returns False if the receiver needs a pause."""
        with self._lock:
            if not self._batch:
                self._tries = 0
                self._batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._notifier.together))]
            batch = self._batch
        try:
            self._notifier.send(batch, self._left())
        except Exception as error:  # noqa: BLE001 - notifiers are users' code, too
            return self._failed(batch, error)
        self._failures, self._due = 0, -math.inf
        self._over(batch, NotifyResult.SENT)
        return True

    def _failed(self, batch: Sequence[Notification], error: Exception) -> bool:
        self._tries += 1
        passing = isinstance(error, SendError) and error.passing
        if isinstance(error, SendError) and error.passing:
            # What the receiver asks for, else twice as long after each failure in a row, and not all sinks at once.
            backoff = FIRST_PAUSE * 2.0 ** min(self._failures, 10) * random.uniform(0.8, 1.2)  # noqa: S311 - not a secret
            pause = backoff if error.pause is None else max(error.pause, FIRST_PAUSE)
            self._due = self._clock() + min(LONGEST_PAUSE, pause)
            self._failures += 1
        if not passing or (self._tries >= TRIES and not self._loop.stopping):
            self._over(batch, NotifyResult.FAILED)
        if self._logged:
            self._errors.count(SOURCE, error)
        else:
            self._logged = True
            self._errors.report(SOURCE, RuntimeError(f"{self.name}: {error}; further failures of it are only counted"))
        return not passing

    def _over(self, batch: Sequence[Notification], result: NotifyResult) -> None:
        with self._lock:
            if self._batch is batch:  # else `close` has dropped it
                self._batch = ()
                self._totals.count(self.name, result, len(batch))
