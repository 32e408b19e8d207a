"""The callback for Lightning: what it starts, tells and ends, in trainings of the real `Trainer`."""

from __future__ import annotations

import csv
import logging
import math
import pickle
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
from tests.trainers.training import Training, compared, ending_of
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Stop
from torch_grad_exporter.integrations.lightning import GradExporterCallback
from torch_grad_exporter.integrations.session import running_exporter

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

QUICK = {"port": None, "every": 1, "collectors": {"process": False, "host": False, "container": False, "gpu": False}}
"""Options of an exporter that looks at each step, and at no machine."""


class Looks(Callback):
    """Calls a function after each batch, behind the callbacks before it."""

    def __init__(self, look: Callable[[Any], object]) -> None:
        self._look = look

    def on_train_batch_end(self, trainer: Any, *_arguments: Any) -> None:
        self._look(trainer)


def trainer_of(*callbacks: Any, package: Any = lightning, **options: Any) -> Any:
    """A quiet trainer of one of the two packages, with these callbacks."""
    chosen = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, **options}
    return package.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks), **chosen
    )  # fmt: skip


def global_norm(module: torch.nn.Module) -> float:
    """The norm of the gradients as they are now, in float64."""
    return math.sqrt(sum(float(one.grad.double().square().sum()) for one in module.parameters() if one.grad is not None))


def trained(
    run: Training, kind: Callable[[], Any] = Through, *, batches: int = 8, validation: bool = False, **options: Any
) -> None:
    """Trains with the callback, or without."""
    torch.manual_seed(0)
    module = kind()
    with run.called_back(module, GradExporterCallback) as callbacks:
        trainer = trainer_of(*callbacks, **options)
        trainer.fit(module, numbers(batches), numbers(2) if validation else None)
    assert running_exporter(module) is None
    run.told.append(trainer.global_step)


@pytest.mark.parametrize("kind", [Module, Through])
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.05, "accumulate_grad_batches": 3, "batches": 9},
        {"validation": True, "val_check_interval": 0.5, "accumulate_grad_batches": 2},
        {"precision": "bf16-mixed"},
    ],
    ids=["clipped", "accumulated", "evaluated", "bf16"],
)
def test_numbers(kind: type[Module], options: dict[str, Any]) -> None:
    """Every number is that of the record, also where the module itself is never called; training is the same to the last bit."""
    run = compared(partial(trained, kind=kind, **options))
    assert run.exporter is not None
    assert errors(run.exporter) == {}


@pytest.mark.parametrize("kind", [Through, Gan])
def test_at_defaults(kind: type[Module]) -> None:
    """What is shown at defaults is of the step that it is said to be of, also with two optimizers in turn."""
    train = partial(trained, kind=kind, batches=60, max_epochs=8)
    assert len(compared(train, Way.DEFAULTS, between=20 if kind is Gan else 3).samples) > 2


class Overflows(Through):
    """A loss scale of 2^20 at first, which half precision cannot hold, halves after each step that overflows."""

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return super().training_step(batch, index) * 64


def test_half_precision_and_skipped_steps() -> None:
    """The callback finds the trainer's scaler: norms of the first steps are unscaled, and skipped steps are counted exactly."""
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
    """Loss, examples, epoch and learning rate are the trainer's, each counted once, whether the module is called or not."""

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
    """Training, evaluating, also where only submodules are called, and finished."""
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


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize("error", [Broken("secret"), KeyboardInterrupt()])
def test_a_training_that_fails(tmp_path: Path, error: BaseException) -> None:
    """The state is failed, by the exception's name; Ctrl-C is an end like any other. The next fit has an exporter of its own."""
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
    """`Stop()` ends the fit, at a whole step."""
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
    """After a checkpoint the numbers of steps go on, as the trainer's loggers count them; counters are those of this process."""
    trainer_of(ModelCheckpoint(tmp_path, filename="at"), enable_checkpointing=True, max_epochs=1).fit(kind(), numbers(6))
    callback, shown = GradExporterCallback(**QUICK), []

    def look(trainer: Any) -> None:
        assert callback.exporter is not None
        scrape = values(callback.exporter)
        numbers = {value for one, value in scrape.items() if one[0] == "torch_grad_sample_step"}
        shown.append((max(numbers), scrape[key("torch_train_earlier_steps")], trainer.fit_loop.epoch_loop.total_batch_idx + 1))

    trainer_of(callback, Looks(look)).fit(kind(), numbers(6), ckpt_path=tmp_path / "at.ckpt")
    assert shown == [(6 + step, 6, 6 + step) for step in range(1, 7)]


def test_several_fits(tmp_path: Path) -> None:
    """Each fit has an exporter, of one run; a trainer that goes on counts on, and one that begins anew begins at one."""
    callback, exporters, last = GradExporterCallback(**QUICK), [], []

    def look(_trainer: Any) -> None:
        assert callback.exporter is not None
        if callback.exporter not in exporters:
            exporters.append(callback.exporter)
        last.append(value(callback.exporter, "torch_grad_sample_step"))

    trainer, module = trainer_of(callback, Looks(look), max_epochs=1), Through()
    trainer.fit(module, numbers(4))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, numbers(4))
    trainer_of(callback, Looks(look), max_epochs=1).fit(module, numbers(4))
    assert last == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4]
    assert len(exporters) == 3
    assert len({exporter.run for exporter in exporters}) == 1
    assert {ending_of(exporter, tmp_path) for exporter in exporters} == {("finished", None)}


