"""Decisions of rank 0: all ranks act after the same step, nobody does, or the rank that differs says so."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.acting import World
from tests.support.tools import PATIENCE, eventually
from torch_grad_exporter.actions import ScaleLearningRate, Stop
from torch_grad_exporter.actions.act.decisions import GENERATIONS, JobOfRanks
from torch_grad_exporter.actions.act.step_actions import StepAction
from torch_grad_exporter.distributed.store import JobStore

pytestmark = pytest.mark.slow


class Cuttable:
    """A rank's connection to the store. Once `cut` is set nothing is answered; `cut_after`: set it after this key is written."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.cut = threading.Event()
        self.cut_after = ""
        self.written: list[str] = []
        self.asked: list[str] = []

    def compare_set(self, *arguments: str) -> bytes:
        """Do what a store does."""
        self._check()
        self.asked.append(arguments[0])
        return self._store.compare_set(*arguments)

    def set(self, key: str, value: bytes) -> None:
        """Do what a store does."""
        self._check()
        self._store.set(key, value)
        self.written.append(key)
        if self.cut_after and key.endswith(self.cut_after):
            self.cut.set()

    def _check(self) -> None:
        if self.cut.is_set():
            raise OSError("the cable is cut")


class Ranks:
    """The ranks of a job, which step together, with one optimizer each."""

    def __init__(self, number: int, store: dist.Store, wait_seconds: float = PATIENCE) -> None:
        self.cables = [Cuttable(store) for _ in range(number)]
        self.stores = [JobStore(lambda cable=cable: cable) for cable in self.cables]
        jobs = [JobOfRanks(one, "job", rank, number, wait_seconds) for rank, one in enumerate(self.stores)]
        self.worlds = [World(job) for job in jobs]
        self.rates = [0.1] * number
        for world in self.worlds:
            world.optimizers = [torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)]

    def on(self, make: Callable[[], object], cause: int = 0, **options: Any) -> None:  # noqa: ANN401 - as `Exporter.on`
        """Call `on` on all ranks; the condition holds on one of them."""
        for rank, world in enumerate(self.worlds):
            world.on(lambda m, rank=rank: rank == cause, make(), **options)

    def evaluate(self, at: float = 0.0) -> None:
        """Evaluate on all ranks."""
        for world in self.worlds:
            world.evaluate(at)

    def step(self) -> list[tuple[float, bool]]:
        """End a step on all ranks. Returns the learning rate of each, and whether it stops."""
        for world in self.worlds:
            world.step_over()
        return [(world.optimizers[0].param_groups[0]["lr"], world.stopped) for world in self.worlds]

    def until(self, done: Callable[[], bool]) -> bool:
        """Step until something happens; the ranks never differ."""

        def again() -> bool:
            first, *others = self.step()
            assert others == [first] * len(others)
            return done()

        return eventually(again)

    def counts(self, action: str, result: str) -> list[int]:
        """Return how many actions of a name had this result, by rank."""
        return [world.count(action, result) for world in self.worlds]

    def errors(self) -> list[int]:
        """Return how many errors there were, by rank."""
        return [world.errors.counts()["action"] for world in self.worlds]

    @property
    def rate(self) -> float:
        """The learning rate of rank 0."""
        return float(self.worlds[0].optimizers[0].param_groups[0]["lr"])

    def close(self) -> None:
        """End all ranks."""
        for world in self.worlds:
            world.act.close()
        for store in self.stores:
            store.close()


@pytest.fixture(name="make")
def _make() -> Iterator[Callable[..., Ranks]]:
    with contextlib.ExitStack() as stack:
        stack.callback(GENERATIONS.clear)

        def make(*arguments: Any, **options: Any) -> Ranks:  # noqa: ANN401 - as `Ranks`
            ranks = Ranks(*arguments, **options)
            stack.callback(ranks.close)
            return ranks

        yield make


def test_all_ranks_act_after_the_same_step(make: Callable[..., Ranks]) -> None:
    """Three ranks change their learning rate after the same step, and again after the cooldown."""
    ranks = make(3, dist.HashStore())
    ranks.on(lambda: ScaleLearningRate(0.5))
    for at, expected in ((0.0, 0.05), (601.0, 0.025)):
        ranks.evaluate(at)
        ranks.evaluate(at + 1)
        assert ranks.until(lambda expected=expected: ranks.rate == expected)
    assert ranks.counts("ScaleLearningRate", "done") == [2, 2, 2]
    assert ranks.errors() == [0, 0, 0]


def test_steps_that_become_faster_wait_for_the_store(make: Callable[..., Ranks]) -> None:
    """A decision at the first step, whose pace is unknown, is read in time although the steps take microseconds."""
    ranks = make(3, dist.HashStore())
    ranks.on(lambda: ScaleLearningRate(0.5))
    ranks.evaluate()
    assert eventually(lambda: any(key.endswith("answer/0") for key in ranks.cables[0].written))
    until = time.monotonic() + PATIENCE
    while ranks.rate != 0.05:
        first, *others = ranks.step()
        assert others == [first] * 2
        assert time.monotonic() < until
    assert ranks.errors() == [0, 0, 0]


