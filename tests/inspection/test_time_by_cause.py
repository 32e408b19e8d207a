"""Where the time went: causes add up to the wall clock, and each has what a loop is known to have spent on it."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.models import Perceptron, batch
from tests.support.scrape import OFF, errors
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.capture.interruptions import CHECKPOINT, COMPILING, EVALUATION
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.inspection.time_by_cause import TimeByCause
from torch_grad_exporter.store.records import Mailbox

NAME = "torch_train_time_seconds_total"


class Loop:
    """A loop of half-second steps by a clock of its own, and the truth about it."""

    def __init__(self, chance: random.Random, step: float = 0.5) -> None:
        self.now, self.chance, self.usual = 100.0, chance, step
        self.clock = StepClock(Mailbox(), clock=lambda: self.now)
        self.times = TimeByCause(self.clock, self.clock.interruptions)
        self.truth = Counter[str]()
        self._moments: list[float] = []

    def spend(self, cause: str, seconds: float) -> None:
        self.now += seconds
        self.truth[cause] += seconds

    def step(self, cause: str = "step") -> None:
        self.spend(cause, self.usual * self.chance.uniform(0.9, 1.1))
        self.clock.step_ended(self.now, first_of_round=True, traced=False)
        self._moments.append(self.now)
        if self.chance.random() < 0.3:
            self.drain()

    def drain(self) -> None:
        if self._moments:
            self.times.take(self._moments)
        self._moments = []

    def within(self, *causes: str, seconds: float) -> None:
        """Spend time on the last of these, which interrupts those before it."""
        for cause in causes:
            self.clock.interrupted(cause, now=True, here=True)
        self.spend(causes[-1], seconds)
        for cause in reversed(causes):
            self.clock.interrupted(cause, now=False, here=True)

    def anything(self) -> None:
        """Do one of all that a loop may do."""
        match self.chance.randrange(12):
            case 0:
                self.within(EVALUATION, seconds=self.chance.uniform(0.1, 40))
            case 1:
                self.within(CHECKPOINT, seconds=self.chance.uniform(0.1, 40))
            case 2:
                self.within(*self.chance.choice([(COMPILING,), (EVALUATION, COMPILING)]), seconds=self.chance.uniform(0.1, 40))
            case 3:
                self.spend("stalled", self.chance.uniform(15, 400))
                self.step()
            case 4:
                self.spend("other", self.chance.uniform(4, 8))
                self.step()
            case 5:
                self.clock.active(evaluating=True)
                self.spend("evaluation", self.chance.uniform(1, 40))
                self.clock.active(evaluating=False)
                self.step()
            case 6:  # reported for each batch, and ended by the next step alone
                for _ in range(3):
                    self.clock.interrupted(EVALUATION, now=True, here=True)
                    self.spend("evaluation", self.chance.uniform(1, 10))
                self.step()
            case _:
                for _ in range(self.chance.randrange(10, 40)):
                    self.step()


@pytest.mark.parametrize("seed", range(8))
def test_causes_have_what_was_spent(seed: int) -> None:
    """In random loops by a given clock each cause has its time but for usual differences of steps; none ever falls."""
    loop, before = Loop(random.Random(seed)), Counter[str]()
    loop.within(COMPILING, seconds=30.0)
    loop.step("starting")
    for _ in range(60):
        loop.step()
    for _ in range(100):
        loop.anything()
        if loop.chance.random() < 0.5:
            loop.drain()
            shown = Counter(loop.times.seconds(over=False))
            assert all(shown[cause] >= before[cause] - 1e-9 for cause in before)
            assert shown.total() <= loop.now - 100.0 + 1e-9
            before = shown
    loop.step()
    loop.drain()
    shown = Counter(loop.times.seconds(over=True))
    assert shown.total() == pytest.approx(loop.now - 100.0, rel=1e-9)
    for cause in ("starting", "compiling", "checkpoint"):
        assert shown[cause] == pytest.approx(loop.truth[cause], rel=1e-9), cause
    for cause in ("evaluation", "stalled", "other", "step"):
        # Of an interruption without a reported end, the last step is taken to be a usual one: 10 % of half a second.
        assert shown[cause] == pytest.approx(loop.truth[cause], rel=0.01, abs=0.1 * 0.5 * 40), cause


def test_what_goes_on_shows_at_once() -> None:
    """A stall shows while it lasts, as soon as it is one; a checkpoint while it is written; what may still be a step does not."""
    loop = Loop(random.Random(0))
    for _ in range(100):
        loop.step()
    loop.drain()
    whole = sum(loop.times.seconds(over=False).values())
    loop.now += 3.0
    assert sum(loop.times.seconds(over=False).values()) == whole
    loop.now += 17.0
    assert loop.times.seconds(over=False)["stalled"] == pytest.approx(20.0, abs=0.6)
    loop.step()
    loop.drain()
    loop.clock.interrupted(CHECKPOINT, now=True, here=True)
    loop.now += 60.0
    assert loop.times.seconds(over=False)["checkpoint"] == pytest.approx(60.0, abs=0.6)
    assert loop.times.seconds(over=True)["checkpoint"] == pytest.approx(60.0)
    assert loop.times.seconds(over=False)["stalled"] == pytest.approx(20.0, abs=0.6)
    loop.step()
    loop.drain()
    loop.clock.interruptions.begin(COMPILING)
    loop.now += 50.0
    assert loop.times.seconds(over=False)["compiling"] == 50.0


def test_an_evaluation_that_is_reported_for_each_batch() -> None:
    """It ends at once, however often it was reported."""
    loop = Loop(random.Random(0))
    for _ in range(100):
        loop.step()
    for _ in range(3):
        loop.clock.interrupted(EVALUATION, now=True, here=True)
        loop.now += 5.0
    loop.clock.interrupted(EVALUATION, now=False, here=True)
    loop.now += 50.0
    loop.step()
    loop.drain()
    shown = loop.times.seconds(over=False)
    assert shown["evaluation"] == pytest.approx(15.0)
    assert shown["stalled"] == pytest.approx(50.0, abs=0.6)


@pytest.mark.parametrize(("usual", "slower", "cause"), [(0.5, 5.0, "other"), (5.0, 40.0, "stalled")])
def test_slower_steps_become_usual(usual: float, slower: float, cause: str) -> None:
    """Steps that take eight or ten times as long from some point on are steps, after a few that count as pauses."""
    loop = Loop(random.Random(0), step=usual)
    for _ in range(200):
        loop.step()
    loop.usual = slower
    for _ in range(200):
        loop.step()
    loop.drain()
    shown = loop.times.seconds(over=False)
    assert shown["step"] > 0.9 * 200 * (slower + usual)
    assert 0 < shown[cause] < 0.1 * 200 * slower
    assert loop.times.mean_step == pytest.approx(slower, rel=0.05)


def test_the_mean_step_is_without_a_stall() -> None:
    """A single stall does not change what the MFU is computed from."""
    loop = Loop(random.Random(0))
    for _ in range(100):
        loop.step()
    loop.now += 400.0
    for _ in range(10):
        loop.step()
    loop.drain()
    assert loop.times.mean_step == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("slower", [1.0, 8.0])
def test_training_in_evaluation_mode(slower: float) -> None:
    """Where the model is in evaluation mode in each round, its steps are steps, also if they become slower."""
    loop = Loop(random.Random(0))
    for number in range(300):
        if number == 150:
            loop.usual *= slower
        loop.clock.active(evaluating=True)
        loop.step()
    loop.drain()
    shown = loop.times.seconds(over=True)
    assert shown["evaluation"] == 0
    assert shown["step"] > 0.9 * (150 + 150 * slower) * 0.5


@pytest.mark.parametrize("later", ["over", "evaluation seen", "step"])
def test_what_was_shown_stays(later: str) -> None:
    """No cause falls when the training ends or goes on after it was shown as stalled, and together they stay the wall clock."""
    loop = Loop(random.Random(0))
    for _ in range(100):
        loop.step()
    loop.drain()
    loop.now += 60.0
    before = loop.times.seconds(over=False)
    assert before["stalled"] > 59
    loop.now += 10.0
    match later:
        case "evaluation seen":
            loop.clock.active(evaluating=True)
        case "step":
            loop.clock.active(evaluating=True)
            loop.step()
            loop.drain()
    after = loop.times.seconds(over=later == "over")
    assert all(after[cause] >= before[cause] - 1e-9 for cause in before)
    last = loop.times.seconds(over=True)
    assert all(last[cause] >= after[cause] - 1e-9 for cause in after)
    assert sum(last.values()) == pytest.approx(loop.now - 100.0)


def test_more_interruptions_than_there_is_room_for() -> None:
    """Those of one cause are added up, as where each batch of an evaluation is reported in a context of its own."""
    loop = Loop(random.Random(0))
    loop.step()
    loop.step()
    loop.drain()
    for _ in range(10_000):
        loop.within(EVALUATION, seconds=0.1)
        loop.now += 0.01
    loop.drain()
    assert loop.times.seconds(over=False)["evaluation"] == pytest.approx(1000.0)
    loop.step()
    loop.drain()
    assert loop.times.seconds(over=False)["evaluation"] == pytest.approx(1000.0)


# A real training


def training(model: torch.nn.Module, called: torch.nn.Module) -> Iterator[None]:
    """Take a step of about 10 ms each time that the next is asked for."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        optimizer.zero_grad()
        called(batch(8)).square().mean().backward()
        threading.Event().wait(0.01)
        optimizer.step()
        yield


