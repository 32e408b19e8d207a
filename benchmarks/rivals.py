"""Monitors of other packages, all of them optional, each attached as its own documentation shows."""

from __future__ import annotations

import runpy
import sys
import tempfile
import types
from importlib.metadata import distribution
from typing import Any

from torch import Tensor

from benchmarks.monitor import Plain
from benchmarks.workloads import Training


class WandbWatch(Plain):
    """`wandb.watch(model, log="gradients", log_freq=...)` in an offline run, and `wandb.log` of the loss after each step.

    Without the call to `wandb.log` nothing that `watch` computes is ever written. `log_freq=None` leaves `watch` out.
    """

    def __init__(self, log_freq: int | None) -> None:
        self._log_freq = log_freq
        self.cycle = log_freq or 1

    def attach(self, training: Training) -> None:
        """A run in a directory that is gone with the process."""
        import wandb  # noqa: PLC0415 - optional

        self._directory = tempfile.TemporaryDirectory(prefix="bench-wandb-", ignore_cleanup_errors=True)
        self._run = wandb.init(mode="offline", project="bench", dir=self._directory.name, settings=wandb.Settings(silent=True))
        if self._log_freq is not None:
            self._run.watch(training.model, log="gradients", log_freq=self._log_freq)

    def after_step(self, loss: Tensor) -> None:
        """As in wandb's examples."""
        self._run.log({"loss": loss.item()})

    def close(self) -> None:
        """Ends the run and its helper process."""
        self._run.finish()
        self._directory.cleanup()


class LightningGradNorm(Plain):
    """`grad_norm(module, norm_type=2)` before each step, as in Lightning's documentation of `on_before_optimizer_step`.

    The values are read out with `.item()` every 50 steps, as a `Trainer` does by default (`log_every_n_steps`). What
    `self.log_dict` and the `Trainer` do besides is left out, which is in Lightning's favour.
    """

    READ_EVERY = 50  # so cheap on a CPU that a block need not be as long

    def attach(self, training: Training) -> None:
        """Nothing but the import."""
        from lightning.pytorch.utilities import grad_norm  # noqa: PLC0415 - optional

        self._grad_norm, self._model, self._steps = grad_norm, training.model, 0
        self.logged: dict[str, float] = {}

    def after_backward(self) -> None:
        """The body of the documented hook."""
        norms = self._grad_norm(self._model, norm_type=2)
        self._steps += 1
        if self._steps % self.READ_EVERY == 0:
            self.logged = {name: norm.item() for name, norm in norms.items()}


class ComposerMonitor(Plain):
    """Composer's `OptimizerMonitor`, its `batch_end` called after each step.

    The class is Composer's own, run from the installed package's file. Importing all of Composer needs versions of torch and
    torchvision that exclude the one measured here, so what that file imports from the rest of it, the base class, two types
    and a function for sharded models, are stand-ins, as are the trainer's state and the logger, which drops what it gets.
    """

    def __init__(self, interval: int) -> None:
        self.cycle = interval

    def attach(self, training: Training) -> None:
        """A state with what the monitor looks at."""
        self._monitor = _composer_class()(batch_log_interval=self.cycle)
        self._batch = types.SimpleNamespace(value=0)
        self._state = types.SimpleNamespace(
            timestamp=types.SimpleNamespace(batch=self._batch),
            model=training.model,
            optimizers=[training.optimizer],
            fsdp_enabled=False,
        )
        self._logger = types.SimpleNamespace(log_metrics=lambda _metrics: None)

    def after_step(self, _loss: Tensor) -> None:
        """As the trainer: the batch is counted, then it ends."""
        self._batch.value += 1
        self._monitor.batch_end(self._state, self._logger)


def _composer_class() -> Any:  # noqa: ANN401 - a class of another package
    stand_ins: dict[str, dict[str, object]] = {
        "composer": {}, "composer.core": {"Callback": object, "State": object},
        "composer.loggers": {"Logger": object}, "composer.utils": {"dist": types.SimpleNamespace(get_world_size=lambda: 1)},
    }  # fmt: skip
    for name, attributes in stand_ins.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(attributes)
    file = distribution("mosaicml").locate_file("composer/callbacks/optimizer_monitor.py")
    return runpy.run_path(str(file))["OptimizerMonitor"]