def test_only_a_stop_may_have_its_cause_elsewhere(make: Callable[..., Ranks]) -> None:
    """Rank 1 makes all ranks stop after the same step, and does not judge what changes weights."""
    ranks = make(3, dist.HashStore())
    ranks.on(lambda: ScaleLearningRate(0.5), cause=1)
    ranks.evaluate()
    assert [world.judgements for world in ranks.worlds] == [1, 0, 0]
    ranks.on(Stop, cause=1)
    ranks.evaluate()
    assert ranks.until(lambda: ranks.worlds[0].stopped)
    assert ranks.counts("Stop", "done") == [1, 1, 1]
    assert ranks.counts("ScaleLearningRate", "done") == [0, 0, 0]


class Failing(StepAction):
    """An action that one rank cannot prepare."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def prepare(self, _training: object, _choice: str) -> None:
        if self.fails:
            raise ValueError("no such layer")

    def act(self, _training: object, _prepared: object) -> None:
        pytest.fail("a rank acts alone")


@pytest.mark.parametrize("case", ["another action", "no action", "failing", "silent"])
def test_nobody_acts_where_one_rank_cannot(make: Callable[..., Ranks], case: str, caplog: pytest.LogCaptureFixture) -> None:
    """If a rank has another action, or none, cannot do it or does not answer, no rank does it, and rank 0 says why."""
    ranks = make(2, dist.HashStore())
    first, second = ranks.worlds
    first.on(lambda m: True, Failing(fails=False))
    if case == "no action":
        second.on(lambda m: False, Failing(fails=False)).remove()
        second.on(lambda m: False, Stop())
    elif case != "silent":
        second.on(lambda m: False, ScaleLearningRate(0.5) if case == "another action" else Failing(fails=True))
    ranks.evaluate()
    if case == "silent":
        assert eventually(lambda: any(key.endswith("answer/0") for key in ranks.cables[0].written))
        first.at = 1e6
    assert ranks.until(lambda: first.count("Failing", "refused") == 1)
    message = {
        "another action": "rank 1 has ScaleLearningRate(factor=0.5, min_lr=0), with steps counted from 0 where rank 0 has Fail",
        "no action": "rank 1 has no such action where rank 0 has Failing()",
        "failing": "rank 1 cannot do it, as its log says",
        "silent": "no answer of rank 1",
    }
    assert f"the ranks did not agree on a step: {message[case]}" in caplog.text
    assert ("no such layer" in caplog.text) is (case == "failing")
    assert first.errors.counts()["action"] == 1


@pytest.mark.parametrize("action", [lambda: ScaleLearningRate(0.5), Stop], ids=["weights", "stop"])
def test_a_rank_that_reads_too_late_says_so(
    make: Callable[..., Ranks], action: Callable[[], object], caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that loses the store after its answer counts an error; later it gives up what changes weights, and stops late."""
    ranks = make(2, dist.HashStore(), wait_seconds=0.1)
    ranks.cables[1].cut_after = "answer/1"
    ranks.on(action, cooldown=0)
    first, second = ranks.worlds
    name = type(action()).__name__
    first.evaluate(0.0)
    assert eventually(lambda: ranks.step() and first.count(name, "done") == 1)
    assert second.errors.counts()["action"] >= 1
    assert f"{action()!r}, with steps counted from 0: the job's store: StoreError" in caplog.text
    ranks.cables[1].cut_after = ""
    ranks.cables[1].cut.clear()
    if action is Stop:
        assert eventually(lambda: ranks.step() and second.stopped)
        return
    assert eventually(lambda: ranks.step() and second.count(name, "failed") == 1)
    assert "rank 1 learned too late that all do it after step" in caplog.text
    first.evaluate(1.0)
    assert eventually(lambda: ranks.step() and first.count(name, "refused") == 1)
    assert "rank 1 has disabled it, as its log says" in caplog.text
    rates = [world.optimizers[0].param_groups[0]["lr"] for world in ranks.worlds]
    assert rates == [0.05, 0.1]


def test_a_restarted_job_begins_again(make: Callable[..., Ranks]) -> None:
    """Ranks that start again with the same store ignore the decisions of the earlier start, and act on new ones."""
    store = dist.HashStore()
    earlier = make(2, store)
    earlier.on(lambda: ScaleLearningRate(0.5))
    earlier.evaluate()
    assert earlier.until(lambda: earlier.counts("ScaleLearningRate", "done") == [1, 1])
    earlier.close()
    GENERATIONS.clear()  # as in a new process
    later = make(2, store)
    first, second = later.worlds
    second.on(lambda m: False, ScaleLearningRate(0.5))
    assert eventually(lambda: any(key.endswith("/1/") for key in later.cables[1].asked))  # the decision after the earlier one
    for _ in range(1000):
        second.step_over()
    first.on(lambda m: True, ScaleLearningRate(0.5))
    for _ in range(1000):
        first.step_over()
    assert later.until(lambda: first.step == 1040)  # at a usual pace
    first.evaluate(0.0)
    assert later.until(lambda: later.counts("ScaleLearningRate", "done") == [1, 1])
    assert [world.optimizers[0].param_groups[0]["lr"] for world in later.worlds] == [0.05, 0.05]
    assert later.errors() == [0, 0]
