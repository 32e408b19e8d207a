"""Rounds that are followed together: every count is as if each had been followed by itself, whatever comes in between."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch

from tests.support.loops import PlainLoop
from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import errors, lost, value
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.capture import round_loss
from torch_grad_exporter.capture.phases import PhaseTimes
from torch_grad_exporter.capture.regular_rounds import AFTER_OTHERS, RegularRounds
from torch_grad_exporter.capture.schedule import SamplingSchedule
from torch_grad_exporter.lifecycle import BackgroundThread
from torch_grad_exporter.transfer.events import PLACED

BACKWARDS = "torch_train_backward_passes_total"
CAPTURES = "torch_grad_exporter_captures_total"
DURATIONS = "torch_train_step_duration_seconds_count"
NONFINITE = "torch_grad_nonfinite_steps_total"
PHASE = "torch_train_phase_seconds_total"
SAMPLES = "torch_train_samples_total"
SKIPPED = "torch_train_skipped_steps_total"
STEPS = "torch_train_steps_total"

OFF = dict.fromkeys(("cuda_memory", "gpu", "process", "host", "container", "whole_run"), False)


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regular rounds end by their number and not by time, however busy the machine; and no round is only counted."""
    torch.manual_seed(0)
    monkeypatch.setattr(SamplingSchedule, "only_counted", lambda _schedule, _number: 0)
    monkeypatch.setattr("torch_grad_exporter.capture.regular_rounds.COUNTING_SECONDS", 3600.0)


@contextlib.contextmanager
def watching(model: torch.nn.Module, **options: object) -> Iterator[Exporter]:
    """An exporter that samples a few rounds."""
    with start_exporter(model, port=None, **{"every": 512, "collectors": OFF, **options}) as exporter:
        yield exporter
        assert not errors(exporter)


def regular(exporter: Exporter) -> bool:
    """Whether rounds are followed together now."""
    return exporter._training.capture._count_only.regular.active


class Loop(PlainLoop):
    """A plain loop: `step` trains once; `settle_in` trains until rounds are followed together."""

    def settle_in(self, exporter: Exporter, one: Callable[[], None] | None = None) -> None:
        """Trains until some rounds were followed together, and more will be."""
        for _ in range(2 * PLACED):
            if regular(exporter) and exporter._training.capture._count_only.regular._over >= 3:
                return
            (one or self.step)()
        pytest.fail("no rounds were followed together")


def test_steps_backwards_durations_and_samples_are_exact() -> None:
    """At each scrape every count is that of the loop, and phases are timed throughout."""
    loop, together = Loop(), 0
    with watching(loop.model, every=128) as exporter:
        while loop.steps < 2048:
            loop.step()
            together += regular(exporter)
            if loop.steps % 50 == 0:
                assert value(exporter, STEPS, optimizer="SGD") == loop.steps
                assert value(exporter, BACKWARDS) == loop.steps
                assert value(exporter, SAMPLES) == 5 * loop.steps
                assert value(exporter, DURATIONS) == loop.steps - 1
                assert value(exporter, "torch_grad_exporter_timing_interval_steps") == 1
        assert together > 1000
        assert value(exporter, CAPTURES) == 2048 / 128
        assert lost(exporter) == {}
        elapsed = value(exporter, "torch_train_step_duration_seconds_sum")
        phases = ("outside", "forward", "backward", "optimizer")
        assert sum(value(exporter, PHASE, phase=phase) for phase in phases) == pytest.approx(elapsed, rel=0.2)


