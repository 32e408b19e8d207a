"""Values that the user gives, from the thread that trains and from others."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import errors, value
from torch_grad_exporter import start_exporter


def elsewhere(action: Callable[[], None]) -> None:
    """Runs it on another thread, to its end."""
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """So many steps."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()


def test_values_may_come_from_another_thread() -> None:
    """Losses, tokens and the epoch that another thread gives are shown, and count as no time of the training thread."""
    model = Perceptron()
    optimizer = sgd(model)
    with start_exporter(model, port=None, every=1) as exporter:
        train(model, optimizer, 3)
        elsewhere(lambda: exporter.observe(loss=torch.tensor(0.25), tokens=7, epoch=2))
        train(model, optimizer, 1)
        assert value(exporter, "torch_train_loss") == 0.25
        assert value(exporter, "torch_train_tokens_total") == 7
        assert value(exporter, "torch_train_epoch") == 2
        assert not errors(exporter)


def test_a_norm_from_another_thread_is_none_of_this_round(caplog: pytest.LogCaptureFixture) -> None:
    """Of which step a norm from another thread is cannot be known: it is counted as an error, told, and changes nothing."""
    model = Perceptron()
    optimizer = sgd(model)
    with start_exporter(model, port=None, every=1) as exporter:
        train(model, optimizer, 3)
        before = value(exporter, "torch_grad_global_norm")
        elsewhere(lambda: exporter.observe(grad_norm=1e9))
        assert errors(exporter) == {"observe": 1}
        assert "on the thread that trains" in caplog.text
        assert value(exporter, "torch_grad_global_norm") == before
        exporter.observe(grad_norm=0.5)
        assert value(exporter, "torch_grad_global_norm") == 0.5


def test_rings_of_threads_are_their_own() -> None:
    """Threads that give values at the same time share no buffer of the training thread's."""
    model = Perceptron()
    optimizer = sgd(model)
    with start_exporter(model, port=None, every=1) as exporter:
        train(model, optimizer, 1)
        rings: list[object] = []
        observations = exporter._training.capture._observations
        elsewhere(lambda: rings.append(observations._ring.transfer))
        elsewhere(lambda: rings.append(observations._ring.transfer))
        assert len({id(ring) for ring in (*rings, observations._ring.transfer)}) == 3


def test_an_evaluation_on_another_thread_does_not_become_the_training() -> None:
    """After a forward without gradients on another thread a norm from the thread that trains is taken as before."""
    model = Perceptron()
    optimizer = sgd(model)

    def evaluate() -> None:
        with torch.no_grad():
            model(batch())

    with start_exporter(model, port=None, every=1) as exporter:
        train(model, optimizer, 3)
        elsewhere(evaluate)
        exporter.observe(grad_norm=0.5)
        assert value(exporter, "torch_grad_global_norm") == 0.5
        assert not errors(exporter)
