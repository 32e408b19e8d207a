"""When an action happens and what becomes of it, with times, values and problems that the tests choose."""

from __future__ import annotations

import functools
import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.acting import CPU, NORM, World
from tests.support.tools import PATIENCE, eventually, lasting_threads
from torch_grad_exporter.actions import Event, Measurements, ScaleLearningRate, Stop
from torch_grad_exporter.actions.act.between_steps import BetweenSteps, Training
from torch_grad_exporter.actions.act.queue import ROOM
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
        """Whether so many events came, which is waited for, and no more."""
        return eventually(lambda: len(self.events) >= number) and len(self.events) == number


def acted(world: World, name: str) -> int:
    """How many actions were done, or are about to be."""
    assert eventually(lambda: not world.act._actions._waiting)
    return world.count(name, "done")


def times(world: World, seconds: range, holds: Any, **options: float) -> list[float]:  # noqa: ANN401 - a function of the time
    """At which of these seconds a condition acts that holds as the function says."""
    found: list[float] = []
    world.on(high, lambda event: found.append(event.time - 1_700_000_000.0), **options)
    for at in seconds:
        world.evaluate(float(at), **{NORM: 3.0 if holds(at) else 1.0})
    world.act.close()
    return found


def test_it_acts_at_once_and_again_after_the_cooldown() -> None:
    """A condition that always holds acts at second 0, and each 600 seconds: not at 599."""
    assert times(World(), range(1300), lambda at: True) == [0, 600, 1200]


def test_a_condition_has_to_hold_for_so_long() -> None:
    """With `for_=10` it acts at second 10, not at 9."""
    assert times(World(), range(20), lambda at: True, for_=10) == [10]


def test_a_break_begins_the_time_anew() -> None:
    """Nine seconds, a break of one, and then ten seconds."""
    assert times(World(), range(40), lambda at: at != 9, for_=10) == [20]


def test_without_a_cooldown_each_evaluation_acts() -> None:
    """As long as it holds."""
    assert times(World(), range(5), lambda at: at != 2, cooldown=0) == [0, 1, 3, 4]


def test_the_cooldown_goes_on_while_the_condition_does_not_hold() -> None:
    """What holds again within it waits for its end, if it still holds then."""
    assert times(World(), range(50), lambda at: at in (0, 5) or at > 20, cooldown=30) == [0, 30]


def test_an_event_of_a_condition_says_what_it_read() -> None:
    """Its name, the values by the call that read them, the step and the time."""
    world, noted = World(), Noted()
    world.step = 812
    world.on(lambda m: high(m) and m.last(CPU) > 0.5, noted, name="too high")
    world.evaluate(5.0, **{NORM: 3.0, CPU: 0.75})
    assert noted.came(1)
    values = {f"last({NORM})": 3.0, f"last({CPU})": 0.75}
    assert noted.events == [Event(name="too high", alert=None, values=values, step=812, time=1_700_000_005.0)]
    world.act.close()


def test_a_rule_acts_when_its_alert_begins() -> None:
    """With the problems of that rule alone, and their numbers by layer; and no more once they are gone."""
    world, noted = World(), Noted()
    world.on("GradientExploding", noted, cooldown=0)
    world.evaluate(0.0)
    world.problems = [EXPLODES, FAILED]
    world.evaluate(1.0)
    assert noted.came(1)
    (event,) = noted.events
    assert (event.name, event.alert, event.values, event.problems) == (
        "GradientExploding", "GradientExploding", {"a": 7.0}, (EXPLODES,),
    )  # fmt: skip
    world.act.close()


def test_a_rule_has_to_hold_for_as_long_as_its_alert_says() -> None:
    """GradientVanishing, whose `for` is ten minutes, acts at second 600, and with `for_=60` at 660."""
    (rule,) = [one for one in RULES if one.name == "GradientVanishing"]
    assert {alert.for_ for alert in rule.alerts} == {"10m"}
    world, first, second = World(), Noted(), Noted()
    world.on(rule.name, first)
    world.on(rule.name, second, for_=60)
    world.problems = [Problem(rule.name, rule.alerts[0].severity, "Layer a: it vanishes.", "a", value=1e-9)]
    for at in range(700):
        world.evaluate(float(at))
    world.act.close()
    assert [[event.time - 1_700_000_000.0 for event in noted.events] for noted in (first, second)] == [[600], [660]]


