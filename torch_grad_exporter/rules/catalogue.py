"""The catalogue of all rules: those that a process judges, and those that only Prometheus judges.

To add a rule that a process judges, declare it in one of the files here and name it in `JUDGED`. To add one that only Prometheus
judges, write it into `promql/*.toml`. Both need a section of `docs/runbook.md` and tests.
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from torch_grad_exporter.rules import (
    actions,
    attention,
    layers,
    nonfinite,
    optimizer_state,
    reinforcement,
    replicas,
    routers,
    spikes,
    training,
)
from torch_grad_exporter.rules.declaration import Alert, Rule

# By the file of alerts. The order counts: of the same severity the first is listed first.
JUDGED: Mapping[str, tuple[Rule, ...]] = {
    "training": (
        training.failed,
        nonfinite.nonfinite_loss,
        training.stalled,
        training.never_started,
        spikes.loss_spikes,
        training.starvation,
    ),
    "gradients": (
        nonfinite.nonfinite_gradients,
        replicas.replicas_differ,
        spikes.exploding,
        layers.vanishing,
        layers.dead,
        layers.without_gradient,
        layers.not_updating,
        layers.updates_lost,
        optimizer_state.spike_ahead,
        routers.expert_collapse,
        routers.router_imbalance,
        attention.logits_growing,
    ),
    "rl": (
        reinforcement.entropy_collapse,
        reinforcement.kl_out_of_range,
        reinforcement.zero_advantage,
        reinforcement.reward_without_eval,
        reinforcement.policy_clipped,
        reinforcement.train_inference_mismatch,
    ),
    "resources": (),
    "actions": (actions.not_clipped, actions.stopped, actions.action_failing, actions.notifications_failing),
    "exporter": (),
}


class Rules:
    """The rules that a process judges, in their order. From any thread."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules: tuple[Rule, ...] = ()
        for rule in rules:
            self.register(rule)

    def register(self, rule: Rule) -> contextlib.ExitStack:
        """Add a rule: exporters that are started from now on judge it, until the result is closed.

        Raises:
            ValueError: Another rule has its name.
        """
        if any(rule.name == other.name for other in self._rules):
            raise ValueError(f"there is a rule {rule.name!r} already; choose another name")
        self._rules = (*self._rules, rule)
        registration = contextlib.ExitStack()
        registration.callback(self._remove, rule)
        return registration

    def _remove(self, rule: Rule) -> None:
        self._rules = tuple(other for other in self._rules if other is not rule)

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._rules)


RULES = Rules(rule for rules in JUDGED.values() for rule in rules)


@dataclass(frozen=True, slots=True)
class RuleGroup:
    """The rules of one file, `NAME.alerts.yml`. `title` and `about`: paragraphs of its head."""

    name: str
    group: str
    title: str
    about: tuple[str, ...]
    rules: tuple[Rule, ...]


@cache
def groups() -> tuple[RuleGroup, ...]:
    """Return all shipped rules by file, those that a process judges first. Reads files at the first call."""
    return tuple(_group(name, rules) for name, rules in JUDGED.items())


@cache
def promql_only() -> frozenset[str]:
    """Return the names of the rules that only Prometheus judges. Reads files at the first call."""
    return frozenset(rule.name for group in groups() for rule in group.rules if rule.judge is None)


def _group(name: str, judged: tuple[Rule, ...]) -> RuleGroup:
    head = tomllib.loads(files(__package__).joinpath("promql", f"{name}.toml").read_text(encoding="utf-8"))
    about = tuple(_one_line(text) for text in head["about"])
    others = tuple(map(_rule, head.get("rules", ())))
    return RuleGroup(name, head["group"], head["title"], about, (*judged, *others))


def _rule(entry: Mapping[str, Any]) -> Rule:
    why, note, steps = (_one_line(entry.get(key, "")) for key in ("why", "note", "first_steps"))
    alerts = tuple(map(_alert, entry.get("alerts", [entry])))
    return Rule(name=entry["name"], alerts=alerts, first_steps=steps, why=why, note=note)


def _alert(entry: Mapping[str, Any]) -> Alert:
    """Return one severity of a rule, which is all of an entry that has one only."""
    durations = entry.get("for", ""), entry.get("keep_firing_for", "")
    return Alert(entry["severity"], entry["expr"], *durations, _one_line(entry["summary"]), _one_line(entry["description"]))


def _one_line(text: str) -> str:
    """Return a text of a TOML file, where it is wrapped, as one line."""
    return " ".join(text.split())
