"""What integrations share: the version of their framework, and the loss of a round."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from torch_grad_exporter.integrations.common import RoundLosses, require


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder from which modules are imported."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def package(folder: Path, name: str, text: str) -> None:
    """Write a module."""
    (folder / f"{name}.py").write_text(text)
    importlib.invalidate_caches()
    sys.modules.pop(name, None)


def test_versions_of_a_framework(installed: Path) -> None:
    """A module of the version, a newer one or without one is returned; an old or missing one is refused with the command to run."""
    for version in ("'2.2'", "'2.10.1rc1'", "'3.0.0+cpu'", "None"):
        package(installed, "framework_a", f"__version__ = {version}")
        assert require("framework_a", "2.2", extra="a").__name__ == "framework_a"
    package(installed, "framework_d", "__version__ = '2.1.4'")
    with pytest.raises(ImportError, match=r"needs framework_d 2.2 or newer, and 2.1.4 is installed; run: pip install --upgrade"):
        require("framework_d", "2.2", extra="d")
    missing = r"needs framework_b.inner 2.2 or newer \(or framework_c\), which is not installed; run: pip install 'framework_b"
    with pytest.raises(ModuleNotFoundError, match=missing):
        require("framework_b.inner", "2.2", extra="b", instead="framework_c")


def test_integrations_without_their_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing an integration without its framework says what to install."""
    for module in ("lightning", "lightning.pytorch", "pytorch_lightning", "transformers", "accelerate"):
        monkeypatch.setitem(sys.modules, module, None)
    for name in ("lightning", "transformers", "accelerate"):
        with pytest.raises(ModuleNotFoundError, match=rf"pip install '{name}>=\d"):
            importlib.import_module(f"torch_grad_exporter.integrations.{name}")


def test_mean_loss_of_a_round() -> None:
    """Over the batches since the last step, of tensors and numbers; other values are left out."""
    losses = RoundLosses()
    assert losses.round_over() is None
    for loss in (torch.tensor(1.0), torch.tensor([2.0], dtype=torch.bfloat16), 6, None, torch.ones(2), True, "text"):
        losses.add(loss)
    assert float(losses.round_over() or 0) == 3
    assert losses.round_over() is None
    losses.add(2.5)
    assert float(losses.round_over() or 0) == 2.5