def test_what_the_end_brings_is_told() -> None:
    """A run that fails is judged once more when it ends, without the two minutes of its alert. Conditions are not."""
    world, told, condition = World(), Noted(), Noted()
    world.on("TrainingFailed", told)
    world.on(lambda m: True, condition)
    world.problems = [FAILED]
    world.act.evaluate(last=True)
    world.act.close()
    assert [event.alert for event in told.events] == ["TrainingFailed"]
    assert condition.events == []


def test_a_removed_one_does_nothing_and_is_not_judged() -> None:
    """After `remove()`, which may be called twice; others go on."""
    world, gone, stays = World(), Noted(), Noted()
    handle = world.on(high, gone, cooldown=0)
    world.on(high, stays, cooldown=0)
    world.evaluate(0.0, **{NORM: 3.0})
    assert gone.came(1)
    handle.remove()
    handle.remove()
    world.evaluate(1.0, **{NORM: 3.0})
    assert stays.came(2)
    assert gone.came(1)
    world.act.close()


def test_nothing_is_judged_without_any() -> None:
    """Neither before the first `on` nor after the last `remove()`."""
    world = World()
    world.evaluate(0.0)
    handle = world.on(high, Noted())
    world.evaluate(1.0)
    handle.remove()
    world.evaluate(2.0)
    assert world.judged == 1
    world.act.close()


def test_an_action_that_raises_is_logged_once_and_switched_off_after_ten(caplog: pytest.LogCaptureFixture) -> None:
    """Ten failures are counted, one line has its name, and then it is called no more; another action goes on."""
    world, calls, other = World(), [], Noted()

    def breaks(event: Event) -> None:
        calls.append(event)
        raise ValueError("no cluster")

    world.on(high, breaks, cooldown=0)
    world.on(high, other, cooldown=0)
    for at in range(15):
        world.evaluate(float(at), **{NORM: 3.0})
        assert other.came(at + 1)
    world.act.close()
    assert len(calls) == world.count("breaks", "failed") == world.errors.counts()["action"] == 10
    lines = [record.getMessage() for record in caplog.records if "breaks" in record.getMessage()]
    assert len(lines) == 2
    assert "the action breaks on high: ValueError: no cluster" in lines[0]
    assert "switched off" in lines[1]


def test_a_success_ends_the_row_of_failures() -> None:
    """Nine failures and a success, again and again, switch nothing off."""
    world, calls = World(), []

    def sometimes(event: Event) -> None:
        calls.append(event)
        if len(calls) % 10:
            raise ValueError

    world.on(high, sometimes, cooldown=0)
    for at in range(50):
        world.evaluate(float(at), **{NORM: 3.0})
        assert eventually(lambda: len(calls) == at + 1)  # noqa: B023 - called at once
    world.act.close()
    assert (world.count("sometimes", "done"), world.count("sometimes", "failed")) == (5, 45)


def test_a_condition_that_raises_is_switched_off_after_ten(caplog: pytest.LogCaptureFixture) -> None:
    """And is logged with its name."""
    world, calls = World(), []

    def wrong(m: Measurements) -> bool:
        calls.append(m)
        return 1 / 0 > 1

    world.on(wrong, Noted())
    for at in range(15):
        world.evaluate(float(at))
    assert len(calls) == world.errors.counts()["action"] == 10
    assert "the condition wrong: ZeroDivisionError: division by zero" in caplog.text
    world.act.close()


def test_two_of_one_name_are_logged_each(caplog: pytest.LogCaptureFixture) -> None:
    """Two lambdas that raise have a line each, and the second failures of both have none."""
    world = World()
    world.on(lambda m: 1 / 0, Noted())
    world.on(lambda m: {}["key"], Noted())
    world.evaluate(0.0)
    world.evaluate(1.0)
    assert world.errors.counts()["action"] == 4
    assert [record.getMessage().count("Error: ") for record in caplog.records] == [1, 1]
    assert "ZeroDivisionError" in caplog.text
    assert "KeyError" in caplog.text
    world.act.close()


def test_a_wrong_name_switches_a_condition_off_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """One evaluation, one line with names that are near."""
    world, calls = World(), []

    def misspelt(m: Measurements) -> bool:
        calls.append(m)
        return m.last("torch_grad_global_nrm") > 2

    world.on(misspelt, Noted())
    for at in range(3):
        world.evaluate(float(at))
    assert len(calls) == world.errors.counts()["action"] == 1
    assert "did you mean torch_grad_global_norm" in caplog.text
    world.act.close()


