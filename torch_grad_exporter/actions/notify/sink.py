"""Sink: what one notifier still has to tell, in a thread of its own, so that none holds up another."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_grad_exporter.actions.notify.notification import Notification
from torch_grad_exporter.actions.notify.notifiers import Notifier
from torch_grad_exporter.actions.notify.sending import SendError
from torch_grad_exporter.collectors.outcomes import NotifyResult, NotifyTotals
from torch_grad_exporter.errors import Guard, caught
from torch_grad_exporter.lifecycle import BackgroundLoop

QUEUE = 1000
"""Notifications that wait, at most. Repetitions are as many as there are problems."""

TRIES = 6
"""Of one notification, at most."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds between the first two tries, each further pause being twice as long; the longest, whatever a receiver asks for."""


@dataclass(slots=True, eq=False)
class _Parcel:
    """What is sent together. `repeats`: it tells again what was told, so the next repetition may stand for it."""

    notifications: Sequence[Notification]
    repeats: bool = False
    tries: int = 0

    @property
    def counted(self) -> int:
        """How much of the room it takes."""
        return 0 if self.repeats else len(self.notifications)

    @property
    def critical(self) -> bool:
        return any(one.severity == "critical" for one in self.notifications)


class Sink:
    """Sends in order what it is offered, from `start` until `close`: again and again while that may help, for a limited time.

    `on_error` takes what each failed try has failed of. `offer` is for one thread.
    """

    def __init__(
        self,
        name: str,
        notifier: Notifier,
        totals: NotifyTotals,
        *,
        on_error: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.repeats = notifier.repeats
        self._notifier = notifier
        self._send = notifier.sender()
        self._totals = totals
        self._on_error = on_error
        self._clock = clock
        self._lock = threading.Lock()  # of what waits, held for moments
        self._waiting: deque[_Parcel] = deque()
        self._held = 0
        """Notifications in it, but for repetitions."""
        self._failures = 0
        self._due = -math.inf
        self._give_up_at = math.inf
        self._loop = BackgroundLoop(f"notify-{name}", self.work, guard=Guard(on_error), pause=self._pause, last=self._flush)

    def start(self) -> None:
        """Starts its thread. Raises `RuntimeError` where there are no more threads to be had."""
        self._loop.start()

    def offer(self, notifications: Sequence[Notification], *, repeats: bool = False) -> None:
        """Takes what is severe enough of them; what there is no room for is dropped, and counted."""
        taken, size = [one for one in notifications if self._notifier.takes(one)], self._notifier.together
        with self._lock:
            if repeats:  # these stand for the ones before, of which the first may be on its way
                self._waiting = deque(one for one in self._waiting if not one.repeats or one is self._waiting[0])
            for start in range(0, len(taken), size):
                self._add(_Parcel(taken[start : start + size], repeats))
        if taken:
            self._loop.wake()

    def _add(self, parcel: _Parcel) -> None:
        """Adds a parcel; where there is no room, a critical one takes that of the newest that is not."""
        while self._held + parcel.counted > QUEUE:
            others = (one for one in reversed(self._waiting) if not (one.critical or one.repeats or one.tries))
            victim = next(others, None) if parcel.critical else None
            self._totals.count(self.name, NotifyResult.DROPPED, len((victim or parcel).notifications))
            if victim is None:
                return
            self._waiting.remove(victim)
            self._held -= victim.counted
        self._waiting.append(parcel)
        self._held += parcel.counted

    def end(self, give_up_at: float) -> None:
        """Lets it send what waits, until then by its clock, and nothing later. Returns at once."""
        self._give_up_at = give_up_at
        self._loop.stop()

    def close(self) -> None:
        """Waits for its end as long as `end` has said; what waits then is dropped. Idempotent."""
        self._loop.join(self._left())
        with self._lock:
            dropped = sum(len(one.notifications) for one in self._waiting)
            self._waiting.clear()
            self._held = 0
        if dropped:
            self._totals.count(self.name, NotifyResult.DROPPED, dropped)

    # The thread

    def _left(self) -> float:
        return max(0.0, self._give_up_at - self._clock())

    def _pause(self) -> float:
        return self._due - self._clock() if self._waiting else math.inf

    def work(self) -> None:
        """Sends what waits and is due, until a try fails that may succeed later. Called by its thread, and by tests."""
        while self._waiting and self._clock() >= self._due and not self._loop.stopping:
            if not self._sent(self._waiting[0]):
                break

    def _flush(self) -> None:
        """The end: one try for each, as long as the receiver answers."""
        while self._waiting and self._left() > 0:
            if not self._sent(self._waiting[0]):
                break

    def _sent(self, parcel: _Parcel) -> bool:
        """Tries to send the first parcel, and takes it out if that succeeds or never will. False where the receiver has a pause."""
        error = caught(self._send, parcel.notifications, self._left)
        if error is None:
            self._failures, self._due = 0, -math.inf
            self._over(parcel, NotifyResult.SENT)
            return True
        parcel.tries += 1
        passing = isinstance(error, SendError) and error.passing
        if passing:
            self._due = self._clock() + self._pause_after(error)
            self._failures += 1
        if not passing or (parcel.tries >= TRIES and not self._loop.stopping):
            self._over(parcel, NotifyResult.FAILED)
        self._on_error(error)
        return not passing

    def _pause_after(self, error: Exception) -> float:
        """Seconds until the next try: what the receiver asks for, within bounds, else twice as long after each failure in a row."""
        told = error.pause if isinstance(error, SendError) else None
        usual = FIRST_PAUSE * 2.0 ** min(self._failures, 10) * random.uniform(0.8, 1.2)  # noqa: S311 - no secret
        return min(LONGEST_PAUSE, usual if told is None else max(told, FIRST_PAUSE))

    def _over(self, parcel: _Parcel, result: NotifyResult) -> None:
        with self._lock:
            if self._waiting and self._waiting[0] is parcel:  # else the end has dropped it
                self._waiting.popleft()
                self._held -= parcel.counted
                self._totals.count(self.name, result, len(parcel.notifications))
