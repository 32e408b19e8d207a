"""The hook for MMEngine: start, reported values and end, in trainings of the real `Runner`."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch.nn.functional import mse_loss

from tests.support.scrape import errors, value
from tests.trainers.training import QUICK, Broken, Training, compared, ending_of, spent
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.actions import Stop
from torch_grad_exporter.integrations.mmengine import GradExporterHook
from torch_grad_exporter.integrations.session import running_exporter

BATCHES = 8


@pytest.fixture(autouse=True)
def no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide torchvision, which may be built for another torch."""
    monkeypatch.setitem(sys.modules, "torchvision", None)


class Net(BaseModel):
    """A model whose targets are its inputs."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.encoder, self.decoder = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6)

    def forward(self, inputs: torch.Tensor, mode: str = "loss") -> Any:
        outputs = self.decoder(self.encoder(inputs).relu())
        return {"loss_mse": mse_loss(outputs, inputs)} if mode == "loss" else [outputs]


class Missed(BaseMetric):
    """The sum of all outputs."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(float(sum(one.sum() for one in data_samples)))

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {"missed": sum(results)}


def loader(batches: int = BATCHES) -> dict[str, Any]:
    """Return the configuration of batches of four, shuffled with the runner's seed."""
    numbers = torch.randn(4 * batches, 6, generator=torch.Generator().manual_seed(1))
    return {
        "dataset": [{"inputs": one} for one in numbers], "batch_size": 4, "num_workers": 0,
        "sampler": {"type": "DefaultSampler", "shuffle": True}, "collate_fn": {"type": "default_collate"},
    }  # fmt: skip


def runner_of(model: torch.nn.Module, folder: Path, *hooks: Any, evaluated: bool = False, **options: Any) -> Runner:
    """Return a quiet runner of two epochs."""
    wrapper = {"optimizer": {"type": "AdamW", "lr": 0.01}, **options.pop("optim", {})}
    chosen = {"train_cfg": {"by_epoch": True, "max_epochs": 2}, **options}
    if evaluated:
        chosen |= {"val_dataloader": loader(2), "val_cfg": {}, "val_evaluator": [Missed()]}
    return Runner(
        model, str(folder), train_dataloader=loader(), optim_wrapper=wrapper, custom_hooks=list(hooks), log_level="ERROR",
        randomness={"seed": 0}, experiment_name=f"run-{id(model)}-{len(list(folder.iterdir()))}", **chosen,
    )  # fmt: skip


class Looks(Hook):
    """Calls a function after each batch, behind all other hooks."""

    priority = "LOWEST"

    def __init__(self, look: Callable[[Any], object]) -> None:
        self._look = look

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self._look(runner)


def trained(run: Training, folder: Path, **options: Any) -> None:
    """Train with the hook, or without."""
    model = Net()
    losses = Looks(lambda runner: run.told.append(runner.message_hub.get_scalar("train/loss").current()))
    with run.called_back(model, GradExporterHook) as hooks:
        runner_of(model, folder, *hooks, losses, **options).train()
    assert running_exporter(model) is None


@pytest.mark.parametrize(
    "options",
    [
        {"optim": {"clip_grad": {"max_norm": 0.05}}},
        {"optim": {"clip_grad": {"max_norm": 0.05}, "accumulative_counts": 4}},
        {"evaluated": True, "train_cfg": {"by_epoch": False, "max_iters": 16, "val_interval": 4}},
    ],
    ids=["clipped", "accumulated", "by iterations, evaluated"],
)
def test_numbers(options: dict[str, Any], tmp_path: Path) -> None:
    """All numbers are those of the record, and training ends in the same bits."""
    run = compared(partial(trained, folder=tmp_path, **options))
    assert run.exporter is not None
    assert errors(run.exporter) == {}


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
    runner_of(Net(), tmp_path, named, Looks(look), cfg=imported, optim=optim).train()
    assert shown.pop("torch_train_loss") == pytest.approx(sum(losses[-2:]) / 2, rel=1e-6)
    assert shown == {"torch_train_epoch": 1, "torch_train_samples_total": 64, "torch_grad_sample_step": 8}
    again = {"train_cfg": {"by_epoch": True, "max_epochs": 3}, "resume": True, "load_from": str(tmp_path / "epoch_2.pth")}
    runner_of(Net(), tmp_path, named, Looks(look), optim=optim, **again).train()
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
    runner_of(Net(), tmp_path, GradExporterHook(**QUICK), Looks(kept), Watches(), evaluated=True).train()
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
    hooks = (GradExporterHook(**QUICK), Looks(kept), Looks(look), Slow())
    saved = {"default_hooks": {"checkpoint": {"type": "CheckpointHook", "interval": 1}}}
    runner_of(Net(), tmp_path, *hooks, evaluated=True, **saved).train()
    assert seen[BATCHES - 1] == (0, 0)
    assert seen[-1] == (pytest.approx(0.4, abs=0.15), pytest.approx(0.3, abs=0.15))