def ends(error: BaseException) -> Callable[[object], bool]:
    """A function that raises this."""

    def ends(_: object) -> bool:
        raise error

    return ends


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_a_condition_that_ends_the_program_ends_only_itself(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """`sys.exit` in a condition is a failure of it: the thread that judges goes on, and so do the others."""
    world, noted = World(), Noted()
    world.on(ends(error), Noted())
    world.on(high, noted)
    world.evaluate(0.0, **{NORM: 3.0})
    assert noted.came(1)
    assert f"it raised {type(error).__name__}, which ends no training from here; use Stop()" in caplog.text
    world.act.close()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_an_action_that_ends_the_program_ends_only_itself(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """`sys.exit` in an action is a failure, and the next event still comes."""
    world, noted = World(), Noted()
    world.on(high, ends(error))
    world.on(high, noted)
    world.evaluate(0.0, **{NORM: 3.0})
    assert noted.came(1)
    assert world.count("ends", "failed") == 1
    assert "use Stop()" in caplog.text
    world.act.close()


def test_addresses_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Those in the message of an exception, whole or in parts as urllib3 tells them, hold the secrets of webhooks."""
    world = World()
    parts = "HTTPSConnectionPool(host='hooks.example.com', port=443): Max retries exceeded with url: /services/SECRET (refused)"

    def told(m: Measurements) -> bool:
        raise ValueError(f"{parts}; tried https://user:SECRET@example.com/a?token=SECRET too")

    world.on(told, Noted())
    world.evaluate(0.0)
    assert "the condition told: ValueError: HTTPSConnectionPool(host=<address>, port=443): Max retries" in caplog.text
    assert "; tried <address> too" in caplog.text
    assert "SECRET" not in caplog.text
    assert "example.com" not in caplog.text
    world.act.close()


def test_conditions_may_take_a_twentieth_of_the_time() -> None:
    """One that takes 2 seconds is judged again 40 seconds after its end, not a second after."""
    world = World()

    def slow(m: Measurements) -> bool:
        world.at += 2.0
        return False

    world.on(slow, Noted())
    world.turn()
    assert world.act._until_due() == pytest.approx(40.0)
    world.act.close()


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="the platform has no such signal")
def test_what_a_signals_handler_raises_in_an_action_is_the_trainings() -> None:
    """It passes through the step's end, where the main thread was; the hook is not to blame for it."""

    class HandlerError(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        raise HandlerError

    class Signalled(BetweenSteps):
        def prepared(self, training: Training, _choice: str) -> Callable[[], None]:
            return lambda: signal.raise_signal(signal.SIGUSR1)

    world = World()
    world.on(high, Signalled())
    world.evaluate(0.0, **{NORM: 3.0})
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(HandlerError):
            world.step_over()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert world.errors.counts()["action"] == 0
    world.act.close()


def test_a_handler_that_closes_within_on_leaves_nothing_behind() -> None:
    """The exporter is closed between the check and the end of `on`, which raises, and there is neither trigger nor hook."""
    world = World()
    add = world.act._steps.add

    def closing(*arguments: Any) -> Any:  # noqa: ANN401 - as the real one
        world.act.close()
        return add(*arguments)

    world.act._steps.add = closing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="closed"):
        world.on(high, Stop())
    assert world.act._triggers == ()
    assert world.act._steps.slots == ()
    assert world.act._steps._handle is None


def test_ten_thousand_events_stay_within_bounds() -> None:
    """Behind an action that hangs so many wait as there is room for; the others are dropped, and all are counted."""
    world, going, hangs = World(), threading.Event(), threading.Event()

    def hang(event: Event) -> None:
        going.set()
        assert hangs.wait(PATIENCE)

    world.on(high, hang, cooldown=0)
    world.evaluate(0.0, **{NORM: 3.0})
    assert going.wait(PATIENCE)
    for at in range(1, 10_000):
        world.evaluate(float(at), **{NORM: 3.0})
    assert len(world.act._actions._waiting) == ROOM
    assert world.count("hang", "dropped") == 9_999 - ROOM
    hangs.set()
    assert eventually(lambda: world.count("hang", "done") == ROOM + 1)
    world.act.close()


def test_an_action_that_hangs_does_not_hold_up_the_end() -> None:
    """`close` returns while it hangs; what waits behind it is dropped and counted."""
    world, going, hangs = World(), threading.Event(), threading.Event()

    def hang(event: Event) -> None:
        going.set()
        assert hangs.wait(PATIENCE)

    world.on(high, hang, cooldown=0)
    world.evaluate(0.0, **{NORM: 3.0})
    assert going.wait(PATIENCE)
    world.evaluate(1.0, **{NORM: 3.0})
    start = time.monotonic()
    world.act.close(hurried=True)
    assert time.monotonic() - start < PATIENCE / 2
    assert world.count("hang", "dropped") == 1
    hangs.set()
    assert eventually(lambda: "torch-grad-exporter-action" not in lasting_threads())


def test_what_waits_at_the_end_is_done() -> None:
    """`close` lets a quick action end, and those behind it."""
    world, noted = World(), Noted()
    world.on(high, noted, cooldown=0)
    for at in range(20):
        world.evaluate(float(at), **{NORM: 3.0})
    world.act.close()
    assert len(noted.events) == 20


def test_a_forked_child_does_nothing() -> None:
    """It has no triggers, and takes no new one."""
    world, noted = World(), Noted()
    world.on(high, noted)
    world.act.after_fork_in_child()
    world.evaluate(0.0, **{NORM: 3.0})
    assert world.judged == 0
    with pytest.raises(RuntimeError, match="closed"):
        world.on(high, noted)


async def later(event: object) -> None:
    """A call of it runs nothing."""


class Later:
    """So is one of these."""

    async def __call__(self, event: object) -> None:
        """Runs nothing yet."""


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("GradientExplodes", Noted()), ValueError, "no such rule; did you mean GradientExploding"),
        ((3, Noted()), TypeError, "what=3: expected the name of a rule, or a callable"),
        ((high, "stop"), TypeError, "action='stop': expected a callable that takes an Event"),
        ((high, later), TypeError, "action=.*later.*: expected a plain function"),
        ((high, Later()), TypeError, "action=.*Later.*: expected a plain function"),
        ((functools.partial(later), Noted()), TypeError, "what=.*later.*: expected a plain function"),
        ((high, lambda event: (yield)), TypeError, "action=.*: expected a plain function"),
        ((high, Stop), TypeError, r"action=Stop: expected an action, not its class; write Stop\(...\)"),
    ],
)
def test_wrong_arguments_raise(arguments: tuple[Any, Any], error: type[Exception], message: str) -> None:
    """Before anything is registered, with the argument and the fix."""
    world = World()
    with pytest.raises(error, match=message):
        world.on(*arguments)
    assert world.act._triggers == ()


