"""All rules together, and how fast the run is."""

from __future__ import annotations

from collections.abc import Iterable

from torch_grad_exporter.collectors.training import TRAIN_SAMPLES, TRAIN_STEPS, TRAIN_TOKENS
from torch_grad_exporter.rules import actions, exporter, gradients, resources, training
from torch_grad_exporter.rules.context import RuleContext
from torch_grad_exporter.rules.declaration import SEVERITIES, Problem, Rule, Rules
from torch_grad_exporter.rules.memory import REMEMBERED, Longest, Memory
from torch_grad_exporter.rules.values import Values

GROUPS = (training.GROUP, gradients.GROUP, resources.GROUP, actions.GROUP, exporter.GROUP)

RULES = Rules(rule for group in GROUPS for rule in group.rules)
"""All of them; of the same severity the first one is listed first."""

OVER = frozenset({"finished", "failed"})
"""The states of a run that is over."""

_OWN = frozenset(map(id, RULES))

LEAST_SECONDS = 3.0
"""Seconds over which a rate is taken."""


class Watch:
    """Remembers what rules need and judges them. For one thread at a time. `now` is Unix time.

    `rules`: by default those that are registered when it is made. `by_samples`: `now` counts samples, as of `RuleContext`.
    """

    def __init__(self, rules: Iterable[Rule] = RULES, *, by_samples: bool = False) -> None:
        self._rules = tuple(rules)
        self.has_foreign = not _OWN.issuperset(map(id, self._rules))
        """Whether there are rules of others, which may read any metric."""
        self._by_samples = by_samples
        seconds = dict(REMEMBERED)
        for spec, back in (one for rule in self._rules for one in rule.remembers.items()):
            seconds[spec] = max(back, seconds.get(spec, 0.0))
        self._memories = {spec: Memory(spec, back) for spec, back in seconds.items()}
        self._slowest_step = Longest()

    def remember(self, values: Values, now: float) -> None:
        """Takes the numbers as of now, unless it did so just now."""
        for memory in self._memories.values():
            memory.remember(values, now)
        self._slowest_step.remember(values, now)

    def problems(self, values: Values, now: float, *, going: bool = False) -> list[Problem]:
        """All of them, the worst first. `going`: a run that is over is judged as if it still went on."""
        state = values.state()
        if going and state in OVER:
            state = "training"
        context = RuleContext(values, now, state, self._memories, self._slowest_step.seconds(), self._by_samples)
        found = [problem for rule in self._rules for problem in rule.problems(context)]
        return sorted(found, key=lambda problem: SEVERITIES.index(problem.severity))

    def rates(self, values: Values, now: float, seconds: float = 60.0) -> dict[str, float]:
        """Steps, training examples and tokens per second over the last minute, or for as long as is remembered."""
        found: dict[str, float] = {}
        for name, spec in (("steps", TRAIN_STEPS), ("samples", TRAIN_SAMPLES), ("tokens", TRAIN_TOKENS)):
            memory, table = self._memories[spec], values.table(spec)
            before = memory.before(now - seconds) or memory.oldest()
            if before is not None and now - before[0] >= LEAST_SECONDS and (more := table.since(before[1]).largest()) is not None:
                found[name] = more / (now - before[0])
        return found