def times(exporter: Exporter) -> dict[str, float]:
    """The seconds by cause."""
    return {name.partition("/")[2]: seconds for name, seconds in exporter.values(f"^{NAME}/").items()}


@pytest.mark.slow
def test_causes_add_up_to_the_wall_clock(tmp_path: Path) -> None:
    """With a compilation, an evaluation, a checkpoint, a stall and a restart they add up within 1 %, and each has its part."""
    model, before = Perceptron(), time.perf_counter()
    options = {"run": "restarts", "state_dir": tmp_path, "collectors": OFF}
    with start_exporter(model, None, **options) as exporter:
        start = time.perf_counter()  # the exporter counts from a moment between the two
        steps = training(model, torch.compile(model, backend="eager"))
        next(steps)
        first = time.perf_counter()
        for _ in range(50):
            next(steps)
        evaluation = time.perf_counter()
        with exporter.evaluating():
            threading.Event().wait(0.5)
        evaluation = time.perf_counter() - evaluation
        next(steps)
        checkpoint = time.perf_counter()
        with exporter.checkpointing():
            threading.Event().wait(0.7)
        checkpoint = time.perf_counter() - checkpoint
        next(steps)
        stall = time.perf_counter()
        threading.Event().wait(11.0)
        stall = time.perf_counter() - stall
        for _ in range(5):
            next(steps)
        shown, end = times(exporter), time.perf_counter()
        assert errors(exporter) == {}
    assert 0.99 * (end - start) - 0.1 <= sum(shown.values()) <= 1.01 * (end - before)
    assert shown["evaluation"] == pytest.approx(evaluation, abs=0.1)
    assert shown["checkpoint"] == pytest.approx(checkpoint, abs=0.1)
    assert shown["stalled"] == pytest.approx(stall, abs=0.5)
    assert 0 < shown["compiling"] <= first - start
    assert first - start - 0.1 <= shown["compiling"] + shown["starting"] <= first - before
    assert "data" not in shown
    with start_exporter(model, None, **options) as exporter:
        exporter.resume(30)
        steps = training(model, model)
        for _ in range(60):
            next(steps)
        shown, end = times(exporter), time.perf_counter()
        earlier = sum(exporter.values("^torch_train_earlier_time_seconds/").values())
    assert 0.99 * (end - start) - 0.1 <= earlier + sum(shown.values()) <= 1.01 * (end - before)
    assert 0 < shown["recomputed"] < shown["recomputed"] + shown["step"]


