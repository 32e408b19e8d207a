"""A rule: one declaration of how Prometheus and a process judge a condition, and of what to do about it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict, Unpack

from torch_grad_exporter.metrics.families import Spec

if TYPE_CHECKING:
    from torch_grad_exporter.rules.context import RuleContext

SEVERITIES = ("critical", "warning", "info")

# A metric, or the rows of it with this value of its first label.
Need = Spec | tuple[Spec, str]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong.

    Attributes:
        alert: Name of the rule.
        severity: "critical" (needs a person now), "warning" (soon) or "info".
        text: A sentence.
        layer: The layer that it is about, if any.
        others: Further layers that it is about.
        first_steps: What to do first.
        value: The number that is wrong, if it is a single one.
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
    """The result of a judgement: a `Problem` without what the rule knows."""

    severity: str
    text: str
    layer: str | None = None
    others: tuple[str, ...] = ()
    value: float | None = field(default=None, compare=False, repr=False)


Judge = Callable[["RuleContext"], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Alert:
    """The judgement of Prometheus: one severity of a rule.

    Attributes:
        severity: One of `SEVERITIES`.
        expr: PromQL.
        for_: How long it has to hold until the alert fires, in Prometheus' notation; empty for at once.
        keep_firing_for: How long the alert goes on after it has ceased to hold; empty for not at all.
        summary: A template of Prometheus.
        description: A template of Prometheus.
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

    Attributes:
        name: Name of the alert.
        alerts: The judgement of Prometheus; empty for a rule that only processes judge.
        judge: The judgement of a process, by its own families. None if only Prometheus judges.
        states: States of the run in which `judge` applies. None among them stands for an unknown state.
        remembers: Metrics whose past `judge` reads, and how many seconds back.
        by_samples: Whether its durations may also pass in samples, of `SAMPLE_SECONDS` each, in a run that is too short for the
            clock. Only where everything it reads belongs to samples or steps.
        needs: Metrics of which the run must have one; else there is nothing to judge.
        takes_seconds: Seconds until the condition can hold, before any `for`.
        takes_samples: Samples until the condition can hold, before any `for`.
        first_steps: What to do first.
        why: Reasons of the numbers in the expressions.
        note: Further facts about the expressions, such as where they cannot fire.
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
        """Yield what is wrong by this rule, as far as this process knows."""
        if self.judge is not None and context.state in self.states:
            for finding in self.judge(context):
                yield Problem(
                    self.name, finding.severity, finding.text, finding.layer, finding.others, self.first_steps, finding.value
                )


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
    """Make a rule of the decorated function, which judges it; see `Rule`."""
    return lambda judge: Rule(name=name, alerts=alerts, judge=judge, states=states, **more)
