"""When an action happens and what its condition reads, with times, values and problems that the tests choose."""

from __future__ import annotations

import functools
import logging
import math
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.acting import CPU, LOSS, METRICS, NORM, Rows, World, values
from tests.support.tools import PATIENCE, eventually
from torch_grad_exporter.actions import Event, Measurements, Stop
from torch_grad_exporter.actions.act.measurements import MOST_WINDOWS, ConditionError
from torch_grad_exporter.actions.act.step_actions import StepAction, Training
from torch_grad_exporter.rules import RULES, Problem

EXPLODES = Problem("GradientExploding", "critical", "Layer a: it explodes.", "a", value=7.0)
FAILED = Problem("TrainingFailed", "critical", "The training failed.")


def high(m: Measurements) -> bool:
    """The norm is above 2."""
    return m.last(NORM) > 2


class Noted:
    """An action that keeps its events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def came(self, number: int) -> bool:
        """Return whether this many events came, and no more."""
        return eventually(lambda: len(self.events) >= number) and len(self.events) == number


@pytest.fixture(name="world")
def _world() -> Iterator[World]:
    made = World()
    yield made
    made.act.close()


def times(world: World, seconds: range, holds: Any, **options: float) -> list[float]:  # noqa: ANN401 - a function of the time
    """Return the seconds at which a condition acts that holds when the function of the time says so."""
    found: list[float] = []
    world.on(high, lambda event: found.append(event.time - 1_700_000_000.0), **options)
    for at in seconds:
        world.evaluate(float(at), **{NORM: 3.0 if holds(at) else 1.0})
    world.act.close()
    return found


TIMES: list[tuple[int, Callable[[int], bool], dict[str, int], list[int]]] = [
    (650, lambda at: True, {}, [0, 600]),
    (20, lambda at: True, {"for_": 10}, [10]),
    (40, lambda at: at != 9, {"for_": 10}, [20]),
    (5, lambda at: at != 2, {"cooldown": 0}, [0, 1, 3, 4]),
    (50, lambda at: at in (0, 5) or at > 20, {"cooldown": 30}, [0, 30]),
]


@pytest.mark.parametrize(("seconds", "holds", "options", "expected"), TIMES)
def test_times_of_actions(world: World, seconds: int, holds: Any, options: dict[str, float], expected: list[int]) -> None:  # noqa: ANN401
    """A condition acts after it held for `for_` seconds without a break, and again when the cooldown is over and it holds."""
    assert times(world, range(seconds), holds, **options) == expected


def test_an_event_of_a_condition_says_what_it_read(world: World) -> None:
    """An event has the condition's name, the values by the call that read them, the step and the time."""
    noted = Noted()
    world.step = 812
    world.on(lambda m: high(m) and m.last(CPU) > 0.5, noted, name="too high")
    world.evaluate(5.0, **{NORM: 3.0, CPU: 0.75})
    assert noted.came(1)
    read = {f"last({NORM})": 3.0, f"last({CPU})": 0.75}
    assert noted.events == [Event(name="too high", alert=None, values=read, step=812, time=1_700_000_005.0)]


def test_a_rule_acts_when_its_alert_begins(world: World) -> None:
    """The action of a rule gets the problems of that rule alone, and their numbers by layer."""
    noted = Noted()
    world.on("GradientExploding", noted, cooldown=0)
    world.evaluate(0.0)
    world.problems = [EXPLODES, FAILED]
    world.evaluate(1.0)
    assert noted.came(1)
    (event,) = noted.events
    assert (event.name, event.alert, event.values, event.problems) == (
        "GradientExploding", "GradientExploding", {"a": 7.0}, (EXPLODES,),
    )  # fmt: skip


def test_a_rule_holds_as_long_as_its_alert(world: World) -> None:
    """GradientVanishing, whose `for` is ten minutes, acts at second 600."""
    (rule,) = [one for one in RULES if one.name == "GradientVanishing"]
    assert {alert.for_ for alert in rule.alerts} == {"10m"}
    noted = Noted()
    world.on(rule.name, noted)
    world.problems = [Problem(rule.name, rule.alerts[0].severity, "Layer a: it vanishes.", "a", value=1e-9)]
    for at in (0, 300, 599, 600):
        world.evaluate(float(at))
    world.act.close()
    assert [event.time - 1_700_000_000.0 for event in noted.events] == [600]


