"""Episodes: when a problem begins and ends, by the `for` and `keep_firing_for` of its rule."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch_grad_exporter.rules.declaration import SEVERITIES, Problem, Rule

# Problems that are followed at a time; of more than that, the worst.
MOST = 10_000

_UNITS: Mapping[str, float] = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "y": 31536000.0}

Key = tuple[str, str, str | None]
"""Alert, severity, and the layer where there is such a problem for each layer."""


def seconds(duration: str) -> float:
    """Return the seconds of a duration in Prometheus' notation, such as "1h30m"; 0 if empty. Raises `ValueError` otherwise."""
    parts = re.findall(r"(\d+)(ms|[smhdwy])", duration)
    if "".join(map("".join, parts)) != duration:
        raise ValueError(f"{duration!r} is not a duration; write it as Prometheus does, such as 5m or 1h30m")
    return sum(int(count) * _UNITS[unit] for count, unit in parts)


@dataclass(frozen=True, slots=True)
class EpisodeTerms:
    """How long a problem has to hold until it begins, and not to hold until it ends, in seconds.

    `by_layer`: whether there is such a problem for each layer, `None` where the rule does not say. `template`: Prometheus' summary.
    """

    begins: float = 0.0
    ends: float = 0.0
    by_layer: bool | None = None
    template: str = ""


_NONE = EpisodeTerms()


@dataclass(slots=True)
class Episode:
    """A problem that has begun, at the time `began`, and held for the last time at `held`. `by_layer`: it is that of one layer."""

    problem: Problem
    terms: EpisodeTerms
    by_layer: bool
    began: float
    held: float


class Episodes:
    """The problems that have begun, from one evaluation to the next. For one thread. Times are in seconds, from any origin."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._terms = {
            (rule.name, alert.severity): EpisodeTerms(
                seconds(alert.for_), seconds(alert.keep_firing_for), alert.by_layer, alert.summary
            )
            for rule in rules
            for alert in rule.alerts
        }
        # What holds now, and since when without a break.
        self._since: dict[Key, float] = {}
        self._begun: dict[Key, Episode] = {}

    @property
    def holding(self) -> frozenset[Key]:
        """The problems that held at the last evaluation, whether they have begun or not."""
        return frozenset(self._since)

    def judge(self, problems: Iterable[Problem], now: float, *, last: bool = False) -> Mapping[Key, Episode]:
        """Return the problems that have begun and not ended, the oldest first.

        Args:
            problems: All present problems.
            now: The time.
            last: No evaluation follows: a problem that is new begins at once, and one that no longer holds ends.
        """
        present = self._by_key(problems)
        before, self._since = self._since, {}
        for key, problem in present.items():
            for held in self._held(key, problem):
                self._since[held] = before.get(held, now)
        for key, problem in present.items():
            if key in self._begun:
                self._begun[key].problem = problem
            elif now - self._held_since(key, problem) >= self._of(problem).begins or (last and key not in before):
                self._begun[key] = Episode(problem, self._of(problem), key[2] is not None, now, now)
        self._end(now, last=last)
        return self._begun

    def _by_key(self, problems: Iterable[Problem]) -> dict[Key, Problem]:
        """Return the problems by key; several with one key, such as two actions that fail, are one problem."""
        present: dict[Key, Problem] = {}
        for problem in problems:
            key = self._key(problem)
            if key in present:
                first = present[key]
                present[key] = replace(first, text=f"{first.text} {problem.text}", others=(*first.others, *problem.others))
            elif len(present) < MOST:
                present[key] = problem
        return present

    def _of(self, problem: Problem) -> EpisodeTerms:
        return self._terms.get((problem.alert, problem.severity), _NONE)

    def _by_layer(self, problem: Problem) -> bool:
        known = self._of(problem).by_layer
        return not (problem.layer and problem.others) if known is None else known

    def _key(self, problem: Problem) -> Key:
        return problem.alert, problem.severity, problem.layer if self._by_layer(problem) else None

    def _covered(self, problem: Problem) -> list[Key]:
        """Return the layers that a problem sums up: a layer keeps its time when it moves between the list and the sum."""
        layers = problem.others if self._by_layer(problem) and problem.layer is None else ()
        return [(problem.alert, problem.severity, layer) for layer in layers]

    def _held(self, key: Key, problem: Problem) -> list[Key]:
        """Return what holds with a problem: itself, the layers in it, and each of these with the lower severities of the rule.

        A process names only the highest severity; for Prometheus the others hold as well.
        """
        both, (alert, severity, _) = [key, *self._covered(problem)], key
        lower = [less for less in SEVERITIES[SEVERITIES.index(severity) + 1 :] if (alert, less) in self._terms]
        return both + [(alert, less, layer) for less in lower for _, _, layer in both]

    def _held_since(self, key: Key, problem: Problem) -> float:
        return min(self._since[held] for held in (key, *self._covered(problem)))

    def _end(self, now: float, *, last: bool) -> None:
        for key, episode in list(self._begun.items()):
            if key in self._since:
                episode.held = now
            elif last or now - episode.held >= episode.terms.ends:
                del self._begun[key]
