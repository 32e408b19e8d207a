"""Worker: takes the records of the training thread in their order, and keeps the tables.

One daemon thread drains the mailbox each second or more often, and every scrape drains it first, so that a value is
never older than the loop itself. Steps count at once; other records wait in their order until their vectors have
arrived. A sample goes to `PendingSamples`, and from there, once its outcome is known, into the tables.
The training thread never takes the lock here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar
from weakref import WeakSet

# NumPy imports this when its `unique` or `median` is first called. No background thread may be the one that does: its
# imports wait for a fork of the training, and a child that is forked meanwhile waits for them without end.
import numpy as np
import numpy.ma

from torch_grad_exporter.errors import BusyError, ErrorLog
from torch_grad_exporter.lifecycle import BackgroundLoop
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.requests import Requests
from torch_grad_exporter.statistics.layout import ORDINARY, Layout
from torch_grad_exporter.store.cursors import Cursor, Losses, Singles
from torch_grad_exporter.store.layer_table import LayerTable
from torch_grad_exporter.store.optimizer_table import OptimizerTable
from torch_grad_exporter.store.pending_samples import CountedSample, Listener, PendingSamples
from torch_grad_exporter.store.records import (
    Inspected,
    Mailbox,
    Observed,
    Record,
    RoundEnded,
    SampleRead,
    StepsTaken,
    Taker,
    number_of,
    tickets_of,
    values_of,
)
from torch_grad_exporter.store.run_table import RunTable
from torch_grad_exporter.store.snapshots import EachSample, GradientSnapshot, NewGradients, Reading, Snapshot
from torch_grad_exporter.store.surprises import Surprises

CLOSE_SECONDS = WAIT_SECONDS = 5.0  # how long `close`, and a scrape, wait for a drain; the scrape has older values then
MOST_WAITING = 1 << 13  # records that wait for their vectors, at most; beyond, the first of them is given up
DRAIN_SECONDS, POLL_SECONDS = 1.0, 0.005  # between two drains, and two looks at a vector that is under way
LOST_SECONDS = 60.0  # until a vector that never arrives is given up

_Kept = TypeVar("_Kept")


class Worker:
    """Drains the mailbox into the tables; `close()` ends the thread after a last drain. Bounded in memory.

    Args:
        mailbox: Where the records come from.
        table: The parameters at the start.
        errors: Failures count under `worker`.
        requests: Where samples are asked for after a surprise.
        layout: The columns of samples.
        clipped: Whether gradients are clipped as `clip=` asks for.
        drain_seconds: Between two drains of the thread.
        periodic: Other work of the thread; returns the seconds until it is due again.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        table: ParameterTable,
        errors: ErrorLog,
        requests: Requests,
        *,
        layout: Layout = ORDINARY,
        clipped: bool = False,
        drain_seconds: float = DRAIN_SECONDS,
        periodic: Callable[[], float] = lambda: DRAIN_SECONDS,
    ) -> None:
        self._mailbox, self._errors = mailbox, errors
        self._guard = errors.boundary("worker", limit=None)
        self._drain_seconds, self._periodic = drain_seconds, periodic
        self._takers: dict[str, Taker] = {}
        self._listeners: list[Listener] = []
        self._cursors: WeakSet[Cursor] = WeakSet()
        self._each: list[EachSample] = []
        self._pending = PendingSamples(clipped=clipped)
        self._layers = LayerTable(table, layout)
        surprises = Surprises(requests)
        self._optimizers = OptimizerTable(self._cursors, surprises)
        self._run = RunTable(self._cursors, surprises)
        self._known: tuple[int, GradientSnapshot] | None = None  # the last snapshot, and the changes up to it
        self._undelivered = 0  # samples whose vectors never arrived
        self._waiting: deque[tuple[float, Record]] = deque()  # records that wait for their vectors, since when
        self._left_out = self._popped = self._changed = self._read_by_each = 0
        # Reentrant, so that a signal handler that interrupts a drain and begins another is refused, and does not wait for itself.
        self._lock = threading.RLock()
        self._draining = False
        self._due = DRAIN_SECONDS
        self._thread = BackgroundLoop("worker", self._work, self._do_periodic, guard=self._guard, pause=self._pause)
        mailbox.wake = self._thread.wake

    def register(self, inspection: str, taker: Taker) -> None:
        """Give the records of an inspection to this taker. Before the training begins."""
        self._takers[inspection] = taker

    def listen(self, listener: Listener) -> None:
        """Let a listener follow what is counted. Before the training begins."""
        self._listeners.append(listener)

    def follow_steps(self, take: Callable[[Sequence[float]], object]) -> None:
        """Let `take` have the ends of all steps, in seconds of the clock; it may not raise. Before the training begins."""
        self._run.on_steps = take

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread after a last drain; idempotent, from any thread.

        Raises:
            BusyError: Another thread has been draining for longer than `CLOSE_SECONDS`.
        """
        give_up_at = time.monotonic() + CLOSE_SECONDS
        self._thread.close(CLOSE_SECONDS)
        with self._held(max(0.0, give_up_at - time.monotonic())):
            self._drain()

    def after_fork_in_child(self) -> None:
        """Start afresh: the child has no worker thread, and its lock may be held for good."""
        self._lock, self._draining = threading.RLock(), False
        self._thread.stop()

    # Reading, from any thread. All of it raises `BusyError` if another drain takes longer than `WAIT_SECONDS`.

    def snapshot(self) -> Snapshot:
        """Return all present values; takes nothing from any consumer."""
        with self._held():
            self._drain()
            return self._snapshot(recent=True)

    def cursor(self, *, norms: bool = False, singles: int = 0) -> Cursor:
        """Return a new consumer's cursor: what comes from now on is new to it.

        Args:
            norms: Whether it asks for sums of norms.
            singles: How many values of each quantity it gets by themselves.
        """
        cursor = Cursor(norms=norms, singles=Singles(singles) if singles else None)
        with self._held():
            self._drain()
            self._layers.rows.follow(cursor)
            self._optimizers.rows.follow(cursor)
            cursor.samples = self._pending.samples
            self._cursors.add(cursor)
        return cursor

    def each_sample(self, cursor: Cursor, take: Callable[[float, Reading], object], most: int) -> EachSample:
        """Let `take` have what is new of gradients at each of the next samples, `most` of them; the rest is left to `read`.

        It is called by one thread at a time, and never while `of` of `read_as` runs.
        """
        each = EachSample(cursor, take, most)
        self._each.append(each)
        return each

    def read(self, cursor: Cursor) -> Reading:
        """Return all present values, and what is new since this cursor's last read; if this raises, it is still new."""
        return self.read_as(cursor, lambda reading: reading)

    def read_as(self, cursor: Cursor, of: Callable[[Reading], _Kept]) -> _Kept:
        """Return what `of` makes of such a reading, before there is another one."""
        with self._held():
            self._drain()
            reading = self._read(cursor, self._snapshot(recent=False))
            losses, cursor.losses = cursor.losses, Losses()
            return of(replace(reading, losses=losses, singles=() if cursor.singles is None else cursor.singles.take()))

    @property
    def changes(self) -> int | None:
        """A number that grows with whatever changes a value; None while something is yet to be taken. From any thread."""
        waits = self._mailbox or self._waiting or self._mailbox.left_out != self._left_out
        return None if waits else self._popped + self._changed

    def _snapshot(self, *, recent: bool) -> Snapshot:
        """Copy the tables. `recent`: with what is of the last minute and of the last steps, which no consumer asks for."""
        if self._known is None or self._known[0] != self._changed:
            table, layers = self._layers.table, self._layers.rows
            layer_values = layers.values[: len(table.layers)].copy()
            optimizers, totals, norm_observed, exponential_totals = self._optimizers.values()
            self._known = self._changed, GradientSnapshot(
                table=table,
                layer_values=layer_values,
                recent_max=np.full(len(table.layers), np.nan),
                optimizers=optimizers,
                totals=totals,
                samples=self._pending.samples,
                undelivered=self._undelivered,
                unattributed=self._pending.unattributed,
                norm_observed=norm_observed,
                untracked=self._layers.untracked(),
                exponential=layers.exponential.of(np.arange(len(table.layers))),
                exponential_totals=exponential_totals,
                declared=self._layers.declared(layer_values),
            )  # fmt: skip
        gradients = self._known[1]
        if recent:
            gradients = replace(gradients, recent_max=self._layers.recent_max(time.time()))
        return Snapshot(gradients, self._run.snapshot(recent=recent))

    def _read(self, cursor: Cursor, snapshot: Snapshot) -> Reading:
        """Return what is new of the gradients to a consumer, with a snapshot of the same moment."""
        gradients, samples = snapshot.gradients, self._pending.samples - cursor.samples
        cursor.samples = self._pending.samples
        new, of_optimizers = self._layers.rows.take(cursor), self._optimizers.rows.take(cursor)
        new = new[:, : len(gradients.table.layers)]
        peaks = self._optimizers.peaks(of_optimizers, gradients.optimizers, norm_observed=gradients.norm_observed)
        return Reading(snapshot, NewGradients(samples, new[:2], peaks, new[2:] if cursor.norms else None))

    # The thread

    @contextlib.contextmanager
    def _held(self, seconds: float = WAIT_SECONDS) -> Iterator[None]:
        """Keep others out. Raises `BusyError` where one is in for longer, or where a signal handler has interrupted it."""
        if not self._lock.acquire(timeout=seconds):
            raise BusyError(f"another drain did not finish within {seconds:g} s")
        try:
            if self._draining:
                raise BusyError("a signal's handler has interrupted a drain, which cannot end before it")
            self._draining = True
            try:
                yield
            finally:
                self._draining = False
        finally:
            self._lock.release()

    def _work(self) -> None:
        if self.changes is None or self._pending.sample is not None:
            with self._held(-1):
                self._drain()

    def _do_periodic(self) -> None:
        self._due = DRAIN_SECONDS  # also where it fails
        self._due = self._periodic()

    def _pause(self) -> float:
        return POLL_SECONDS if self._waiting else min(self._due, self._drain_seconds)

    # Records

    def _drain(self) -> None:
        """Take in everything that has arrived."""
        now = time.time()
        with np.errstate(all="ignore"):  # NaN and overflow are detected in the tables
            before, self._left_out = self._left_out, self._mailbox.left_out
            if lost := self._left_out - before:
                self._guard(self._errors.count, "worker", OverflowError(f"the mailbox had no room for {lost} records"), lost)
            while self._mailbox:
                record = self._mailbox.popleft()
                self._popped += 1
                if isinstance(record, StepsTaken):
                    self._guard(self._take_steps, record)
                else:
                    self._waiting.append((now, record))
            self._guard(self._take_steps)
            while self._waiting and self._guard.result(self._take_first, now) is not False:
                pass  # a record that fails is gone: those behind it are taken
            if not self._waiting:
                self._mailbox.pressing = False  # else it is looked at again in a moment, and need not be asked for
                self._guard(lambda: self._count(self._pending.expired(now)))

    def _take_steps(self, record: StepsTaken | None = None) -> None:
        """Count what has come to the last record of steps, and then the next one."""
        rounds = self._run.take_steps(record)
        if rounds:
            for listener in self._listeners:
                listener.rounds_over(rounds)

    def _take_first(self, now: float) -> bool:
        """Take the first record that waits if its vectors are here, or have to be given up; return whether it did."""
        since, record = self._waiting.popleft()  # out first: a record that fails must not be met again
        lost = any(ticket.ready() is None for ticket in tickets_of(record))
        if lost and now - since <= LOST_SECONDS and len(self._waiting) < MOST_WAITING:
            self._waiting.appendleft((since, record))
            return False
        self._changed += isinstance(record, SampleRead | RoundEnded)
        if lost and isinstance(record, RoundEnded):  # the outcome is known all the same
            record = replace(record, views=(), divisor=None)
        elif lost:
            self._undelivered += isinstance(record, SampleRead)
            return True
        match record:
            case SampleRead():
                self._count(self._pending.read(record))
            case RoundEnded(owners=None):
                self._optimizers.resolve(record.outcome)
            case RoundEnded():
                self._count(self._pending.round_ended(record))
            case Inspected():
                self._takers[record.inspection].take(record, tuple(values_of(ticket) for ticket in record.tickets))
            case Observed():
                value = number_of(record.value)
                if record.name == "grad_norm":
                    self._changed += 1
                    self._optimizers.observe(value, record.step)
                    self._pending.norm_given(value)
                else:
                    self._run.observed(record, value)
                for listener in self._listeners:
                    listener.observed(record.name, value)
        return True

    def _count(self, counted: CountedSample | None) -> None:
        """Enter a sample into the tables, and let those read who want each."""
        if counted is None:
            return
        self._changed += 1
        self._layers.count(counted)
        self._optimizers.count(counted)
        for listener in self._listeners:
            listener.counted(counted)
        if self._pending.samples == self._read_by_each:
            return
        self._read_by_each = self._pending.samples
        self._each = [each for each in self._each if each.left > 0]
        for each in self._each:
            each.take(counted.sample.read.at, self._read(each.cursor, self._snapshot(recent=True)))
            each.left -= 1
