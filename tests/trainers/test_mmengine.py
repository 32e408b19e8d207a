"""The hook for MMEngine: start, reported values and end, in trainings of the real `Runner`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mmengine.hooks import Hook

from tests.support.scrape import value
from tests.trainers.adapters import BATCHES, Net, RunnerLooks, runner_of
from tests.trainers.training import QUICK, spent
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.integrations.mmengine import GradExporterHook
from torch_grad_exporter.integrations.session import running_exporter


@pytest.fixture(autouse=True)
def no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide torchvision, which may be built for another torch."""
    monkeypatch.setitem(sys.modules, "torchvision", None)


def test_reported_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook named in a configuration reports loss, epoch and samples, also after a checkpoint."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # as MMEngine's checkpoints need it
    named = {"type": "GradExporterHook", **QUICK, "priority": "HIGH"}
    imported = {"custom_imports": {"imports": ["torch_grad_exporter.integrations.mmengine"]}}
    shown: dict[str, float | None] = {}
    losses: list[float] = []

    def look(runner: Any) -> None:
        exporter = running_exporter(runner.model)
        assert exporter is not None
        losses.append(runner.message_hub.get_scalar("train/loss").current())
        for name in ("torch_train_loss", "torch_train_epoch", "torch_train_samples_total", "torch_grad_sample_step"):
            shown[name] = value(exporter, name)

    optim = {"accumulative_counts": 2}
    runner_of(Net(), tmp_path, named, RunnerLooks(look), cfg=imported, optim=optim).train()
    assert shown.pop("torch_train_loss") == pytest.approx(sum(losses[-2:]) / 2, rel=1e-6)
    assert shown == {"torch_train_epoch": 1, "torch_train_samples_total": 64, "torch_grad_sample_step": 8}
    again = {"train_cfg": {"by_epoch": True, "max_epochs": 3}, "resume": True, "load_from": str(tmp_path / "epoch_2.pth")}
    runner_of(Net(), tmp_path, named, RunnerLooks(look), optim=optim, **again).train()
    assert shown["torch_train_epoch"] == 2
    assert shown["torch_grad_sample_step"] == 12


class Kept:
    """Keeps the exporter of a training after its end."""

    exporter: Exporter

    def __call__(self, runner: Any) -> None:
        found = running_exporter(runner.model)
        assert found is not None
        self.exporter = found


def test_evaluations_show(tmp_path: Path) -> None:
    """The state is `evaluating` from the first batch of an evaluation to its end."""
    shown: list[float | None] = []

    class Watches(Hook):
        priority = "LOWEST"

        def after_val_iter(self, runner: Any, **more: Any) -> None:
            shown.append(value(kept.exporter, "torch_train_state", state="evaluating"))

        def after_val(self, runner: Any) -> None:
            shown.append(value(kept.exporter, "torch_train_state", state="evaluating"))

    kept = Kept()
    runner_of(Net(), tmp_path, GradExporterHook(**QUICK), RunnerLooks(kept), Watches(), evaluated=True).train()
    assert shown == [1, 1, 0] * 2


def test_time_of_evaluations_and_checkpoints(tmp_path: Path) -> None:
    """An evaluation and a checkpoint have the time that they take."""

    class Slow(Hook):
        def after_val_iter(self, runner: Any, **more: Any) -> None:
            time.sleep(0.2)

        def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
            time.sleep(0.3)

    def look(_runner: Any) -> None:
        seen.append((spent(kept.exporter, "evaluation"), spent(kept.exporter, "checkpoint")))

    kept, seen = Kept(), list[tuple[float, float]]()
    hooks = (GradExporterHook(**QUICK), RunnerLooks(kept), RunnerLooks(look), Slow())
    saved = {"default_hooks": {"checkpoint": {"type": "CheckpointHook", "interval": 1}}}
    runner_of(Net(), tmp_path, *hooks, evaluated=True, **saved).train()
    assert seen[BATCHES - 1] == (0, 0)
    assert seen[-1] == (pytest.approx(0.4, abs=0.15), pytest.approx(0.3, abs=0.15))


@pytest.mark.parametrize("log_values", [True, False])
def test_what_the_runner_logs_is_shown(tmp_path: Path, log_values: bool) -> None:
    """The exporter shows what the runner's message hub has at the logger's iterations, or nothing of it."""
    model, logged = Net(), list[float]()

    def look(runner: Any) -> None:
        logged.append(runner.message_hub.get_scalar("train/loss").current())

    with start_exporter(model, port=None) as exporter:
        hook = GradExporterHook(exporter, log_values=log_values)
        runner_of(model, tmp_path, hook, RunnerLooks(look), default_hooks={"logger": {"type": "LoggerHook", "interval": 3}}).train()
        shown = exporter.values("^torch_train_value/train/(loss|lr)$")
    names = {"torch_train_value/train/loss", "torch_train_value/train/lr"}
    assert shown.keys() == (names if log_values else set())
    assert not log_values or shown["torch_train_value/train/loss"] == pytest.approx(logged[13])
