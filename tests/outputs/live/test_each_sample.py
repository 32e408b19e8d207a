"""Of the layers each sample has a record of its own at first, and when the history is full there is one a second."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.outputs.live.test_live import decoded
from tests.support.models import Perceptron, batch, sgd
from torch_grad_exporter import start_exporter
from torch_grad_exporter.outputs.live.history import RECENT
from torch_grad_exporter.outputs.live.live import VIEWS

QUIET = dict.fromkeys(("host", "process", "container", "gpu", "cuda_memory"), False)


class Sampled:
    """A run of which every step is sampled, and the global norm of each."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Perceptron()
        self.optimizer = sgd(self.model)
        self.exporter = start_exporter(self.model, None, every=1, collectors=QUIET)
        self.norms: list[float] = []

    def train(self, steps: int) -> None:
        """Goes on for so many steps."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(batch()).square().mean().backward()
            gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
            self.norms.append(sum(float(one.double().square().sum()) for one in gradients) ** 0.5)
            self.optimizer.step()


def test_a_short_run_has_a_column_for_each_sample(tmp_path: Path) -> None:
    """Of 120 steps within a moment, the layers' norms are there with their steps, and so they are saved."""
    run = Sampled()
    run.train(120)
    run.exporter.close()
    run.exporter.save(tmp_path / "run.json")
    saved = json.loads((tmp_path / "run.json").read_text())
    for view in ("recent", "whole"):
        grid = saved["layers"]["norm"][view]
        assert grid["steps"] == list(range(1, 121))
        assert grid["times"] == sorted(grid["times"])
        assert np.sqrt(np.square(decoded(grid)).sum(axis=1)) == pytest.approx(run.norms, rel=1e-3)
    assert max(saved["run"]["recent"]["norm"]) == pytest.approx(max(run.norms), rel=1e-5)


def test_when_the_history_is_full_samples_share_a_record() -> None:
    """The first `RECENT` samples are single records; those after them are one together."""
    run = Sampled()
    run.train(RECENT + 20)
    history = run.exporter._view.history
    run.exporter._host.drain()
    history.finish()
    assert history.grid("norm", VIEWS["recent"])[1].steps.tolist() == list(range(1, RECENT + 1))
    run.train(20)
    run.exporter.close()
    last = history.grid("norm", VIEWS["recent"])[1]
    assert (last.first, last.steps[-1]) == (1, RECENT + 40)
