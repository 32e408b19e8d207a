"""A rule: one declaration of how Prometheus and a process judge a condition, of what it finds, and of what to do about it."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict, Unpack

from torch_grad_exporter.metrics.families import Spec

if TYPE_CHECKING:
    from torch_grad_exporter.rules.context import RuleContext

SEVERITIES = ("critical", "warning", "info")

Need = Spec | tuple[Spec, str]
"""A metric, or the rows of it with this value of its first label."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong: the name of its alert, how bad it is, a sentence, and the layer that it is about.

    `severity`: "critical" (a person is needed now), "warning" (soon) or "info". `others`: layers that it is about, too.
    `first_steps`: what to do first. `value`: the number that is wrong, if it is a single one, for notifications.
    """

    alert: str
    severity: str
    text: str
    layer: str | None = None
    others: tuple[str, ...] = ()
    first_steps: str = ""
    value: float | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule has found; the rule knows the alert. `value`: the number that is wrong, if it is a single one."""

    severity: str
    text: str
    layer: str | None = None
    others: tuple[str, ...] = ()
    value: float | None = field(default=None, compare=False, repr=False)


Judge = Callable[["RuleContext"], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Alert:
    """How Prometheus judges: one severity of a rule.

    `expr`: PromQL. `for_`: how long it has to hold until the alert fires; `keep_firing_for`: how long the alert goes on when it
    has ceased to hold; both in Prometheus' notation, empty for not at all. `summary` and `description` are templates of Prometheus.
    """

    severity: str
    expr: str
    for_: str = ""
    keep_firing_for: str = ""
    summary: str = ""
    description: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "expr", textwrap.dedent(self.expr).strip())

    @property
    def by_layer(self) -> bool:
        """Whether there is an alert for each layer."""
        return "$labels.layer" in self.summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A condition that is wrong.

    `alerts`: how Prometheus judges it; none of a rule that only processes judge. `judge`: how a process judges it by its own
    families, in the states of the run that are `states`; `None` where that takes more than one process knows, such as other ranks
    or a target that is down. `remembers`: metrics whose past it needs, and how many seconds back, in addition to those
    that are always remembered. `by_samples`: its durations may pass in samples too, of which one counts as `SAMPLE_SECONDS`, in a
    run that is too short for the clock; only where all that it reads is of samples or of steps. `needs`: where the run has none
    of these metrics, there is nothing to judge. `takes_seconds`, `takes_samples`: what it takes until its condition can hold,
    beside any `for`. `first_steps`: what to do first. `why`: the reasons of the numbers in the expressions. `note`: what else has
    to be known of them, such as where they cannot fire.
    """

    name: str
    alerts: tuple[Alert, ...] = ()
    judge: Judge | None = None
    states: frozenset[str | None] = frozenset()
    remembers: Mapping[Spec, float] = field(default_factory=dict)
    by_samples: bool = False
    needs: tuple[Need, ...] = ()
    takes_seconds: float = 0.0
    takes_samples: int = 0
    first_steps: str = ""
    why: str = ""
    note: str = ""

    def problems(self, context: RuleContext) -> Iterator[Problem]:
        """What is wrong by it, as far as this process knows."""
        if self.judge is not None and context.state in self.states:
            for found in self.judge(context):
                yield Problem(self.name, found.severity, found.text, found.layer, found.others, self.first_steps, found.value)


class _More(TypedDict, total=False):
    remembers: Mapping[Spec, float]
    by_samples: bool
    needs: tuple[Need, ...]
    takes_seconds: float
    takes_samples: int
    first_steps: str
    why: str
    note: str


def rule(name: str, states: frozenset[str | None], *alerts: Alert, **more: Unpack[_More]) -> Callable[[Judge], Rule]:
    """Makes a rule of a function that judges it, see `Rule`."""
    return lambda judge: Rule(name=name, alerts=alerts, judge=judge, states=states, **more)


def server_rule(name: str, *alerts: Alert, **more: Unpack[_More]) -> Rule:
    """A rule that only a server which knows all ranks and their past can judge."""
    return Rule(name=name, alerts=alerts, **more)


@dataclass(frozen=True, slots=True)
class Group:
    """The rules of one file, `NAME.alerts.yml`. `title` and `about`: paragraphs of its head."""

    name: str
    group: str
    title: str
    about: tuple[str, ...]
    rules: tuple[Rule, ...]


class Rules:
    """Rules in their order. From any thread."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules: tuple[Rule, ...] = ()
        for rule in rules:
            self.register(rule)

    def register(self, rule: Rule) -> contextlib.ExitStack:
        """Adds a rule: exporters that are started from now on judge by it, until the result is closed.

        Raises `ValueError` where another rule has its name.
        """
        if any(rule.name == other.name for other in self._rules):
            raise ValueError(f"there is a rule {rule.name!r} already; choose another name")
        self._rules = (*self._rules, rule)
        registration = contextlib.ExitStack()
        registration.callback(self._take_out, rule)
        return registration

    def _take_out(self, rule: Rule) -> None:
        self._rules = tuple(one for one in self._rules if one is not rule)

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._rules)
