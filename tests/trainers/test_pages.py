"""The examples of docs/transformers.md, lightning.md and Accelerate run as they stand, and show what the pages say."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch.nn.functional import mse_loss

from tests.support.pages import blocks
from tests.support.tools import REPOSITORY
from tests.trainers.pages import last_values, run, steps
from tests.trainers.test_accelerate import BATCHES
from tests.trainers.test_lightning import Module, numbers
from tests.trainers.test_transformers import Sentences, llama, settings
from tests.trainers.training import reset_accelerate
from torch_grad_exporter.collectors import REGISTRY


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[Any, float]]:
    """The last values of each exporter of a test, on no port; what the trainers write is written elsewhere."""
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_EVERY", "1")
    monkeypatch.chdir(tmp_path)
    return last_values(monkeypatch)


@pytest.mark.parametrize("number", range(3))
def test_lightning(number: int, ended: list[dict[Any, float]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example trains and shows; that of the issue shows mean and deviation by layer, and reports problems."""
    monkeypatch.setattr(lightning.pytorch.Trainer, "__init__", _quietly(lightning.pytorch.Trainer.__init__))
    run("lightning.md", number, module=Module(), loader=numbers(4))
    assert [steps(scrape) for scrape in ended] == [8 if number == 2 else 12]
    assert any(one[0] == "torch_grad_mean" for one in ended[0]) == (number == 1)
    assert any(one[0] == "torch_alerts_active" for one in ended[0]) == (number == 1)


def _quietly(init: Any) -> Any:
    def quiet(self: Any, **options: Any) -> None:
        init(self, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, **options)

    return quiet


@pytest.mark.parametrize("number", range(3))
def test_transformers(number: int, tmp_path: Path, ended: list[dict[Any, float]]) -> None:
    """Each example trains and shows."""
    given: dict[str, Any] = {"eval_dataset": Sentences(4)}
    text = blocks(REPOSITORY / "docs" / "transformers.md", "python")[number]
    names = {"model": llama(), "args": settings(tmp_path), "dataset": Sentences(8), "given": given}
    exec(text.replace("callbacks=", "**given, callbacks="), names)  # noqa: S102 - what a user copies, with something to evaluate
    assert [steps(scrape) for scrape in ended] == [4]


@pytest.mark.parametrize("number", range(2))
def test_accelerate(number: int, ended: list[dict[Any, float]]) -> None:
    """Each example trains and shows, the second one from the step of a checkpoint on."""
    reset_accelerate()
    model = torch.nn.Linear(6, 6)
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loader": numbers(BATCHES)}
    run("frameworks.md", number, "Accelerate", **names, loss_function=mse_loss)
    assert [steps(scrape) for scrape in ended] == [BATCHES]


@pytest.mark.parametrize("page", ["transformers.md", "lightning.md", "frameworks.md"])
def test_names(page: str) -> None:
    """Each metric that a page names is one."""
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`(torch_(?:grad|train|alerts|watch)_\w+)", text)) - {"torch_grad_exporter"}
    assert named
    assert named <= set(REGISTRY.catalogue)


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
