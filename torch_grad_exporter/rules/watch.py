"""Watch: judges rules by the present values and by those that it remembers, and measures how fast the run is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from torch_grad_exporter.collectors.training import TRAIN_SAMPLES, TRAIN_SLOWEST_STEP, TRAIN_STEPS, TRAIN_TOKENS
from torch_grad_exporter.metrics.families import Spec
from torch_grad_exporter.rules.catalogue import RULES
from torch_grad_exporter.rules.context import HOUR, RuleContext
from torch_grad_exporter.rules.declaration import SEVERITIES, Problem, Rule
from torch_grad_exporter.rules.values import Table, Values

OVER = frozenset({"finished", "failed"})
"""The states of a run that is over."""

RATES = {"steps": TRAIN_STEPS, "samples": TRAIN_SAMPLES, "tokens": TRAIN_TOKENS}

# Seconds over which a rate is taken: at most, and at least.
RATE_SECONDS, LEAST_SECONDS = 60.0, 3.0

# Seconds between two moments that are remembered.
OFTEN, SELDOM = 15.0, 60.0

HOURS_OF_DAY = 24

Moment = tuple[float, Table]

_OWN = frozenset(map(id, RULES))


class Watch:
    """Remembers what rules need and judges them. For one thread at a time. `now` is Unix time.

    Args:
        rules: By default those that are registered when it is made.
        by_samples: Whether `now` counts samples, see `RuleContext`.
    """

    def __init__(self, rules: Iterable[Rule] = RULES, *, by_samples: bool = False) -> None:
        self._rules = tuple(rules)
        # Rules of other packages may read any metric.
        self.has_foreign = not _OWN.issuperset(map(id, self._rules))
        self._by_samples = by_samples
        seconds = dict.fromkeys(RATES.values(), RATE_SECONDS)
        for rule in self._rules:
            for spec, back in rule.remembers.items():
                seconds[spec] = max(back, seconds.get(spec, 0.0))
        self._memories = {spec: Memory(spec, back) for spec, back in seconds.items()}
        self._slowest_step = SlowestStep()

    def remember(self, values: Values, now: float) -> None:
        """Remember the present numbers, unless the last ones are recent."""
        for memory in self._memories.values():
            memory.remember(values, now)
        self._slowest_step.remember(values, now)

    def problems(self, values: Values, now: float, *, going: bool = False) -> list[Problem]:
        """Return all problems, the worst first. `going`: judge a run that is over as if it still went on."""
        state = values.state()
        if going and state in OVER:
            state = "training"
        context = RuleContext(values, now, state, self._memories, self._slowest_step.seconds(), self._by_samples)
        problems = [problem for rule in self._rules for problem in rule.problems(context)]
        return sorted(problems, key=lambda problem: SEVERITIES.index(problem.severity))

    def rates(self, values: Values, now: float) -> dict[str, float]:
        """Return steps, training examples and tokens per second over the last minute, or since the first moment."""
        rates: dict[str, float] = {}
        for name, spec in RATES.items():
            memory, table = self._memories[spec], values.table(spec)
            before = memory.before(now - RATE_SECONDS) or memory.oldest()
            if before is not None and now - before[0] >= LEAST_SECONDS and (more := table.since(before[1]).largest()) is not None:
                rates[name] = more / (now - before[0])
        return rates


class Memory:
    """The past of a metric: all its rows, now and then, for `seconds` and a little longer. `now` is Unix time.

    Metrics of layers have many rows: they are remembered seldom, and in 32 bits.
    """

    def __init__(self, spec: Spec, seconds: float) -> None:
        layers = "layer" in spec.labels
        self._spec = spec
        self._seconds = seconds
        self._every = SELDOM if layers or seconds > HOUR else OFTEN
        self._kind: type[np.floating] = np.float32 if layers else np.float64
        self._moments: deque[Moment] = deque()

    def remember(self, values: Values, now: float) -> None:
        """Remember the present numbers, unless the last ones are recent."""
        if self._moments and now < self._moments[-1][0]:  # the clock was set back
            back = self._moments[-1][0] - now
            self._moments = deque((at - back, table) for at, table in self._moments)
        if self._moments and now - self._moments[-1][0] < self._every:
            return
        table = values.table(self._spec)
        if table.rows:
            with np.errstate(over="ignore"):  # a copy: the original may be a view of much more
                table = Table(table.rows, table.numbers.astype(self._kind))
        self._moments.append((now, table))
        while len(self._moments) > 1 and self._moments[1][0] <= now - self._seconds:
            self._moments.popleft()

    def before(self, at: float) -> Moment | None:
        """Return the last moment up to then."""
        return next((moment for moment in reversed(self._moments) if moment[0] <= at), None)

    def oldest(self) -> Moment | None:
        """Return the first moment that is remembered."""
        return self._moments[0] if self._moments else None

    def between(self, first: float, last: float) -> list[Table]:
        """Return the metric after the first time and before the last, the oldest first."""
        return [table for at, table in self._moments if first < at < last and table.rows]


class SlowestStep:
    """The slowest step of the last 24 hours, and of the hour in which they began."""

    def __init__(self) -> None:
        self._hours: dict[int, float] = {}

    def remember(self, values: Values, now: float) -> None:
        """Remember the slowest of the recent steps."""
        slowest, hour = values.one(TRAIN_SLOWEST_STEP), int(now // HOUR)
        if slowest is not None:
            self._hours[hour] = max(slowest, self._hours.get(hour, 0.0))
        self._hours = {then: longest for then, longest in self._hours.items() if hour - HOURS_OF_DAY <= then <= hour}

    def seconds(self) -> float | None:
        """Return its duration, None if there was no step."""
        return max(self._hours.values(), default=None)
