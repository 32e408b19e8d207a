"""The examples of the pages on MMEngine and Ignite run as they stand; that of Ray compiles and takes what there is."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import blocks
from tests.support.tools import REPOSITORY
from tests.trainers import test_ignite, test_mmengine
from tests.trainers.pages import last_values, run, steps
from torch_grad_exporter.integrations import ray as for_ray


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> list[dict[Any, float]]:
    """The last values of each exporter of a test, on no port."""
    monkeypatch.setitem(sys.modules, "torchvision", None)
    return last_values(monkeypatch)


def test_mmengine_by_name(tmp_path: Path, ended: list[dict[Any, float]]) -> None:
    """The two lines of a configuration."""
    found = run("frameworks.md", 0, "MMEngine")
    hook = found["custom_hooks"][0] | {"port": None}
    test_mmengine.runner_of(test_mmengine.Net(), tmp_path, hook, cfg={"custom_imports": found["custom_imports"]}).train()
    assert [steps(scrape) for scrape in ended] == [16]


def test_mmengine_by_hand(tmp_path: Path, ended: list[dict[Any, float]]) -> None:
    """The hook itself."""
    settings = {
        "train_dataloader": test_mmengine.loader(), "train_cfg": {"by_epoch": True, "max_epochs": 1}, "log_level": "ERROR",
        "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1}}, "experiment_name": "by-hand",
    }  # fmt: skip
    run("frameworks.md", 1, "MMEngine", model=test_mmengine.Net(), work_dir=str(tmp_path), settings=settings)
    assert [steps(scrape) for scrape in ended] == [8]


@pytest.mark.parametrize("number", [0, 1])
def test_ignite_page(number: int, ended: list[dict[Any, float]]) -> None:
    """The line, and the monitor with a threshold."""
    model = test_ignite.network()
    run("frameworks.md", number, "Ignite", model=model, trainer=test_ignite.trainer_of(model), loader=test_ignite.batches())
    assert [steps(scrape) for scrape in ended] == [16]
    assert any(one[0] == "torch_alerts_active" for one in ended[0]) == (number == 1)


def test_ray_page() -> None:
    """What it imports is there; tests/trainers/test_ray.py trains with the same calls."""
    text = blocks(REPOSITORY / "docs" / "frameworks.md", "python", section="Ray Train")[0]
    ast.parse(text)
    assert run("frameworks.md", 0, "Ray Train")["start_exporter"] is for_ray.start_exporter
