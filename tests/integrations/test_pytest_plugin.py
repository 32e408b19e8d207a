"""The fixture `grad_health`: a test whose training is not healthy fails, with the table, and nothing is imported before that."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.programs import Starter
from tests.support.tools import REPOSITORY

PLUGIN = "torch_grad_exporter.integrations.pytest_plugin"

HEAD = """
import torch
torch.set_num_threads(1)

def train(model, steps, factor=lambda step: 1.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        loss = model(torch.randn(4, 6)).square().mean() * factor(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
"""


@pytest.mark.process
def test_healthy_trainings_pass_and_others_fail(starter: Starter, tmp_path: Path) -> None:
    """A healthy training passes, and a NaN, a limit, no samples, an exception and wrong options each fail their test."""
    text = HEAD + textwrap.dedent(
        """
        def test_healthy(grad_health, tmp_path):
            first = model()
            with grad_health(first, save=tmp_path / "base.json.gz") as exporter:
                assert exporter.url is None
                train(first, 24)
            second = model()
            with grad_health(second, baseline=tmp_path / "base.json.gz", tolerance={"step_seconds": 1000},
                             max={"torch_train_steps_total": 24}, min={"torch_grad_exporter_captures_total": 24},
                             peak={"torch_grad_norm": 1e9}):
                train(second, 24)

        def test_nan(grad_health):
            watched = model()
            with grad_health(watched):
                train(watched, 12, lambda step: float("nan") if step == 9 else 1.0)

        def test_noted(grad_health):
            watched = model()
            with grad_health(watched, fail_on="info"):
                train(watched, 12, lambda step: float("nan") if step == 9 else 1.0)

        def test_limit(grad_health):
            watched = model()
            with grad_health(watched, max={"torch_train_steps_total": 1}):
                train(watched, 3)

        def test_nothing_trained(grad_health):
            with grad_health(model()):
                pass

        def test_raises(grad_health):
            with grad_health(model()):
                raise KeyError("of the test")

        def test_wrong(grad_health):
            with grad_health(model(), max={"torch_grad_globl_norm": 1}, fail_on=["Nothing"]):
                raise AssertionError("never reached")
        """
    )
    (tmp_path / "test_it.py").write_text(text)
    done = starter.pytest(tmp_path, "-p", PLUGIN, "-W", "error", "-rA", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    code, out = done.wait(), done.out.read_text()
    assert code == 1, out
    results = {line.split("::")[1].split(" ")[0]: line for line in out.splitlines() if line.startswith(("PASSED", "FAILED"))}
    assert {name for name, line in results.items() if line.startswith("PASSED")} == {"test_healthy", "test_noted"}, out
    assert len(results) == 7
    assert "FAILED  TrainingNonFiniteGradients" in out
    assert "FAILED  --max torch_train_steps_total=1: torch_train_steps_total" in out
    assert "UNUSABLE: the run has no samples" in out
    assert "KeyError" in results["test_raises"]
    assert "UserError" in results["test_wrong"]
    assert "unknown alert or severity" in out
    assert "never reached" not in results["test_wrong"]


OTHER = """
import sys

def test_other():
    assert not {"torch", "numpy"} & set(sys.modules)
    assert "torch_grad_exporter.integrations.pytest_plugin" in sys.modules
"""


@pytest.mark.process
def test_nothing_is_imported_before_a_test_uses_it(tmp_path: Path) -> None:
    """A test without the fixture runs without PyTorch and NumPy."""
    (tmp_path / "test_it.py").write_text(OTHER)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "-W", "error", "-q"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300)
