"""The examples of the pages on inspection and of the hook list run, and print what the pages show."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import torch_grad_exporter
from tests.support.models import Perceptron, sgd
from tests.support.pages import blocks
from tests.support.scrape import Key, values
from tests.support.tools import REPOSITORY
from torch_grad_exporter import Exporter
from torch_grad_exporter.integrations.session import running_exporter

DOCS = REPOSITORY / "docs"
EXPLAIN, LOSS = DOCS / "explain.md", DOCS / "loss-does-not-fall.md"
ACTIVATIONS_PAGE, TIMES = DOCS / "activations.md", DOCS / "where-time-goes.md"
HOOKS = blocks(DOCS / "frameworks.md", "python", section="A loop of your own")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample each step, without a port, from the same weights each time."""
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_PORT", "off")
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_EVERY", "1")
    torch.manual_seed(0)


def printed(text: str, names: dict[str, Any]) -> str:
    """Return what an example prints, as a program of the name `train.py`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(text, "train.py", "exec"), names)  # noqa: S102 - what a user copies
    return out.getvalue()


def trained(text: str, monkeypatch: pytest.MonkeyPatch) -> dict[Key, float]:
    """Run an example that trains, and return the values of its exporter."""
    started: list[Exporter] = []
    start = torch_grad_exporter.start_exporter

    def kept(*arguments: object, **options: object) -> Exporter:
        started.append(start(*arguments, **options))  # type: ignore[arg-type]
        return started[-1]

    monkeypatch.setattr(torch_grad_exporter, "start_exporter", kept)  # an example need not keep its exporter
    model = Perceptron()
    batches = [(torch.randn(5, 6), torch.randn(5, 3)) for _ in range(4)]
    exec(text, {"model": model, "optimizer": sgd(model), "batches": batches, "loss_function": mse_loss})  # noqa: S102
    (exporter,) = started
    return values(exporter)


@pytest.mark.parametrize("number", [0, 1], ids=["explain", "record"])
def test_an_example_prints_its_output(number: int) -> None:
    """The examples print what the page shows, with the lines of the program that they name."""
    shown = blocks(EXPLAIN, "text")[number]
    assert printed(blocks(EXPLAIN, "python")[number], {}).split("\n") == shown.split("\n")


@pytest.mark.slow
def test_the_walk_through_a_loss_prints_its_output() -> None:
    """The cells of docs/loss-does-not-fall.md print what the page shows, one after the other in one program."""
    names: dict[str, Any] = {}
    cells = re.findall(r"^```(python|text)\n(.*?)^```", LOSS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for place, (kind, text) in enumerate(cells):
        if kind == "python":
            following = cells[place + 1 : place + 2]
            shown = following[0][1] if following and following[0][0] == "text" else ""
            assert printed(text, names).rstrip() == shown.rstrip()


@pytest.mark.parametrize("number", range(len(blocks(ACTIVATIONS_PAGE, "python"))))
def test_an_example_of_activations(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example of docs/activations.md trains, and its metrics are exported."""
    names = {name for name, _ in trained(blocks(ACTIVATIONS_PAGE, "python")[number], monkeypatch)}
    assert ("torch_activation_rms" if number == 0 else "torch_watch_grad_norm") in names
    assert ("torch_watch_clipped_total" in names) == (number == 2)


def test_the_example_of_layer_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/where-time-goes.md trains, and each layer has the time of both passes."""
    (example,) = blocks(TIMES, "python")
    series = [dict(labels) for name, labels in trained(example, monkeypatch) if name == "torch_layer_seconds_total"]
    assert {(labels["layer"], labels["pass"]) for labels in series} == {
        (layer, name) for layer in ("first", "second") for name in ("forward", "backward")
    }


def test_the_example_of_the_hook_list(capsys: pytest.CaptureFixture[str]) -> None:
    """The example of "A loop of your own" trains, prints and ends its exporter."""
    model = torch.nn.Linear(3, 3)
    names: dict[str, object] = {"model": model, "loader": [torch.ones(2, 3)] * 3, "loss_function": mse_loss}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(HOOKS[0], names)  # noqa: S102 - what a user copies
    assert capsys.readouterr().out.count("loss ") == 6
    assert running_exporter(model) is None


def test_an_exception_in_the_hook_list(tmp_path: Path) -> None:
    """An exception in the second loop of "A loop of your own" reaches the caller and fails the run."""
    model, exporters = torch.nn.Linear(3, 3), []

    def train(model: torch.nn.Module, loader: object, hooks: object) -> None:
        exporters.append(running_exporter(model))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        exec(HOOKS[1], {"model": model, "loader": [], "train": train})  # noqa: S102 - what a user copies
    (exporter,) = exporters
    assert exporter is not None
    exporter.save(tmp_path / "saved.json")
    status = json.loads((tmp_path / "saved.json").read_text())["status"]
    assert (status["state"], status["ended_by"]) == ("failed", "ZeroDivisionError")
    assert running_exporter(model) is None