def test_an_exporter_of_the_users() -> None:
    """It is told, whether it is given or found, and goes on after the fit."""
    for given in (True, False):
        module = Module()
        with start_exporter(module, **QUICK) as exporter:
            callback = GradExporterCallback(exporter) if given else GradExporterCallback()
            trainer_of(callback).fit(module, numbers(4))
            assert value(exporter, "torch_train_samples_total") == 2 * 4 * 4
            assert value(exporter, "torch_train_epoch") == 1
            assert running_exporter(module) is exporter


def test_added_twice(caplog: pytest.LogCaptureFixture) -> None:
    """Two callbacks: the second one tells nothing, and the log says so. The same one twice raises before the training."""
    first, second = GradExporterCallback(**QUICK), GradExporterCallback(**QUICK)
    shown = []

    def look(_trainer: Any) -> None:
        assert first.exporter is not None
        shown.append(value(first.exporter, "torch_train_samples_total"))

    with caplog.at_level(logging.WARNING, "torch_grad_exporter"):
        trainer_of(first, second, Looks(look), max_epochs=1).fit(Through(), numbers(3))
    assert shown == [4, 8, 12]
    assert "GradExporterCallback: GradExporterCallback tells this exporter already; remove one of them" in caplog.text
    with pytest.raises(ValueError, match="added to the trainer twice; add it once"):
        trainer_of(first, first).fit(Through(), numbers(3))


def test_arguments() -> None:
    """Wrong ones raise where the callback is made, or when the training begins, and say what to do; a callback pickles."""
    with start_exporter(network(), port=None) as exporter, pytest.raises(TypeError, match=r"port=\.\.\..*not both"):
        GradExporterCallback(exporter, port=9100)
    assert isinstance(pickle.loads(pickle.dumps(GradExporterCallback(port=None))), GradExporterCallback)  # noqa: S301 - our own
    with pytest.raises(TypeError, match=r"GradExporterCallback\(prot=...\): no option of start_exporter"):
        GradExporterCallback(prot=9100)
    with pytest.raises(ValueError, match="no regular expression"):
        GradExporterCallback(log="(")
    with pytest.raises(ValueError, match="every"):
        trainer_of(GradExporterCallback(port=None, every=-1)).fit(Through(), numbers(2))


def test_what_is_logged(tmp_path: Path) -> None:
    """The trainer's own loggers and its `callback_metrics` get the values, at its logging steps and no others."""
    logger = CSVLogger(tmp_path)
    trainer = trainer_of(GradExporterCallback(log=True, **QUICK), logger=logger, log_every_n_steps=4)
    trainer.fit(Through(), numbers(10))
    with Path(logger.log_dir, "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["torch_grad_global_norm"]]
    assert [int(row["step"]) for row in rows] == [3, 7, 11, 15, 19]
    assert all(float(row["torch_grad_norm/encoder.0"]) > 0 for row in rows)
    assert "torch_train_skipped_steps_total" in rows[0]
    assert float(trainer.callback_metrics["torch_grad_global_norm"]) == pytest.approx(float(rows[-1]["torch_grad_global_norm"]))
    assert not any("torch_" in name for name in _logged(tmp_path / "off", log=False))
    chosen = [name for name in _logged(tmp_path / "chosen", log="^torch_train_steps") if "torch_" in name]
    assert chosen == ["torch_train_steps_total/AdamW"]


def _logged(where: Path, log: bool | str) -> list[str]:
    """The names that a logger gets."""
    logger = CSVLogger(where)
    module = Through()
    module.on_train_batch_end = lambda *_: module.log("mine", 1.0)
    trainer_of(GradExporterCallback(log=log, **QUICK), logger=logger, log_every_n_steps=1).fit(module, numbers(2))
    with Path(logger.log_dir, "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file).fieldnames or ())


def test_a_callback_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """What fails in it at an event costs what was to be told there, is logged once and counted; the training is the same."""

    class Fails(GradExporterCallback):
        def _batch_over(self, *arguments: Any) -> None:
            raise Broken

    def states(callbacks: list[Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = Through()
        trainer_of(*callbacks).fit(module, numbers(6))
        return [parameter.detach() for parameter in module.parameters()]

    callback, failures = Fails(**QUICK), []
    with caplog.at_level(logging.WARNING, "torch_grad_exporter"):
        found = states([callback, Looks(lambda _: failures.append(errors(callback.exporter)))])
    assert all(torch.equal(a, b) for a, b in zip(found, states([]), strict=True))
    assert failures[-1] == {"integration": 12}
    assert caplog.text.count("integration failed; training goes on") == 1


def test_both_packages(tmp_path: Path) -> None:
    """One class serves the trainers of `lightning` and of `pytorch_lightning`, also where it is given without a list."""
    for package, base in ((lightning, Through), (pytorch_lightning, None)):
        module: Any = Through() if base is not None else _of_the_other_package()
        callback, kept = GradExporterCallback(**QUICK), []
        assert isinstance(callback, package.Callback)
        trainer = trainer_of(package=package, max_epochs=1)
        trainer = package.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=callback,
        )  # fmt: skip
        module.on_train_batch_end = lambda *_, kept=kept, callback=callback: kept.append(callback.exporter)
        trainer.fit(module, numbers(3))
        assert value(kept[0], "torch_train_steps_total", optimizer="AdamW") == 3
        assert ending_of(kept[0], tmp_path) == ("finished", None)


def _of_the_other_package() -> Any:
    class Other(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return mse_loss(self.net(batch), batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Other()


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
    """Under DDP each rank tells of its own batches, and norms are those of the reduced gradients."""
    run_ranks(_rank, tmp_path)