def test_the_end_is_judged_once_more(world: World) -> None:
    """A run that fails is judged again at its end without the alert's two minutes, and conditions are not."""
    told, condition = Noted(), Noted()
    world.on("TrainingFailed", told)
    world.on(lambda m: True, condition)
    world.problems = [FAILED]
    world.act.evaluate(last=True)
    world.act.close()
    assert [event.alert for event in told.events] == ["TrainingFailed"]
    assert condition.events == []


def test_a_removed_action_is_not_run(world: World) -> None:
    """After `remove()`, which may be called twice, the action gets no event, others go on, and without any nothing is judged."""
    gone, stays = Noted(), Noted()
    world.evaluate(0.0)
    handles = [world.on(high, action, cooldown=0) for action in (gone, stays)]
    world.evaluate(0.0, **{NORM: 3.0})
    assert gone.came(1)
    handles[0].remove()
    handles[0].remove()
    world.evaluate(1.0, **{NORM: 3.0})
    assert stays.came(2)
    handles[1].remove()
    world.evaluate(2.0, **{NORM: 3.0})
    assert world.judgements == 2
    world.act.close()
    assert (len(gone.events), len(stays.events)) == (1, 2)


def test_an_action_that_raises_is_disabled(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """An action that raises, also KeyboardInterrupt, is counted ten times and then disabled, and others go on."""
    calls, other = list[str](), Noted()

    def breaks(event: Event) -> None:
        calls.append("breaks")
        raise ValueError("no cluster")

    def ends(event: Event) -> None:
        raise KeyboardInterrupt

    for action in (breaks, ends, other):
        world.on(high, action, cooldown=0)
    for at in range(15):
        world.evaluate(float(at), **{NORM: 3.0})
        assert other.came(at + 1)
    world.act.close()
    assert len(calls) == world.count("breaks", "failed") == world.count("ends", "failed") == 10
    assert world.errors.counts()["action"] == 20
    lines = [record.getMessage() for record in caplog.records if "breaks" in record.getMessage()]
    assert len(lines) == 2
    assert "the action breaks on high: ValueError: no cluster" in lines[0]
    assert "switched off" in lines[1]
    assert "it raised KeyboardInterrupt, which ends no training from here; use Stop()" in caplog.text


def test_a_condition_that_raises_is_disabled(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A condition that raises is disabled after ten times, one that asks for an unknown metric at once, and the log says why."""
    calls = list[str]()

    def wrong(m: Measurements) -> bool:
        calls.append("wrong")
        return 1 / 0 > 1

    def misspelt(m: Measurements) -> bool:
        calls.append("misspelt")
        return m.last("torch_grad_global_nrm") > 2

    for condition in (wrong, misspelt, lambda m: sys.exit(3)):
        world.on(condition, Noted())
    for at in range(15):
        world.evaluate(float(at))
    assert (calls.count("wrong"), calls.count("misspelt"), world.errors.counts()["action"]) == (10, 1, 21)
    assert "the condition wrong: ZeroDivisionError: division by zero" in caplog.text
    assert "did you mean torch_grad_global_norm" in caplog.text
    assert "it raised SystemExit, which ends no training from here; use Stop()" in caplog.text


def test_addresses_are_not_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Addresses in an exception's message are not logged, since they hold the secrets of webhooks."""
    parts = "HTTPSConnectionPool(host='hooks.example.com', port=443): Max retries exceeded with url: /services/SECRET (refused)"

    def told(m: Measurements) -> bool:
        raise ValueError(f"{parts}; tried https://user:SECRET@example.com/a?token=SECRET too")

    world.on(told, Noted())
    world.evaluate(0.0)
    assert "the condition told: ValueError: HTTPSConnectionPool(host=<address>, port=443): Max retries" in caplog.text
    assert "SECRET" not in caplog.text
    assert "example.com" not in caplog.text


@pytest.mark.slow
def test_waiting_actions_are_bounded(world: World) -> None:
    """Behind an action that hangs a hundred events wait; the others are dropped, and all are counted."""
    going, hangs = threading.Event(), threading.Event()

    def hang(event: Event) -> None:
        going.set()
        assert hangs.wait(PATIENCE)

    world.on(high, hang, cooldown=0)
    world.evaluate(0.0, **{NORM: 3.0})
    assert going.wait(PATIENCE)
    for at in range(1, 1_000):
        world.evaluate(float(at), **{NORM: 3.0})
    assert world.count("hang", "dropped") == 899
    hangs.set()
    assert eventually(lambda: world.count("hang", "done") == 101)


async def later(event: object) -> None:
    """Do nothing until awaited."""


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((high, Noted(), {"for_": -1}), ValueError, "for_"),
        ((high, Noted(), {"name": ""}), TypeError, "name"),
        (("GradientExplodes", Noted()), ValueError, "no such rule; did you mean GradientExploding"),
        (("StragglerRank", Noted()), ValueError, "only Prometheus judges this rule; use a condition"),
        ((3, Noted()), TypeError, "what=3: expected the name of a rule, or a callable"),
        ((high, "stop"), TypeError, "action='stop': expected a callable that takes an Event"),
        ((functools.partial(later), Noted()), TypeError, "what=.*later.*: expected a regular function"),
        ((high, lambda event: (yield)), TypeError, "action=.*: expected a regular function"),
        ((high, Stop), TypeError, r"action=Stop: expected an action, not its class; write Stop\(...\)"),
    ],
)
def test_wrong_arguments_raise(world: World, arguments: tuple[Any, Any], error: type[Exception], message: str) -> None:
    """`on` refuses a wrong argument, names it and registers nothing."""
    with pytest.raises(error, match=message):
        world.on(*arguments[:2], **dict(*arguments[2:]))
    world.evaluate(0.0)
    assert world.judgements == 0


