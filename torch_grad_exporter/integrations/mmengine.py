"""The hook for the `Runner` of MMEngine, and of what is built on it, such as MMDetection.

See docs/frameworks.md. It reports what only the runner knows: beginnings and ends, steps, epochs, and the loss and size of batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from torch_grad_exporter.integrations.common import RoundLosses, TrainingInterrupted, require
from torch_grad_exporter.integrations.session import SessionOwner

require("mmengine", "0.10", extra="mmengine")

from mmengine.hooks import Hook, LoggerHook  # noqa: E402 - require() has raised if it is missing
from mmengine.optim import OptimWrapperDict  # noqa: E402
from mmengine.registry import HOOKS  # noqa: E402

# Iterations from one logged one to the next if there is no `LoggerHook`; its own default.
INTERVAL = 10


@HOOKS.register_module()
class GradExporterHook(SessionOwner, Hook):  # type: ignore[misc] # of a package without types here
    """Shows the gradients and the course of a training: `custom_hooks=[dict(type="GradExporterHook", port=9100)]`.

    In a configuration it needs `custom_imports=dict(imports=["torch_grad_exporter.integrations.mmengine"])`. MMEngine has no event
    for an exception. One that ends the process is seen; where your code catches it, train in a `with`:
    `with GradExporterHook() as hook: Runner(..., custom_hooks=[hook]).train()`.

    With `log` the exporter's values go to the runner's visualizer, at the iterations at which its `LoggerHook` logs; `log_values`
    are what is logged there, and the metrics of each validation. See `SessionOwner` for the arguments.
    """

    priority = "NORMAL"

    def before_train(self, runner: Any) -> None:
        """Start the exporter, unless there is one. Checkpoints are loaded by now."""
        if sum(hook is self for hook in runner.hooks) > 1:
            raise ValueError("this GradExporterHook was registered twice; register it once")
        if self._session.active:
            self._session.end(TrainingInterrupted())
        self._losses = RoundLosses()
        wrapper = runner.optim_wrapper
        # Several batches may share a step of the optimizer.
        step = int(runner.iter // max(1, getattr(wrapper, "_accumulative_counts", 1)))
        self._session.begin(runner.model, step=step or None, trainer=runner, **_known(wrapper))

    def before_train_epoch(self, runner: Any) -> None:
        """Report the epoch."""
        self._session.during(lambda: self._session.observe(epoch=runner.epoch))

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Report the batch, log if the runner does, and end the training if a `Stop()` asks for it."""
        self._session.during(self._batch_over, runner, batch_idx, data_batch, outputs)
        if self._session.should_stop:
            runner.train_loop.stop_training = True

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Report that a checkpoint is being written."""
        self._session.during(self._session.checkpointing)

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Report that an evaluation runs."""
        self._session.during(self._session.evaluating)

    def after_val_epoch(self, runner: Any, metrics: Mapping[str, object] | None = None) -> None:
        """Show the metrics of a validation."""
        values = {f"val/{name}": value for name, value in (metrics or {}).items()}
        self._session.during(self._session.log_values, values)

    def after_val(self, runner: Any) -> None:
        """Report that it is over."""
        self._session.during(self._session.evaluating, False)

    def after_train(self, runner: Any) -> None:
        """End the exporter that was started for this training."""
        self._session.end()

    def _batch_over(self, runner: Any, batch_idx: int, data_batch: Any, outputs: Any) -> None:
        self._losses.add(outputs.get("loss") if isinstance(outputs, Mapping) else None)
        wrapper = runner.optim_wrapper
        stepped = isinstance(wrapper, OptimWrapperDict) or wrapper.should_update()
        self._session.observe(samples=_size(data_batch), epoch=runner.epoch, loss=self._losses.round_over() if stepped else None)
        if not self._logged_now(runner, batch_idx):
            return
        self._session.log_values({name: values.current() for name, values in runner.message_hub.log_scalars.items()})
        if self._logs:
            runner.visualizer.add_scalars(self._session.logged(), step=runner.iter + 1)

    def _logged_now(self, runner: Any, batch_idx: int) -> bool:
        """Return whether the runner's `LoggerHook`, which comes after this one, logs this iteration."""
        logger = next((hook for hook in runner.hooks if isinstance(hook, LoggerHook)), None)
        if logger is None or self.every_n_inner_iters(batch_idx, logger.interval):
            return logger is not None or self.every_n_inner_iters(batch_idx, INTERVAL)
        loader = runner.train_dataloader
        return self.end_of_epoch(loader, batch_idx) and (not logger.ignore_last or len(loader) <= logger.interval)


def _known(wrapper: Any) -> dict[str, Any]:
    """Return what an `OptimWrapper`, or several by name, knows of the training, as options of `start_exporter`."""
    if isinstance(wrapper, OptimWrapperDict):
        wrappers = dict(wrapper.items())
        scalers = [scaler for each in wrappers.values() if (scaler := getattr(each, "loss_scaler", None)) is not None]
        optimizers: dict[str, Any] = {"optimizers": {name: each.optimizer for name, each in wrappers.items()}}
        return optimizers | ({"grad_scaler": scalers[0]} if len(scalers) == 1 else {})
    return {"optimizers": wrapper.optimizer, "grad_scaler": getattr(wrapper, "loss_scaler", None)}


def _size(batch: object) -> int | None:
    """Return the examples in a batch of MMEngine's collate functions: those of `inputs`, or of its first part."""
    parts = [batch.get("inputs")] if isinstance(batch, Mapping) else list(batch)[:1] if isinstance(batch, list | tuple) else []
    return len(parts[0]) if parts and isinstance(parts[0], Sized) else None
