"""Other threads run the same model while one trains it (reinforcement learning): only the training thread counts."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from tests.capture.recorded_loop import RecordedLoop
from tests.capture.scenes import BACKWARDS, REGIMES, each_regime, watching
from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import errors, value
from tests.support.tools import PATIENCE
from torch_grad_exporter import start_exporter

STEPS = 30

Act = Callable[[torch.nn.Module, torch.nn.Module], None]
"""What an actor does with the model that is trained, and with a copy of it."""


def without_gradients(model: torch.nn.Module, _copied: torch.nn.Module) -> None:
    """Choose an action, as an actor does."""
    with torch.no_grad():
        model(batch())


def with_a_graph(model: torch.nn.Module, _copied: torch.nn.Module) -> None:
    """Run a forward whose graph is dropped."""
    model(batch()).square().mean()


def with_a_backward_on_a_copy(model: torch.nn.Module, copied: torch.nn.Module) -> None:
    """Run both models, and a backward of the copy alone."""
    model(batch())
    copied(batch()).square().mean().backward()


def with_gradients_of_inputs(model: torch.nn.Module, _copied: torch.nn.Module) -> None:
    """Ask for the gradient of the inputs, which touches no gradient of the model."""
    inputs = batch().requires_grad_()
    torch.autograd.grad(model(inputs).sum(), inputs)


ACTS: Sequence[Act] = (without_gradients, with_a_graph, with_a_backward_on_a_copy, with_gradients_of_inputs)

MOMENTS = ("before", "in forward", "forward", "in backward", "backward", "in step", "step")

CHAINS = (MOMENTS, ("in step",), ("before", "backward"), ("forward", "step"))
"""At which moments an actor that never rests ends a forward and begins another one."""


@pytest.fixture(name="actor")
def _actor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


class Meeting(Perceptron):
    """A model that calls `noticed` in the middle of a forward, with what flows there."""

    noticed: Callable[[torch.Tensor], object] = staticmethod(lambda hidden: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        self.noticed(hidden)
        return self.second(hidden)


class Met(RecordedLoop):
    """A loop in which an actor acts from one moment of a round to a later one, in another way at each step.

    `chain`: moments at which it ends one act and begins the next, if it never rests.
    """

    def __init__(self, actor: ThreadPoolExecutor, chain: Collection[str] = ()) -> None:
        super().__init__(Meeting())
        self.optimizer.register_step_pre_hook(lambda *_given: self.at("in step"))
        self.actor, self.chain = actor, chain
        self.training = threading.get_ident()
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.acting: Future[None] | None = None
        self.first, self.last = "", ""
        self.copied = copy.deepcopy(self.model)
        self.model.noticed = self.meet

    def meet(self, hidden: torch.Tensor) -> None:
        """A forward is in its middle."""
        if threading.get_ident() != self.training:
            self.begun.set()
            assert self.may_end.wait(PATIENCE)
            return
        self.at("in forward")
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.at("in backward"))

    def at(self, moment: str) -> None:
        """Let the actor begin or end if this is the moment."""
        if moment in self.chain:
            self.end()
            self.begin()
        elif moment == self.first and self.acting is None:
            self.begin()
        if moment == self.last:
            self.end()

    def begin(self) -> None:
        """Let the actor run to the middle of its forward."""
        self.begun.clear()
        self.may_end.clear()
        acts = ACTS[:3] if self.chain or "step" in self.last else ACTS  # the last one fails after a step
        self.acting = self.actor.submit(acts[self.steps % len(acts)], self.model, self.copied)
        assert self.begun.wait(PATIENCE)

    def end(self) -> None:
        """Let the actor finish, if it acts."""
        if self.acting is not None:
            self.may_end.set()
            self.acting.result()
            self.acting = None

    def met(self, first: str = "", last: str = "") -> None:
        """Train one step with an actor that acts from one moment to the other one."""
        self.first, self.last = first, last
        self.optimizer.zero_grad()
        self.at("before")
        loss = self.model(batch()).square().mean()
        self.at("forward")
        loss.backward()
        self.at("backward")
        self.take()
        self.at("step")
        self.first = self.last = ""


@pytest.mark.slow
@each_regime
@pytest.mark.parametrize("first", MOMENTS)
def test_an_actor_from_one_moment_to_another(first: str, regime: str, actor: ThreadPoolExecutor) -> None:
    """Whatever begins at one moment of a round and ends at this one or a later one changes no count and no norm."""
    ends = itertools.cycle(MOMENTS[MOMENTS.index(first) :])
    loop = Met(actor)
    with watching(loop.model, **REGIMES[regime]) as exporter:
        loop.warm_up(exporter, regime)
        for _ in range(STEPS):
            loop.met(first, next(ends))
            if regime == "sampled":
                loop.check(exporter)
        loop.go_on(regime)
        loop.check(exporter)
        assert value(exporter, BACKWARDS) == loop.steps


@pytest.mark.slow
@each_regime
@pytest.mark.parametrize("moments", CHAINS, ids=", ".join)
def test_an_actor_that_never_rests(moments: Sequence[str], regime: str, actor: ThreadPoolExecutor) -> None:
    """An actor that is always within a forward changes no count and no norm, from the first round on."""
    loop = Met(actor, moments)
    with watching(loop.model, **REGIMES[regime]) as exporter:
        for _ in range(STEPS):
            loop.met()
        loop.chain = ()
        loop.end()
        loop.go_on(regime)
        loop.check(exporter)


@pytest.mark.slow
def test_two_trainings_in_two_threads() -> None:
    """Two models trained in two threads with their own exporters count only their own steps."""
    steps = {"first": 100, "second": 60}
    ready = threading.Barrier(len(steps))
    models = {name: Perceptron() for name in steps}
    exporters = {name: start_exporter(model, port=None, every=3, run=name) for name, model in models.items()}

    def train(name: str) -> None:
        optimizer = sgd(models[name])
        ready.wait(PATIENCE)
        for _ in range(steps[name]):
            optimizer.zero_grad()
            models[name](batch()).square().mean().backward()
            optimizer.step()

    with ThreadPoolExecutor(len(steps)) as pool:
        list(pool.map(train, steps))
    for name, exporter in exporters.items():
        with exporter:
            assert value(exporter, "torch_train_steps_total", optimizer="SGD") == steps[name]
            assert value(exporter, "torch_train_backward_passes_total") == steps[name]
            assert value(exporter, "torch_train_skipped_steps_total") == 0
            assert sum(errors(exporter).values()) == 0
