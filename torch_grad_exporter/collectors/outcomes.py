"""What became of notifications and actions: written by those who send and act, read by the collector `exporter`."""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable, Mapping

from torch_grad_exporter.collectors.happened import Happenings

NAMES = 100
"""Names that are counted apart, at most."""

OTHERS = "other"
"""The name under which further ones count together."""


class NotifyResult(enum.Enum):
    """What becomes of a notification."""

    SENT = "sent"
    FAILED = "failed"
    DROPPED = "dropped"


class ActionOutcome(enum.Enum):
    """What becomes of an action."""

    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"
    DROPPED = "dropped"


class OutcomeCounts:
    """What was tried, by name and outcome; all outcomes of a name are there once it is known. From any thread.

    `outcomes`: the kinds that there are.
    """

    def __init__(self, outcomes: type[NotifyResult | ActionOutcome]) -> None:
        self._outcomes = outcomes
        # Reentrant: a signal's handler may count while its own thread is in here.
        self._lock = threading.RLock()
        self._counts: dict[tuple[str, str], int] = {}

    def know(self, name: str) -> str:
        """Shows a name from now on; returns the one under which it counts."""
        with self._lock:
            known = {one for one, _ in self._counts}
            counted = name if name in known or len(known) < NAMES else OTHERS
            for outcome in self._outcomes:
                self._counts.setdefault((counted, outcome.value), 0)
            return counted

    def count(self, name: str, outcome: NotifyResult | ActionOutcome, times: int = 1) -> None:
        """Counts under a known name."""
        with self._lock:
            self._counts[name, outcome.value] += times

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """How often, by name and outcome."""
        with self._lock:
            return dict(self._counts)

    def after_fork_in_child(self) -> None:
        """The child has none of the threads that may hold the lock."""
        self._lock = threading.RLock()


class ActionTotals(OutcomeCounts):
    """Actions by name and outcome, and when they happened."""

    def __init__(self) -> None:
        super().__init__(ActionOutcome)
        self.happened = Happenings()

    def after_fork_in_child(self) -> None:
        """As of `OutcomeCounts`."""
        super().after_fork_in_child()
        self.happened.after_fork_in_child()


class NotifyTotals(OutcomeCounts):
    """Notifications by notifier and result, and active problems by alert and severity. All known ones are there from the start."""

    def __init__(self, sinks: Iterable[str], alerts: Iterable[tuple[str, str]]) -> None:
        super().__init__(NotifyResult)
        for sink in sinks:
            self.know(sink)
        self._active = dict.fromkeys(alerts, 0)

    def set_active(self, active: Mapping[tuple[str, str], int]) -> None:
        """Replaces the numbers of active problems; what was active once goes on with 0."""
        with self._lock:
            self._active = {**dict.fromkeys(self._active, 0), **active}

    @property
    def active(self) -> dict[tuple[str, str], int]:
        """Active problems by alert and severity."""
        with self._lock:
            return dict(self._active)
