"""Failures of reading: each costs one sample, and reading that fails persistently is disabled alone."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.capture.scenes import CAPTURES, STEPS, Loop
from tests.support.scrape import OFF, errors, lost, value
from torch_grad_exporter import start_exporter


def test_reading_that_fails_persistently_is_disabled(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Ten failures are counted in 40 steps, each sample is lost, and steps are counted all the same."""

    def fails(*_arguments: object, **_options: object) -> bool:
        raise ZeroDivisionError

    loop = Loop()
    with caplog.at_level(logging.ERROR, "torch_grad_exporter"):
        exporter = start_exporter(loop.model, port=None, every=1, collectors=OFF)
        with exporter, monkeypatch.context() as patch:
            patch.setattr(torch, "split", fails)
            patch.setattr(torch, "stack", fails)
            patch.setattr(torch, "cat", fails)
            patch.setattr(torch.linalg, "vector_norm", fails)
            for _ in range(40):
                loop.step()
        assert errors(exporter) == {"capture": 10}
        assert len([record for record in caplog.records if "switched off" in record.getMessage()]) == 1
        assert value(exporter, STEPS, optimizer="SGD") == 40
        assert value(exporter, CAPTURES) == 0
        assert lost(exporter) == {"failed": 40}