class Odd:
    """What may come in between, each as a method; after it the loop goes on as before."""

    def __init__(self, loop: Loop, exporter: Exporter, chance: random.Random) -> None:
        self.loop, self.exporter, self.chance = loop, exporter, chance
        self.second = torch.optim.Adam(loop.model.second.parameters())
        self.other = Loop()

    def skipped(self) -> None:
        for _ in range(self.chance.randint(1, 3)):
            self.loop.backward()

    def longer(self) -> None:
        self.loop.backward()
        self.loop.add()
        self.loop.optimizer.step()

    def longer_with_zeros(self) -> None:
        self.loop.optimizer.zero_grad(**self.loop.clearing)
        for _ in range(2):  # gradients that are zero by themselves were not cleared
            (0 * self.loop.model(batch())).sum().backward()
        self.loop.optimizer.step()

    def evaluation(self) -> None:
        self.loop.model.eval()
        with torch.no_grad():
            self.loop.model(batch())
        self.loop.model.train()

    def evaluation_between(self) -> None:
        outputs = self.loop.model(batch())
        self.evaluation()
        outputs.sum().backward()
        self.loop.optimizer.step()

    def forward_alone(self) -> None:
        self.loop.model(batch())

    def two_forwards(self) -> None:
        self.loop.optimizer.zero_grad()
        (self.loop.model(batch()) + self.loop.model(batch())).sum().backward()
        self.loop.optimizer.step()

    def gradient_alone(self) -> None:
        torch.autograd.grad(self.loop.model(batch()).sum(), self.loop.model.first.weight)

    def second_derivative(self) -> None:
        self.loop.optimizer.zero_grad()
        inputs = batch().requires_grad_()
        (slope,) = torch.autograd.grad(self.loop.model(inputs).square().sum(), inputs, create_graph=True)
        (slope.square().sum() + self.loop.model(inputs).sum()).backward()
        self.loop.optimizer.step()

    def kept_graph(self) -> None:
        self.loop.optimizer.zero_grad()
        loss = self.loop.model(batch()).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        self.loop.optimizer.step()

    def backward_raises(self) -> None:
        def fails(_gradient: torch.Tensor) -> None:
            raise ValueError

        outputs = self.loop.model(batch())
        hidden = self.loop.model.first.weight.register_hook(fails)
        with contextlib.suppress(ValueError):
            outputs.sum().backward()
        hidden.remove()

    def step_raises(self) -> None:
        self.loop.backward()

        def fails(*_arguments: object) -> None:
            raise ValueError

        handle = self.loop.optimizer.register_step_pre_hook(fails)
        with contextlib.suppress(ValueError):
            self.loop.optimizer.step()
        handle.remove()

    def forward_raises(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.loop.model(batch(inputs=7))

    def second_optimizer(self) -> None:
        self.loop.step()
        self.second.step()

    def other_model(self) -> None:
        self.other.step()

    def closure(self) -> None:
        def evaluated() -> torch.Tensor:
            self.loop.optimizer.zero_grad()
            loss = self.loop.model(batch()).square().mean()
            loss.backward()
            return loss

        self.loop.optimizer.step(evaluated)

    def numbered(self) -> None:
        self.loop.step()
        self.exporter.step()

    def reported_twice(self) -> None:
        self.exporter.step()
        self.exporter.step()

    def bad_norm(self) -> None:
        self.loop.backward()
        self.exporter.observe(grad_norm=math.nan)
        if self.chance.random() < 0.5:
            self.loop.optimizer.step()

    def norm_afterwards(self) -> None:
        self.loop.step()
        self.exporter.observe(grad_norm=math.inf)

    def cleared_by_hand(self) -> None:
        self.loop.backward()
        for parameter in self.loop.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.loop.add()
        self.loop.optimizer.step()

    def other_size(self) -> None:
        self.loop.optimizer.zero_grad()
        self.loop.model(batch(3)).sum().backward()
        self.loop.optimizer.step()


KINDS = [name for name in vars(Odd) if not name.startswith("_")]


def counts(exporter: Exporter) -> dict[str, object]:
    """Everything that is counted in rounds, and the number of the present one."""
    names = BACKWARDS, SKIPPED, SAMPLES, DURATIONS, CAPTURES
    steps = {one: value(exporter, STEPS, optimizer=one) for one in exporter._training.optimizers.names}
    outcomes = {one: value(exporter, NONFINITE, outcome=one) for one in ("stepped", "skipped", "unknown")}
    rounds = exporter._training.capture._parts.rounds
    return {**{name: value(exporter, name) for name in names}, "lost": lost(exporter), **steps, **outcomes} | {
        "number": rounds.current.number,
        "backwards": rounds.current.backwards,
        "stepped": set(rounds.current.stepped),
    }


def run(kinds: list[str], seed: int, *, together: bool, clearing: dict[str, bool]) -> list[dict[str, object]]:
    """What is counted after each of these odd things. `together`: whether rounds may be followed together in between."""
    torch.manual_seed(seed)
    chance, loop, found = random.Random(seed), Loop(**clearing), list[dict[str, object]]()
    met = list[bool]()
    with watching(loop.model) as exporter:
        odd = Odd(loop, exporter, chance)
        for _ in range(PLACED + 20):
            loop.step()
        for kind in kinds:
            for _ in range(AFTER_OTHERS + 40):
                loop.step()
            met.append(regular(exporter))
            getattr(odd, kind)()
            for _ in range(chance.randint(0, 3)):
                loop.step()
            exporter._training.capture.settle()
            found.append(counts(exporter))
    assert sum(met) >= len(kinds) // 2 if together else not any(met)  # some come at a round that is followed by itself
    return found


def assert_same(kinds: list[str], seed: int, monkeypatch: pytest.MonkeyPatch, **clearing: bool) -> None:
    """The same is counted as where each round is followed by itself."""
    found = run(kinds, seed, together=True, clearing=clearing)
    with monkeypatch.context() as patch:
        patch.setattr(RegularRounds, "may_begin", lambda _rounds: False)
        expected = run(kinds, seed, together=False, clearing=clearing)
    for kind, one, other in zip(kinds, found, expected, strict=True):
        assert one == other, kind


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_odd_is_counted_as_by_itself(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes between regular rounds, all counts are those of a run in which each round is followed by itself."""
    assert_same([kind, kind], 0, monkeypatch)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("set_to_none", [True, False])
def test_odd_things_by_chance_are_counted_as_by_themselves(seed: int, set_to_none: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of many kinds in one run, with gradients that are dropped and with such that are set to zero."""
    kinds = random.Random(seed).sample(KINDS, 8)
    assert_same(kinds, seed, monkeypatch, set_to_none=set_to_none)


def test_an_accumulation_is_regular() -> None:
    """Rounds of three backwards each are followed together as well, and a shorter one is what it is."""
    loop = Loop()
    with watching(loop.model) as exporter:
        loop.settle_in(exporter, lambda: loop.accumulated(3))
        loop.accumulated(2)
        assert not regular(exporter)
        whole = loop.steps - 1
        for _ in range(40):
            loop.accumulated(3)
        assert regular(exporter)
        assert value(exporter, BACKWARDS) == 3 * (whole + 40) + 2
        assert value(exporter, SKIPPED) == 0
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps


@pytest.mark.parametrize("skips", [True, False])
def test_a_norm_has_the_outcome_of_its_own_step(skips: bool) -> None:
    """Norms that are observed in each round end no regular rounds; one that is NaN has the outcome of its round."""
    loop = Loop()

    def observed(norm: float = 1.0, *, skip: bool = False) -> None:
        loop.backward()
        exporter.observe(grad_norm=norm)
        if not skip:
            loop.optimizer.step()
        loop.steps += not skip

    with watching(loop.model) as exporter:
        loop.settle_in(exporter, observed)
        observed(math.nan, skip=skips)
        for _ in range(3):
            observed()
        assert skips or regular(exporter)
        assert value(exporter, NONFINITE, outcome="stepped") == (not skips)
        assert value(exporter, NONFINITE, outcome="skipped") == skips
        assert value(exporter, NONFINITE, outcome="unknown") == 0


def test_losses_of_models_are_read_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model returns as its loss is read in the rounds that are followed by themselves, and is that of a round."""
    monkeypatch.setattr(round_loss, "READ_SECONDS", -1.0)
    monkeypatch.setattr("torch_grad_exporter.capture.regular_rounds.COUNTED_ROUNDS", 8)

    class WithLoss(Perceptron):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"loss": super().forward(x).square().mean()}

    model, losses = WithLoss(), list[float]()
    optimizer = sgd(model)
    with watching(model) as exporter:
        shown, together = set[float](), 0
        for step in range(PLACED + 60):
            optimizer.zero_grad()
            loss = model(batch())["loss"]
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            together += regular(exporter)
            if step >= PLACED:
                shown.add(value(exporter, "torch_train_loss"))
        assert together > 30
        assert 4 <= len(shown) <= 20
        assert shown <= set(losses)


def test_another_thread_sees_rounds_before_they_are_handed_over() -> None:
    """Durations of rounds that are followed together are in each scrape, once."""
    loop = Loop()
    with watching(loop.model) as exporter:
        loop.settle_in(exporter)
        for _ in range(5):
            loop.step()
            assert regular(exporter)
            assert value(exporter, DURATIONS) == loop.steps - 1
        exporter._training.capture.settle()
        assert value(exporter, DURATIONS) == loop.steps - 1


def test_a_failure_is_counted_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails within regular rounds is counted, and does not reach the loop; later rounds are counted again."""
    loop = Loop()
    with start_exporter(loop.model, port=None, every=512, collectors=OFF) as exporter:
        loop.settle_in(exporter)

        def fails(*_arguments: object) -> None:
            raise ValueError

        with monkeypatch.context() as patch:
            patch.setattr(PhaseTimes, "enter", fails)
            for _ in range(2):
                loop.step()
        failed = errors(exporter)
        assert failed.keys() == {"forward_hook", "optimizer_hook"}  # a forward whose hook has failed tells of no backward
        before = value(exporter, STEPS, optimizer="SGD")
        for _ in range(100):
            loop.step()
        assert value(exporter, STEPS, optimizer="SGD") >= before + 99
        assert errors(exporter) == failed


def test_a_model_and_its_optimizer_are_freed_meanwhile() -> None:
    """Regular rounds hold neither."""
    loop = Loop()
    with start_exporter(loop.model, port=None, every=512, collectors=OFF) as exporter:
        loop.settle_in(exporter)
        assert regular(exporter)
        model, optimizer = weakref.ref(loop.model), weakref.ref(loop.optimizer)
        loop.optimizer.zero_grad()
        del loop
        gc.collect()
        assert model() is None
        assert optimizer() is None


@pytest.mark.parametrize("option", [{"activations": True}, {"nan_origin": "always"}, {"every": 2}])
def test_rounds_that_are_looked_into_are_followed_by_themselves(option: dict[str, object]) -> None:
    """What inspects rounds is told of each; and where every second is sampled, there are too few in between."""
    loop = Loop()
    with watching(loop.model, **option) as exporter:
        for _ in range(PLACED + 100):
            loop.step()
            assert not regular(exporter)


# What it costs


def entered(parameters: int, *, watched: bool) -> float:
    """Python functions that are entered in a step."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(parameters // 2)))
    loop = Loop(model)
    loop.add = lambda _size=5: model(torch.ones(1, 4)).sum().backward()  # type: ignore[method-assign]
    found = Counter[str]()

    def called(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            found[frame.f_code.co_qualname] += 1

    with watching(model) if watched else contextlib.nullcontext() as exporter:
        if exporter is not None:
            loop.settle_in(exporter)
        else:
            loop.step()
        sys.setprofile(called)
        try:
            for _ in range(5):
                loop.step()
        finally:
            sys.setprofile(None)
        assert exporter is None or regular(exporter)
    return found.total() / 5


FUNCTIONS = 64
"""Python functions at most that a step enters for the exporter's sake, PyTorch's among them."""


def test_a_step_enters_few_functions_however_many_parameters_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is not sampled does as much for 400 parameters as for 6."""
    monkeypatch.setattr(BackgroundThread, "start", lambda _thread: None)  # what they do is not of the step
    few, many = (entered(size, watched=True) - entered(size, watched=False) for size in (6, 400))
    assert 6 * 3 <= few <= FUNCTIONS  # six hooks, each with its guard and what it does
    assert many == few
