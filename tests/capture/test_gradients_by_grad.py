"""`torch.autograd.grad` accumulates into no parameter: it is neither a backward nor a skipped step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.capture.recorded_loop import RecordedLoop
from tests.capture.scenes import BACKWARDS, CAPTURES, REGIMES, watching
from tests.support.models import batch
from tests.support.scrape import lost, value

ROUNDS = 40

BUDGETS = {
    **REGIMES,
    "large budget": {"every": 4096, "overhead_budget": 0.9},
    "large budget, sampled": {"every": 1, "overhead_budget": 0.9},
}

Round = Callable[[RecordedLoop], None]


def penalised(loop: RecordedLoop) -> None:
    """Train with the norm of the gradients as a penalty, which takes a second derivative."""
    loop.optimizer.zero_grad()
    loss = loop.model(batch()).square().mean()
    gradients = torch.autograd.grad(loss, [*loop.model.parameters()], create_graph=True)
    (loss + 0.1 * sum(gradient.square().sum() for gradient in gradients)).backward()
    loop.take()


def penalised_at_inputs(loop: RecordedLoop) -> None:
    """Train with the norm of the gradient of the inputs as a penalty (WGAN-GP)."""
    loop.optimizer.zero_grad()
    inputs = batch().requires_grad_()
    loss = loop.model(inputs).square().mean()
    (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
    (loss + 0.1 * (gradient.norm(dim=1) - 1).square().mean()).backward()
    loop.take()


def looked_at(loop: RecordedLoop) -> None:
    """Train one step, then look at gradients twice in an evaluation."""
    loop.step()
    loop.model.eval()
    for _ in range(2):
        torch.autograd.grad(loop.model(batch()).square().mean(), [*loop.model.parameters()])
    loop.model.train()


def looked_at_before_the_step(loop: RecordedLoop) -> None:
    """Look at the gradients of another batch between the backward and the step."""
    loop.backward()
    torch.autograd.grad(loop.model(batch()).square().mean(), [*loop.model.parameters()])
    loop.take()


def looked_at_around_the_root(loop: RecordedLoop) -> None:
    """Train one step, then look at the gradient of a hidden output of submodules."""
    loop.step()
    hidden = loop.model.first(batch()).relu()
    torch.autograd.grad(loop.model.second(hidden).sum(), hidden)


@pytest.mark.slow
@pytest.mark.parametrize("regime", BUDGETS)
@pytest.mark.parametrize("train", [penalised, penalised_at_inputs, looked_at, looked_at_before_the_step, looked_at_around_the_root])
def test_it_is_no_backward(train: Round, regime: str) -> None:
    """Backwards, steps and skipped steps are those without it, and so is the norm."""
    loop = RecordedLoop()
    with watching(loop.model, **BUDGETS[regime]) as exporter:
        if regime in REGIMES:
            loop.warm_up(exporter, regime)
        for _ in range(ROUNDS):
            train(loop)
            if regime == "sampled":
                loop.check(exporter)
        if regime in REGIMES:
            loop.go_on(regime)
        loop.check(exporter)
        assert value(exporter, BACKWARDS) == loop.steps
        if BUDGETS[regime]["every"] == 1:
            assert lost(exporter) == {}
            assert value(exporter, CAPTURES) == loop.steps
