"""Backwards without a step: skipped steps, passes of one step, and gradients that were cleared before the step."""

from __future__ import annotations

import pytest
import torch

from tests.capture.recorded_loop import RecordedLoop
from tests.capture.scenes import (
    BACKWARDS,
    CAPTURES,
    COUNTED,
    MISSING,
    NORM,
    SKIPPED,
    Loop,
    watching,
    whole,
)
from tests.support.models import Perceptron, batch, sgd
from tests.support.record import norm
from tests.support.scrape import lost, value


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.0001, 0.9])
def test_a_skipped_step_is_followed_by_one_sample(budget: float) -> None:
    """After a skipped step one more round is sampled soon, which shows what is wrong, and only one, whatever the budget pays."""
    loop = Loop()
    with watching(loop.model, every=4096, overhead_budget=budget) as exporter:
        loop.go_on("counted")
        assert value(exporter, CAPTURES) == 1
        loop.backward()
        for _ in range(2):
            loop.go_on("counted")
            assert value(exporter, CAPTURES) == 2
        assert value(exporter, SKIPPED) == 1


# Skipped steps, or passes of one step


def test_skipped_steps_are_counted_at_once_when_known() -> None:
    """After steps with nothing cleared before them, a clearing is a skipped step at once, also right after another one."""
    loop = Loop()
    with watching(loop.model) as exporter:
        for _ in range(3):
            loop.step()
        for skipped in range(1, 4):
            loop.backward()
            loop.backward()
            assert value(exporter, SKIPPED) == skipped
            loop.optimizer.step()


# What a cleared backward reached


def test_a_cleared_backward_around_the_root() -> None:
    """Where submodules are called, a layer that only a skipped backward reached has no gradient either."""
    model = Perceptron()
    optimizer = sgd(model)

    def backward(*, head_only: bool = False) -> None:
        hidden = model.first(batch()).relu()
        model.second(hidden.detach() if head_only else hidden).square().mean().backward()

    with watching(model) as exporter:
        for _ in range(4):
            optimizer.zero_grad()
            backward()
            optimizer.step()
        assert value(exporter, MISSING, layer="first") == 0
        for skipped in range(1, 4):
            optimizer.zero_grad(set_to_none=skipped == 2)
            backward()
            optimizer.zero_grad(set_to_none=skipped == 2)
            backward(head_only=True)
            seen = norm(p.grad.double() for p in model.second.parameters())
            optimizer.step()
            assert value(exporter, SKIPPED) == skipped
            assert value(exporter, MISSING, layer="first") == 2
            assert value(exporter, "torch_grad_norm", layer="second") == pytest.approx(seen)
        assert lost(exporter) == {}


@pytest.mark.slow
def test_counting_goes_on_after_a_skipped_step() -> None:
    """After a skipped step some rounds are followed, and then most are only counted again."""
    loop = Loop()
    with watching(loop.model, **COUNTED) as exporter:
        loop.until_counted(exporter)
        loop.backward()
        loop.until_counted(exporter)
        assert value(exporter, SKIPPED) == 1


@pytest.mark.parametrize("in_place", [True, False])
def test_an_edit_of_zeros_clears_nothing(in_place: bool) -> None:
    """A micro-batch without a gradient whose zeros the loop scales goes on as an accumulation; one that it clears is skipped."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model, every=1) as exporter:
        for number in range(12):
            optimizer.zero_grad()
            for scale in (0.0, 1.0) if number % 2 else (1.0,):
                (scale * model(batch()).square().mean()).backward()
                for parameter in model.parameters() if not scale else ():
                    parameter.grad = parameter.grad.mul_(0.5) if in_place else 0.5 * parameter.grad
            expected = whole(model)
            optimizer.step()
            assert value(exporter, NORM) == pytest.approx(expected, rel=1e-5)
            assert value(exporter, CAPTURES) == number + 1
        assert value(exporter, SKIPPED) == 0
        optimizer.zero_grad(set_to_none=False)
        model(batch()).square().mean().backward()
        optimizer.zero_grad(set_to_none=False)
        model(batch()).square().mean().backward()
        optimizer.step()
        assert value(exporter, SKIPPED) == 1


@pytest.mark.slow
@pytest.mark.parametrize("every", [8, 4096])
def test_layers_that_are_frozen_later(every: int) -> None:
    """From the change on backwards and skipped steps are seen by other parameters; at most one backward is missed."""
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4)))
    loop = RecordedLoop(model)
    with watching(model, every=every) as exporter:
        for number in range(200):
            if number == 60:
                for layer in (model[0], model[3]):
                    layer.requires_grad_(False)
            loop.backward()
            if number > 80 and number % 20 == 0:
                loop.skipped += 1
            else:
                loop.take()
        loop.step()
    loop.check_counts(exporter)
    assert loop.steps + loop.skipped - value(exporter, BACKWARDS) in (0, 1)
