"""Rounds that are not one forward, one backward and one step: counts and norms are the loop's own, however they are followed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.capture.recorded_loop import RecordedLoop
from tests.capture.scenes import ACCUMULATED, BACKWARDS, CAPTURES, REGIMES, all_regimes, watching
from tests.matrix.loops import CallsSuper
from tests.support.models import Perceptron, batch
from tests.support.scrape import lost, value

PAID = {"every": 4096, "overhead_budget": 0.9}
"""The budget pays for hooks in every round, so rounds are followed without being sampled."""

ROUNDS = {"sampled": 30, "mixed": 120, "counted": 300, "paid": 60}

Round = Callable[[RecordedLoop], None]


# Gradients that are asked for, and not accumulated: neither a backward nor a skipped step


def looked_at_before_the_step(loop: RecordedLoop) -> None:
    """Look at the gradients of another batch between the backward and the step."""
    loop.backward()
    torch.autograd.grad(loop.model(batch()).square().mean(), [*loop.model.parameters()])
    loop.take()


def inputs_require_a_gradient(loop: RecordedLoop) -> None:
    """Take a step on a backward that also gives the inputs a gradient."""
    loop.optimizer.zero_grad()
    loop.run(loop.model(batch().requires_grad_()).square().mean())
    loop.take()


def backward_on_another_thread(loop: RecordedLoop) -> None:
    """Run forward and backward on one thread and take the step on another one."""
    with ThreadPoolExecutor(1) as worker:
        worker.submit(loop.backward).result()
    loop.take()


# Several backwards between two steps, with a clearing in between


def attacked(loop: RecordedLoop, inputs: torch.Tensor) -> torch.Tensor:
    """Change inputs by their gradient from a backward, which leaves some at the parameters as well, and clear those (FGSM)."""
    inputs.requires_grad_()
    loop.run(loop.model(inputs).square().mean())
    loop.optimizer.zero_grad()
    return (inputs + 0.1 * inputs.grad.sign()).detach()


def train_on(loop: RecordedLoop, inputs: torch.Tensor) -> None:
    """Run a backward over these inputs and take the step."""
    loop.run(loop.model(inputs).square().mean())
    loop.take()


def attack(loop: RecordedLoop) -> None:
    """Train on attacked inputs."""
    loop.optimizer.zero_grad()
    train_on(loop, attacked(loop, batch()))


def two_passes(loop: RecordedLoop) -> None:
    """Take two passes, each of two backwards, to one step (SAM)."""
    for _ in range(2):
        loop.backward()
        loop.add()
    loop.take()


ASKED = [looked_at_before_the_step, inputs_require_a_gradient, backward_on_another_thread]


@pytest.mark.slow
@pytest.mark.parametrize("regime", ROUNDS)
@pytest.mark.parametrize("train", ASKED)
def test_one_backward_to_a_step(train: Round, regime: str) -> None:
    """Between plain rounds, backwards, steps and skipped steps are exact, and so is each norm."""
    loop = RecordedLoop()
    with watching(loop.model, **{**REGIMES, "paid": PAID}[regime]) as exporter:
        if regime in REGIMES:
            loop.warm_up(exporter, regime)
        for _ in range(40):
            train(loop)
            if regime == "sampled":
                loop.check(exporter)
        if regime in REGIMES:
            loop.go_on(regime)
        loop.check(exporter)
        assert value(exporter, BACKWARDS) == loop.backwards == loop.steps
        if regime == "sampled":
            assert lost(exporter) == {}
            assert value(exporter, CAPTURES) == loop.steps


@pytest.mark.slow
@all_regimes
@pytest.mark.parametrize(("train", "share"), [(two_passes, 1), (attack, 1), (attack, 2)])
def test_passes_are_no_skipped_steps(train: Round, share: int, regime: str) -> None:
    """Where each or every second round clears in between, steps are exact, none is skipped, and the last pass is shown."""
    loop = RecordedLoop()
    with watching(loop.model, **REGIMES[regime]) as exporter:
        for number in range(ROUNDS[regime]):
            train(loop) if number % share == 0 else loop.step()
        loop.check(exporter)
        if share == 1:
            assert value(exporter, BACKWARDS) == loop.backwards
        if regime == "sampled":
            assert value(exporter, CAPTURES) == loop.steps
            squares = sum(value(exporter, ACCUMULATED, layer=layer) or 0.0 for layer in ("first", "second"))
            assert squares == pytest.approx(sum(norm**2 for norm in loop.norms), rel=1e-5)


ACCUMULATIONS = {
    "longer from then on": (1, [2] * 20, 2),
    "one shorter": (4, [2], 4),
    "one more now and then": (1, [2 if step % 20 == 7 else 1 for step in range(200)], 1),
}
"""Backwards to a step: at first, then in each round, and from then on."""


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["sampled", "counted"])
@pytest.mark.parametrize("kind", ACCUMULATIONS)
def test_accumulations_that_change(kind: str, regime: str) -> None:
    """Where the number of backwards to a step changes, each counts and no step is skipped."""
    first, then, at_last = ACCUMULATIONS[kind]
    loop = RecordedLoop()
    with watching(loop.model, **REGIMES[regime]) as exporter:
        loop.warm_up(exporter, regime, lambda: loop.accumulated(first, set_to_none=False))
        for backwards in then:
            loop.accumulated(backwards, set_to_none=False)
        loop.go_on(regime, lambda: loop.accumulated(at_last))
        loop.check_counts(exporter)
        assert value(exporter, BACKWARDS) == loop.backwards


class Shared(Perceptron):
    """A model whose first layer is in two reentrant checkpoints, so that it receives two gradients in each backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.first, x[:, :6], use_reentrant=True)
        return self.second(x)


def nested() -> RecordedLoop:
    """Return a loop whose step calls that of its base class."""
    loop = RecordedLoop()
    loop.optimizer = CallsSuper(loop.model.parameters(), lr=0.01)
    return loop


@pytest.mark.slow
@all_regimes
@pytest.mark.parametrize("make", [nested, lambda: RecordedLoop(Shared())], ids=["a step in a step", "a layer in two checkpoints"])
def test_what_happens_twice_is_counted_once(make: Callable[[], RecordedLoop], regime: str) -> None:
    """A step within a step is one step, and a layer that receives two gradients in a backward has one of them."""
    loop = make()
    with watching(loop.model, **REGIMES[regime]) as exporter:
        for _ in range(ROUNDS[regime]):
            loop.step()
        loop.check(exporter)
        assert value(exporter, BACKWARDS) == loop.steps


@pytest.mark.slow
@all_regimes
@pytest.mark.parametrize("skipped", [0, 1, 3])
@pytest.mark.parametrize("clears", [True, False])
def test_skipped_steps_before_the_end(skipped: int, clears: bool, regime: str) -> None:
    """After `close()` the skipped steps at the end are counted, whether the last gradients were cleared or not."""
    loop = RecordedLoop()
    with watching(loop.model, **REGIMES[regime]) as exporter:
        loop.warm_up(exporter, regime)
        for _ in range(skipped):
            loop.backward()
            loop.skipped += 1
        if clears:
            loop.optimizer.zero_grad()
    loop.check_counts(exporter)
    assert value(exporter, BACKWARDS) == loop.backwards
