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
from tests.capture.scenes import BACKWARDS, REGIMES, all_regimes, watching
from tests.support.models import Perceptron, batch
from tests.support.scrape import value
from tests.support.tools import PATIENCE

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


acts = pytest.mark.parametrize("act", [without_gradients, with_a_graph, with_a_backward_on_a_copy, with_gradients_of_inputs])


@pytest.fixture(name="actor")
def _actor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.mark.slow
@all_regimes
@acts
def test_an_actor_between_the_parts_of_a_round(act: Act, regime: str, actor: ThreadPoolExecutor) -> None:
    """An actor that acts before the forward, the backward, the step and the clearing changes no count and no norm."""
    loop = RecordedLoop()
    copied = copy.deepcopy(loop.model)

    def acted() -> None:
        actor.submit(act, loop.model, copied).result()

    def step() -> None:
        acted()
        loss = loop.model(batch()).square().mean()
        acted()
        loss.backward()
        acted()
        loop.take()
        acted()
        loop.optimizer.zero_grad()

    with watching(loop.model, **REGIMES[regime]) as exporter:
        loop.warm_up(exporter, regime)
        for _ in range(STEPS):
            step()
            if regime == "sampled":
                loop.check(exporter)
        loop.go_on(regime)
        loop.check(exporter)
        assert value(exporter, BACKWARDS) == loop.steps


MOMENTS = ("before", "in forward", "forward", "in backward", "backward", "in step", "step")


CHAINS = (MOMENTS, ("in step",), ("before", "backward"), ("forward", "step"))
"""At which moments an actor that never rests ends a forward and begins another one."""


class Meeting(Perceptron):
    """A model that calls `noticed` in the middle of a forward, with what flows there."""

    noticed: Callable[[torch.Tensor], object] = staticmethod(lambda hidden: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        self.noticed(hidden)
        return self.second(hidden)


class Met(RecordedLoop):
    """A loop in which an actor's forward begins at one moment of a round and ends at a later one."""

    def __init__(self, actor: ThreadPoolExecutor) -> None:
        super().__init__(Meeting())
        self.optimizer.register_step_pre_hook(lambda *_given: self.at("in step"))
        self.actor = actor
        self.training = threading.get_ident()
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.acting: Future[None] | None = None
        self.begin, self.end = "", ""
        self.model.noticed = self.meet

    def act(self) -> None:
        """Run a forward, as the actor; every second step with a graph."""
        with torch.set_grad_enabled(self.steps % 2 == 0):
            self.model(batch())

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
        if moment == self.begin and self.acting is None:
            self.begun.clear()
            self.may_end.clear()
            self.acting = self.actor.submit(self.act)
            assert self.begun.wait(PATIENCE)
        if moment == self.end and self.acting is not None:
            self.may_end.set()
            self.acting.result()
            self.acting = None

    def met(self, begin: str, end: str) -> None:
        """Train one step with an actor's forward from one moment to the other one."""
        self.begin, self.end = begin, end
        self.optimizer.zero_grad()
        self.at("before")
        loss = self.model(batch()).square().mean()
        self.at("forward")
        loss.backward()
        self.at("backward")
        self.take()
        self.at("step")
        self.begin = self.end = ""


@pytest.mark.slow
@all_regimes
@pytest.mark.parametrize("begin", MOMENTS)
def test_an_actor_from_one_moment_to_another(begin: str, regime: str, actor: ThreadPoolExecutor) -> None:
    """A forward that begins at one moment of a round and ends at this one or a later one changes no count and no norm."""
    ends = itertools.cycle(MOMENTS[MOMENTS.index(begin) :])
    loop = Met(actor)
    with watching(loop.model, **REGIMES[regime]) as exporter:
        loop.warm_up(exporter, regime)
        for _ in range(STEPS):
            loop.met(begin, next(ends))
        loop.go_on(regime)
        loop.check(exporter)


class Chained(Met):
    """The same where the actor never rests: at some moments its forward ends and the next one begins."""

    def __init__(self, actor: ThreadPoolExecutor, moments: Collection[str]) -> None:
        super().__init__(actor)
        self.moments, self.chained = moments, True

    def at(self, moment: str) -> None:
        """End one forward and begin another one."""
        if moment in self.moments and self.chained:
            self.finish()
            self.begun.clear()
            self.may_end.clear()
            self.acting = self.actor.submit(self.act)
            assert self.begun.wait(PATIENCE)

    def finish(self) -> None:
        """End the forward that is under way."""
        if self.acting is not None:
            self.may_end.set()
            self.acting.result()
            self.acting = None


@pytest.mark.slow
@all_regimes
@pytest.mark.parametrize("moments", CHAINS, ids=", ".join)
def test_an_actor_that_never_rests(moments: Sequence[str], regime: str, actor: ThreadPoolExecutor) -> None:
    """An actor that is always within a forward changes no count and no norm, from the first round on."""
    loop = Chained(actor, moments)
    with watching(loop.model, **REGIMES[regime]) as exporter:
        for _ in range(STEPS):
            loop.met("", "")
        loop.chained = False
        loop.finish()
        loop.go_on(regime)
        loop.check(exporter)
