"""Notify: judges the run each second, and notifies when a problem begins and when it ends.

One thread judges, and each notifier has a thread of its own. The training thread takes no part in it.

With a store that all ranks reach, rank 0 sends the notifications of all ranks, each problem once. Each rank publishes its problems,
and rank 0 publishes that it is alive. No rank waits for another: one that has not heard from rank 0 for some time sends its own
notifications, and so does each rank of a job without a store.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from torch_grad_exporter.actions.notify.notification import Notification
from torch_grad_exporter.actions.notify.notifiers import Notifier
from torch_grad_exporter.actions.notify.sink import SOURCE, Sink
from torch_grad_exporter.arguments import numbered
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.collectors.outcomes import NotifyTotals
from torch_grad_exporter.distributed.store import JobStore, NoStoreError, StoreError
from torch_grad_exporter.errors import BusyError, ErrorLog
from torch_grad_exporter.lifecycle import BackgroundLoop
from torch_grad_exporter.rules import RULES, Rule
from torch_grad_exporter.rules.actions import notifications_failing
from torch_grad_exporter.rules.declaration import SEVERITIES
from torch_grad_exporter.rules.episodes import Episode, Episodes, Key

if TYPE_CHECKING:
    from torch_grad_exporter.outputs.live.live import Live

EVALUATION_SECONDS = 1.0

SHARE = 0.05  # of the time that evaluations may take; if one takes long, the next one comes later

# The end waits this long for notifications; the second if a user or a launcher waits for it.
CLOSE_SECONDS, HURRIED_SECONDS = 2.0, 1.0

# A rank without a report for this time is gone; with more ranks than RANKS, it is longer in proportion.
GONE_SECONDS, RANKS = 10.0, 256

# An evaluation waits this long for each of two answers of the store; at the end less, which leaves time to send.
STORE_SECONDS, LAST_SECONDS = 1.0, 0.2

MOST = 100  # problems in the report of a rank

Active = Mapping[Key, Notification]


class JobReports:
    """This rank's part in the notifications of a job. For one thread.

    `store`: that which the ranks share; `clock`: returns seconds.
    """

    def __init__(self, store: JobStore, rank: int, world_size: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._rank = rank
        self._keys = {_key(other): other for other in range(1, world_size)} if rank == 0 else {_key(0): 0}
        self._gone = GONE_SECONDS * max(1.0, world_size / RANKS)
        self._clock = clock
        self._number = time.time_ns()  # of the next report: no other one has it, nor has one of a process before a restart
        self._begun = clock()
        # By rank the last report, when it came, and the problems in it.
        self._reports: dict[int, tuple[bytes, float, Active]] = {}
        self._own: Active = {}
        self._has_store = True

    def exchange(self, own: Active, *, last: bool = False) -> Active | None:
        """Return the active problems that this rank has to send.

        Args:
            own: The active problems of this rank.
            last: Whether the run of this rank is over. Rank 0 may be gone as well, so the rank itself sends what the end brought.

        Returns:
            The problems, or None while rank 0 sends them, or may be about to.
        """
        new = {key: problem for key, problem in own.items() if key not in self._own} if last else {}
        self._own = own
        report = {} if self._rank == 0 else {key: problem for key, problem in own.items() if key not in new}
        self._ask(report, LAST_SECONDS if last else STORE_SECONDS)
        now = self._clock()
        fresh = {rank: active for rank, (_, at, active) in self._reports.items() if now - at <= self._gone}
        if self._rank == 0:
            if last:  # for rank 0 the problems of the others end with its run
                return own
            # The lowest rank that has a problem comes last and wins.
            return {key: problem for rank in sorted(fresh, reverse=True) for key, problem in fresh[rank].items()} | dict(own)
        starting = self._has_store and now - self._begun <= self._gone
        return (new if last else None) if fresh or starting else own

    def _ask(self, report: Active, seconds: float) -> None:
        """Publish a report, and read the reports of the others."""
        self._number += 1
        problems = [[*key, asdict(problem)] for key, problem in list(report.items())[:MOST]]
        content = json.dumps([self._number, problems])
        try:
            self._store.publish(_key(self._rank), content.encode(), seconds=seconds)
            published = self._store.collect(self._keys, seconds=seconds)
        except StoreError as error:
            self._has_store = not isinstance(error, NoStoreError)
            return
        self._has_store = True
        for key, value in published.items():
            before = self._reports.get(self._keys[key])
            if before is None or before[0] != value:
                # The first report may be that of an ended process: a store outlives a restart of the ranks.
                at = -math.inf if before is None else self._clock()
                with contextlib.suppress(ValueError, TypeError, LookupError):  # not a report of ours
                    self._reports[self._keys[key]] = value, at, _decoded(value)


def _decoded(content: bytes) -> Active:
    """Return the problems in the report of another rank. Raises if it is not one."""
    active: dict[Key, Notification] = {}
    for alert, severity, layer, fields in json.loads(content)[1]:
        if severity not in SEVERITIES:
            raise ValueError
        active[alert, severity, layer] = Notification(**fields)
    return active


def _key(rank: int) -> str:
    return f"notify/{rank}"


class Announced:
    """The problems whose beginning was sent and whose end was not. For one thread."""

    def __init__(self) -> None:
        self._active: dict[Key, Notification] = {}

    @property
    def active(self) -> list[Notification]:
        """Them as they are now, the oldest first."""
        return list(self._active.values())

    def changes(self, active: Active | None, at: float, *, ended: str = "") -> list[Notification]:
        """Return what begins and ends.

        Args:
            active: The problems now; None if another rank sends them from now on.
            at: Unix time.
            ended: A sentence to add to the summary of each end.
        """
        if active is None:
            self._active = {}
            return []
        before, self._active = self._active, {}
        changes = []
        for key, problem in active.items():
            first = before.get(key)
            if first is None:
                changes.append(problem)
            # The end must have the labels of the beginning.
            self._active[key] = problem if first is None else replace(problem, rank=first.rank, started=first.started)
        over = [problem for key, problem in before.items() if key not in active]
        return changes + [replace(problem, status="resolved", timestamp=at, summary=problem.summary + ended) for problem in over]


def names(notifiers: Iterable[Notifier]) -> list[str]:
    """Return the name of each in metrics: its kind, with a number from the second of a kind on."""
    return numbered([notifier.kind for notifier in notifiers])


def totals(notifiers: Sequence[Notifier], rules: Iterable[Rule] = RULES) -> NotifyTotals:
    """Return the counts of these notifiers, and of the alerts of all rules that a process judges."""
    alerts = [(rule.name, alert.severity) for rule in rules for alert in rule.alerts]
    return NotifyTotals(names(notifiers), alerts)


class Notify:
    """Judges and notifies, from `start` until `close`.

    Args:
        notifiers: What sends.
        live: Judges the run.
        totals: Counts what is sent.
        errors: Counts failures.
        run, rank, steps: Name the run and this process, and count optimizer steps.
        job: The other ranks, None if there are none.
        rules: The rules that are judged.
        clock, now: Return seconds, and Unix time.
    """

    def __init__(
        self,
        notifiers: Sequence[Notifier],
        live: Live,
        totals: NotifyTotals,
        errors: ErrorLog,
        *,
        run: str,
        rank: int,
        steps: StepClock,
        job: JobReports | None = None,
        rules: Iterable[Rule] = RULES,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._live, self._run, self._rank, self._steps, self.totals, self._job = live, run, rank, steps, totals, job
        self._clock, self._now = clock, now
        self._episodes, self._announced = Episodes(rules), Announced()
        pairs = zip(names(notifiers), notifiers, strict=True)
        self.sinks = [Sink(name, notifier, totals, errors, clock=clock) for name, notifier in pairs]
        self._repeated = {sink.name: clock() for sink in self.sinks}
        self._due = clock()
        self._closing = errors.boundary("close", limit=None)
        guard = errors.boundary(SOURCE, "judging")
        self._loop = BackgroundLoop("notify", self._in_turn, guard=guard, pause=lambda: self._due - clock(), last=self._judge_last)

    def start(self) -> None:
        """Start the threads. Raises `RuntimeError` if no thread can be started."""
        for sink in self.sinks:
            sink.start()
        self._loop.start()

    def close(self, *, hurried: bool = False) -> None:
        """Judge for the last time, and wait a limited time until all is sent. Idempotent."""
        give_up_at = self._clock() + (HURRIED_SECONDS if hurried else CLOSE_SECONDS)
        self._loop.close((give_up_at - self._clock()) / 2)
        for sink in self.sinks:
            sink.end(give_up_at)
        for sink in self.sinks:
            self._closing(sink.close)

    def after_fork_in_child(self) -> None:
        """Replace the lock of the counts. The threads are the parent's, so the child sends nothing."""
        self.totals.after_fork_in_child()

    # The thread

    def _in_turn(self) -> None:
        self._due = self._clock() + EVALUATION_SECONDS
        # Other readers may hold up the scrape; the next evaluation has its values.
        with contextlib.suppress(BusyError):
            self.evaluate()

    def _judge_last(self) -> None:
        with contextlib.suppress(BusyError):
            self.evaluate(last=True)

    def evaluate(self, *, last: bool = False) -> None:
        """Judge once, and offer what begins and ends to all sinks. `last`: the run is over."""
        now, at = self._clock(), self._now()
        episodes = self._episodes.judge(self._live.judged(last=last).problems, now, last=last)
        active = {key: self._notification(episode, at, now) for key, episode in episodes.items()}
        self.totals.set_active(Counter((alert, severity) for alert, severity, _ in active))
        ended = self._clock()
        self._due = max(self._due, ended + (ended - now) / SHARE)
        # A notification about failing notifications would fail as well.
        own = {key: problem for key, problem in active.items() if key[0] != notifications_failing.name}
        to_send = own if self._job is None else self._job.exchange(own, last=last)
        # The end of the run need not be the end of the problem.
        changes = self._announced.changes(to_send, at, ended=" The run has ended." if last else "")
        for sink in self.sinks:
            if changes:
                sink.offer(changes)
            elif sink.repeats is not None and now - self._repeated[sink.name] >= sink.repeats and sink.idle:
                self._repeated[sink.name] = now
                sink.offer([replace(problem, timestamp=at) for problem in self._announced.active])

    def _notification(self, episode: Episode, at: float, now: float) -> Notification:
        problem = episode.problem
        return Notification(
            timestamp=at,
            started=at - (now - episode.began),
            status="firing",
            alert=problem.alert,
            severity=problem.severity,
            summary=problem.text,
            layer=problem.layer,
            value=problem.value,
            step=self._steps.number,
            run=self._run,
            rank=self._rank,
            first_steps=problem.first_steps,
            by_layer=episode.by_layer,
            template=episode.terms.template,
        )
