"""Each sample, and each step with a known value of the run, has its own record until the history is full."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests.outputs.live.support import decoded
from tests.outputs.live.test_live import QUIET, saved
from tests.support.models import Perceptron, batch, sgd
from tests.support.tools import eventually
from torch_grad_exporter import start_exporter
from torch_grad_exporter.outputs.live import saved as reading
from torch_grad_exporter.outputs.live.fetch import loaded
from torch_grad_exporter.outputs.live.track import RECENT

Told = Literal["before the backward", "before the step", "after the step"]


class Sampled:
    """A run with the global norm and the loss of each step, each `every`-th sampled. The learning rate falls at each step."""

    def __init__(self, *, every: int = 1, told: Told = "before the step", tells_norm: bool = False, inside: bool = False) -> None:
        torch.manual_seed(0)
        self.model = Perceptron()
        self.optimizer = sgd(self.model)
        self.exporter = start_exporter(self.model, None, every=every, activations=inside, collectors=QUIET)
        self.told, self.tells_norm = told, tells_norm
        self.norms: list[float] = []
        self.losses: list[float] = []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(batch()).square().mean()
            self.losses.append(loss.item())
            self._tell("before the backward")
            loss.backward()
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            self.norms.append(sum(float(gradient.double().square().sum()) for gradient in gradients) ** 0.5)
            if self.tells_norm:
                self.exporter.observe(grad_norm=self.norms[-1])
            self._tell("before the step")
            self.optimizer.step()
            self._tell("after the step")
            self.optimizer.param_groups[0]["lr"] *= 0.99

    def _tell(self, now: Told) -> None:
        if now == self.told:
            self.exporter.observe(loss=self.losses[-1])

    def ended(self, folder: Path) -> dict[str, Any]:
        """Close the exporter and return what it saves once the last step is recorded."""
        self.exporter.close()
        last = [len(self.losses)]
        assert eventually(lambda: saved(self.exporter, folder)["run"]["recent"]["steps"][-1:] == last)
        return saved(self.exporter, folder)


def known(lines: dict[str, Any], name: str) -> tuple[list[int], list[float]]:
    """Return the steps with a value of this name, and the values."""
    pairs = [(int(step), value) for step, value in zip(lines["steps"], lines[name], strict=True) if value is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


@pytest.mark.slow
def test_a_fast_run_records_each_sample(tmp_path: Path) -> None:
    """100 steps in a moment have a column and a point each, in the saved file and when it is read again."""
    run, every = Sampled(inside=True), list(range(1, 101))
    run.train(100)
    content = run.ended(tmp_path)
    again = loaded(str(tmp_path / "saved.json"))
    for view in ("recent", "whole"):
        for quantity in ("norm", "activation_rms"):
            grid = content["layers"][quantity][view]
            assert grid["steps"] == every
            assert grid["times"] == sorted(grid["times"])
            assert np.isfinite(decoded(grid)).all()
        assert np.sqrt(np.square(decoded(content["layers"]["norm"][view])).sum(axis=1)) == pytest.approx(run.norms, rel=1e-3)
        lines = content["run"][view]
        assert lines["steps"] == every
        assert lines["times"] == sorted(lines["times"])
        assert lines["norm"] == pytest.approx(run.norms, rel=1e-5)
        assert lines["loss"] == pytest.approx(run.losses, rel=1e-5)
        rates = [0.99**step for step in range(100)]
        assert np.array(lines["learning_rate"]) / lines["learning_rate"][0] == pytest.approx(rates, rel=1e-4)
        assert known(lines, "step_seconds")[0] == every[1:]
        assert reading.lines(again, view).values["norm"] == pytest.approx(run.norms, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("told", ["before the backward", "after the step"])
def test_a_loss_is_at_its_step(told: Told, tmp_path: Path) -> None:
    """The loss of each step is at that step, also between samples, and so is a norm that the loop observes."""
    run = Sampled(every=50, told=told, tells_norm=told == "after the step")
    run.train(200)
    lines = run.ended(tmp_path)["run"]["recent"]
    assert known(lines, "loss") == (list(range(1, 201)), pytest.approx(run.losses, rel=1e-5))
    steps, norms = known(lines, "norm")
    assert len(steps) == 200 if run.tells_norm else len(steps) >= 4
    assert norms == pytest.approx([run.norms[step - 1] for step in steps], rel=1e-5)


@pytest.mark.slow
def test_samples_share_records_in_a_full_history(tmp_path: Path) -> None:
    """After the first `RECENT` samples, a record has the mean loss and the largest norm since the record before."""
    run = Sampled()
    run.train(RECENT + 40)
    run.ended(tmp_path)
    assert eventually(lambda: saved(run.exporter, tmp_path)["layers"]["norm"]["recent"]["steps"][-1] == RECENT + 40)
    content = saved(run.exporter, tmp_path)
    lines = content["run"]["recent"]
    for name, values, together in (("loss", run.losses, np.mean), ("norm", run.norms, max)):
        steps, shown = known(lines, name)
        assert steps[:RECENT] == list(range(1, RECENT + 1))
        assert RECENT < len(steps) < RECENT + 40
        records = list(zip([0, *steps], steps, strict=False))
        assert shown[:RECENT] == pytest.approx([together(values[before:step]) for before, step in records[:RECENT]], rel=1e-5)
        # A value that arrives after the record of its step was made is in a later one.
        later = values[RECENT - 1 :]
        assert all(min(later) * 0.999 <= value <= max(later) * 1.001 for value in shown[RECENT:])
    # A column is at the step of its last sample, which may be behind the steps taken when it was recorded.
    columns = content["layers"]["norm"]["recent"]["steps"]
    assert columns == sorted({*columns})
    assert len(columns) == RECENT
    assert [step for step in columns if step <= RECENT] == list(range(int(columns[0]), RECENT + 1))