def test_a_rule_that_one_process_cannot_judge_raises() -> None:
    """Each rule that only a server judges."""
    names = [rule.name for rule in RULES if rule.judge is None]
    assert names
    for name in names:
        with pytest.raises(ValueError, match="let Prometheus do that"):
            World().on(name, Noted())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"for_": -1}, ValueError), ({"for_": "1m"}, TypeError), ({"cooldown": float("nan")}, ValueError),
        ({"cooldown": True}, TypeError), ({"name": ""}, TypeError), ({"name": 3}, TypeError),
    ],
)  # fmt: skip
def test_wrong_options_raise(options: dict[str, Any], error: type[Exception]) -> None:
    """Times that are none, and a name that is none."""
    with pytest.raises(error, match=next(iter(options))):
        World().on(high, Noted(), **options)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [((0,), ValueError), ((-1,), ValueError), ((float("inf"),), ValueError), (("2",), TypeError), ((0.5, -1), ValueError)],
)
def test_wrong_factors_raise(arguments: tuple[Any, ...], error: type[Exception]) -> None:
    """Of `ScaleLearningRate`."""
    with pytest.raises(error, match="expected a number"):
        ScaleLearningRate(*arguments)


def test_names_of_actions_are_bounded() -> None:
    """A hundred are counted apart, and the others together."""
    world = World()
    for number in range(150):
        action = Noted().came
        function = lambda event, action=action: None  # noqa: E731 - gets a name
        function.__name__ = f"action{number}"
        world.on(high, function)
    assert len({name for name, _ in world.totals.counts}) == 101
    world.act.close()


def test_an_action_between_steps_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """It changes the training, so a line says that, at which step, and why."""
    world = World()
    world.step = 7
    world.on(high, Stop(), name="too high")
    with caplog.at_level(logging.WARNING):
        world.evaluate(0.0, **{NORM: 3.0})
        assert not world.stopped
        world.act._steps.step_over()
    assert world.stopped
    assert "too high: Stop() changed the training at step 7" in caplog.text
    assert world.count("Stop", "done") == 1
    world.act.close()
