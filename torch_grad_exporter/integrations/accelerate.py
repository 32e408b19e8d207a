"""The tracker for Accelerate: `Accelerator(log_with=GradExporterTracker())`.

See docs/frameworks.md. The exporter follows models and optimizers by itself; the tracker reports the loss and the epoch that the
loop logs, and ends with `accelerator.end_training()`. Accelerate calls trackers on the main process only, whatever their
`main_process_only` says; so on the other ranks this one begins with the first forward.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_pre_hook

from torch_grad_exporter import Exporter
from torch_grad_exporter.arguments import numbered
from torch_grad_exporter.errors import Guard, warn
from torch_grad_exporter.integrations.common import require
from torch_grad_exporter.integrations.session import Models, SessionOwner
from torch_grad_exporter.torch_compat.compiler import compile_again, is_tracing, never_compile, stop_compiling

require("accelerate", "1.8", extra="accelerate")

from accelerate import Accelerator  # noqa: E402 - what is missing has been said by now
from accelerate.tracking import GeneralTracker  # noqa: E402

# Names under which a loop logs its loss and its epoch; the first that is there counts.
LOSS = ("loss", "train_loss", "train/loss")
EPOCH = ("epoch", "train/epoch")


class GradExporterTracker(SessionOwner, GeneralTracker):  # type: ignore[misc] # of a package without types here
    """Shows the gradients and the course of a training: `Accelerator(log_with=GradExporterTracker())`, on every rank.

    `init_trackers` or the first forward of a prepared model starts an exporter, and `end_training` ends it. With `log` its values
    go to the accelerator's other trackers, with each `accelerator.log`. A failure in a forward, as where an option does not fit a
    model that is prepared after `init_trackers`, is logged, and nothing is watched. See `SessionOwner` for the other arguments.

    Args:
        model: What is watched, a module or a mapping of names to modules; by default what `accelerator.prepare` was given.
    """

    name = "torch_grad_exporter"
    requires_logging_directory = False
    main_process_only = False

    def __init__(
        self,
        exporter: Exporter | None = None,
        *,
        model: Models | None = None,
        log: bool | str = False,
        log_values: bool = True,
        **options: object,
    ) -> None:
        super().__init__(exporter, log=log, log_values=log_values, **options)
        self._session.check_options()
        self._model = model
        self._step: int | None = None
        self._accelerator_reference: weakref.ref[Accelerator] | None = None
        self._saving: Any = None
        self._searches, self._looking = 0, False
        self._guard = Guard(self._failed)
        never_compile(type(self)._forward_begins)
        self._waiting: Any = register_module_forward_pre_hook(self._forward_begins)

    @property
    def tracker(self) -> Exporter | None:
        """The exporter, as `accelerator.get_tracker("torch_grad_exporter", unwrap=True)` returns it."""
        return self._session.exporter

    def resume(self, step: int) -> None:
        """Report that the training goes on after this many optimizer steps, as those of a checkpoint; before its next step."""
        self._step = step
        if self._session.active and self._session.exporter is not None:
            self._session.exporter.resume(step)

    def start(self) -> None:
        """Start the exporter; if no model is prepared yet, the first forward of one does."""
        self._accelerator_reference = self._session.before_start(self._search)
        self._begin()

    def store_init_configuration(self, values: Mapping[str, object]) -> None:
        """Ignore the configuration of the run, which is not a metric."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **more: object) -> None:
        """Report the loss and the epoch that a loop logs, and add the exporter's values for the other trackers."""
        self._session.during(self._log, values, step)

    def finish(self) -> None:
        """End the exporter that was started for this training; in a `finally`, by the exception that is being raised."""
        self._stop_waiting()
        if self._saving is not None:
            self._saving.remove()
            self._saving = None
        self._session.end(sys.exception())

    def _log(self, values: Mapping[str, Any], step: int | None) -> None:
        loss, epoch = (next((values[name] for name in names if name in values), None) for names in (LOSS, EPOCH))
        if loss is not None:
            self._session.logged_loss(loss)
        self._session.observe(epoch=epoch)
        self._session.log_values(values, step)
        logged = self._session.logged()
        if logged and self._accelerator is not None:
            for tracker in self._accelerator.trackers:
                if tracker is not self:
                    tracker.log(logged, step=step)

    @property
    def _accelerator(self) -> Accelerator | None:
        return None if self._accelerator_reference is None else self._accelerator_reference()

    def _begin(self) -> None:
        """Start the exporter on the models that are known, if there are any."""
        models = self._model if self._model is not None else self._session.before_start(self._prepared)
        if models is None and self._session.exporter is None:
            return
        self._stop_waiting()
        accelerator = self._accelerator
        if accelerator is not None and not accelerator.is_main_process and self not in accelerator.trackers:
            accelerator.trackers.append(self)  # so that `end_training` ends it here, too
        scaler = getattr(accelerator, "scaler", None)
        self._session.begin(models or {}, step=self._step, trainer=accelerator, knows_step=False, grad_scaler=scaler)
        if accelerator is not None and self._saving is None:
            self._saving = accelerator.register_save_state_pre_hook(lambda *_: self._session.during(self._session.checkpointing))

    def _prepared(self) -> Models | None:
        """Return the models that the accelerator has prepared, without what it has wrapped around them."""
        accelerator = self._accelerator
        models = [] if accelerator is None else [accelerator.unwrap_model(model) for model in accelerator._models]
        unique = list({id(model): model for model in models}.values())
        if len(unique) < 2:
            return unique[0] if unique else None
        return dict(zip(numbered([type(model).__name__ for model in unique]), unique, strict=True))

    def _search(self) -> weakref.ref[Accelerator] | None:
        """Return the accelerator that has this tracker, from all objects of the process, which takes a tenth of a second."""
        accelerators = (each for each in gc.get_objects() if issubclass(type(each), Accelerator))
        return next((weakref.ref(each) for each in accelerators if self in getattr(each, "log_with", ())), None)

    def _forward_begins(self, module: torch.nn.Module, args: object) -> None:
        """Look for a prepared model before the forward of any module, until the exporter is started."""
        if is_compiling() or is_tracing() or self._looking:
            return
        compiler, self._looking = stop_compiling(), True
        try:
            self._guard(self._look)
        finally:
            self._looking = False
            compile_again(compiler)

    def _look(self) -> None:
        if self._accelerator is None and self._model is None:
            self._searches += 1
            if self._searches & (self._searches - 1):  # only at powers of two, since each search takes time
                return
            self._accelerator_reference = self._session.before_start(self._search)
        self._begin()

    def _failed(self, error: Exception) -> None:
        self._stop_waiting()
        message = "%s: nothing is watched: %s: %s"
        warn(message, type(self).__name__, type(error).__name__, error, error=error)

    def _stop_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.remove()
