"""Loops that change, or do something in an unusual place: what was found wrong in reviews."""

from __future__ import annotations

import pytest
import torch

from tests.capture.recorded_loop import RecordedLoop
from tests.capture.scenes import BACKWARDS, watching, whole
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
