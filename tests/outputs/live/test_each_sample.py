"""A short run that samples fast has a column for each sample, a long one a record a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import Perceptron, batch, sgd
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.outputs.live.history import RECENT
from torch_grad_exporter.outputs.live.live import VIEWS

QUIET = dict.fromkeys(("host", "process", "container", "gpu", "cuda_memory"), False)


def trained(steps: int) -> tuple[Exporter, list[float]]:
    """An exporter after so many steps, each sampled; and the global norm of each."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer, norms = sgd(model), []
    exporter = start_exporter(model, None, every=1, collectors=QUIET)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        norms.append(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5)
        optimizer.step()
    return exporter, norms


def saved(exporter: Exporter, tmp_path: Path) -> Any:  # noqa: ANN401 - JSON
    """What the exporter saves at its end."""
    exporter.close()
    exporter.save(tmp_path / "run.json")
    return json.loads((tmp_path / "run.json").read_text())


def test_a_short_run_has_a_column_for_each_sample(tmp_path: Path) -> None:
    """Of 120 steps within a moment, all norms are there with their steps, in the lines of the run and in the heatmap."""
    exporter, norms = trained(120)
    found = saved(exporter, tmp_path)
    lines, grid = found["run"]["recent"], found["layers"]["norm"]["recent"]
    assert lines["norm"][:119] == pytest.approx(norms[:119], rel=1e-5)
    assert lines["steps"][:119] == list(range(1, 120))
    assert len(grid["times"]) == 120
    assert grid["times"] == sorted(grid["times"])


def test_what_is_kept_of_each_sample_is_bounded() -> None:
    """After `RECENT` samples nobody waits for single ones any more, and what was kept has been taken."""
    exporter, _ = trained(RECENT + 50)
    host = exporter._host
    host.drain()
    assert not host._each
    exporter._view.history.finish()
    assert exporter._view.history.samples >= RECENT
    assert len(exporter._view.history.run(VIEWS["recent"]).times) <= 2 * RECENT
    exporter.close()
