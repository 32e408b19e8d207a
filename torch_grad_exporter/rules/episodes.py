"""Episodes: when a problem begins and ends, by the `for` and `keep_firing_for` of its rule. Knows no clock and no receiver."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch_grad_exporter.rules.declaration import SEVERITIES, Problem, Rule

MOST = 10_000
"""Problems that are followed at a time; of more than that, the worst."""

_UNITS: Mapping[str, float] = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "y": 31536000.0}

Key = tuple[str, str, str | None]
"""Alert, severity, and the layer where there is such a problem for each layer."""


def seconds(duration: str) -> float:
    """A duration in Prometheus' notation, such as "1h30m"; 0 for an empty one. Raises `ValueError` on anything else."""
    parts = re.findall(r"(\d+)(ms|[smhdwy])", duration)
    if "".join(map("".join, parts)) != duration:
        raise ValueError(f"{duration!r} is no duration; write it as Prometheus does, such as 5m or 1h30m")
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
    """Follows problems from one evaluation to the next. For one thread. Times are in seconds, from any beginning."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._terms = {
            (rule.name, alert.severity): EpisodeTerms(
                seconds(alert.for_), seconds(alert.keep_firing_for), alert.by_layer, alert.summary
            )
            for rule in rules
            for alert in rule.alerts
        }
        self._since: dict[Key, float] = {}
        """What holds now, and since when without a break."""
        self._begun: dict[Key, Episode] = {}

    @property
    def holding(self) -> frozenset[Key]:
        """The problems that held at the last evaluation, whether they have begun or not."""
        return frozenset(self._since)

    def judge(self, problems: Iterable[Problem], now: float, *, last: bool = False) -> Mapping[Key, Episode]:
        """The problems that have begun and not ended, the oldest first. `problems`: all that there are now.

        `last`: there is no further evaluation. What the end itself has brought begins at once, and what no longer holds ends.
        """
        found = self._found(problems)
        before, self._since = self._since, {}
        for key, problem in found.items():
            for one in self._held(key, problem):
                self._since[one] = before.get(one, now)
        for key, problem in found.items():
            if key in self._begun:
                self._begun[key].problem = problem
            elif now - self._held_since(key, problem) >= self._of(problem).begins or (last and key not in before):
                self._begun[key] = Episode(problem, self._of(problem), key[2] is not None, now, now)
        self._end(now, last=last)
        return self._begun

    def _found(self, problems: Iterable[Problem]) -> dict[Key, Problem]:
        """The problems by key; several with one key, as of several devices, are one problem."""
        found: dict[Key, Problem] = {}
        for problem in problems:
            key = self._key(problem)
            if key in found:
                first = found[key]
                found[key] = replace(first, text=f"{first.text} {problem.text}", others=(*first.others, *problem.others))
            elif len(found) < MOST:
                found[key] = problem
        return found

    def _of(self, problem: Problem) -> EpisodeTerms:
        return self._terms.get((problem.alert, problem.severity), _NONE)

    def _by_layer(self, problem: Problem) -> bool:
        known = self._of(problem).by_layer
        return not (problem.layer and problem.others) if known is None else known

    def _key(self, problem: Problem) -> Key:
        return problem.alert, problem.severity, problem.layer if self._by_layer(problem) else None

    def _covered(self, problem: Problem) -> list[Key]:
        """The layers that a problem sums up: one that is listed later has held since then, and one that was listed goes on."""
        layers = problem.others if self._by_layer(problem) and problem.layer is None else ()
        return [(problem.alert, problem.severity, layer) for layer in layers]

    def _held(self, key: Key, problem: Problem) -> list[Key]:
        """What holds with a problem: itself, the layers in it, and each of these with the lower severities of the rule.

        A process names the highest severity alone; for Prometheus the others hold as well.
        """
        both, (alert, severity, _) = [key, *self._covered(problem)], key
        lower = [one for one in SEVERITIES[SEVERITIES.index(severity) + 1 :] if (alert, one) in self._terms]
        return both + [(alert, less, layer) for less in lower for _, _, layer in both]

    def _held_since(self, key: Key, problem: Problem) -> float:
        return min(self._since[one] for one in (key, *self._covered(problem)))

    def _end(self, now: float, *, last: bool) -> None:
        for key, episode in list(self._begun.items()):
            if key in self._since:
                episode.held = now
            elif last or now - episode.held >= episode.terms.ends:
                del self._begun[key]
