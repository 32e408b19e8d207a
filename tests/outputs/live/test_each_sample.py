"""Each sample, and each step of which a value of the run is known, has a record of its own until the history is full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests.outputs.live.test_live import decoded
from tests.support.models import Perceptron, batch, sgd
from tests.support.tools import FOREVER, PATIENCE
from torch_grad_exporter import start_exporter
from torch_grad_exporter.outputs.live import saved as reading
from torch_grad_exporter.outputs.live import view as view_module
from torch_grad_exporter.outputs.live.live import VIEWS
from torch_grad_exporter.outputs.live.recorder import recorder
from torch_grad_exporter.outputs.live.track import RECENT

QUIET = dict.fromkeys(("host", "process", "container", "gpu", "cuda_memory"), False)

Told = Literal["before the backward", "before the step", "after the step"]


class Sampled:
    """A run of which every step is sampled, or each of so many, and the global norm and the loss of each step.

    `told`: when the loop tells the loss; `tells_norm`: whether it tells the global norm. The learning rate falls at each step.
    """

    def __init__(self, *, every: int = 1, told: Told = "before the step", tells_norm: bool = False) -> None:
        torch.manual_seed(0)
        self.model = Perceptron()
        self.optimizer = sgd(self.model)
        self.exporter = start_exporter(self.model, None, every=every, activations=True, collectors=QUIET)
        self.told, self.tells_norm = told, tells_norm
        self.norms: list[float] = []
        self.losses: list[float] = []

    def train(self, steps: int) -> None:
        """Goes on for so many steps."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(batch()).square().mean()
            self.losses.append(loss.item())
            self._tell("before the backward")
            loss.backward()
            gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
            self.norms.append(sum(float(one.double().square().sum()) for one in gradients) ** 0.5)
            if self.tells_norm:
                self.exporter.observe(grad_norm=self.norms[-1])
            self._tell("before the step")
            self.optimizer.step()
            self._tell("after the step")
            self.optimizer.param_groups[0]["lr"] *= 0.99

    def _tell(self, now: Told) -> None:
        if now == self.told:
            self.exporter.observe(loss=self.losses[-1])

    def lines(self, view: str = "recent") -> dict[str, Any]:
        """The records of the run so far."""
        self.exporter._view.history.finish()
        return self.exporter._view.live.run(VIEWS[view])


def known(lines: dict[str, Any], name: str) -> tuple[list[int], list[float]]:
    """The steps at which there is a value of this name, and the values."""
    found = [(int(step), value) for step, value in zip(lines["steps"], lines[name], strict=True) if value is not None]
    return [step for step, _ in found], [value for _, value in found]


def test_a_fast_run_has_a_column_and_a_point_for_each_sample(tmp_path: Path) -> None:
    """Of 300 steps within a moment heatmaps and lines have all, each at its step, in the saved file and when it is read again."""
    run, every = Sampled(), list(range(1, 301))
    run.train(300)
    run.exporter.close()
    run.exporter.save(tmp_path / "run.json")
    saved = json.loads((tmp_path / "run.json").read_text())
    again = reading.loaded(str(tmp_path / "run.json"))
    for view in ("recent", "whole"):
        for quantity in ("norm", "activation_rms"):
            grid = saved["layers"][quantity][view]
            assert grid["steps"] == every
            assert grid["times"] == sorted(grid["times"])
            assert np.isfinite(decoded(grid)).all()
        assert np.sqrt(np.square(decoded(saved["layers"]["norm"][view])).sum(axis=1)) == pytest.approx(run.norms, rel=1e-3)
        lines = saved["run"][view]
        assert lines["steps"] == every
        assert lines["times"] == sorted(lines["times"])
        assert lines["norm"] == pytest.approx(run.norms, rel=1e-5)
        assert lines["loss"] == pytest.approx(run.losses, rel=1e-5)
        rates = [0.99**step for step in range(300)]
        assert np.array(lines["learning_rate"]) / lines["learning_rate"][0] == pytest.approx(rates, rel=1e-4)
        assert known(lines, "step_seconds")[0] == every[1:]
        assert reading.lines(again, view).values["norm"] == pytest.approx(run.norms, rel=1e-5)


@pytest.mark.parametrize("told", ["before the backward", "before the step", "after the step"])
def test_a_loss_is_at_its_step_whenever_it_is_told(told: Told) -> None:
    """Also between samples, and where rounds are only counted."""
    run = Sampled(every=100, told=told)
    run.train(500)
    counted = run.exporter._training.clock.counting()
    lines = run.lines()
    run.exporter.close()
    assert counted is not None  # else this run shows nothing of such rounds
    assert known(lines, "loss") == (list(range(1, 501)), pytest.approx(run.losses, rel=1e-5))
    steps, norms = known(lines, "norm")
    assert len(steps) >= 5
    assert norms == pytest.approx([run.norms[step - 1] for step in steps], rel=1e-5)


def test_a_norm_that_the_loop_tells_is_at_its_step() -> None:
    """Those of steps between samples, too, of which each has one."""
    run = Sampled(every=50, tells_norm=True)
    run.train(200)
    lines = run.lines()
    run.exporter.close()
    assert known(lines, "norm") == (list(range(1, 201)), pytest.approx(run.norms, rel=1e-5))


def test_a_loss_that_is_not_finite_is_marked_at_its_step() -> None:
    """And at no other one."""
    run = Sampled()
    run.train(5)
    run.exporter.observe(loss=float("nan"))
    run.train(5)
    lines = run.lines()
    run.exporter.close()
    assert [lines["steps"][place] for place in lines["nonfinite"]["loss"]] == [5]
    assert list(lines["nonfinite"]) == ["loss"]


def test_while_nothing_happens_there_is_no_record() -> None:
    """However often it is looked: what lasts, as the learning rate, is not told again."""
    run = Sampled()
    run.train(3)
    assert [run.lines()["steps"] for _ in range(3)] == [[1, 2, 3]] * 3
    run.exporter.close()
    assert run.lines()["steps"] == [1, 2, 3]


def test_when_the_history_is_full_samples_share_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first `RECENT` samples are single records, in all of the history; those after them are one together at each look."""
    monkeypatch.setitem(recorder.__kwdefaults__, "interval", FOREVER)  # no look but these
    monkeypatch.setattr(view_module, "CLOSE_SECONDS", PATIENCE)
    run = Sampled()
    run.train(RECENT + 20)
    lines = run.lines()
    run.exporter._view._finish()
    histories = run.exporter._view._histories
    steps = [*range(1, RECENT + 1), RECENT + 20]
    together = {"loss": np.mean(run.losses[RECENT:]), "norm": max(run.norms[RECENT:])}
    for name, values in (("loss", run.losses), ("norm", run.norms)):
        assert known(lines, name) == (steps, pytest.approx([*values[:RECENT], together[name]], rel=1e-5))
    run.train(20)
    run.exporter.close()
    assert known(run.lines(), "loss")[0] == known(run.lines(), "norm")[0] == [*steps, RECENT + 40]
    for history, quantity in zip(histories, ("norm", "activation_rms"), strict=True):
        last = history.grid(quantity, VIEWS["recent"])[1]
        assert (last.first, last.steps.tolist()) == (2, [*steps[2:], RECENT + 40])
