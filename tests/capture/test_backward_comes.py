"""A loop in which the forward of the model itself is never run: what it says of its backwards and its evaluations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.scrape import errors, mode, value
from torch_grad_exporter import Exporter, start_exporter


def network() -> torch.nn.Sequential:
    """Two layers."""
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


def train(exporter: Exporter, model: torch.nn.Sequential, *, says: bool, calls: bool = False, steps: int = 6) -> list[float]:
    """Norms of the first layer at each step. `says`: the loop says when a backward comes; `calls`: it calls the model itself."""
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
    """From the first one on, by the cheapest rung; where the model is called as well, each counts once."""
    torch.manual_seed(0)
    model = network()
    with start_exporter(model, port=None, every=1) as exporter:
        norms = train(exporter, model, says=True, calls=calls)
        assert value(exporter, "torch_train_backward_passes_total") == 12
        assert value(exporter, "torch_grad_captures_total", layer="0") == 6
        assert value(exporter, "torch_grad_norm", layer="0") == pytest.approx(norms[-1], rel=1e-5)
        assert value(exporter, "torch_grad_norm_distribution", layer="0") is None
        assert mode(exporter) == "output"
        assert errors(exporter) == {}


def test_without_it_the_first_ones_are_not() -> None:
    """What the call is for."""
    model = network()
    with start_exporter(model, port=None, every=1) as exporter:
        train(exporter, model, says=False)
        assert (value(exporter, "torch_train_backward_passes_total") or 0) < 12
        assert mode(exporter) == "parameter"


def test_nothing_changes_while_steps_are_only_counted() -> None:
    """Very short steps are followed only now and then; the call ends no such stretch, and the count of steps stays exact."""
    model = network()
    with start_exporter(model, port=None) as exporter:
        train(exporter, model, says=True, steps=3000)
        assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 3000
        assert value(exporter, "torch_train_backward_passes_total") == 6000
        assert (value(exporter, "torch_grad_exporter_timing_interval_steps") or 0) > 1


def test_what_is_no_loss() -> None:
    """It is counted as a failure, and raises nothing; after the end it is nothing."""
    wrong: Any = None
    with start_exporter(network(), port=None) as exporter:
        exporter.backward_comes(wrong)
        exporter.backward_comes(torch.ones(1))  # needs no gradient
    exporter.backward_comes(torch.ones(1))
    exporter.evaluating()


def test_evaluating() -> None:
    """The state is that which the loop tells, until it takes it back, or the next step."""
    model = network()
    with start_exporter(model, port=None) as exporter:
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