@pytest.mark.parametrize("caught_by_with", [True, False])
def test_failures(tmp_path: Path, caught_by_with: bool) -> None:
    """Within a `with` the run has failed with the exception; else the next training marks it as failed."""

    def breaks(runner: Any) -> None:
        kept(runner)
        if runner.iter == 3:
            raise Broken

    kept, hook = Kept(), GradExporterHook(**QUICK)
    if caught_by_with:
        with pytest.raises(Broken), hook:
            runner_of(Net(), tmp_path, hook, Looks(breaks)).train()
        assert ending_of(kept.exporter, tmp_path) == ("failed", "Broken")
    else:
        with pytest.raises(Broken):
            runner_of(Net(), tmp_path, hook, Looks(breaks)).train()
        first = kept.exporter
        runner_of(Net(), tmp_path, hook, Looks(kept)).train()
        assert ending_of(first, tmp_path) == ("failed", "TrainingInterrupted")
        assert ending_of(kept.exporter, tmp_path) == ("finished", None)
        assert kept.exporter.run == first.run


def test_stops(tmp_path: Path) -> None:
    """`Stop()` ends the training at once."""

    def stop(runner: Any) -> None:
        assert hook.exporter is not None
        if runner.iter == 0:
            hook.exporter.on(lambda m: True, Stop())

    hook, model = GradExporterHook(**QUICK), Net()
    runner = runner_of(model, tmp_path, hook, Looks(stop), train_cfg={"by_epoch": False, "max_iters": 10**9})
    runner.train()
    assert runner.iter < 10**9
    assert running_exporter(model) is None


def test_what_is_logged(tmp_path: Path) -> None:
    """The visualizer gets norms at the logger's interval, without smoothing."""
    hook = GradExporterHook(**QUICK, log="^torch_grad_global_norm$")
    norms: list[float | None] = []

    def look(runner: Any) -> None:
        assert hook.exporter is not None
        norms.append(value(hook.exporter, "torch_grad_global_norm"))

    runner_of(
        Net(), tmp_path, hook, Looks(look), default_hooks={"logger": {"type": "LoggerHook", "interval": 3}},
        visualizer={"type": "Visualizer", "name": "own", "vis_backends": [{"type": "LocalVisBackend"}]},
    ).train()  # fmt: skip
    lines = [json.loads(line) for path in tmp_path.glob("*/vis_data/scalars.json") for line in path.read_text().splitlines()]
    logged = {line["step"]: line["torch_grad_global_norm"] for line in lines if "torch_grad_global_norm" in line}
    assert logged == {step: norms[step - 1] for step in (3, 6, 11, 14)}


@pytest.mark.parametrize("log_values", [True, False])
def test_what_the_runner_logs_is_shown(tmp_path: Path, log_values: bool) -> None:
    """The exporter shows what the runner's message hub has at the logger's iterations, or nothing of it."""
    model, logged = Net(), list[float]()

    def look(runner: Any) -> None:
        logged.append(runner.message_hub.get_scalar("train/loss").current())

    with start_exporter(model, port=None) as exporter:
        hook = GradExporterHook(exporter, log_values=log_values)
        runner_of(model, tmp_path, hook, Looks(look), default_hooks={"logger": {"type": "LoggerHook", "interval": 3}}).train()
        shown = exporter.values("^torch_train_value/train/(loss|lr)$")
    names = {"torch_train_value/train/loss", "torch_train_value/train/lr"}
    assert shown.keys() == (names if log_values else set())
    assert not log_values or shown["torch_train_value/train/loss"] == pytest.approx(logged[13])


def test_the_users_exporter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The user's exporter continues; a second hook is logged, and the same one twice raises."""
    model = Net()
    with start_exporter(model, port=None) as exporter, caplog.at_level(logging.WARNING, "torch_grad_exporter"):
        hook = GradExporterHook(exporter)
        runner_of(model, tmp_path, hook, GradExporterHook(port=None)).train()
        assert value(exporter, "torch_train_samples_total") == 64
        assert running_exporter(model) is exporter
        runner = runner_of(model, tmp_path, hook, hook)
        with pytest.raises(ValueError, match="registered twice"):
            runner.train()
    assert "remove one of them" in caplog.text
