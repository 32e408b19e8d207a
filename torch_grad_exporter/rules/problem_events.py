"""ProblemEvents: writes down when problems begin and end, by the clock, as notifications report them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch_grad_exporter.rules.declaration import Problem, Rule
from torch_grad_exporter.rules.episodes import Episodes, Key
from torch_grad_exporter.store.journal import Journal, JournalEvent

if TYPE_CHECKING:
    from torch_grad_exporter.rules.record import JudgedAt

START, END = "torch.problem.start", "torch.problem.end"


class ProblemEvents:
    """Follows problems from one judgement to the next. For one thread at a time.

    Args:
        journal: Takes the events.
        rules: The rules that are judged.
    """

    def __init__(self, journal: Journal, rules: Iterable[Rule]) -> None:
        self._journal = journal
        self._episodes = Episodes(rules)
        self._first: dict[Key, int] = {}  # the steps from which on problems have held
        self._begun: dict[Key, tuple[Problem, int]] = {}

    def judge(self, problems: Iterable[Problem], at: JudgedAt, *, last: bool = False) -> None:
        """Write down what has begun or ended. `last`: the run is over, and no judgement follows."""
        episodes = self._episodes.judge(problems, at.now, last=last)
        known = {key: first for key, (_, first) in self._begun.items()}
        self._first = {key: known.get(key, self._first.get(key, at.step)) for key in {*self._episodes.holding, *episodes}}
        before, self._begun = self._begun, {key: (each.problem, self._first[key]) for key, each in episodes.items()}
        for key, (problem, first) in self._begun.items():
            if key not in before:
                self._journal.add(
                    JournalEvent(at.now, START, problem.severity, problem.text, _attributes(problem, first, at.step), at.trace)
                )
        for key, (problem, first) in before.items():
            if key not in self._begun:
                text = f"Ended: {problem.text}{' The run has ended.' * last}"
                self._journal.add(JournalEvent(at.now, END, "info", text, _attributes(problem, first, at.step), at.trace))


def _attributes(problem: Problem, first: int, step: int) -> dict[str, str | float | None]:
    return {
        "alert": problem.alert, "severity": problem.severity, "layer": problem.layer, "step": step, "start_step": first,
        "value": problem.value, "first_steps": problem.first_steps or None,
    }  # fmt: skip
