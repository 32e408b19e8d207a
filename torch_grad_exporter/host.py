"""HostSide: takes what the training thread put into the mailbox, in the background, and keeps the totals.

One daemon thread drains the mailbox a few times a second, and every scrape drains it first, so that a
value is never older than the loop itself. Gradient events wait in their order until their vectors have
arrived; everything else is counted at once. The training thread never takes the lock here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.events import AfterClip, Captured, Closed, Mailbox, Observed, Part, Stepped, Weights
from torch_grad_exporter.ledger import GradientLedger, GradientSnapshot
from torch_grad_exporter.totals import TotalsSnapshot, TrainingTotals
from torch_grad_exporter.transfer import Ticket

IDLE_SECONDS = 0.2
"""Between two looks into the mailbox when nothing is under way."""

POLL_SECONDS = 0.005
"""Between two looks at a vector that is under way."""

LOST_SECONDS = 60.0
"""After which a vector that never arrived, as on a device that has failed, is given up."""

GradientEvent = Captured | AfterClip | Closed | Weights


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Everything that the collectors show, as of one moment."""

    gradients: GradientSnapshot
    totals: TotalsSnapshot


class HostSide:
    """Drains the mailbox into the ledger and the totals; `close()` ends the thread after a last drain."""

    def __init__(
        self,
        mailbox: Mailbox,
        ledger: GradientLedger,
        totals: TrainingTotals,
        errors: ErrorLog,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._mailbox = mailbox
        self._ledger = ledger
        self._totals = totals
        self._errors = errors
        self._now = now
        self._waiting: deque[tuple[float, GradientEvent]] = deque()
        self._observed: deque[tuple[float, Observed]] = deque()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="torch-grad-exporter-worker", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def drain(self) -> None:
        """Takes in everything that has arrived."""
        with self._lock:
            self._drain()

    def snapshot(self) -> Snapshot:
        """All values as of now, after a drain."""
        with self._lock:
            self._drain()
            return Snapshot(self._ledger.snapshot(self._now()), self._totals.snapshot())

    def close(self) -> None:
        """Ends the thread after a last drain; idempotent, from any thread."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        self._errors.guard("worker", self.drain)

    def after_fork_in_child(self) -> None:
        """The child has no worker thread and its lock may be held for ever: start afresh, empty."""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._stop.set()

    def _work(self) -> None:
        while not self._stop.wait(POLL_SECONDS if self._waiting or self._observed else IDLE_SECONDS):
            self._errors.guard("worker", self.drain)
            if self._errors.switched_off("worker"):
                return

    def _drain(self) -> None:
        now = self._now()
        while self._mailbox:
            event = self._mailbox.popleft()
            match event:
                case Stepped():
                    self._totals.stepped(event)
                case Observed():
                    self._observed.append((now, event))
                case _:
                    self._waiting.append((now, event))
        while self._waiting and self._apply(*self._waiting[0], now):
            self._waiting.popleft()
        while self._observed and self._observe(*self._observed[0], now):
            self._observed.popleft()
        self._ledger.expire(now)

    def _apply(self, since: float, event: GradientEvent, now: float) -> bool:
        """Applies an event if its vectors have arrived; true when it is done with."""
        if all(ticket.ready() is not None for ticket in _tickets(event)):
            self._errors.guard("worker", lambda: self._ledger.apply(event))
            return True
        if now - since > LOST_SECONDS:
            self._ledger.undelivered += isinstance(event, Captured)
            return True
        return False

    def _observe(self, since: float, event: Observed, now: float) -> bool:
        vector = None
        value = event.value if isinstance(event.value, float) else None
        if value is None and (vector := event.value.ready()) is not None:  # type: ignore[union-attr]
            value = float(vector[0])
        if value is None:
            return now - since > LOST_SECONDS
        if event.name == "grad_norm":
            self._ledger.observe_norm(value)
        else:
            self._totals.observed(event, value)
        return True


def _tickets(event: GradientEvent) -> list[Ticket]:
    parts: tuple[Part, ...] = getattr(event, "parts", ())
    tickets = [part.ticket for part in parts]
    if isinstance(event, Captured) and event.scale is not None:
        tickets.append(event.scale)
    if isinstance(event, Weights):
        tickets.append(event.vector)
    return tickets
