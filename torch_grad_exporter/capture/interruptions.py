"""Interruptions: evaluations, checkpoints and compilations, as they are reported while the training waits for them."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

EVALUATION, CHECKPOINT, COMPILING = "evaluation", "checkpoint", "compiling"

# Interruptions that wait for the worker, at most, which takes them after the next step. Beyond it those of one cause are added up.
ROOM = 4096


class Interruption(NamedTuple):
    """Part of the training thread's time. `end`: infinite if a step has ended it, or while it goes on."""

    cause: str
    start: float
    end: float


class Interruptions:
    """They follow each other without overlapping: one that begins within another interrupts that one, too.

    From any thread; the lock is held for an instant, and nothing here is called in an ordinary step.

    Attributes:
        clock: Seconds from any origin.
        started: When this was made.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.started = clock, clock()
        self._lock = threading.RLock()  # a signal's handler may report one while another begins
        self._open: list[str] = []
        self._since = self.started  # when the last of the open ones began, or went on
        self._closed = deque[Interruption](maxlen=ROOM)
        self._seen = deque[float](maxlen=ROOM)  # when forwards showed that an unreported evaluation runs

    def begin(self, cause: str, last_step: float = -math.inf) -> bool:
        """Begin one and return True. An evaluation or a checkpoint that is reported again goes on, if no step was in between."""
        with self._lock:
            self._end_by(last_step)
            begins = cause == COMPILING or cause not in self._open
            if begins:
                self._switch()
                self._open.append(cause)
            return begins

    def end(self, cause: str) -> None:
        """End the last one of this cause, if there is one; a step may have ended it before."""
        with self._lock:
            if cause in self._open:
                self._switch()
                del self._open[len(self._open) - 1 - self._open[::-1].index(cause)]

    def evaluation_seen(self, last_step: float) -> None:
        """Note, once after each step, that a forward ran in evaluation mode, unless an evaluation is reported."""
        with self._lock:
            self._end_by(last_step)
            if EVALUATION not in self._open and (not self._seen or self._seen[-1] < last_step):
                self._seen.append(self.clock())

    def _end_by(self, step: float) -> None:
        """End by a step what has begun before it."""
        if self._open and self._since < step:
            self._closed.append(Interruption(self._open[-1], self._since, math.inf))
            self._open.clear()

    def _switch(self) -> None:
        moment = self.clock()
        if self._open:
            self._close(Interruption(self._open[-1], self._since, moment))
        self._since = moment

    def _close(self, ended: Interruption) -> None:
        if len(self._closed) == ROOM and self._closed[-1].cause == ended.cause:
            last = self._closed[-1]
            self._closed[-1] = last._replace(end=last.end + ended.end - ended.start)
        else:
            self._closed.append(ended)

    def goes_on(self, last_step: float) -> bool:
        """Return whether one has begun since the last step and not ended."""
        return bool(self._open) and self._since >= last_step

    def until(self, moment: float) -> tuple[list[Interruption], list[float]]:
        """Remove and return what began before the end of a step, which ends what is open, and when evaluations were seen."""
        if not (self._open or self._closed or self._seen):
            return [], []
        ended: list[Interruption] = []
        with self._lock:
            self._end_by(moment)
            while self._closed and self._closed[0].start < moment:
                ended.append(self._closed.popleft())
        seen: list[float] = []
        with contextlib.suppress(IndexError):
            while self._seen[0] < moment:
                seen.append(self._seen.popleft())
        return ended, seen

    def since_last_step(self) -> tuple[list[Interruption], bool]:
        """Return what was not taken yet, with the one that goes on, and whether an evaluation was seen."""
        with self._lock:
            current = [Interruption(self._open[-1], self._since, math.inf)] if self._open else []
            return [*self._closed, *current], bool(self._seen)
