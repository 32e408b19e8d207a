"""The marks of actions on the live page: which exist, and where they stand."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.support.acting import NORM, World
from tests.support.notified import receiver
from tests.support.scrape import value
from tests.support.tools import eventually
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Event, Measurements, Stop, Webhook
from torch_grad_exporter.collectors.outcomes import LONGEST, MOST, ActionMark, ActionMarks

LAST = "torch_grad_exporter_last_action_timestamp_seconds"
START = 1_700_000_000.0


def high(m: Measurements) -> bool:
    """The norm is above 2."""
    return m.last(NORM) > 2


def test_each_time_is_a_mark_at_its_step() -> None:
    """An action that fails and one that changes the training leave marks with time, step, name and result."""
    world = World()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    world.optimizers = [optimizer]

    def broken(event: Event) -> None:
        raise OSError(event.name)

    world.on(high, Stop(), cooldown=0)
    world.on(high, broken, name="fails")
    world.step = 8
    world.evaluate(2.0, **{NORM: 3.0})
    assert eventually(lambda: len(world.totals.marks.latest()) == 1)
    world.at, world.step = 3.0, 9
    optimizer.step()
    assert [(one.time - START, one.step, one.name, one.action, one.result) for one in world.totals.marks.latest()] == [
        (2, 8, "fails", "broken", "failed"),
        (3, 9, "high", "Stop()", "done"),
    ]
    assert world.totals.marks.last_done == {"Stop": START + 3}
    world.act.close()


def test_marks_are_bounded() -> None:
    """The latest marks are kept with names of a bounded length, and for each action the last time."""
    marks = ActionMarks()
    for number in range(10 * MOST):
        marks.add(ActionMark(float(number), number, "n" * 10_000, "a" * 10_000, "done"), f"action {number % 3}")
    latest = marks.latest()
    assert [mark.step for mark in latest] == list(range(9 * MOST, 10 * MOST))
    assert all(len(mark.name) == len(mark.action) == LONGEST for mark in latest)
    assert marks.last_done == {f"action {number % 3}": float(number) for number in range(10 * MOST - 3, 10 * MOST)}


@pytest.mark.slow
def test_a_stopped_run_shows_and_notifies_it() -> None:
    """The time of the stop is a metric once it was done, and TrainingStoppedItself a problem that a webhook hears of once."""
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    armed = threading.Event()

    def stopped() -> bool:
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return exporter.should_stop

    def train() -> None:
        with exporter:
            exporter.on(lambda m: armed.is_set(), Stop(), name="enough")
            stopped()
            assert value(exporter, LAST, action="Stop") is None
            begun = time.time()
            armed.set()
            assert eventually(stopped)
            assert begun <= (value(exporter, LAST, action="Stop") or 0.0) <= time.time()
            assert eventually(lambda: [one.severity for one in exporter.problems()] == ["warning"])
            assert [one.alert for one in exporter.problems()] == ["TrainingStoppedItself"]
            raise ZeroDivisionError  # a loop that ends so afterwards

    with receiver() as there:
        exporter = start_exporter(net, port=None, every=1, alerts=[Webhook(there.url)])
        with pytest.raises(ZeroDivisionError):
            train()
        told = [(one.json["alert"], one.json["status"]) for one in there.asked]
    assert told.count(("TrainingStoppedItself", "firing")) == 1
    assert ("TrainingStoppedItself", "resolved") not in told
    assert ("TrainingFailed", "firing") in told
