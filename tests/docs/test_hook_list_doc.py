"""The example of docs/hook-list.md runs, and its list of points is that of the code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

from tests.docs.test_commands import blocks
from tests.support.tools import REPOSITORY
from torch_grad_exporter.integrations.hook_list import POINTS, PRIORITIES
from torch_grad_exporter.integrations.session import running_exporter

PAGE = REPOSITORY / "docs" / "hook-list.md"


def test_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It trains, prints, and ends its exporter."""
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_PORT", "off")
    model = torch.nn.Linear(3, 3)
    names: dict[str, object] = {"model": model, "loader": [torch.ones(2, 3)] * 3, "loss_function": mse_loss}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(blocks(PAGE, "python")[0], names)  # noqa: S102 - what a user copies
    assert capsys.readouterr().out.count("loss ") == 6
    assert running_exporter(model) is None


def test_an_exception(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The exception of the page's second loop reaches the caller, and is what has ended the run."""
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_PORT", "off")
    model, exporters = torch.nn.Linear(3, 3), []

    def train(model: torch.nn.Module, loader: object, hooks: object) -> None:
        exporters.append(running_exporter(model))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        exec(blocks(PAGE, "python")[1], {"model": model, "loader": [], "train": train})  # noqa: S102 - what a user copies
    (exporter,) = exporters
    assert exporter is not None
    exporter.save(tmp_path / "saved.json")
    status = json.loads((tmp_path / "saved.json").read_text())["status"]
    assert (status["state"], status["ended_by"]) == ("failed", "ZeroDivisionError")
    assert running_exporter(model) is None


def test_lists() -> None:
    """Every point and priority is there."""
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{point}`" in text for point in POINTS)
    assert all(f"`{name}` {number}" in text for name, number in PRIORITIES.items())
