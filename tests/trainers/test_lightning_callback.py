"""The callback for Lightning: what it starts, tells and ends, in trainings of the real `Trainer`."""

from __future__ import annotations

import csv
import logging
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
from tests.trainers.training import Training, compared
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Log, Stop
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


def trained(run: Training, kind: Callable[[], Any] = Through, *, batches: int = 8, validation: bool = False, **options: Any) -> None:
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
