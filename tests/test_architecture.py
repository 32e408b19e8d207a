"""The package keeps its shape: who may import whom, how long functions are, and what an import does."""

from __future__ import annotations

import ast
import pathlib
import shutil
import subprocess
import sys
import tomllib

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "torch_grad_exporter"

PLANTED = {
    "rooms": ("model/layers.py", "torch_grad_exporter.outputs.live.history"),
    "outputs": ("outputs/live/view.py", "torch_grad_exporter.outputs.otlp.delta"),
    "server": ("outputs/http/message.py", "torch"),
    "metrics": ("metrics/catalogue.py", "torch"),
    "families": ("metrics/families.py", "torch_grad_exporter.errors"),
    "statistics": ("statistics/eager.py", "torch_grad_exporter.metrics.catalogue"),
}
"""By contract of pyproject.toml: an import that breaks it, and the file to plant it in."""


def contracts(package: pathlib.Path, *chosen: str) -> subprocess.CompletedProcess[str]:
    """What `lint-imports` says of the package in this folder, by all contracts or by some."""
    program = pathlib.Path(sys.executable).with_name("lint-imports")
    only = [argument for contract in chosen for argument in ("--contract", contract)]
    config = ["--config", str(PACKAGE.parent / "pyproject.toml")]
    return subprocess.run(
        [program, *config, "--no-cache", "--no-logo", *only], cwd=package, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a copy of the package's sources."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", "shipped", "page"))
    return folder


def test_no_room_imports_from_above() -> None:
    """The package as it is keeps every contract of pyproject.toml, and each of them has a planted import below."""
    declared = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {contract["id"] for contract in declared} == set(PLANTED)
    result = contracts(PACKAGE.parent)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("contract", PLANTED)
def test_a_planted_import_breaks_its_contract(copy: pathlib.Path, contract: str) -> None:
    """A single forbidden import, planted within a function of a copy of the package, is found and named by the contract."""
    path, imported = PLANTED[contract]
    file = copy / PACKAGE.name / path
    before = file.read_text()
    assert contracts(copy, contract).returncode == 0
    try:
        file.write_text(f"{before}\n\ndef _planted() -> None:\n    import {imported}\n")
        result = contracts(copy, contract)
    finally:
        file.write_text(before)
    room = path.removesuffix(".py").replace("/", ".")
    assert result.returncode == 1
    assert f"{PACKAGE.name}.{room} -> {imported}" in " ".join(result.stdout.split())


def test_a_folder_in_no_line_is_found(copy: pathlib.Path) -> None:
    """A new folder that the order of rooms does not name breaks the contract: nothing stands outside of it."""
    attic = copy / PACKAGE.name / "attic"
    attic.mkdir()
    try:
        (attic / "__init__.py").write_text("")
        result = contracts(copy, "rooms")
    finally:
        shutil.rmtree(attic)
    assert result.returncode == 1
    assert "attic" in result.stdout


def length(function: ast.FunctionDef) -> int:
    """The lines of a function but for its docstring."""
    assert function.end_lineno is not None
    first = function.body[0]
    described = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = (first.end_lineno or 0) - first.lineno + 1 if described else 0
    return function.end_lineno - function.lineno + 1 - docstring


def test_functions_are_short() -> None:
    """No function is longer than 50 lines without its docstring, and half of them have at most ten."""
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    lengths = sorted(length(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    assert lengths[len(lengths) // 2] <= 10
    assert lengths[-1] <= 50


def test_importing_the_package_does_nothing() -> None:
    """Importing the package imports no PyTorch; importing every public name starts no thread and registers no hook."""
    script = """
import sys, threading
import torch_grad_exporter
assert "torch" not in sys.modules and "numpy" not in sys.modules
assert set(torch_grad_exporter.__all__) <= set(dir(torch_grad_exporter))
from torch_grad_exporter import *
assert start_exporter.__name__ == "start_exporter" and callable(explain) and callable(record)
import torch.optim.optimizer as optimizer
assert threading.active_count() == 1
assert not optimizer._global_optimizer_pre_hooks and not optimizer._global_optimizer_post_hooks
try:
    torch_grad_exporter.start_importer
except AttributeError as error:
    assert "start_importer" in str(error)
else:
    raise AssertionError("a name that is not there")
"""
    subprocess.run([sys.executable, "-c", script], check=True)
