"""The callback for Lightning: start, reported values and end, in trainings of the real `Trainer`."""

from __future__ import annotations

import csv
import logging
import math
import pickle
import time
from collections.abc import Callable
from functools import partial
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

from tests.matrix.harness import Way
from tests.support.ranks import run_ranks
from tests.support.scrape import errors, key, value, values
from tests.trainers.test_lightning import Gan, Module, Through, network, numbers
from tests.trainers.training import AMPLE, QUICK, Broken, Training, compared, ending_of, spent
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Stop
from torch_grad_exporter.integrations.lightning import GradExporterCallback
from torch_grad_exporter.integrations.session import running_exporter

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


def trained(
    run: Training, kind: Callable[[], Any] = Through, *, batches: int = 8, validation: bool = False, **options: Any
) -> None:
    """Train with the callback, or without."""
    torch.manual_seed(0)
    module = kind()
    with run.called_back(module, GradExporterCallback) as callbacks:
        trainer = trainer_of(*callbacks, **options)
        trainer.fit(module, numbers(batches), numbers(2) if validation else None)
    assert running_exporter(module) is None
    run.told.append(trainer.global_step)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Through, {"gradient_clip_val": 0.05}),
        (Module, {"gradient_clip_val": 0.05, "accumulate_grad_batches": 3, "batches": 9}),
        (Through, {"gradient_clip_val": 0.05, "accumulate_grad_batches": 3, "batches": 9}),
        (Module, {"validation": True, "val_check_interval": 0.5, "accumulate_grad_batches": 2}),
        (Through, {"precision": "bf16-mixed"}),
    ],
    ids=["clipped", "accumulated by parts", "accumulated", "evaluated by parts", "bf16"],
)
def test_numbers(kind: type[Module], options: dict[str, Any]) -> None:
    """All numbers are those of the record, and training ends in the same bits."""
    run = compared(partial(trained, kind=kind, **options))
    assert run.exporter is not None
    assert errors(run.exporter) == {}


def test_at_defaults() -> None:
    """At the default options each value belongs to the step that it names."""
    assert len(compared(partial(trained, batches=60, max_epochs=8), Way.DEFAULTS, between=3, **AMPLE).samples) > 2


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


def test_what_the_trainer_knows() -> None:
    """Loss, samples, epoch and learning rate are the trainer's, each counted once."""

    class Logs(Through):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            losses.append(loss := super().training_step(batch, index))
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    class Submodules(Logs):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            losses.append(loss := Module.training_step(self, batch, index))
            return loss

    def look(trainer: Any) -> None:
        assert callback.exporter is not None
        shown = values(callback.exporter)
        assert shown[key("torch_train_epoch")] == trainer.current_epoch
        if len(losses) % 2 == 0:
            assert shown[key("torch_train_samples_total")] == 4 * len(losses)
            assert shown[key("torch_train_loss")] == pytest.approx(float(sum(losses[-2:])) / 2, rel=1e-6)
            rates.append(shown[key("torch_train_learning_rate", optimizer="AdamW", group="0")])

    for kind in (Logs, Submodules):
        losses: list[torch.Tensor] = []
        rates: list[float] = []
        callback = GradExporterCallback(**QUICK)
        trainer_of(callback, Looks(look), accumulate_grad_batches=2).fit(kind(), numbers(8))
        assert rates == [0.01 * 0.5**step for step in range(8)]


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


@pytest.mark.parametrize("error", [Broken("secret"), KeyboardInterrupt()])
def test_a_training_that_fails(tmp_path: Path, error: BaseException) -> None:
    """The state is failed with the exception's name, Ctrl-C is finished, and the next fit has its own exporter."""
    kept: list[Any] = []

    class Fails(Through):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            if index == 2 and not kept:
                kept.append(callback.exporter)
                raise error
            return super().training_step(batch, index)

    callback, module = GradExporterCallback(**QUICK), Fails()
    with pytest.raises(Broken if isinstance(error, Broken) else SystemExit):
        trainer_of(callback).fit(module, numbers(4))
    assert ending_of(kept[0], tmp_path) == (("failed", "Broken") if isinstance(error, Broken) else ("finished", None))
    assert running_exporter(module) is None
    trainer_of(callback, Looks(lambda _: kept.append(callback.exporter))).fit(module, numbers(4))
    assert kept[-1].run == kept[0].run
    assert ending_of(kept[-1], tmp_path) == ("finished", None)


def test_stop() -> None:
    """`Stop()` ends the fit after a whole step."""
    callback, stepped = GradExporterCallback(**QUICK), []

    class Stops(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            assert callback.exporter is not None
            callback.exporter.on(lambda m: m.mean("torch_train_steps_total", samples=1) >= 3, Stop())

    trainer = trainer_of(callback, Stops(), Looks(lambda trainer: stepped.append(trainer.global_step)), max_epochs=-1)
    trainer.fit(Through(), numbers(8))
    assert trainer.should_stop
    assert stepped[-1] == trainer.global_step >= 3


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


def test_the_users_exporter(caplog: pytest.LogCaptureFixture) -> None:
    """The user's exporter is found and continues after the fit; a second callback is logged and reports nothing."""
    module = Module()
    with start_exporter(module, **QUICK) as exporter, caplog.at_level(logging.WARNING, "torch_grad_exporter"):
        callback = GradExporterCallback(exporter)
        trainer_of(callback, GradExporterCallback()).fit(module, numbers(4))
        assert value(exporter, "torch_train_samples_total") == 2 * 4 * 4
        assert value(exporter, "torch_train_epoch") == 1
        assert running_exporter(module) is exporter
    assert "remove one of them" in caplog.text
    with pytest.raises(ValueError, match="added to the trainer twice; add it once"):
        trainer_of(callback, callback).fit(Through(), numbers(3))


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


def test_wrong_arguments_raise() -> None:
    """Wrong arguments raise where the callback is made or when training begins, and a callback pickles."""
    assert isinstance(pickle.loads(pickle.dumps(GradExporterCallback(port=None))), GradExporterCallback)  # noqa: S301 - our own
    with pytest.raises(TypeError, match=r"GradExporterCallback\(prot=...\): not an option of start_exporter"):
        GradExporterCallback(prot=9100)
    with pytest.raises(ValueError, match="every"):
        trainer_of(GradExporterCallback(port=None, every=-1)).fit(Through(), numbers(2))


def test_what_is_logged(tmp_path: Path) -> None:
    """The trainer's loggers and `callback_metrics` get the values at the logging steps."""
    logger = CSVLogger(tmp_path)
    trainer = trainer_of(GradExporterCallback(log=True, **QUICK), logger=logger, log_every_n_steps=4)
    trainer.fit(Through(), numbers(10))
    with Path(logger.log_dir, "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["torch_grad_global_norm"]]
    assert [int(row["step"]) for row in rows] == [3, 7, 11, 15, 19]
    assert all(float(row["torch_grad_norm/encoder.0"]) > 0 for row in rows)
    assert "torch_train_skipped_steps_total" in rows[0]
    assert float(trainer.callback_metrics["torch_grad_global_norm"]) == pytest.approx(float(rows[-1]["torch_grad_global_norm"]))


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
