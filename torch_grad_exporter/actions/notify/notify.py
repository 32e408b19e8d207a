"""Notify: judges the run each second, and tells of each problem when it begins and when it ends.

Everything happens in threads of its own: one judges, and each notifier has one. The training thread takes no part in it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch_grad_exporter.actions.notify.job import Announced, Job
from torch_grad_exporter.actions.notify.notification import Notification
from torch_grad_exporter.actions.notify.notifiers import Notifier
from torch_grad_exporter.actions.notify.sink import Sink
from torch_grad_exporter.collectors.outcomes import NotifyTotals
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.lifecycle import BackgroundLoop
from torch_grad_exporter.outputs.http.shared import ScrapeBusyError
from torch_grad_exporter.rules import RULES, Problem, Rule
from torch_grad_exporter.rules.actions import untold
from torch_grad_exporter.rules.episodes import Episode, Episodes

logger = logging.getLogger("torch_grad_exporter")

SOURCE = "notify"
"""Of its failures."""

EVALUATION_SECONDS = 1.0
"""Between two evaluations."""

SHARE = 0.05
"""Of the time that evaluations may take; where one takes long, the next one comes later."""

CLOSE_SECONDS, HURRIED_SECONDS = 2.0, 1.0
"""How long the end waits for what is still to be told, at most, and where a user or a launcher waits for it."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Which process it is. `step`: the optimizer steps until now."""

    run: str
    rank: int
    step: Callable[[], int]


def names(notifiers: Iterable[Notifier]) -> list[str]:
    """The name of each in metrics: its kind, with a number from the second of a kind on."""
    kinds = [one.kind for one in notifiers]
    counts = [kinds[:place].count(kind) for place, kind in enumerate(kinds)]
    return [f"{kind}-{count + 1}" if count else kind for kind, count in zip(kinds, counts, strict=True)]


def totals(notifiers: Sequence[Notifier], rules: Iterable[Rule] = RULES) -> NotifyTotals:
    """The counts of these notifiers, and of the alerts of all rules that a process can judge."""
    alerts = [(rule.name, alert.severity) for rule in rules if rule.judge is not None for alert in rule.alerts]
    return NotifyTotals(names(notifiers), alerts)


class Notify:
    """Judges and tells, from `start` until `close`.

    `problems`: what is wrong by a scrape of now; its argument says whether the run is over. `totals`: counts what is told. `job`:
    the other ranks, if there are any. `clock` in seconds, `now` is Unix time.
    """

    def __init__(
        self,
        notifiers: Sequence[Notifier],
        problems: Callable[[bool], Iterable[Problem]],
        origin: Origin,
        totals: NotifyTotals,
        errors: ErrorLog,
        *,
        job: Job | None = None,
        rules: Iterable[Rule] = RULES,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._problems = problems
        self._origin = origin
        self.totals = totals
        self._errors = errors
        self._clock = clock
        self._now = now
        self._job = job
        self._episodes = Episodes(rules)
        self._announced = Announced()
        self._told: set[str] = set()
        self._sinks = [
            Sink(name, one, totals, on_error=functools.partial(self._not_sent, name), clock=clock)
            for name, one in zip(names(notifiers), notifiers, strict=True)
        ]
        self._repeated = {sink.name: clock() for sink in self._sinks}
        self._due, self._took = clock(), 0.0
        self._closing = errors.boundary("close", limit=None)
        guard = errors.boundary(SOURCE, "judging")
        self._loop = BackgroundLoop("notify", self._in_turn, guard=guard, pause=self._until_due, last=self._judge_last)

    def start(self) -> None:
        """Starts the threads. Raises `RuntimeError` where there are no more to be had."""
        for sink in self._sinks:
            sink.start()
        self._loop.start()

    def close(self, *, hurried: bool = False) -> None:
        """Judges for the last time, and waits until all is told, for a limited time. Idempotent."""
        give_up_at = self._clock() + (HURRIED_SECONDS if hurried else CLOSE_SECONDS)
        self._loop.close((give_up_at - self._clock()) / 2)
        for sink in self._sinks:
            sink.end(give_up_at)
        for sink in self._sinks:
            self._closing(sink.close)

    def after_fork_in_child(self) -> None:
        """The threads are the parent's, and the child tells nothing."""
        self.totals.after_fork_in_child()

    # The thread

    def _until_due(self) -> float:
        return self._due - self._clock()

    def _in_turn(self) -> None:
        self._due = self._clock() + EVALUATION_SECONDS
        # Others may be busy with the same values: the next evaluation has them.
        with contextlib.suppress(ScrapeBusyError, TimeoutError):
            self.evaluate()
        self._due = max(self._due, self._clock() + self._took / SHARE)

    def _judge_last(self) -> None:
        with contextlib.suppress(ScrapeBusyError, TimeoutError):
            self.evaluate(last=True)

    def evaluate(self, *, last: bool = False) -> None:
        """Judges once, and offers what begins and ends to all notifiers. `last`: the run is over."""
        now, at = self._clock(), self._now()
        active = self._episodes.judge(self._problems(last), now, last=last)
        found = {key: self._notification(one, at, now) for key, one in active.items()}
        self.totals.set_active(Counter((alert, severity) for alert, severity, _ in found))
        self._took = self._clock() - now
        own = {key: one for key, one in found.items() if key[0] != untold.name}
        to_tell = own if self._job is None else self._job.exchange(own, last=last)
        changes = self._announced.changes(to_tell, at, ended=" The run has ended." if last else "")  # the problem may not have
        for sink in self._sinks:
            if changes:
                sink.offer(changes)
            if sink.repeats is not None and now - self._repeated[sink.name] >= sink.repeats:
                self._repeated[sink.name] = now
                sink.offer([replace(one, timestamp=at) for one in self._announced.active], repeats=True)

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
            step=self._origin.step(),
            run=self._origin.run,
            rank=self._origin.rank,
            first_steps=problem.first_steps,
            by_layer=episode.by_layer,
            template=episode.terms.template,
        )

    def _not_sent(self, name: str, error: Exception) -> None:
        """Counts a try that failed, and logs the first one of each notifier."""
        if name in self._told:
            self._errors.count(SOURCE, error)
        else:
            self._told.add(name)
            self._errors.tell(SOURCE, RuntimeError(f"{name}: {error}; further failures of it are only counted"))
