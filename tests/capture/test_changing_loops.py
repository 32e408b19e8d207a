"""Loops that change, or do something in an unusual place: what was found wrong in reviews."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.capture.recorded_loop import RecordedLoop
from tests.capture.scenes import BACKWARDS, CAPTURES, REGIMES, all_regimes, reads_after_backward, watching, whole
from tests.support.models import batch, sgd
from tests.support.scrape import value

AFTER = "torch_grad_global_norm_after_clip"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_past_versions(dtype: torch.dtype) -> None:
    """Gradients that are clipped through `.data` leave no trace in versions; each sample has the right norm."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(dtype)
    optimizer = sgd(model)
    with watching(model) as exporter:
        for _ in range(20):
            optimizer.zero_grad()
            model(batch().to(dtype)).float().square().mean().backward()
            factor = 0.01 / whole(model)
            for parameter in model.parameters():
                parameter.grad.data.mul_(factor)
            expected = whole(model)
            optimizer.step()
            assert value(exporter, AFTER) == pytest.approx(expected, rel=1e-2)


def test_a_single_element_at_the_step() -> None:
    """A single element that every second step writes to in place shows in its norm, and in no other."""
    loop = RecordedLoop(torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Linear(64, 3)))
    with watching(loop.model) as exporter:
        for number in range(20):
            loop.backward()
            if number % 2:
                loop.model[0].weight.grad[0, 0] = 1.0
            expected = whole(loop.model)
            loop.take()
            assert value(exporter, AFTER) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@all_regimes
def test_backward_on_another_thread(regime: str) -> None:
    """Forward and backward on one thread and the step on another are counted and read as usual."""
    loop = RecordedLoop()
    with watching(loop.model, **REGIMES[regime]) as exporter, ThreadPoolExecutor(1) as worker:
        for number in range(120):
            worker.submit(loop.backward).result()
            if number % 20 == 19:
                loop.skipped += 1
            else:
                loop.take()
        loop.step()
        loop.check(exporter)
        assert value(exporter, BACKWARDS) == loop.steps + loop.skipped
        assert reads_after_backward(exporter)


class Nested(torch.optim.SGD):
    """An optimizer whose step calls that of its base class, which reports as well."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take a step."""
        return super().step(closure)


@pytest.mark.slow
@all_regimes
def test_a_step_within_a_step(regime: str) -> None:
    """A step that calls that of its base class is one step, however many there are."""
    loop = RecordedLoop()
    loop.optimizer = Nested(loop.model.parameters(), lr=0.01)
    with watching(loop.model, **REGIMES[regime]) as exporter:
        for _ in range(400):
            loop.step()
        loop.check(exporter)
        assert value(exporter, BACKWARDS) == loop.steps


@pytest.mark.slow
@all_regimes
def test_inputs_that_always_require_a_gradient(regime: str) -> None:
    """Where steps are taken on backwards that give inputs a gradient, a cleared one is a skipped step."""
    loop = RecordedLoop()
    with watching(loop.model, **REGIMES[regime]) as exporter:
        for number in range(120):
            loop.optimizer.zero_grad()
            loop.model(batch().requires_grad_()).square().mean().backward()
            if number % 20 == 19:
                loop.skipped += 1
            else:
                loop.take()
        loop.step()
        loop.check(exporter)


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


@pytest.mark.slow
def test_parameters_that_are_assigned_later() -> None:
    """After `load_state_dict(assign=True)` with a new optimizer backwards and samples go on; at most one is missed each time."""
    loop = RecordedLoop()
    with watching(loop.model, every=8) as exporter:
        for number in range(120):
            if number % 40 == 39:
                state = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
                loop.model.load_state_dict(state, assign=True)
                loop.optimizer = sgd(loop.model)
            loop.step()
        assert loop.steps - value(exporter, BACKWARDS) <= 3
        assert value(exporter, CAPTURES) >= 10
        loop.check(exporter)
