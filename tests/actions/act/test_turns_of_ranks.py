"""What ranks do each second so that their actions happen after the same step, with a store and times that the tests choose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.acting import World, world_of_ranks
from torch_grad_exporter.actions import Measurements, ScaleLearningRate, Stop
from torch_grad_exporter.actions.act.between_steps import BetweenSteps, Training
from torch_grad_exporter.distributed.identity import Identity


def train(worlds: list[World], seconds: int, after: Callable[[], object] = lambda: None) -> None:
    """Seconds of a training of ten steps each. `after`: is called after each of the steps of all ranks."""
    for _ in range(seconds):
        for _ in range(10):
            for world in worlds:
                world.step_over()
            after()
        for world in worlds:
            world.turn()


def never(m: Measurements) -> bool:
    """A cause that is not there."""
    return False


def test_all_stop_where_one_has_a_cause() -> None:
    """After one step, which is found within ten seconds; the cause is followed once."""
    _, worlds = world_of_ranks(3)
    for rank, world in enumerate(worlds):
        world.on((lambda m: True) if rank == 1 else never, Stop())
    stopped: list[list[bool]] = []
    train(worlds, 10, lambda: stopped.append([world.stopped for world in worlds]))
    assert [all(one) for one in stopped] == [any(one) for one in stopped]
    assert all(stopped[-1])
    assert [world.count("Stop", "done") for world in worlds] == [1, 1, 1]


def test_a_rank_whose_condition_is_wrong_still_takes_part() -> None:
    """It asks for a metric that is not there, and is switched off on rank 1; rank 0 has a cause, and both stop."""
    _, worlds = world_of_ranks(2)
    worlds[0].on(lambda m: True, Stop())
    worlds[1].on(lambda m: m.last("torch_grad_global_nrm") > 2, Stop())
    train(worlds, 10)
    assert [world.stopped for world in worlds] == [True, True]
    assert worlds[1].errors.counts()["action"] == 1


def test_a_rank_whose_values_are_busy_still_takes_part() -> None:
    """No evaluation of rank 1 comes to an end."""
    _, worlds = world_of_ranks(2)
    worlds[0].on(lambda m: True, Stop())
    worlds[1].on(never, Stop())

    def busy() -> None:
        raise TimeoutError

    worlds[1].act.evaluate = busy  # type: ignore[method-assign]
    train(worlds, 10)
    assert [world.stopped for world in worlds] == [True, True]


def test_a_removed_action_takes_no_part() -> None:
    """Rank 1 has removed its own: nobody acts."""
    _, worlds = world_of_ranks(2)
    worlds[0].on(lambda m: True, Stop())
    worlds[1].on(never, Stop()).remove()
    train(worlds, 20)
    assert [world.stopped for world in worlds] == [False, False]


def test_other_actions_at_the_same_place_never_act() -> None:
    """Rank 0 would stop where rank 1 halves: neither does, and rank 0 is refused at once."""
    _, worlds = world_of_ranks(2)
    worlds[0].on(lambda m: True, Stop())
    worlds[1].on(lambda m: True, ScaleLearningRate(0.5))
    train(worlds, 5)
    assert not worlds[0].stopped
    assert (worlds[0].count("Stop", "refused"), worlds[1].count("ScaleLearningRate", "done")) == (1, 0)


def test_the_same_action_after_another_step_never_acts(caplog: pytest.LogCaptureFixture) -> None:
    """`on` after step 5 on rank 0 and after step 7 on rank 1: their counts differ by two, so neither acts, and it is said why."""
    _, worlds = world_of_ranks(2)
    for world, step in zip(worlds, (5, 7), strict=True):
        world.step = step
        world.on(lambda m: True, Stop())
    train(worlds, 5)
    assert [world.stopped for world in worlds] == [False, False]
    assert "steps counted from 7 where rank 0 has Stop(), with steps counted from 5" in caplog.text


def test_a_second_action_in_the_middle_of_the_training_acts() -> None:
    """`on` after step 5 and after step 50, on both ranks: the second one is agreed on as well."""
    _, worlds = world_of_ranks(2)
    train(worlds, 1)
    for world in worlds:
        world.on(never, ScaleLearningRate(0.5))
    train(worlds, 4)
    for world in worlds:
        world.on(lambda m: True, Stop())
    train(worlds, 10)
    assert [world.stopped for world in worlds] == [True, True]


def test_a_hundred_actions_cost_one_question_a_second() -> None:
    """As long as no rank has a cause; and then one of them is still heard of."""
    store, worlds = world_of_ranks(2)
    cause: list[bool] = []
    for world in worlds:
        for _ in range(99):
            world.on(never, ScaleLearningRate(0.5))
        world.on(lambda m: bool(cause), Stop())
    train(worlds, 2)
    before = store.asked
    train(worlds, 10)
    assert store.asked - before == 2 * 10
    cause.append(True)
    train(worlds, 10)
    assert [world.stopped for world in worlds] == [True, True]


def test_a_bell_that_was_not_heard_is_heard_later() -> None:
    """Rank 1's question after the bell gets no answer; the next one does, and both stop."""
    store, worlds = world_of_ranks(2)
    cause: list[bool] = []
    for world in worlds:
        world.on(lambda m: bool(cause), Stop())
    train(worlds, 3)
    cause.append(True)
    worlds[0].turn()
    cause.clear()
    collect = store.collect

    def once(keys: object, *, seconds: float = 0.0) -> dict[str, bytes]:
        found = collect(keys, seconds=seconds)  # type: ignore[arg-type]
        store.slow, store.collect = 1, collect  # type: ignore[method-assign]
        return found

    store.collect = once  # type: ignore[method-assign]
    worlds[1].turn()
    assert worlds[1].errors.counts()["action"] == 1
    for world in (worlds[1], worlds[0], worlds[1]):
        world.turn()
    train(worlds, 10)
    assert [world.stopped for world in worlds] == [True, True]
    assert not any(key.endswith("/1/proposal") for key in store.kept)  # the first one was enough


class Broken(BetweenSteps):
    """It cannot be prepared on one rank."""

    def __init__(self, *, breaks: bool) -> None:
        self._breaks = breaks

    def prepared(self, training: Training, _choice: str) -> Callable[[], None]:
        if self._breaks:
            raise LookupError
        return training.stop


def test_what_cannot_be_prepared_on_one_rank_happens_on_none() -> None:
    """And an action behind it is not held up."""
    _, worlds = world_of_ranks(2)
    for rank, world in enumerate(worlds):
        world.on(lambda m: True, Broken(breaks=rank == 1))
        world.on(lambda m: True, ScaleLearningRate(0.5))
    train(worlds, 15)
    assert [world.stopped for world in worlds] == [False, False]
    assert [world.count("ScaleLearningRate", "done") for world in worlds] == [1, 1]


def test_a_process_that_does_not_know_of_the_other_ranks_never_acts() -> None:
    """The exporter was started before the process group: `on` raises, and what was taken before the group came does not run."""
    world = World()
    world.on(lambda m: True, Stop())
    world.group = Identity(0, 2)
    with pytest.raises(RuntimeError, match=r"all 2 ranks .* start it after init_process_group"):
        world.on(never, Stop())
    world.evaluate(0.0)
    world.step_over()
    assert not world.stopped
    assert world.errors.counts()["action"] == 1
