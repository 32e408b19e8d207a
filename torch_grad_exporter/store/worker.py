"""HostSide: takes what the training thread put into the mailbox, in the background, and keeps the totals.

One daemon thread drains the mailbox each second or more often, unless others have, and every scrape drains it first, so that
a value is never older than the loop itself. Gradient events wait in their order until their vectors have
arrived; everything else is counted at once. The training thread never takes the lock here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

# NumPy imports this when its `unique` or `median` is first called. No background thread may be the one that does: its imports
# wait for a fork of the training, and a child that is forked meanwhile waits for them without end.
import numpy.ma  # noqa: F401

from torch_grad_exporter.aggregation import samples
from torch_grad_exporter.aggregation.cursor import Cursor, Losses, NormSums, Single, Singles
from torch_grad_exporter.aggregation.gradients import GradientAggregation, GradientSnapshot, NewGradients
from torch_grad_exporter.aggregation.totals import TotalsSnapshot, TrainingTotals
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.lifecycle import BackgroundLoop
from torch_grad_exporter.transfer.events import (
    ROOM,
    AfterClip,
    Captured,
    Closed,
    Counted,
    Counting,
    Divided,
    Inspected,
    Local,
    Mailbox,
    Observed,
    OutcomeResolved,
    Stepped,
    Weights,
    Withdrawn,
)
from torch_grad_exporter.transfer.transfer import Ticket

# A drain takes milliseconds; on a machine with other work its thread may not run for a second or two.
CLOSE_SECONDS = 5.0
"""How long `close` waits for a drain under way."""

WAIT_SECONDS = 5.0
"""How long a scrape waits for a drain; then it has the values from before."""

MOST_WAITING = 1 << 13
"""Events that wait at most; beyond, the first of them is given up."""

HURRIED_SECONDS, IDLE_SECONDS = 0.2, 1.0
"""Between two checks of the mailbox when nothing is under way: while somebody waits for what is found, and else."""

HURRIED_FOR = 10.0
"""How long after the last event somebody may still wait."""

BACKLOG = ROOM // 16
"""Events in the mailbox at which it is checked at once: a scrape that comes while they are taken in waits for it."""

POLL_SECONDS = 0.005
"""Between two checks of a vector that is under way."""

LOST_SECONDS = 60.0
"""After this time a vector that never arrived, as on a device that has failed, is given up."""

_Kept = TypeVar("_Kept")
_Ticketed = Inspected | Captured | Local | AfterClip | Closed | Divided | Withdrawn | OutcomeResolved | Weights | Observed


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Everything that the collectors show, as of one moment."""

    gradients: GradientSnapshot
    totals: TotalsSnapshot


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Everything as of one moment, and what of it is new to the consumer whose cursor has read.

    A read has nothing of the last minute, nor of the last steps together.
    `singles`: what it gets by itself, with its step.
    """

    snapshot: Snapshot
    gradients: NewGradients
    losses: Losses
    singles: Sequence[Single] = ()


@dataclass(slots=True, eq=False)
class EachSample:
    """A consumer that reads at each of the next samples while there are some `left`. `take` gets Unix time and the reading."""

    cursor: Cursor
    take: Callable[[float, Reading], object]
    left: int


class HostSide:
    """Drains the mailbox into the aggregation of gradients and the totals; `close()` ends the thread after a last drain.

    Holds a bounded number of events. `periodic`: something else to be done each second or more often; it returns the seconds until
    it wants to be called again. `counting`: the rounds whose record is yet to come. `hurried`: whether somebody waits for what is
    found: the sender of vectors for their place in a ring, or what looks for the origin of a NaN.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        gradients: GradientAggregation,
        totals: TrainingTotals,
        errors: ErrorLog,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        periodic: Callable[[], float] = lambda: IDLE_SECONDS,
        counting: Callable[[], Counting | None] = lambda: None,
        hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        self._mailbox = mailbox
        self._gradients = gradients
        self._totals = totals
        self._errors = errors
        self._guard = errors.boundary("worker", limit=None)
        self._now = now
        self._clock = clock
        self._counting = counting
        self._left_out = 0
        self._popped = 0
        self._samples = 0
        self._each: list[EachSample] = []
        """Who wants each sample by itself."""
        self._waiting: deque[tuple[float, _Ticketed]] = deque()
        self._observed: deque[tuple[float, _Ticketed]] = deque()
        # Reentrant, so that a signal handler that interrupts a drain and begins another is refused instead of waiting for itself.
        self._lock = threading.RLock()
        self._draining = False
        self._periodic = periodic
        self._hurried = hurried
        self._due, self._came = IDLE_SECONDS, (0, float("-inf"))
        self._drained = float("-inf")
        """When the mailbox was last drained, by whomever."""
        self._thread = BackgroundLoop("worker", self._work, self._do_periodic, guard=self._guard, pause=self._pause)
        mailbox.on_backlog(BACKLOG, self._thread.wake)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def drain(self) -> None:
        """Takes in everything that has arrived."""
        with self._held():
            self._drain()

    def snapshot(self) -> Snapshot:
        """All values as of now, after a drain; takes nothing from any consumer.

        Raises `TimeoutError` where another drain takes longer than `WAIT_SECONDS`.
        """
        with self._held(WAIT_SECONDS):
            return self._snapshot()

    def cursor(self, *, norms: bool = False, singles: int = 0) -> Cursor:
        """A new consumer's: what comes from now on is new to it. Raises as `snapshot`.

        `norms`: whether it asks for those. `singles`: how many values of each quantity it gets by themselves.
        """
        cursor = Cursor(norms=NormSums() if norms else None, singles=Singles(singles, self._now) if singles else None)
        with self._held(WAIT_SECONDS):
            self._drain()
            self._gradients.follow(cursor)
            self._totals.follow(cursor)
        return cursor

    def each_sample(self, cursor: Cursor, take: Callable[[float, Reading], object], most: int) -> EachSample:
        """Reads what is new of gradients at each of the next samples, so many at most; losses and singles are left to `read`.

        `take` gets Unix time and the reading, one at a time, and never while `of` of `read_as` runs.
        """
        found = EachSample(cursor, take, most)
        self._each.append(found)
        return found

    def read(self, cursor: Cursor) -> Reading:
        """All values as of now, and what is new since this cursor's last read; other cursors lose nothing by it.

        Raises as `snapshot`; what was new is then still new.
        """
        return self.read_as(cursor, lambda reading: reading)

    def read_as(self, cursor: Cursor, of: Callable[[Reading], _Kept]) -> _Kept:
        """What `of` makes of such a reading, before there is another one."""
        with self._held(WAIT_SECONDS):
            snapshot = self._snapshot(whole=False)
            gradients = self._gradients.read(cursor, snapshot.gradients)
            losses, cursor.losses = cursor.losses, Losses()
            return of(Reading(snapshot, gradients, losses, () if cursor.singles is None else cursor.singles.take()))

    def _snapshot(self, *, whole: bool = True) -> Snapshot:
        """`whole`: with what is of the last minute and of the last steps, which no consumer of what is new asks for."""
        # Read first: what is over when the mailbox is drained has its record there.
        counting = self._guard.result(self._counting)
        self._drain()
        self._guard(self._totals.counting, counting)
        gradients = self._gradients.snapshot(self._now(), more_to_come=bool(self._waiting), of_minute=whole)
        return Snapshot(gradients, self._totals.snapshot(of_last=whole))

    @property
    def changes(self) -> int | None:
        """Grows with whatever changes a value; `None` while something is yet to be taken in. From any thread."""
        waits = self._mailbox or self._waiting or self._observed or self._mailbox.left_out != self._left_out
        return None if waits else self._popped + self._gradients.changes

    def close(self) -> None:
        """Ends the thread after a last drain; idempotent, from any thread.

        Raises `TimeoutError` if another thread has been draining for longer than `CLOSE_SECONDS`: a program's end must not wait.
        """
        give_up_at = time.monotonic() + CLOSE_SECONDS
        self._thread.close(CLOSE_SECONDS)
        with self._held(max(0.0, give_up_at - time.monotonic())):
            self._drain()

    def after_fork_in_child(self) -> None:
        """The child has no worker thread and its lock may be held permanently: start afresh, empty."""
        self._lock, self._draining = threading.RLock(), False
        self._thread.stop()

    @contextlib.contextmanager
    def _held(self, seconds: float = -1) -> Iterator[None]:
        """Keeps others out. Raises `TimeoutError` where one is in for longer, or where a signal handler has interrupted it."""
        if not self._lock.acquire(timeout=seconds):
            raise TimeoutError(f"another drain did not finish within {seconds:g} s")
        try:
            if self._draining:
                raise TimeoutError("a signal's handler has interrupted a drain, which cannot end before it")
            self._draining = True
            try:
                yield
            finally:
                self._draining = False
        finally:
            self._lock.release()

    def _work(self) -> None:
        """Takes in what there is, if it is not clear that there is nothing, or that who reads each second takes it in."""
        waits = self._waiting or self._observed or self._mailbox.pressing or len(self._mailbox) >= BACKLOG
        rests = self._clock() - self._drained < IDLE_SECONDS and not waits and not self._guard.result(self._hurried)
        if not rests and (self.changes is None or self._gradients.pending):
            self.drain()

    def _do_periodic(self) -> None:
        self._due = IDLE_SECONDS  # also where it fails
        self._due = self._periodic()

    def _pause(self) -> float:
        if self._waiting or self._observed:
            return POLL_SECONDS
        now = self._clock()
        if self._popped != self._came[0]:
            self._came = self._popped, now
        hurried = now - self._came[1] < HURRIED_FOR and self._guard.result(self._hurried)
        return min(self._due, HURRIED_SECONDS if hurried else IDLE_SECONDS)

    def _drain(self) -> None:
        now, self._drained = self._now(), self._clock()
        if self._mailbox.left_out > self._left_out:
            self._guard(self._note_left_out)
        while self._mailbox:
            event = self._mailbox.popleft()
            self._popped += 1
            if isinstance(event, Stepped):
                self._guard(self._totals.stepped, event)
                self._gradients.stepped(1)
            elif isinstance(event, Counted):
                self._guard(self._totals.counted, event)
                self._gradients.stepped(len(event.seconds))
            elif isinstance(event, Observed) and event.name != "grad_norm":
                self._observed.append((now, event))
            else:
                self._waiting.append((now, event))
        for line in (self._waiting, self._observed):
            while line and self._guard.result(self._take, line, now) is not False:
                pass  # an event that fails is gone: those behind it are taken
        if not self._waiting and not self._observed:
            self._mailbox.pressing = False  # else it is looked at again in a moment, and need not be asked for
        if not self._waiting:
            self._guard(self._gradients.expire, now)

    def _note_left_out(self) -> None:
        count, self._left_out = self._mailbox.left_out - self._left_out, self._mailbox.left_out
        self._errors.count("worker", OverflowError(f"{count} records did not fit into the mailbox"), count)

    def _take(self, line: deque[tuple[float, _Ticketed]], now: float) -> bool:
        """Applies the first event of a line if all its vectors are here, or have to be given up; whether it did."""
        since, event = line.popleft()  # out first: an event that fails must not be met again
        may_wait = now - since <= LOST_SECONDS and len(line) < MOST_WAITING
        if may_wait and any(ticket.ready() is None for ticket in _tickets(event)):
            line.appendleft((since, event))
            return False
        self._apply(event)
        return True

    def _apply(self, event: _Ticketed) -> None:
        if isinstance(event, Inspected):
            values = [found for ticket in event.tickets if (found := ticket.ready()) is not None]
            if len(values) == len(event.tickets):  # else a device has failed
                event.take(tuple(values))
            return
        if any(ticket.ready() is None for ticket in _tickets(event)):
            self._gradients.give_up(event)
        elif not isinstance(event, Observed):
            self._gradients.apply(event)
            if self._gradients.samples != self._samples:
                self._samples = self._gradients.samples
                self._read_for_each()
        else:
            value = event.value if isinstance(event.value, float) else float(samples.values(event.value.ready())[0])
            if event.name == "grad_norm":
                self._gradients.observe_norm(value, event.step)
            else:
                self._totals.observed(event, value)
                if event.name == "samples":
                    self._gradients.observe_batch(value)

    def _read_for_each(self) -> None:
        """There is a new sample: reads for those who want each."""
        now, self._each = self._now(), [each for each in self._each if each.left > 0]
        for each in self._each:
            snapshot = Snapshot(self._gradients.snapshot(now, more_to_come=True, of_minute=False), self._totals.snapshot())
            new = self._gradients.read(each.cursor, snapshot.gradients)
            each.take(self._gradients.sampled_at, Reading(snapshot, new, Losses()))
            each.left -= 1


def _tickets(event: _Ticketed) -> list[Ticket]:
    """Everything that an event waits for."""
    match event:
        case Captured(parts=parts, scale=scale):
            found = [*(part.ticket for part in parts), scale]
        case AfterClip(parts=parts, loss_scale=loss_scale, own_scale=own_scale, found_inf=found_inf):
            found = [*(part.ticket for part in parts), loss_scale, own_scale, found_inf]
        case Local(parts=local_parts):
            found = [part.ticket for part in local_parts]
        case Inspected(tickets=tickets):
            found = [*tickets]
        case Weights(vector=vector):
            found = [vector]
        case Observed(value=value) | Divided(divisor=value):
            found = [] if isinstance(value, float) else [value]
        case Closed() | Withdrawn() | OutcomeResolved():
            found = []
    return [ticket for ticket in found if ticket is not None]
