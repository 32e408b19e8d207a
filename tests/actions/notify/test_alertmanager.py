"""A real Alertmanager with the shipped configuration: from a fault in a training to its receivers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.notified import Trained
from tests.support.real_alertmanager import alertmanager, shortened, webhook
from tests.support.tools import eventually
from torch_grad_exporter.actions import Alertmanager

pytestmark = pytest.mark.server


def test_a_fault_reaches_the_pager(tmp_path: Path) -> None:
    """A NaN loss is a critical alert with the labels and summary of Prometheus, sent to the pager, and resolved at the end."""
    with webhook() as received, alertmanager(tmp_path, shortened(tmp_path, received)) as real:
        trained = Trained(Alertmanager(real.url), run="nan run", rank=0)

        def active() -> list[Mapping[str, Any]]:
            return [alert for alert in real.alerts() if alert["labels"]["alertname"] == "TrainingNonFiniteLoss"]

        with trained.exporter:
            trained.train(nan=True)
            assert eventually(lambda: bool(active()))
            (alert,) = active()
            assert alert["labels"] == {
                "alertname": "TrainingNonFiniteLoss", "severity": "critical", "run": "nan run", "rank": "0",
            }  # fmt: skip
            assert alert["annotations"]["summary"] == "The loss of run nan run is NaN or infinite."
            assert "Check whether it continues." in alert["annotations"]["description"]
            assert [receiver["name"] for receiver in alert["receivers"]] == ["pager"]
            assert eventually(lambda: ("pager", "TrainingNonFiniteLoss", "nan run") in received.firing())
        assert eventually(lambda: ("pager", "TrainingNonFiniteLoss", "nan run") in received.resolved())
        assert active() == []
