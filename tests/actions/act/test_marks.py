"""The marks of actions on the live page: which exist, and where they stand."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch

from tests.support.acting import NORM, World
from tests.support.notified import receiver
from tests.support.scrape import value
from tests.support.tools import PATIENCE, eventually
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Event, Measurements, Stop, Webhook
from torch_grad_exporter.collectors.happened import LONGEST, MOST, Happened, Happenings

LAST = "torch_grad_exporter_last_action_timestamp_seconds"
START = 1_700_000_000.0


def high(m: Measurements) -> bool:
    """The norm is above 2."""
    return m.last(NORM) > 2


def broken(event: Event) -> None:
    """Raise an error."""
    raise OSError(event.name)


def marks(world: World) -> tuple[Happened, ...]:
    """Return all marks."""
    return world.totals.happened.latest()


def test_each_time_is_a_mark_at_its_step() -> None:
    """An action that is done, one that fails and one that changes the training leave marks with time, step, name and result."""
    world = World()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    world.optimizers = [optimizer]
    called = threading.Event()
    world.on(high, lambda event: called.set(), name="tells")
    world.step = 7
    world.evaluate(1.0, **{NORM: 3.0})
    assert called.wait(PATIENCE)
    world.act.close()
    assert eventually(lambda: marks(world) == (Happened(START + 1, 7, "tells", "lambda", "done"),))
    other = World()
    other.optimizers = [optimizer]
    other.on(high, Stop(), cooldown=0)
    other.on(high, broken, name="fails")
    other.step = 8
    other.evaluate(2.0, **{NORM: 3.0})
    assert eventually(lambda: len(marks(other)) == 1)
    other.at, other.step = 3.0, 9
    optimizer.step()
    assert [(one.time - START, one.step, one.name, one.action, one.result) for one in marks(other)] == [
        (2, 8, "fails", "broken", "failed"),
        (3, 9, "high", "Stop()", "done"),
    ]
    assert other.totals.happened.last_done == {"Stop": START + 3}
    other.act.close()


def test_marks_are_bounded() -> None:
    """The latest marks are kept with names of a bounded length, and for each action the last time."""
    found = Happenings()
    for number in range(10 * MOST):
        found.add(Happened(float(number), number, "n" * 10_000, "a" * 10_000, "done"), f"action {number % 3}")
    latest = found.latest()
    assert [one.step for one in latest] == list(range(9 * MOST, 10 * MOST))
    assert all(len(one.name) == len(one.action) == LONGEST for one in latest)
    assert found.last_done == {f"action {number % 3}": float(number) for number in range(10 * MOST - 3, 10 * MOST)}


@pytest.mark.slow
def test_a_run_shows_when_it_was_last_done() -> None:
    """The time of the last action is a metric once it was done, and the run has the problem TrainingStoppedItself."""
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    armed = threading.Event()

    def step() -> None:
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    with start_exporter(net, port=None, every=1) as exporter:
        step()
        exporter.on(lambda m: armed.is_set(), Stop(), name="enough")
        step()
        assert value(exporter, LAST, action="Stop") is None
        begun = time.time()
        armed.set()

        def stopped() -> bool:
            step()
            return exporter.should_stop

        assert eventually(stopped)
        assert begun <= (value(exporter, LAST, action="Stop") or 0.0) <= time.time()
        assert eventually(lambda: [one.severity for one in exporter.problems()] == ["warning"])
        assert [one.alert for one in exporter.problems()] == ["TrainingStoppedItself"]


@pytest.mark.slow
@pytest.mark.parametrize("ended", [None, ValueError("a loop that ends so")])
def test_a_stopped_run_is_notified_at_its_end(ended: Exception | None) -> None:
    """The webhook hears of the stop once, also where the loop ends by an exception after it."""
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with receiver() as there:
        with contextlib.suppress(ValueError), start_exporter(net, port=None, every=1, alerts=[Webhook(there.url)]) as exporter:
            exporter.on(lambda m: True, Stop())

            def stopped() -> bool:
                net(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                return exporter.should_stop

            assert eventually(stopped)
            if ended is not None:
                raise ended
        told = [(one.json["alert"], one.json["status"]) for one in there.asked]
    assert told.count(("TrainingStoppedItself", "firing")) == 1
    assert ("TrainingStoppedItself", "resolved") not in told
    assert (("TrainingFailed", "firing") in told) == (ended is not None)
