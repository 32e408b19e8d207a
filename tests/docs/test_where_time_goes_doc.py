"""The example of docs/where-time-goes.md runs as it stands, and the page names the metrics."""

from __future__ import annotations

import pytest
import torch

import torch_grad_exporter
from tests.docs.test_commands import blocks
from tests.support.models import Perceptron, sgd
from tests.support.scrape import values
from tests.support.tools import REPOSITORY
from torch_grad_exporter import Exporter
from torch_grad_exporter.collectors.layer_times import METRICS

PAGE = REPOSITORY / "docs" / "where-time-goes.md"


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains, and each layer has the time of both passes."""
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_PORT", "off")
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_EVERY", "1")
    started: list[Exporter] = []
    start = torch_grad_exporter.start_exporter

    def kept(*arguments: object, **options: object) -> Exporter:
        started.append(start(*arguments, **options))  # type: ignore[arg-type]
        return started[-1]

    monkeypatch.setattr(torch_grad_exporter, "start_exporter", kept)
    model = Perceptron()
    batches = [(torch.randn(5, 6), torch.randn(5, 3)) for _ in range(4)]
    names = {"model": model, "optimizer": sgd(model), "batches": batches, "loss_function": torch.nn.functional.mse_loss}
    (example,) = blocks(PAGE, "python")
    exec(example, names)  # noqa: S102 - what a user copies
    found = [dict(labels) for name, labels in values(started[0]) if name == "torch_layer_seconds_total"]
    assert {(one["layer"], one["pass"]) for one in found} == {
        (layer, name) for layer in ("first", "second") for name in ("forward", "backward")
    }


def test_the_page_names_every_metric() -> None:
    """Those of layers, and the one of phases."""
    text = PAGE.read_text(encoding="utf-8")
    assert all(spec.name in text for spec in METRICS.specs)
    assert "torch_train_phase_seconds_total" in text