def test_names_of_actions_are_bounded(world: World) -> None:
    """A hundred names of actions are counted separately, and the others together."""
    for number in range(150):
        function = lambda event: None  # noqa: E731 - gets a name
        function.__name__ = f"action{number}"
        world.on(high, function)
    assert len({name for name, _ in world.totals.counts}) == 101


class Named(StepAction):
    """Keeps the layers that the problems named."""

    def __init__(self) -> None:
        self.named: list[tuple[str, ...]] = []

    def choose(self, training: Training, problems: Sequence[Problem]) -> None:
        self.named.append(tuple(layer for problem in problems for layer in (problem.layer, *problem.others) if layer))


def test_a_rule_names_layers_to_its_action(world: World) -> None:
    """An action between steps gets the layers that the problems of its rule name, also those of a summary."""
    action = Named()
    world.on("LayerDead", action, for_=0)
    world.problems = [
        Problem("LayerDead", "warning", "dead", "1"),
        Problem("LayerDead", "warning", "dead", None, ("2", "3")),
        EXPLODES,
    ]
    for at in range(0, 3000, 60):
        world.evaluate(float(at))
    assert set(action.named) == {("1", "2", "3")}


def test_nan_is_not_true(world: World) -> None:
    """A window that is not full is NaN, which is true in Python, and the condition does not hold."""
    world.on(lambda m: m.mean(LOSS, samples=10), Stop())
    world.on(lambda m: m.mean(LOSS, samples=10) < 1 or math.nan, Stop())
    for at in range(3):
        world.evaluate(float(at), **{LOSS: 0.5})
        world.step_over()
    assert not world.stopped
    assert world.errors.counts()["action"] == 0


def test_an_action_between_steps_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """An action that changes the training is logged with its step and its cause, and runs when a step ends."""
    world.step = 7
    world.on(high, Stop(), name="too high")
    with caplog.at_level(logging.WARNING):
        world.evaluate(0.0, **{NORM: 3.0})
        assert not world.stopped
        world.step_over()
    assert world.stopped
    assert "too high: Stop() changed the training at step 8" in caplog.text
    assert world.count("Stop", "done") == 1


# What a condition reads, compared with numpy over the same values

SAMPLE = "torch_grad_sample_step"


def fed(*moments: tuple[float, dict[str, float | Rows]]) -> Measurements:
    """Return measurements that saw these moments."""
    measurements = Measurements(METRICS)
    for at, numbers in moments:
        measurements.begin(values(numbers), at)
    return measurements


