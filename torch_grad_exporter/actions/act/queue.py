"""ActionQueue: runs actions of the user, one after the other, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from torch_grad_exporter.errors import Guard
from torch_grad_exporter.lifecycle import BackgroundLoop

ROOM = 100
"""Actions that wait, at most."""

Work = Callable[[], object]


class ActionQueue:
    """Runs what it is offered until `close`. The thread starts with the first one. `offer` is for one thread at a time."""

    def __init__(self, guard: Guard, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._guard = guard
        self._waiting: deque[tuple[Work, Work]] = deque()
        self._started = self._closed = False
        self._lock = threading.Lock()  # of what waits, held for moments
        self._give_up_at = 0.0
        self._loop = BackgroundLoop("action", self._work, guard=guard, last=self._flush)

    def offer(self, run: Work, dropped: Work) -> None:
        """Runs it after those that wait, or calls `dropped` where there is no room. Raises `RuntimeError` without a thread."""
        with self._lock:
            fits = len(self._waiting) < ROOM and not self._closed
            if fits:
                self._waiting.append((run, dropped))
        if not fits:
            dropped()
            return
        if not self._started:
            self._loop.start()
            self._started = True
        self._loop.wake()

    def close(self, seconds: float) -> None:
        """Runs what waits, for so long at most; one that hangs is left behind, and the others are dropped. Idempotent."""
        self._give_up_at = self._clock() + seconds
        self._loop.close(seconds)
        with self._lock:
            left, self._waiting, self._closed = self._waiting, deque(), True
        for _, dropped in left:
            dropped()

    # The thread

    def _next(self) -> Work | None:
        with self._lock:
            return self._waiting.popleft()[0] if self._waiting else None

    def _work(self) -> None:
        while not self._loop.stopping and (run := self._next()) is not None:
            self._guard(run)

    def _flush(self) -> None:
        while self._clock() < self._give_up_at and (run := self._next()) is not None:
            self._guard(run)
