"""Failures of reading: each costs one sample, and a kind that fails persistently is switched off alone."""

from __future__ import annotations

import logging

import pytest

from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import errors, lost, value
from torch_grad_exporter import start_exporter
from torch_grad_exporter.capture.reader import GradientReader


@pytest.mark.parametrize("what", ["_read", "_read_again"])
def test_a_reading_that_fails_persistently_is_switched_off(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten failures of one kind of reading are counted in 60 steps, though all other measuring succeeds in between."""

    def fails(*_arguments: object, **_options: object) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(GradientReader, what, fails)
    model = Perceptron()
    optimizer = sgd(model)
    with caplog.at_level(logging.ERROR, "torch_grad_exporter"), start_exporter(model, port=None, every=1) as exporter:
        for _ in range(60):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            optimizer.step()
        assert errors(exporter) == {"capture": 10}
        assert len([record for record in caplog.records if "switched off" in record.getMessage()]) == 1
        assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 60
        assert value(exporter, "torch_grad_exporter_captures_total") == (0 if what == "_read" else 60)
        assert lost(exporter) == ({"failed": 60} if what == "_read" else {})