def test_windows_in_seconds_are_those_of_numpy() -> None:
    """Mean, largest and smallest value and increase over 10 s at uneven times are those of numpy in float64."""
    generator = random.Random(1)
    now, at, seen = Measurements(METRICS), 0.0, list[tuple[float, float]]()
    compared = 0
    for _ in range(200):
        at += generator.uniform(0.5, 2.0)
        seen.append((at, generator.gauss(0.0, 1.0)))
        now.begin(values({LOSS: seen[-1][1]}), at)
        found = [one(LOSS, seconds=10) for one in (now.mean, now.max, now.min, now.increase)]
        before = [value for then, value in seen if then <= at - 10]
        if not before:
            assert all(map(math.isnan, found))
            continue
        inside = np.array([value for then, value in seen if then > at - 10], dtype=np.float64)
        assert found == pytest.approx([inside.mean(), inside.max(), inside.min(), inside[-1] - before[-1]], rel=1e-12)
        compared += 1
    assert compared > 150


def test_windows_of_samples_are_full_at_their_number() -> None:
    """A window of three samples is NaN before the third, then that of the last three; a sample counts once."""
    now, means = Measurements(METRICS), []
    for step, norm in enumerate((1.0, 2.0, 6.0, 6.0, 10.0)):
        for _ in range(2):
            now.begin(values({NORM: norm, SAMPLE: float(step)}), float(step))
            found = now.mean(NORM, samples=3), now.increase(NORM, samples=3)
        means.append(found)
    assert all(map(math.isnan, (*means[0], *means[1], means[2][1])))
    assert (means[2][0], *means[3], *means[4]) == pytest.approx((3.0, 14 / 3, 5.0, 22 / 3, 8.0), rel=1e-12)


def test_numbers_that_are_not_finite_stay_so() -> None:
    """An infinite value makes the mean infinite, NaN makes all NaN, and the largest finite numbers do not overflow."""
    now = Measurements(METRICS)
    found = []
    for at, loss in enumerate((1e308, 1.7e308, math.inf, math.nan)):
        now.begin(values({LOSS: loss}), float(at))
        found.append([one(LOSS, samples=2) for one in (now.mean, now.max, now.min)])
    assert found[1] == [pytest.approx(1.35e308), 1.7e308, 1e308]
    assert found[2] == [math.inf, math.inf, 1.7e308]
    assert all(map(math.isnan, found[3]))


def test_labels_choose_a_series() -> None:
    """A series is chosen by its labels, and one that does not exist is NaN."""
    now = fed((0.0, {"torch_grad_norm": {("a",): 1.0, ("b",): 2.0}}))
    assert now.last("torch_grad_norm", layer="b") == 2.0
    assert math.isnan(now.last("torch_grad_norm", layer="c"))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda m: m.last("torch_grad_global_nrm"), "no metric 'torch_grad_global_nrm'; did you mean torch_grad_global_norm"),
        (lambda m: m.last("torch_grad_norm"), "2 series here; choose one by layer="),
        (lambda m: m.last("torch_grad_norm", lawyer="a"), "no label 'lawyer'; it has layer"),
        (lambda m: m.last("torch_grad_norm_distribution", layer="a"), "histogram"),
        (lambda m: m.mean(CPU), "one of both"),
        (lambda m: m.mean(CPU, seconds=0), "seconds=0"),
        (lambda m: m.mean(CPU, samples=1.5), "samples=1.5"),
        (lambda m: [m.mean(CPU, seconds=1 + n) for n in range(MOST_WINDOWS + 1)], "more than 1000 windows"),
    ],
)
def test_what_can_never_be_there_raises(ask: object, message: str) -> None:
    """A wrong question raises with what to ask instead."""
    now = fed((0.0, {CPU: 0.5, "torch_grad_norm": {("a",): 1.0, ("b",): 2.0}}))
    assert callable(ask)
    with pytest.raises(ConditionError, match=message):
        ask(now)


def test_what_was_read_is_known() -> None:
    """The values of this evaluation are known by the call that read them."""
    now = fed((0.0, {CPU: 0.5}))
    now.last(CPU)
    now.begin(values({CPU: 0.75, "torch_grad_norm": {("a",): 1.0}}), 1.0)
    now.last("torch_grad_norm", layer="a")
    now.mean(CPU, samples=1)
    assert now.read == {"last(torch_grad_norm, layer=a)": 1.0, f"mean({CPU}, samples=1)": 0.75}
