"""The callback for the `Trainer` of Lightning, of the package `lightning` and of `pytorch_lightning`.

See docs/lightning.md. It reports what only the trainer knows: beginnings and ends, steps, epochs, and the loss and size of batches.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from torch_grad_exporter.capture.torch_hooks import batch_size
from torch_grad_exporter.integrations.common import RoundLosses, require
from torch_grad_exporter.integrations.session import SessionOwner

# Of both packages.
OLDEST = "2.2"


def _class_of_callbacks() -> type:
    """Return Lightning's class of callbacks: of the package in use, of both if both are, else of the one that is installed."""
    used = [name for name in ("lightning.pytorch", "pytorch_lightning") if name in sys.modules]
    if "lightning.pytorch" in used or not used:
        try:
            require("lightning", OLDEST, extra="lightning", instead="pytorch_lightning")
            used = used or ["lightning.pytorch"]
        except ModuleNotFoundError:
            require("pytorch_lightning", OLDEST, extra="lightning", instead="lightning", package="lightning")
            used = ["pytorch_lightning"]
    if "pytorch_lightning" in used:
        require("pytorch_lightning", OLDEST, extra="lightning", instead="lightning")
    return type("Callback", tuple(require(name, OLDEST, extra="lightning").Callback for name in used), {})


if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = _class_of_callbacks()


class GradExporterCallback(SessionOwner, Callback):  # type: ignore[misc] # of a package without types here
    """Shows the gradients and the course of a training: `Trainer(callbacks=[GradExporterCallback()])`.

    With `log` the exporter's values go to the trainer's loggers and its `callback_metrics`, whenever the trainer logs; `log_values`
    are what the module logs with `self.log`. See `SessionOwner` for the arguments.
    """

    _steps, _samples = 0, 0  # `_samples`: examples of the batches since the last step
    _knows_size: bool | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the exporter, unless there is one. Checkpoints are restored by now, and the module is on its device."""
        if sum(callback is self for callback in trainer.callbacks) > 1:
            raise ValueError("this GradExporterCallback was added to the trainer twice; add it once")
        step = self._session.before_start(_steps_before, trainer)
        scaler: object = self._session.before_start(lambda: getattr(trainer.precision_plugin, "scaler", None))
        self._session.begin(pl_module, step=step or None, trainer=trainer, grad_scaler=scaler)
        self._steps, self._losses, self._samples, self._knows_size = trainer.global_step, RoundLosses(), 0, None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the epoch, and what the module has logged over the one before."""
        self._session.during(lambda: self._session.observe(epoch=trainer.current_epoch))
        self._session.during(self._log_values, trainer)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Report the backward, which nothing else shows if `training_step` calls submodules."""
        self._session.backward_comes(loss)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Report the batch, log if the trainer does, and end the training if a `Stop()` asks for it."""
        self._session.during(self._batch_over, trainer, pl_module, outputs, batch)
        if self._session.should_stop:
            trainer.should_stop = True

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Report that a checkpoint is being written."""
        self._session.during(self._session.checkpointing)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report that an evaluation begins."""
        self._session.during(self._session.evaluating)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Report that an evaluation goes on, which is not seen if `validation_step` calls submodules."""
        self._session.during(self._session.evaluating)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report that it is over, and what it has found."""
        self._session.during(self._session.evaluating, False)
        self._session.during(self._log_values, trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report what the module has logged over the last epoch."""
        self._session.during(self._log_values, trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End a training that has failed, by this exception."""
        self._session.during(lambda: self._report(loss=False))
        self._session.end(exception)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the exporter that was started for this training."""
        self._session.during(lambda: self._report(loss=False))
        self._session.end()

    def _batch_over(self, trainer: Trainer, module: LightningModule, outputs: object, batch: object) -> None:
        # The first dimension of its tensors; None if they disagree, or there are none.
        parts = () if isinstance(batch, Mapping) else tuple(batch) if isinstance(batch, list | tuple) else (batch,)
        size = batch_size(parts, batch if isinstance(batch, Mapping) else {})
        if self._knows_size is None:
            self._knows_size = size is not None
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            # What the trainer has divided by the batches of a round, it shows divided.
            batches = trainer.accumulate_grad_batches if module.automatic_optimization else 1
            self._losses.add(loss if batches == 1 else loss.detach() * batches)
        if self._knows_size:
            self._samples += size or 0
        steps = trainer.global_step
        stepped, self._steps = steps != self._steps, steps
        if stepped:
            self._report(loss=True)
        if stepped and trainer._logger_connector.should_update_logs:  # as Lightning's own monitors ask
            self._session.log_values(trainer.logged_metrics, _steps_before(trainer))
            if self._logs:
                values = self._session.logged()
                trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
                for logger in trainer.loggers:  # as the trainer's own values
                    logger.log_metrics(values, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _report(self, *, loss: bool) -> None:
        """Report what has come since the last report. `loss`: a step is over, whose loss is known now."""
        samples, self._samples = self._samples, 0
        self._session.observe(samples=samples or None, loss=self._losses.round_over() if loss else None)

    def _log_values(self, trainer: Trainer) -> None:
        self._session.log_values(trainer.callback_metrics, _steps_before(trainer))


def _steps_before(trainer: Trainer) -> int:
    """Return the steps so far, as the trainer's loggers count: each batch is one if several optimizers share it."""
    if len(trainer.optimizers) <= 1:
        return int(trainer.global_step)
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)
