"""When a problem begins and ends: by its rule's `for` and `keep_firing_for`, with times that the tests choose."""

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
    """One layer's problem."""
    return Problem("Layers", "warning", f"Layer {name}.", name)


def more(*names: str) -> Problem:
    """That of several layers together."""
    return Problem("Layers", "warning", f"{len(names)} more layers.", others=names)


class Followed:
    """Episodes, and what begins and ends with each evaluation."""

    def __init__(self, *rules: Rule) -> None:
        self._episodes = Episodes(rules)
        self._active: dict[Key, Problem] = {}

    def changes(self, problems: list[Problem], now: float, *, last: bool = False) -> list[tuple[bool, Problem]]:
        """Whether it begins, and the problem, of each change."""
        before = self._active
        self._active = {key: one.problem for key, one in self._episodes.judge(problems, now, last=last).items()}
        begun = [(True, one) for key, one in self._active.items() if key not in before]
        return begun + [(False, one) for key, one in before.items() if key not in self._active]

    def told(self, problems: list[Problem], now: float, *, last: bool = False) -> list[tuple[bool, str, str | None]]:
        """Whether it begins, which alert, and which layer, of each change."""
        return [(begins, one.alert, one.layer) for begins, one in self.changes(problems, now, last=last)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", 0), ("5m", 300), ("1h30m", 5400), ("500ms", 0.5), ("2d", 172800), ("1w", 604800), ("1y", 31536000), ("30s", 30)],
)
def test_durations_are_those_of_prometheus(text: str, expected: float) -> None:
    """Each unit of Prometheus' notation, and several together."""
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["5", "m", "5 m", "1.5h", "-5m", "5m!"])
def test_anything_else_is_no_duration(text: str) -> None:
    """A duration that Prometheus refuses raises."""
    with pytest.raises(ValueError, match="no duration"):
        seconds(text)


def test_every_duration_of_the_rules_can_be_read() -> None:
    """All `for` and `keep_firing_for` of the shipped rules: none is unknown, and some are longer than a minute."""
    found = [seconds(text) for rule in RULES for alert in rule.alerts for text in (alert.for_, alert.keep_firing_for)]
    assert max(found) == dt.timedelta(hours=1).total_seconds()


def test_a_problem_begins_at_the_first_evaluation_after_its_for() -> None:
    """Evaluated each second, a problem with a `for` of a minute begins at second 60, once."""
    episodes = Followed(SLOW)
    begun = [now for now in range(100) if episodes.told([slow], now)]
    assert begun == [60]


def test_a_problem_without_a_for_begins_at_once() -> None:
    """At the first evaluation that finds it, and not again at the second."""
    episodes = Followed(AT_ONCE)
    assert episodes.told([at_once], 5) == [(True, "AtOnce", None)]
    assert episodes.told([at_once], 6) == []
    assert episodes.told([], 7) == [(False, "AtOnce", None)]


def test_a_break_starts_the_for_anew() -> None:
    """59 seconds, a break of one, and then again: it begins 60 seconds after the break."""
    episodes = Followed(SLOW)
    begun = [now for now in range(200) if episodes.told([] if now == 59 else [slow], now)]
    assert begun == [120]


