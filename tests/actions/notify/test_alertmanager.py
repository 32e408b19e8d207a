"""A real Alertmanager with the shipped configuration: from a fault in a training to its receivers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.support.notified import Judged, Trained
from tests.support.real_alertmanager import Alertmanager as Real
from tests.support.real_alertmanager import Webhook as Told
from tests.support.real_alertmanager import alertmanager, shortened, webhook
from tests.support.tools import eventually
from torch_grad_exporter.actions import Alertmanager
from torch_grad_exporter.rules import Problem

pytestmark = pytest.mark.server


@pytest.fixture(name="running", scope="module")
def _running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Real, Told]]:
    tmp_path = tmp_path_factory.mktemp("alertmanager")
    with webhook() as told, alertmanager(tmp_path, shortened(tmp_path, told)) as real:
        yield real, told


def of(real: Real, name: str) -> list[Mapping[str, Any]]:
    """Return its alerts of a name."""
    return [alert for alert in real.alerts() if alert["labels"]["alertname"] == name]


def test_a_fault_reaches_the_pager(running: tuple[Real, Told]) -> None:
    """A NaN loss is a critical alert with the labels and summary of Prometheus, sent to the pager, and resolved at the end."""
    real, told = running
    trained = Trained(Alertmanager(real.url), run="nan run", rank=0)
    with trained.exporter:
        trained.train(nan=True)
        assert eventually(lambda: bool(of(real, "TrainingNonFiniteLoss")))
        (alert,) = of(real, "TrainingNonFiniteLoss")
        assert alert["labels"] == {"alertname": "TrainingNonFiniteLoss", "severity": "critical", "run": "nan run", "rank": "0"}
        assert alert["annotations"]["summary"] == "The loss of run nan run is NaN or infinite."
        assert "Check whether it continues." in alert["annotations"]["description"]
        assert [one["name"] for one in alert["receivers"]] == ["pager"]
        assert eventually(lambda: ("pager", "TrainingNonFiniteLoss", "nan run") in told.firing())
    assert eventually(lambda: ("pager", "TrainingNonFiniteLoss", "nan run") in told.resolved())
    assert of(real, "TrainingNonFiniteLoss") == []


def test_alerts_are_routed_and_inhibited(running: tuple[Real, Told]) -> None:
    """Warnings go to the team, information to nobody, and a NaN inhibits the explosion of the same run."""
    real, told = running
    judged = Judged(Alertmanager(real.url), begun=time.time())
    judged.at(
        0,
        Problem("TrainingNonFiniteGradients", "critical", "NaN."),
        Problem("GradientExploding", "warning", "It explodes."),
        Problem("DataLoaderStarvation", "warning", "It waits."),
        Problem("GpuUnderused", "info", "It idles."),
    )
    sent = {("pager", "TrainingNonFiniteGradients", "r"), ("team", "DataLoaderStarvation", "r")}
    assert eventually(lambda: sent <= {*told.firing()})
    assert sorted(one for one in told.firing() if one[2] == "r") == sorted(sent)
    receivers = {one["labels"]["alertname"]: [to["name"] for to in one["receivers"]] for one in real.alerts()}
    assert receivers["GpuUnderused"] == ["nobody"]
    (exploding,) = of(real, "GradientExploding")
    assert exploding["status"]["inhibitedBy"]
    judged.at(1)
    assert eventually(lambda: sent <= {*told.resolved()})
    assert not [one for one in real.alerts() if one["labels"]["run"] == "r"]
