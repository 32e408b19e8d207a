"""The rooms keep their doors: who may import whom."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "torch_grad_exporter"

FORBIDDEN = {
    "outputs/http": ("torch", "torch_grad_exporter.collectors", "torch_grad_exporter.capture", "torch_grad_exporter.aggregation"),
    "outputs/prometheus": (
        "torch",
        "torch_grad_exporter.collectors",
        "torch_grad_exporter.capture",
        "torch_grad_exporter.aggregation",
    ),
    "collectors": ("torch_grad_exporter.outputs", "torch_grad_exporter.exporter"),
    "statistics": ("torch_grad_exporter.metrics.catalogue", "torch_grad_exporter.aggregation", "torch_grad_exporter.outputs"),
    "capture": ("torch_grad_exporter.metrics.catalogue", "torch_grad_exporter.aggregation"),
    "aggregation": ("torch_grad_exporter.capture", "torch_grad_exporter.collectors"),
    "metrics/families.py": ("torch", "torch_grad_exporter."),
}


def imported(path: pathlib.Path) -> set[str]:
    """The full names that a file imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


@pytest.mark.parametrize("room", FORBIDDEN)
def test_a_room_imports_only_what_lies_before_it(room: str) -> None:
    """No file of the room imports, anywhere in it, what the direction of the data forbids."""
    files = [PACKAGE / room] if room.endswith(".py") else sorted((PACKAGE / room).rglob("*.py"))
    assert files
    found = {
        f"{path.name}: {name}"
        for path in files
        for name in imported(path)
        for wrong in FORBIDDEN[room]
        if name == wrong or name.startswith(f"{wrong.rstrip('.')}.")
    }
    assert found == set()


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
    """Import starts no thread and registers no hook."""
    script = """
import threading
import torch.optim.optimizer as optimizer
import torch_grad_exporter
assert threading.active_count() == 1
assert not optimizer._global_optimizer_pre_hooks and not optimizer._global_optimizer_post_hooks
"""
    subprocess.run([sys.executable, "-c", script], check=True)
