"""Notify: judges the run each second, and notifies when a problem begins and when it ends.

One thread judges, and each notifier has a thread of its own. The training thread takes no part in it.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch_grad_exporter.actions.notify.job import Announced, Job
from torch_grad_exporter.actions.notify.notification import Notification
from torch_grad_exporter.actions.notify.notifiers import Notifier
from torch_grad_exporter.actions.notify.sink import SOURCE, Sink
from torch_grad_exporter.arguments import numbered
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.collectors.outcomes import NotifyTotals
from torch_grad_exporter.errors import BusyError, ErrorLog
from torch_grad_exporter.lifecycle import BackgroundLoop
from torch_grad_exporter.rules import RULES, Rule
from torch_grad_exporter.rules.actions import notifications_failing
from torch_grad_exporter.rules.episodes import Episode, Episodes

if TYPE_CHECKING:
    from torch_grad_exporter.outputs.live.live import Live

EVALUATION_SECONDS = 1.0

SHARE = 0.05  # of the time that evaluations may take; if one takes long, the next one comes later

# The end waits this long for notifications; the second if a user or a launcher waits for it.
CLOSE_SECONDS, HURRIED_SECONDS = 2.0, 1.0


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
        run: The name of the run.
        rank: This process' rank.
        steps: Counts optimizer steps.
        totals: Counts what is sent.
        errors: Counts failures.
        job: The other ranks, None if there are none.
        rules: The rules that are judged.
        clock: Returns seconds.
        now: Returns Unix time.
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
        job: Job | None = None,
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
        """The threads belong to the parent, and the child sends nothing."""
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
