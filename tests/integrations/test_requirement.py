"""What an integration says where its framework is absent, too old or broken; and whose method calls it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from torch_grad_exporter.integrations.caller import calling
from torch_grad_exporter.integrations.requirement import numbers, require


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which modules are imported, for this test."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def package(folder: Path, name: str, text: str) -> None:
    """A module of this name and content."""
    (folder / f"{name}.py").write_text(text)
    importlib.invalidate_caches()
    sys.modules.pop(name, None)


def test_what_is_there(installed: Path) -> None:
    """A module of the version or of a newer one is returned, also one that names no version."""
    for version in ("'2.2'", "'2.10.1rc1'", "'3.0.0+cpu'", "None"):
        package(installed, "framework_a", f"__version__ = {version}")
        assert require("framework_a", "2.2", extra="a").__name__ == "framework_a"


def test_what_is_absent() -> None:
    """The error says which package is needed, in which version, and what to run."""
    with pytest.raises(ModuleNotFoundError) as raised:
        require("framework_b.inner", "2.2", extra="b", instead="framework_c")
    assert str(raised.value) == (
        "torch_grad_exporter.integrations.b needs framework_b.inner 2.2 or newer (or framework_c), which is not installed; "
        "run: pip install 'torch-grad-exporter[b]'"
    )


def test_what_is_too_old(installed: Path) -> None:
    """The error says which version there is, and what to run."""
    package(installed, "framework_d", "__version__ = '2.1.4'")
    with pytest.raises(ImportError, match=r"needs framework_d 2.2 or newer, and 2.1.4 is installed; run: pip install --upgrade"):
        require("framework_d", "2.2", extra="d")


def test_what_is_broken(installed: Path) -> None:
    """A package that lacks something itself says so: it is not taken for one that is absent."""
    package(installed, "framework_e", "import what_it_lacks")
    with pytest.raises(ModuleNotFoundError, match="No module named 'what_it_lacks'"):
        require("framework_e", "2.2", extra="e")


def test_numbers() -> None:
    """The numbers of a version are compared, not its letters."""
    assert numbers("5.10.1rc1") == (5, 10, 1) > numbers("5.9")
    assert numbers("unknown") == ()


@pytest.mark.parametrize("name", ["lightning", "transformers", "accelerate"])
def test_integrations_without_their_framework(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here none of them is installed: importing an integration says what to install."""
    for module in ("lightning", "lightning.pytorch", "pytorch_lightning", "transformers", "accelerate"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'torch-grad-exporter\[{name}\]'"):
        importlib.import_module(f"torch_grad_exporter.integrations.{name}")


def test_who_calls() -> None:
    """The nearest object of a type whose method is running; none where there is none near."""

    class Handler:
        def call(self) -> Handler | None:
            return calling(Handler)

    handler = Handler()
    assert handler.call() is handler
    assert calling(Handler) is None
