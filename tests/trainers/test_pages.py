"""The pages on frameworks run as a whole, each section of docs/frameworks.md by itself, and name metrics that exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import cells, run_page, text_of
from tests.support.programs import Starter
from tests.trainers import test_mmengine
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.integrations.mmengine import GradExporterHook

SECTIONS = [("frameworks.md", section) for section in ("Accelerate", "MMEngine", "Ignite", "Other loggers")]


@pytest.mark.parametrize(("page", "section"), [("lightning.md", ""), ("transformers.md", ""), *SECTIONS])
def test_a_page_runs_from_nothing(page: str, section: str, starter: Starter, tmp_path: Path) -> None:
    """The examples run one after the other in a process that knows nothing else."""
    run_page(starter, page, section, folder=tmp_path, before="import tests.trainers")


def test_mmengine_by_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two lines of a configuration bring the hook."""
    monkeypatch.setitem(sys.modules, "torchvision", None)
    lines: dict[str, Any] = {}
    exec(cells("frameworks.md", "MMEngine")[0].code, lines)  # noqa: S102 - what a user copies
    hook = lines["custom_hooks"][0] | {"port": None}
    runner = test_mmengine.runner_of(test_mmengine.Net(), tmp_path, hook, cfg={"custom_imports": lines["custom_imports"]})
    runner.train()
    assert any(isinstance(hook, GradExporterHook) for hook in runner.hooks)


@pytest.mark.parametrize("page", ["transformers.md", "lightning.md", "frameworks.md"])
def test_names(page: str) -> None:
    """Each metric that a page names is one."""
    named = set(re.findall(r"`(torch_(?:grad|train|alerts|watch)_\w+)", text_of(page))) - {"torch_grad_exporter"}
    assert named
    assert named <= set(REGISTRY.catalogue)
