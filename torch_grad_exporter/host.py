"""HostSide: takes what the training thread put into the mailbox, in the background, and keeps the totals.

One daemon thread drains the mailbox a few times a second, and every scrape drains it first, so that a
value is never older than the loop itself. Gradient events wait in their order until their vectors have
arrived; everything else is counted at once. The training thread never takes the lock here.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch_grad_exporter import samples
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.events import AfterClip, Captured, Closed, Counted, Mailbox, Observed, Stepped, Told, Weights
from torch_grad_exporter.ledger import GradientLedger, GradientSnapshot
from torch_grad_exporter.totals import TotalsSnapshot, TrainingTotals
from torch_grad_exporter.transfer import Ticket

IDLE_SECONDS = 0.2
"""Between two looks into the mailbox when nothing is under way."""

POLL_SECONDS = 0.005
"""Between two looks at a vector that is under way."""

LOST_SECONDS = 60.0
"""After which a vector that never arrived, as on a device that has failed, is given up."""

_Ticketed = Captured | AfterClip | Closed | Told | Weights | Observed


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Everything that the collectors show, as of one moment."""

    gradients: GradientSnapshot
    totals: TotalsSnapshot


class HostSide:
    """Drains the mailbox into the ledger and the totals; `close()` ends the thread after a last drain.

    `beside`: something else to be done a few times a second.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        ledger: GradientLedger,
        totals: TrainingTotals,
        errors: ErrorLog,
        *,
        now: Callable[[], float] = time.time,
        beside: Callable[[], None] | None = None,
    ) -> None:
        self._mailbox = mailbox
        self._ledger = ledger
        self._totals = totals
        self._errors = errors
        self._now = now
        self._beside = beside
        self._waiting: deque[tuple[float, _Ticketed]] = deque()
        self._observed: deque[tuple[float, _Ticketed]] = deque()
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
            return Snapshot(self._ledger.snapshot(self._now(), more_to_come=bool(self._waiting)), self._totals.snapshot())

    def close(self) -> None:
        """Ends the thread after a last drain; idempotent, from any thread."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        self.drain()

    def after_fork_in_child(self) -> None:
        """The child has no worker thread and its lock may be held for ever: start afresh, empty."""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._stop.set()

    def _work(self) -> None:
        while not self._stop.wait(POLL_SECONDS if self._waiting or self._observed else IDLE_SECONDS):
            self.drain()
            if self._beside is not None:
                self._guarded(self._beside)

    def _drain(self) -> None:
        now = self._now()
        while self._mailbox:
            event = self._mailbox.popleft()
            if isinstance(event, Stepped):
                self._guarded(functools.partial(self._totals.stepped, event.seconds, event.own_seconds))
            elif isinstance(event, Counted):
                self._guarded(functools.partial(self._totals.counted, event))
            elif isinstance(event, Observed) and event.name != "grad_norm":
                self._observed.append((now, event))
            else:
                self._waiting.append((now, event))
        for line in (self._waiting, self._observed):
            while line and self._guarded(functools.partial(self._take, line, now)):
                pass
        if not self._waiting:
            self._guarded(lambda: self._ledger.expire(now))

    def _take(self, line: deque[tuple[float, _Ticketed]], now: float) -> bool:
        """Applies the first event of a line if all its vectors are here, or have to be given up; whether it did."""
        since, event = line.popleft()  # out first: an event that fails must not be met again
        if now - since <= LOST_SECONDS and any(ticket.ready() is None for ticket in _tickets(event)):
            line.appendleft((since, event))
            return False
        self._apply(event)
        return True

    def _apply(self, event: _Ticketed) -> None:
        if any(ticket.ready() is None for ticket in _tickets(event)):
            self._ledger.undelivered += isinstance(event, Captured)
        elif not isinstance(event, Observed):
            self._ledger.apply(event)
        else:
            value = event.value if isinstance(event.value, float) else float(samples.values(event.value.ready())[0])
            if event.name == "grad_norm":
                self._ledger.observe_norm(value)
            else:
                self._totals.observed(event, value)

    def _guarded(self, action: Callable[[], object]) -> bool:
        """Runs one piece of the worker's work; whether to go on. A failure costs that piece, and the worker goes on."""
        try:
            return action() is not False
        except Exception as error:  # noqa: BLE001 - the boundary: one bad event must not cost the others
            self._errors.count("worker", error)
            return True


def _tickets(event: _Ticketed) -> list[Ticket]:
    """Everything that an event waits for."""
    match event:
        case Captured(parts=parts, scale=scale):
            found = [*(part.ticket for part in parts), scale]
        case AfterClip(parts=parts, loss_scale=loss_scale, own_scale=own_scale, found_inf=found_inf):
            found = [*(part.ticket for part in parts), loss_scale, own_scale, found_inf]
        case Weights(vector=vector):
            found = [vector]
        case Observed(value=value):
            found = [] if isinstance(value, float) else [value]
        case Closed() | Told():
            found = []
    return [ticket for ticket in found if ticket is not None]