def test_an_unreported_evaluation() -> None:
    """Forwards in evaluation mode explain a gap between two steps."""
    model = Perceptron()
    with start_exporter(model, None, collectors=OFF) as exporter:
        steps = training(model, model)
        for _ in range(30):
            next(steps)
        model.eval()
        start = time.perf_counter()
        while time.perf_counter() < start + 1.5:  # while rounds are only counted, forwards show after a second
            model(batch(8))
        took = time.perf_counter() - start
        model.train()
        next(steps)
        shown = times(exporter)
    assert shown["evaluation"] == pytest.approx(took, abs=0.3)


def test_the_share_of_the_data() -> None:
    """Waits for a watched loader in followed rounds count by their share in all steps; without a loader there is no series."""
    model = Perceptron()

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(60):
            threading.Event().wait(0.01)
            yield batch(8)

    with start_exporter(model, None, every=2, collectors=OFF) as exporter:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for inputs in exporter.watch_loader(batches()):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            threading.Event().wait(0.01)
            optimizer.step()
        shown = times(exporter)
    assert shown["data"] / (shown["data"] + shown["step"]) == pytest.approx(0.5, abs=0.2)


def test_a_loader_of_an_evaluation() -> None:
    """Waits for a watched loader within an evaluation are that evaluation's time, and no data of training."""
    model = Perceptron()

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(10):
            threading.Event().wait(0.01)
            yield batch(8)

    with start_exporter(model, None, every=1, collectors=OFF) as exporter:
        steps = training(model, model)
        for _ in range(3):
            next(steps)
        with exporter.evaluating():
            for inputs in exporter.watch_loader(batches()):
                model(inputs)
        next(steps)
        shown = times(exporter)
    assert shown["evaluation"] > 0.1
    assert "data" not in shown


def test_contexts_of_one_cause_within_each_other() -> None:
    """The outer one ends it."""
    model = Perceptron()
    with start_exporter(model, None, collectors=OFF) as exporter:
        steps = training(model, model)
        for _ in range(30):
            next(steps)
        with exporter.checkpointing():
            with exporter.checkpointing():
                pass
            threading.Event().wait(0.5)
        next(steps)
        assert times(exporter)["checkpoint"] >= 0.5


def test_another_thread_interrupts_nothing() -> None:
    """A checkpoint that another thread writes is not what the training waits for; contexts end by themselves and twice."""
    model = Perceptron()
    with start_exporter(model, None, collectors=OFF) as exporter:
        steps = training(model, model)
        for _ in range(3):
            next(steps)
        thread = threading.Thread(target=exporter.checkpointing)
        thread.start()
        thread.join()
        next(steps)
        assert times(exporter)["checkpoint"] == 0
        with exporter.evaluating():
            next(steps)
        exporter.evaluating(False)
        with pytest.raises(KeyError), exporter.checkpointing():
            raise KeyError
        next(steps)
        assert 0 < times(exporter)["checkpoint"] < 0.5
    with exporter.checkpointing(), exporter.evaluating():
        pass
