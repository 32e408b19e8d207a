"""Values from the user, on the thread that trains and on others."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from tests.support.loops import train
from tests.support.models import Perceptron, batch, sgd
from tests.support.record import gradients_of, norm
from tests.support.scrape import errors, value
from torch_grad_exporter import start_exporter


def elsewhere(action: Callable[[], None]) -> None:
    """Run an action on another thread to its end."""
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def test_values_may_come_from_another_thread() -> None:
    """Losses, tokens and the epoch may come from another thread."""
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


@pytest.mark.parametrize("wrong", [{"grad_norm": 1e9}, {"grad_divisor": 7}], ids=str)
def test_what_belongs_to_a_round_is_refused(wrong: dict[str, float], caplog: pytest.LogCaptureFixture) -> None:
    """A norm or divisor from another thread, whose step is unknown, is a counted and logged error and changes nothing."""
    model = Perceptron()
    optimizer = sgd(model)
    with start_exporter(model, port=None, every=1) as exporter:
        train(model, optimizer, 3)
        before = value(exporter, "torch_grad_global_norm")
        elsewhere(lambda: exporter.observe(**wrong))
        assert errors(exporter) == {"observe": 1}
        assert "on the thread that trains" in caplog.text
        assert value(exporter, "torch_grad_global_norm") == before
        train(model, optimizer, 1)
        assert value(exporter, "torch_grad_global_norm") == pytest.approx(norm(gradients_of(model).values()), rel=1e-5)


def test_an_evaluation_on_another_thread() -> None:
    """After a forward on another thread, the thread that trains may still observe a norm."""
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
