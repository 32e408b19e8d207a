"""Several backwards between two steps that are not accumulation: adversarial training clears gradients in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.capture.recorded_loop import RecordedLoop
from tests.capture.scenes import REGIMES, all_regimes, watching
from tests.support.models import batch

ROUNDS = {"sampled": 30, "mixed": 120, "counted": 300}

Attack = Callable[[RecordedLoop, torch.Tensor], torch.Tensor]


def by_backward(loop: RecordedLoop, inputs: torch.Tensor) -> torch.Tensor:
    """Take the gradients of the inputs from a backward, which leaves some at the parameters as well, and clear those (FGSM)."""
    inputs.requires_grad_()
    loop.model(inputs).square().mean().backward()
    loop.optimizer.zero_grad()
    return (inputs + 0.1 * inputs.grad.sign()).detach()


def by_two_backwards(loop: RecordedLoop, inputs: torch.Tensor) -> torch.Tensor:
    """Attack twice (PGD)."""
    return by_backward(loop, by_backward(loop, inputs))


def by_frozen_backward(loop: RecordedLoop, inputs: torch.Tensor) -> torch.Tensor:
    """Attack while no parameter requires a gradient."""
    loop.model.requires_grad_(False)
    attacked = by_backward(loop, inputs)
    loop.model.requires_grad_(True)
    return attacked


def by_grad(loop: RecordedLoop, inputs: torch.Tensor) -> torch.Tensor:
    """Ask for the gradients of the inputs alone."""
    inputs.requires_grad_()
    (gradient,) = torch.autograd.grad(loop.model(inputs).square().mean(), inputs)
    return (inputs + 0.1 * gradient.sign()).detach()


attacks = pytest.mark.parametrize("attack", [by_backward, by_two_backwards, by_frozen_backward, by_grad])


def train(loop: RecordedLoop, attack: Attack | None) -> None:
    """Train one step, with attacked inputs if there is an attack."""
    loop.optimizer.zero_grad()
    inputs = batch() if attack is None else attack(loop, batch())
    loop.model(inputs).square().mean().backward()
    loop.take()


@pytest.mark.slow
@all_regimes
@attacks
def test_each_round_is_attacked(attack: Attack, regime: str) -> None:
    """Steps are exact, nothing is skipped, and the norm is that of the last backward."""
    loop = RecordedLoop()
    with watching(loop.model, **REGIMES[regime]) as exporter:
        for _ in range(ROUNDS[regime]):
            train(loop, attack)
        loop.check(exporter)


@pytest.mark.slow
@all_regimes
@attacks
def test_each_second_round_is_attacked(attack: Attack, regime: str) -> None:
    """The same where every second batch is left as it is."""
    loop = RecordedLoop()
    with watching(loop.model, **REGIMES[regime]) as exporter:
        for number in range(ROUNDS[regime]):
            train(loop, attack if number % 2 else None)
        loop.check(exporter)
