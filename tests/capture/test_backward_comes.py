"""A loop that never calls the model itself announces its backwards and evaluations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.capture.scenes import reads_after_backward
from tests.support.scrape import errors, value
from torch_grad_exporter import Exporter, start_exporter


def network() -> torch.nn.Sequential:
    """Return two layers."""
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


def train(exporter: Exporter, model: torch.nn.Sequential, *, says: bool, calls: bool = False, steps: int = 6) -> list[float]:
    """Return the first layer's norm at each step. `says`: the loop announces backwards; `calls`: it calls the model itself."""
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(2):
            inputs = torch.ones(3, 4)
            loss = (model(inputs) if calls else model[2](model[1](model[0](inputs)))).square().sum()
            if says:
                exporter.backward_comes(loss)
            loss.backward()
        norms.append(float(torch.stack([p.grad.square().sum() for p in model[0].parameters()]).sum().sqrt()))  # type: ignore[union-attr]
        optimizer.step()
    return norms


@pytest.mark.parametrize("calls", [False, True])
def test_all_backwards_are_seen(calls: bool) -> None:
    """Announced backwards are seen from the first one on; where the model is called as well, each counts once."""
    torch.manual_seed(0)
    model = network()
    with start_exporter(model, port=None, every=1) as exporter:
        norms = train(exporter, model, says=True, calls=calls)
        assert value(exporter, "torch_train_backward_passes_total") == 12
        assert value(exporter, "torch_grad_captures_total", layer="0") == 6
        assert value(exporter, "torch_grad_norm", layer="0") == pytest.approx(norms[-1], rel=1e-5)
        assert value(exporter, "torch_grad_norm_distribution", layer="0") is None
        assert reads_after_backward(exporter)
        assert errors(exporter) == {}


@pytest.mark.slow
def test_announcements_in_counted_rounds() -> None:
    """Very short steps are mostly only counted; announcements do not end that, and counts stay exact."""
    model = network()
    with start_exporter(model, port=None, every=128, overhead_budget=0.0001) as exporter:
        train(exporter, model, says=True, steps=400)
        assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 400
        assert value(exporter, "torch_train_backward_passes_total") == 800
        assert (value(exporter, "torch_grad_exporter_timing_interval_steps") or 0) > 1


def test_something_that_is_not_a_loss() -> None:
    """It raises nothing, not even after the end."""
    wrong: Any = None
    with start_exporter(network(), port=None) as exporter:
        exporter.backward_comes(wrong)
        exporter.backward_comes(torch.ones(1))  # needs no gradient
    exporter.backward_comes(torch.ones(1))
    exporter.evaluating()


def test_an_announced_evaluation() -> None:
    """The state is `evaluating` until the loop takes it back, or until the next step."""
    model = network()
    with start_exporter(model, port=None) as exporter:
        assert value(exporter, "torch_train_state", state="initialising") == 1
        for end in ("said", "step"):
            train(exporter, model, says=True, steps=1)
            assert value(exporter, "torch_train_state", state="training") == 1
            before = value(exporter, "torch_train_last_activity_timestamp_seconds")
            exporter.evaluating()
            assert value(exporter, "torch_train_state", state="evaluating") == 1
            assert (value(exporter, "torch_train_last_activity_timestamp_seconds") or 0) > (before or 0)
            if end == "said":
                exporter.evaluating(False)
            else:
                train(exporter, model, says=True, steps=1)
            assert value(exporter, "torch_train_state", state="training") == 1
