"""Record: what was wrong in a run, from its start on, for a verdict on the whole of it.

`exporter.problems()` says what is wrong now; a verdict asks what ever was. The rules are followed in two courses. By the clock, as
Prometheus does it: all of them. By samples: those on training and gradients (`Rule.by_samples`), whose `for` and whose windows are
minutes long, while a run in CI lasts for seconds. There a sample counts as `SAMPLE_SECONDS`, as if each were seen by one scrape, so
that `for: 10m` are 40 samples. What begins in either course was wrong.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch_grad_exporter.collectors.training import TRAIN_START_TIMESTAMP
from torch_grad_exporter.errors import BusyError
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.rules.catalogue import RULES
from torch_grad_exporter.rules.context import SAMPLE_SECONDS
from torch_grad_exporter.rules.declaration import Problem, Rule
from torch_grad_exporter.rules.episodes import Episode, Episodes, Key
from torch_grad_exporter.rules.problem_events import ProblemEvents
from torch_grad_exporter.rules.values import Values
from torch_grad_exporter.rules.watch import Watch
from torch_grad_exporter.store.journal import Journal
from torch_grad_exporter.store.records import TraceIds

EVERY = 4
"""Samples between two judgements by samples, which is a minute of theirs: Prometheus evaluates its rules each minute."""

# Problems that are kept.
MOST = 1000

# How long a judgement waits for another one.
WAIT_SECONDS = 1.0


@dataclass(slots=True)
class Wrong:
    """A problem that began in the run. `others`: further layers that it was about.

    `first`, `last`: the optimizer steps of the first and the last judgement by which its condition held. `text`, `value`: of the
    last one. `by_samples`: whether it first began by samples; else it was by the clock.
    """

    alert: str
    severity: str
    layer: str | None
    others: tuple[str, ...]
    text: str
    value: float | None
    first: int
    last: int
    by_samples: bool


@dataclass(frozen=True, slots=True)
class JudgedAt:
    """The moment of a judgement: Unix time, and how many samples and optimizer steps there have been.

    `trace`: the span that was active when the run ended, if it has ended and there was one.
    """

    now: float
    samples: int
    step: int
    trace: TraceIds | None = None


class Record:
    """The problems of a run until now. From any thread.

    Args:
        rules: By default those that are registered when it is made.
        journal: Takes beginnings and ends, None for nothing.
    """

    def __init__(self, rules: Iterable[Rule] = RULES, journal: Journal | None = None) -> None:
        self.rules = tuple(rules)
        self._events = None if journal is None else ProblemEvents(journal, self.rules)
        counted = tuple(rule for rule in self.rules if rule.by_samples)
        self._watch = Watch(counted, by_samples=True)
        self._by_clock, self._by_samples = _Course(self.rules), _Course(counted, by_samples=True)
        self._at_end = _Course(self.rules)
        self._wrong: dict[Key, Wrong] = {}
        self._there: set[str] = set()
        self._seen = self._judged = 0
        self._began: float | None = None
        self._latest = 0.0
        self._lock = threading.Lock()

    @property
    def wrong(self) -> list[Wrong]:
        """All problems that began, in that order."""
        return list(self._wrong.values())

    @property
    def samples(self) -> int:
        """The number of samples until now."""
        return max(self._seen, self._judged)

    @property
    def seconds(self) -> float:
        """The time from the first judgement by the clock to the last."""
        return self._latest - self._began if self._began is not None else 0.0

    @property
    def there(self) -> frozenset[str]:
        """The rules for which there was something to judge."""
        return frozenset(self._there)

    def of_sample(self, samples: int, step: int, scrape: Callable[[], Iterable[Family]]) -> None:
        """Judge by samples, at every few of them.

        Args:
            samples: Number of the sample, beginning with 1.
            step: Its optimizer step.
            scrape: Returns its metrics; called only if it is judged.

        Raises:
            BusyError: Another judgement is under way.
        """
        self._seen = samples
        if samples % EVERY == 0:
            with self._judging():
                self._judge_samples(Values(scrape()), samples, step)

    def of_scrape(
        self, values: Values, moment: JudgedAt, problems: Iterable[Problem], ended: Iterable[Problem] = (), *, last: bool = False
    ) -> None:
        """Judge by the clock, and by samples once these no longer come one by one.

        Args:
            values: A scrape.
            moment: Its time.
            problems: What is wrong in a run that goes on; for one that is over, what would be wrong if it went on.
            ended: What is wrong once the run is over.
            last: No judgement follows: what is in `ended` begins, and other problems end. Until then `problems` are written down.

        Raises:
            BusyError: Another judgement is under way.
        """
        with self._judging():
            self._began = moment.now if self._began is None else self._began
            self._latest = max(self._latest, moment.now)
            self._take(self._by_clock, problems, moment.now, moment.step)
            self._take(self._at_end, ended, moment.now, moment.step, last=True)  # nothing follows that could end it
            if self._events is not None:
                self._events.judge(problems, moment)
                if last:
                    self._events.judge(ended, moment, last=True)
                    self._events = None  # another thread may be about to judge an earlier scrape
            # While samples come one by one, a scrape shows of the last minute what they show of four.
            if moment.samples > self._seen:
                self._judge_samples(values, moment.samples, moment.step)
            else:
                self._note(values)

    @contextlib.contextmanager
    def _judging(self) -> Iterator[None]:
        # The wait is bounded: a signal's handler may have interrupted a judgement in this very thread.
        if not self._lock.acquire(timeout=WAIT_SECONDS):
            raise BusyError("another judgement is under way")
        try:
            yield
        finally:
            self._lock.release()

    def _judge_samples(self, values: Values, samples: int, step: int) -> None:
        self._note(values)
        if samples <= self._judged:
            return
        self._judged = samples
        now = (values.one(TRAIN_START_TIMESTAMP) or 0.0) + SAMPLE_SECONDS * samples
        self._watch.remember(values, now)
        self._take(self._by_samples, self._watch.problems(values, now, going=True), now, step)

    def _note(self, values: Values) -> None:
        """Note for which rules there is something to judge."""
        self._there.update(rule.name for rule in self.rules if rule.name not in self._there and _is_there(rule, values))

    def _take(self, course: _Course, problems: Iterable[Problem], now: float, step: int, *, last: bool = False) -> None:
        for key, episode, first in course.judge(problems, now, step, last=last):
            problem, known = episode.problem, self._wrong.get(key)
            if known is not None:
                known.text, known.value, known.last = problem.text, problem.value, step
                known.others = tuple(dict.fromkeys((*known.others, *problem.others)))
            elif len(self._wrong) < MOST:
                self._wrong[key] = Wrong(
                    problem.alert, problem.severity, problem.layer, problem.others, problem.text, problem.value, first, step,
                    course.by_samples,
                )  # fmt: skip


class _Course:
    """Episodes, and the steps at which they were first seen."""

    def __init__(self, rules: Iterable[Rule], *, by_samples: bool = False) -> None:
        self.by_samples = by_samples
        self._episodes = Episodes(rules)
        self._first: dict[Key, int] = {}

    def judge(self, problems: Iterable[Problem], now: float, step: int, *, last: bool) -> list[tuple[Key, Episode, int]]:
        """Return the problems that have begun and hold now, each with the step from which on it held."""
        begun = self._episodes.judge(problems, now, last=last)
        holding = self._episodes.holding
        self._first = {key: self._first.get(key, step) for key in holding}
        return [(key, episode, self._first[key]) for key, episode in begun.items() if key in holding]


def _is_there(rule: Rule, values: Values) -> bool:
    """Return whether the run has one of the metrics that the rule needs."""
    if not rule.needs:
        return True
    needs = [need if isinstance(need, tuple) else (need, None) for need in rule.needs]
    return any(label is None or row[0] == label for spec, label in needs for row, _ in values.table(spec).items())