def test_flapping_within_keep_firing_for_is_one_problem() -> None:
    """A problem that comes and goes each 20 seconds begins once, and ends 30 seconds after it held last."""
    episodes = Followed(SLOW)
    changes = []
    for now in range(400):
        holds = now <= 60 or (now < 300 and now // 20 % 2 == 1)
        changes += [(now, begins) for begins, _, _ in episodes.told([slow] if holds else [], now)]
    last_held = max(now for now in range(300) if now // 20 % 2 == 1)
    assert changes == [(60, True), (last_held + 30, False)]


def test_any_history_is_judged_as_a_naive_loop_does() -> None:
    """For random histories, beginnings and ends are those of a loop over the whole past, as Prometheus describes both settings."""
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


def test_each_layer_has_a_time_of_its_own() -> None:
    """A layer that joins later begins later."""
    episodes = Followed(LAYERS)
    found = {now: episodes.told([layer("a")] + ([layer("b")] if now >= 10 else []), now) for now in range(80)}
    assert {now: what for now, what in found.items() if what} == {
        60: [(True, "Layers", "a")], 70: [(True, "Layers", "b")],
    }  # fmt: skip


def test_a_layer_that_was_summed_up_has_held_since_then() -> None:
    """A layer that moves from the sum into the list has not begun anew, and one that moves into the sum has not ended."""
    episodes = Followed(LAYERS)
    episodes.told([layer("a"), more("b", "c")], 0)
    assert episodes.told([layer("a"), more("b", "c")], 60) == [(True, "Layers", "a"), (True, "Layers", None)]
    assert episodes.told([layer("b"), more("a", "c")], 61) == [(True, "Layers", "b")]
    assert episodes.told([layer("b")], 62) == [(False, "Layers", "a"), (False, "Layers", None)]


def test_a_problem_that_gets_worse_has_not_ended() -> None:
    """A warning goes on while the same condition is critical, as with Prometheus; what gets better is a warning again."""
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


def test_a_problem_that_is_critical_at_once_is_told_once() -> None:
    """The lower severity is not told in addition; when it gets better the warning has held since then."""
    alerts = [Alert(severity, "x", for_="1m", summary="It waits.") for severity in ("warning", "critical")]
    episodes = Followed(Rule(name="Waits", alerts=tuple(alerts)))
    found = []
    for now in range(200):
        problem = Problem("Waits", "critical" if now < 100 else "warning", "It waits.")
        found += [(now, one.severity, begins) for begins, one in episodes.changes([problem], now)]
    assert found == [(60, "critical", True), (100, "warning", True), (100, "critical", False)]


def test_several_findings_of_one_kind_are_one_problem() -> None:
    """Two devices with the same alert are one problem, whose sentence has both."""
    episodes = Followed(AT_ONCE)
    both = [Problem("AtOnce", "critical", "Device 0."), Problem("AtOnce", "critical", "Device 1.")]
    ((_, problem),) = episodes.changes(both, 0)
    assert problem.text == "Device 0. Device 1."
    assert episodes.told(both[1:], 1) == []


def test_the_layers_of_an_alert_without_layers_are_no_problems_of_their_own() -> None:
    """An alert of the whole run stays one problem, whichever layer its sentence names first."""
    episodes = Followed(AT_ONCE)
    assert len(episodes.changes([Problem("AtOnce", "critical", "In a, b.", "a", ("b",))], 0)) == 1
    assert episodes.changes([Problem("AtOnce", "critical", "In b.", "b")], 1) == []


def test_the_end_ends_what_no_longer_holds() -> None:
    """At the last evaluation nothing waits for `keep_firing_for`, and what the end has brought does not wait for its `for`."""
    episodes = Followed(SLOW, AT_ONCE, Rule(name="Failed", alerts=(Alert("critical", "x", for_="2m", summary="It has."),)))
    episodes.told([slow], 0)
    assert episodes.told([slow], 60) == [(True, "Slow", None)]
    failed = Problem("Failed", "critical", "An exception ended the training.")
    assert episodes.told([failed], 61, last=True) == [(True, "Failed", None), (False, "Slow", None)]


def test_what_only_began_to_hold_is_not_told_at_the_end() -> None:
    """A problem that has held for less than its `for` when the run ends never begins."""
    episodes = Followed(SLOW)
    episodes.told([slow], 0)
    assert episodes.told([slow], 30, last=True) == []


def test_no_more_than_the_most_are_followed() -> None:
    """Of 20,000 problems, 10,000 are followed: the worst, which come first."""
    episodes = Followed()
    changes = episodes.changes([Problem(f"P{number}", "info", "It is.") for number in range(2 * MOST)], 0)
    assert [one.alert for _, one in changes] == [f"P{number}" for number in range(MOST)]
