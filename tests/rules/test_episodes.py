"""Begin and end of problems by `for` and `keep_firing_for` of their rules."""

from __future__ import annotations

import datetime as dt
import random

import pytest

from torch_grad_exporter.rules import RULES, Alert, Problem, Rule
from torch_grad_exporter.rules.episodes import MOST, Episodes, Key, seconds

SLOW = Rule(name="Slow", alerts=(Alert("warning", "x", for_="1m", keep_firing_for="30s", summary="It is slow."),))
AT_ONCE = Rule(name="AtOnce", alerts=(Alert("critical", "x", summary="It is."),))
LAYERS = Rule(name="Layers", alerts=(Alert("warning", "x", for_="1m", summary="Layer {{ $labels.layer }} is."),))

slow, at_once = Problem("Slow", "warning", "Slow."), Problem("AtOnce", "critical", "At once.")


def layer(name: str) -> Problem:
    """A problem of one layer."""
    return Problem("Layers", "warning", f"Layer {name}.", name)


def more(*names: str) -> Problem:
    """A problem of several layers together."""
    return Problem("Layers", "warning", f"{len(names)} more layers.", others=names)


class Followed:
    """Episodes, and what begins and ends at each evaluation."""

    def __init__(self, *rules: Rule) -> None:
        self._episodes = Episodes(rules)
        self._active: dict[Key, Problem] = {}

    def changes(self, problems: list[Problem], now: float, *, last: bool = False) -> list[tuple[bool, Problem]]:
        """Return for each change whether it begins, and the problem."""
        before = self._active
        self._active = {key: one.problem for key, one in self._episodes.judge(problems, now, last=last).items()}
        begun = [(True, one) for key, one in self._active.items() if key not in before]
        return begun + [(False, one) for key, one in before.items() if key not in self._active]

    def told(self, problems: list[Problem], now: float, *, last: bool = False) -> list[tuple[bool, str, str | None]]:
        """Return for each change whether it begins, the alert and the layer."""
        return [(begins, one.alert, one.layer) for begins, one in self.changes(problems, now, last=last)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", 0), ("5m", 300), ("1h30m", 5400), ("500ms", 0.5), ("2d", 172800), ("1w", 604800), ("1y", 31536000), ("30s", 30)],
)
def test_durations_have_prometheus_units(text: str, expected: float) -> None:
    """Durations may have each unit of Prometheus, and several."""
    assert seconds(text) == expected


def test_every_duration_of_the_rules_can_be_read() -> None:
    """All durations of the shipped rules can be parsed."""
    found = [seconds(text) for rule in RULES for alert in rule.alerts for text in (alert.for_, alert.keep_firing_for)]
    assert max(found) == dt.timedelta(hours=1).total_seconds()


@pytest.mark.slow
def test_any_history_is_judged_as_by_a_naive_loop() -> None:
    """For random histories, begins and ends are those of a loop over the whole past as Prometheus describes it."""
    for seed in range(200):
        random_ = random.Random(seed)
        holds = [random_.random() < random_.choice((0.98, 0.5)) for _ in range(300)]
        episodes = Followed(SLOW)
        found = [(now, begins) for now, on in enumerate(holds) for begins, _, _ in episodes.told([slow] if on else [], now)]
        expected, firing = [], False
        for now in range(300):
            if not firing and now >= 60 and all(holds[now - 60 : now + 1]):
                firing = True
                expected.append((now, True))
            elif firing and not any(holds[now - 29 : now + 1]):
                firing = False
                expected.append((now, False))
        assert found == expected


def test_a_summarized_layer_keeps_its_time() -> None:
    """A layer keeps its time when it moves between the list and the summary."""
    episodes = Followed(LAYERS)
    episodes.told([layer("a"), more("b", "c")], 0)
    assert episodes.told([layer("a"), more("b", "c")], 60) == [(True, "Layers", "a"), (True, "Layers", None)]
    assert episodes.told([layer("b"), more("a", "c")], 61) == [(True, "Layers", "b")]
    assert episodes.told([layer("b")], 62) == [(False, "Layers", "a"), (False, "Layers", None)]


def test_a_worse_problem_has_not_ended() -> None:
    """A warning goes on while the same condition is critical."""
    alerts = [Alert(severity, "x", for_="1m", summary="It waits.") for severity in ("warning", "critical")]
    episodes = Followed(Rule(name="Waits", alerts=tuple(alerts)))
    found = []
    for now in range(400):
        severity = "critical" if 100 <= now < 200 else "warning"
        problems = [Problem("Waits", severity, "It waits.")] if now < 300 else []
        found += [(now, one.severity, begins) for begins, one in episodes.changes(problems, now)]
    assert found == [
        (60, "warning", True), (160, "critical", True), (200, "critical", False), (300, "warning", False),
    ]  # fmt: skip


def test_findings_of_one_kind_are_one_problem() -> None:
    """Two devices with the same alert are one problem with both in its text."""
    episodes = Followed(AT_ONCE)
    both = [Problem("AtOnce", "critical", "Device 0."), Problem("AtOnce", "critical", "Device 1.")]
    ((_, problem),) = episodes.changes(both, 0)
    assert problem.text == "Device 0. Device 1."
    assert episodes.told(both[1:], 1) == []


def test_the_end_ends_what_no_longer_holds() -> None:
    """The last evaluation waits neither for `keep_firing_for` nor for the `for` of what the end has brought."""
    episodes = Followed(SLOW, AT_ONCE, Rule(name="Failed", alerts=(Alert("critical", "x", for_="2m", summary="It has."),)))
    episodes.told([slow], 0)
    assert episodes.told([slow], 60) == [(True, "Slow", None)]
    failed = Problem("Failed", "critical", "An exception ended the training.")
    assert episodes.told([failed], 61, last=True) == [(True, "Failed", None), (False, "Slow", None)]


def test_the_number_of_problems_is_bounded() -> None:
    """Of 20,000 problems the worst 10,000 are followed."""
    episodes = Followed()
    changes = episodes.changes([Problem(f"P{number}", "info", "It is.") for number in range(2 * MOST)], 0)
    assert [one.alert for _, one in changes] == [f"P{number}" for number in range(MOST)]
