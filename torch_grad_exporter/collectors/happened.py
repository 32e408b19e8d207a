"""What `exporter.on` has done and when, as marks for the live page: written by actions, read by outputs."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

MOST = 200
"""Marks that are kept, the latest."""

LONGEST = 200
"""Characters of a name that are kept."""


@dataclass(frozen=True, slots=True)
class Happened:
    """One time that an action was due.

    `time`: Unix time. `step`: optimizer steps until then. `name`: of the rule or the condition. `action`: what was to be done, as
    `exporter.on` was given it. `result`: "done", "failed" or "refused".
    """

    time: float
    step: int
    name: str
    action: str
    result: str


class Happenings:
    """The latest marks, the oldest first. From any thread; costs nothing where nothing happens."""

    def __init__(self) -> None:
        # Reentrant: a signal's handler may act while its own thread is in here.
        self._lock = threading.RLock()
        self._latest: deque[Happened] = deque(maxlen=MOST)
        self._last_done: dict[str, float] = {}

    def add(self, one: Happened, counted: str) -> None:
        """Takes a mark. `counted`: the name under which the action counts, of which there are few."""
        one = Happened(one.time, one.step, one.name[:LONGEST], one.action[:LONGEST], one.result)
        with self._lock:
            self._latest.append(one)
            if one.result == "done":
                self._last_done[counted] = one.time

    def latest(self) -> tuple[Happened, ...]:
        """All that are kept."""
        with self._lock:
            return tuple(self._latest)

    @property
    def last_done(self) -> dict[str, float]:
        """When each action was last done, as Unix time, by the name under which it counts."""
        with self._lock:
            return dict(self._last_done)

    def after_fork_in_child(self) -> None:
        """The child has none of the threads that may hold the lock."""
        self._lock = threading.RLock()
