"""The callback for Lightning: start, reported values and end, in trainings of the real `Trainer`."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import pytorch_lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch.nn.functional import mse_loss

from tests.support.ranks import run_ranks
from tests.support.scrape import key, value, values
from tests.trainers.test_lightning import Gan, Module, Through, network, numbers
from tests.trainers.training import QUICK, ending_of, spent
from torch_grad_exporter import start_exporter
from torch_grad_exporter.integrations.lightning import GradExporterCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class Looks(Callback):
    """Calls a function after each batch, behind the callbacks before it."""

    def __init__(self, look: Callable[[Any], object]) -> None:
        self._look = look

    def on_train_batch_end(self, trainer: Any, *_arguments: Any) -> None:
        self._look(trainer)


def trainer_of(*callbacks: Any, package: Any = lightning, **options: Any) -> Any:
    """Return a quiet trainer of one of the two packages with these callbacks."""
    chosen = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, **options}
    return package.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks), **chosen
    )  # fmt: skip


def global_norm(module: torch.nn.Module) -> float:
    """Return the norm of the present gradients in float64."""
    return math.sqrt(sum(float(one.grad.double().square().sum()) for one in module.parameters() if one.grad is not None))


class Overflows(Through):
    """A module whose first steps overflow half precision."""

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return super().training_step(batch, index) * 64


def test_half_precision() -> None:
    """The callback finds the trainer's scaler: norms are unscaled and skipped steps are counted."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1000)
    callback, skipped, scales, steps, norms = GradExporterCallback(**QUICK), [], [], [], []

    def look(trainer: Any) -> None:
        scales.append(scaler.get_scale())
        assert callback.exporter is not None
        shown = values(callback.exporter)
        skipped.append(shown[key("torch_train_skipped_steps_total")])
        steps.append(shown.get(key("torch_train_steps_total", optimizer="AdamW"), 0))
        norm = global_norm(trainer.lightning_module)
        if math.isfinite(norm):
            norms.append((shown[key("torch_grad_global_norm")], norm))

    torch.manual_seed(0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    trainer_of(callback, Looks(look), plugins=[plugin]).fit(Overflows(), numbers(11))
    halved = sum(before > after for before, after in zip([2.0**20, *scales], scales, strict=False))
    assert 0 < halved < 22
    assert (skipped[-1], steps[-1]) == (halved, 22 - halved)
    assert len(norms) >= steps[-1]
    assert all(shown == pytest.approx(norm, rel=1e-5) for shown, norm in norms)


def test_states(tmp_path: Path) -> None:
    """The state is training, evaluating and finished in turn."""
    seen: list[str] = []

    class States(Callback):
        def state(self, trainer: Any, *_arguments: Any) -> None:
            exporter = callback.exporter
            if exporter is not None:
                kept.append(exporter)
                states = ("initialising", "training", "evaluating", "finished", "failed")
                seen.extend(state for state in states if value(exporter, "torch_train_state", state=state))

        on_train_batch_end = on_validation_batch_end = on_train_epoch_end = on_validation_end = state

    kept: list[Any] = []
    callback = GradExporterCallback(**QUICK)
    trainer_of(callback, States(), max_epochs=1).fit(Module(), numbers(2), numbers(2))
    assert seen == ["training", "training", "evaluating", "evaluating", "training", "training"]
    assert ending_of(kept[0], tmp_path) == ("finished", None)


def test_time_of_evaluations_and_checkpoints(tmp_path: Path) -> None:
    """An evaluation without a forward of the module, and a checkpoint, have the time that they take."""

    class Slow(Module):
        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            time.sleep(0.2)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            time.sleep(0.3)

    def look(trainer: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(tmp_path / "saved.ckpt")
        seen.append((spent(kept(), "evaluation"), spent(kept(), "checkpoint")))

    def kept() -> Any:
        assert callback.exporter is not None
        return callback.exporter

    seen: list[tuple[float, float]] = []
    callback = GradExporterCallback(**QUICK)
    trainer_of(callback, Looks(look), num_sanity_val_steps=0).fit(Slow(), numbers(4), numbers(2))
    assert seen[1] == (0, 0)
    assert seen[-1] == (pytest.approx(0.4, abs=0.15), pytest.approx(0.3, abs=0.15))


@pytest.mark.parametrize("kind", [Through, Gan])
def test_resumed_training(tmp_path: Path, kind: type[Module]) -> None:
    """Step numbers continue after a checkpoint, and counters are those of this process."""
    trainer_of(ModelCheckpoint(tmp_path, filename="at"), enable_checkpointing=True, max_epochs=1).fit(kind(), numbers(6))
    callback, shown = GradExporterCallback(**QUICK), []

    def look(trainer: Any) -> None:
        assert callback.exporter is not None
        scrape = values(callback.exporter)
        numbers = {value for one, value in scrape.items() if one[0] == "torch_grad_sample_step"}
        shown.append((max(numbers), scrape[key("torch_train_earlier_steps")], trainer.fit_loop.epoch_loop.total_batch_idx + 1))

    trainer_of(callback, Looks(look)).fit(kind(), numbers(6), ckpt_path=tmp_path / "at.ckpt")
    assert shown == [(6 + step, 6, 6 + step) for step in range(1, 7)]


class OfTheOtherPackage(pytorch_lightning.LightningModule):
    """A module of `pytorch_lightning`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return mse_loss(self.net(batch), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def test_the_other_package() -> None:
    """The callback also serves the trainer of `pytorch_lightning`."""
    callback, shown = GradExporterCallback(**QUICK), []
    module: Any = OfTheOtherPackage()
    module.on_train_batch_end = lambda *_: shown.append(values(callback.exporter))
    trainer_of(callback, package=pytorch_lightning, max_epochs=1).fit(module, numbers(3))
    assert shown[-1][key("torch_train_steps_total", optimizer="AdamW")] == 3


def test_what_is_logged(tmp_path: Path) -> None:
    """`callback_metrics` get the values at the logging steps."""
    callback, shown = GradExporterCallback(log=True, **QUICK), []
    looks = Looks(lambda _: shown.append(value(callback.exporter, "torch_grad_global_norm")))
    trainer = trainer_of(callback, looks, logger=CSVLogger(tmp_path), log_every_n_steps=4)
    trainer.fit(Through(), numbers(10))
    assert float(trainer.callback_metrics["torch_grad_global_norm"]) == pytest.approx(shown[19])


@pytest.mark.parametrize("log_values", [True, False])
def test_what_the_module_logs_is_shown(log_values: bool) -> None:
    """The exporter shows what `self.log` was given: at logging steps, of each epoch, and of validations; or nothing of it."""

    class Logs(Through):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            self.log("train/reward", float(index), on_step=True, on_epoch=True)
            return super().training_step(batch, index)

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            self.log("val/accuracy", 0.25)

    module = Logs()
    with start_exporter(module, port=None) as exporter:
        trainer = trainer_of(GradExporterCallback(exporter, log_values=log_values), log_every_n_steps=4)
        trainer.fit(module, numbers(10), numbers(2))
        shown = exporter.values("^torch_train_value/")
    expected = {"train/reward": 4.5, "train/reward_step": 9, "train/reward_epoch": 4.5, "val/accuracy": 0.25}
    assert shown == ({f"torch_train_value/{name}": value for name, value in expected.items()} if log_values else {})


def _rank(rank: int, folder: Path) -> None:
    import tests.trainers  # noqa: F401, PLC0415 - what it sets in a process

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    losses, shown = [], []

    class Kept(Module):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            losses.append(loss := super().training_step(batch, index))
            return loss

    def look(trainer: Any) -> None:
        assert callback.exporter is not None
        scrape = values(callback.exporter)
        shown.append(scrape)
        assert scrape[key("torch_train_loss")] == pytest.approx(float(losses[-1]), rel=1e-6)
        assert scrape[key("torch_train_samples_total")] == 4 * len(losses)
        assert scrape[key("torch_grad_global_norm")] == pytest.approx(global_norm(trainer.lightning_module), rel=1e-5)

    callback = GradExporterCallback(**QUICK)
    torch.manual_seed(0)
    trainer = trainer_of(callback, Looks(look), strategy="ddp", devices=2, max_epochs=1)
    trainer.fit(Kept(), numbers(8))
    assert len(shown) == 4
    assert shown[-1][key("torch_train_world_size")] == 2
    assert (key("torch_grad_norm", layer="encoder.0") in shown[-1]) == (rank == 0)
    dist.destroy_process_group()


def test_two_ranks(tmp_path: Path) -> None:
    """Under DDP each rank reports its own batches, and norms are those of the reduced gradients."""
    run_ranks(_rank, tmp_path)
