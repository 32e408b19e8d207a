"""Outcomes of notifications and actions, as counts and as marks for the live page: written by those who send and act."""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch_grad_exporter.store.journal import Journal

# Names that are counted apart, at most, and the name under which further ones count together.
NAMES, OTHERS = 100, "other"


class NotifyResult(enum.Enum):
    """The outcome of a notification."""

    SENT = "sent"
    FAILED = "failed"
    DROPPED = "dropped"


class ActionOutcome(enum.Enum):
    """The outcome of an action."""

    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"
    DROPPED = "dropped"


class OutcomeCounts:
    """Attempts by name and outcome; all outcomes of a name are there once it is known. From any thread."""

    def __init__(self, outcomes: type[NotifyResult | ActionOutcome]) -> None:
        self._outcomes = outcomes
        # Reentrant: a signal's handler may count while its own thread is in here.
        self._lock = threading.RLock()
        self._counts: dict[tuple[str, str], int] = {}

    def know(self, name: str) -> str:
        """Show a name from now on; return the one under which it counts."""
        with self._lock:
            known = {counted for counted, _ in self._counts}
            counted = name if name in known or len(known) < NAMES else OTHERS
            for outcome in self._outcomes:
                self._counts.setdefault((counted, outcome.value), 0)
            return counted

    def count(self, name: str, outcome: NotifyResult | ActionOutcome, times: int = 1) -> None:
        """Count attempts under a known name."""
        with self._lock:
            self._counts[name, outcome.value] += times

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """Attempts by name and outcome."""
        with self._lock:
            return dict(self._counts)

    def after_fork_in_child(self) -> None:
        """Replace the lock: the child has none of the threads that may hold it."""
        self._lock = threading.RLock()


# Marks that are kept, the latest, and characters of their names.
MOST, LONGEST = 200, 200


@dataclass(frozen=True, slots=True)
class ActionMark:
    """One time that an action was due.

    Attributes:
        time: Unix time.
        step: Optimizer steps until then.
        name: Of the rule or the condition.
        action: As given to `exporter.on`.
        result: "done", "failed" or "refused".
    """

    time: float
    step: int
    name: str
    action: str
    result: str


class ActionMarks:
    """The latest marks, the oldest first. From any thread; costs nothing where nothing happens."""

    def __init__(self) -> None:
        # Reentrant: a signal's handler may act while its own thread is in here.
        self._lock = threading.RLock()
        self._latest: deque[ActionMark] = deque(maxlen=MOST)
        self._last_done: dict[str, float] = {}

    def add(self, mark: ActionMark, counted: str) -> None:
        """Add a mark. `counted`: the name under which the action counts, of which there are few."""
        mark = replace(mark, name=mark.name[:LONGEST], action=mark.action[:LONGEST])
        with self._lock:
            self._latest.append(mark)
            if mark.result == "done":
                self._last_done[counted] = mark.time

    def latest(self) -> tuple[ActionMark, ...]:
        """Return all that are kept."""
        with self._lock:
            return tuple(self._latest)

    @property
    def last_done(self) -> dict[str, float]:
        """The Unix time at which each action was last done, by the name under which it counts."""
        with self._lock:
            return dict(self._last_done)

    def after_fork_in_child(self) -> None:
        """Replace the lock: the child has none of the threads that may hold it."""
        self._lock = threading.RLock()


class ActionTotals(OutcomeCounts):
    """Actions by name and outcome, and when they happened. `journal`: takes each of them as an event, None for nothing."""

    def __init__(self, journal: Journal | None = None) -> None:
        super().__init__(ActionOutcome)
        self.marks = ActionMarks()
        self.journal = journal

    def after_fork_in_child(self) -> None:
        """See `OutcomeCounts`."""
        super().after_fork_in_child()
        self.marks.after_fork_in_child()


class NotifyTotals(OutcomeCounts):
    """Notifications by notifier and result, and active problems by alert and severity. All known ones are there from the start."""

    def __init__(self, sinks: Iterable[str], alerts: Iterable[tuple[str, str]]) -> None:
        super().__init__(NotifyResult)
        for sink in sinks:
            self.know(sink)
        self._active = dict.fromkeys(alerts, 0)

    def set_active(self, active: Mapping[tuple[str, str], int]) -> None:
        """Replace the numbers of active problems; one that was active before goes on with 0."""
        with self._lock:
            self._active = {**dict.fromkeys(self._active, 0), **active}

    @property
    def active(self) -> dict[tuple[str, str], int]:
        """Active problems by alert and severity."""
        with self._lock:
            return dict(self._active)
