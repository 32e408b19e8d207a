"""The tracker for Accelerate: `Accelerator(log_with=GradExporterTracker())`.

See docs/accelerate.md. The exporter follows models and optimizers by itself; the tracker takes the loss and the epoch of what the
loop logs, and ends with `accelerator.end_training()`. Accelerate calls trackers on the main process only, whatever they say of
themselves; so on the other ranks this one begins with the first forward.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_pre_hook

from torch_grad_exporter import Exporter
from torch_grad_exporter.errors import Guard, raised_by_handler, say
from torch_grad_exporter.integrations.caller import calling
from torch_grad_exporter.integrations.requirement import require
from torch_grad_exporter.integrations.session import MayStop, Models, Session
from torch_grad_exporter.torch_compat.compiler import compile_again, is_tracing, never_compile, stop_compiling

require("accelerate", "1.8", extra="accelerate")

from accelerate import Accelerator  # noqa: E402 - what is missing has been said by now
from accelerate.tracking import GeneralTracker  # noqa: E402

logger = logging.getLogger("torch_grad_exporter")

LOSS = ("loss", "train_loss", "train/loss")
"""What is taken for the loss of what a loop logs; the first one that there is."""

EPOCH = ("epoch", "train/epoch")


class _Handle(Protocol):
    """Of the hook that waits."""

    def remove(self) -> None:
        """Ends the waiting."""


class GradExporterTracker(MayStop, GeneralTracker):  # type: ignore[misc] # of a package without types here
    """Shows the gradients and the course of a training: `Accelerator(log_with=GradExporterTracker())`, on every rank.

    `exporter`: one that you have started yourself, which goes on after the training; without it one is started, with the `options`
    of `start_exporter`, by `init_trackers` or the first forward of a prepared model, and `end_training` ends it. An exporter that
    is running on a model is used as well. `model`: what is watched, a module or a mapping of names to modules; without it what
    `accelerator.prepare` was given by then. `log`: whether what the exporter shows also goes to the accelerator's other trackers,
    with each `accelerator.log`: with `True` norms, clipping and skipped steps, or the names in which a regular expression is found.

    Raises `TypeError` or `ValueError` where an argument is wrong: here, or by `init_trackers`. What fails in a forward, as where an
    argument does not fit a model that is prepared after `init_trackers`, is logged, and nothing is watched. Later failures are
    counted, in `torch_grad_exporter_errors_total{source="integration"}`.
    """

    name = "torch_grad_exporter"
    requires_logging_directory = False
    main_process_only = False

    def __init__(
        self, exporter: Exporter | None = None, *, model: Models | None = None, log: bool | str = False, **options: object
    ) -> None:
        super().__init__()
        self._session = Session(type(self).__name__, exporter, options, log=log)
        self._session.check_options()
        self._model = model
        self._step: int | None = None
        self._calling: weakref.ref[Accelerator] | None = None
        self._searched = 0
        self._guard = Guard(self._failed)
        self._looking = False
        never_compile(type(self)._forward_begins)
        self._waiting: _Handle | None = register_module_forward_pre_hook(self._forward_begins)

    @property
    def tracker(self) -> Exporter | None:
        """The exporter, as `accelerator.get_tracker("torch_grad_exporter", unwrap=True)` returns it."""
        return self._session.exporter

    def resume(self, step: int) -> None:
        """Says that the training goes on after this many optimizer steps, as those of a checkpoint; before its next step."""
        self._step = step
        if self._session.telling and self._session.exporter is not None:
            self._session.exporter.resume(step)

    # What the accelerator calls

    def start(self) -> None:
        """Starts the exporter, unless no model is prepared yet: then the first forward of one does."""
        accelerator = calling(Accelerator)
        self._calling = None if accelerator is None else weakref.ref(accelerator)
        self._begin()

    def store_init_configuration(self, values: Mapping[str, object]) -> None:
        """The configuration of a run is no metric."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **more: object) -> None:
        """Takes the loss and the epoch that a loop logs, and adds the exporter's values for the other trackers."""
        self._session.during(self._log, values, step)

    def finish(self) -> None:
        """Ends the exporter that was started for this training; in a `finally`, by the exception that is being raised."""
        self._wait_no_longer()
        self._session.end(sys.exception())

    @property
    def _accelerator(self) -> Accelerator | None:
        """The accelerator that has this tracker; `None` while it is not known."""
        return None if self._calling is None else self._calling()

    def _begin(self) -> None:
        """Starts the exporter on the models that are known, if there are any, and waits no longer."""
        models = self._model if self._model is not None else self._session.found(self._prepared)
        if models is None and self._session.exporter is None:
            return
        self._wait_no_longer()
        accelerator = self._accelerator
        if accelerator is not None and not accelerator.is_main_process and self not in accelerator.trackers:
            accelerator.trackers.append(self)  # so that `end_training` ends it here, too
        scaler = getattr(accelerator, "scaler", None)
        self._session.begin(models or {}, step=self._step, trainer=accelerator, grad_scaler=scaler)

    def _wait_no_longer(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.remove()

    def _prepared(self) -> Models | None:
        """The models that the accelerator has prepared, without what it has wrapped around them."""
        accelerator = self._accelerator
        if accelerator is None:
            return None
        found: list[torch.nn.Module] = []
        for model in accelerator._models:
            module = accelerator.unwrap_model(model)
            if module not in found:
                found.append(module)
        if len(found) < 2:
            return found[0] if found else None
        kinds = [type(module).__name__ for module in found]
        counts = [kinds[:place].count(kind) for place, kind in enumerate(kinds)]
        return {f"{kind}-{n + 1}" if n else kind: one for kind, n, one in zip(kinds, counts, found, strict=True)}

    def _forward_begins(self, module: torch.nn.Module, args: object) -> None:
        """Before the forward of any module, until the exporter is started."""
        if is_compiling() or is_tracing() or self._looking:
            return
        compiler, self._looking = stop_compiling(), True
        try:
            self._guard(self._look)
        finally:
            self._looking = False
            compile_again(compiler)

    def _failed(self, error: Exception) -> None:
        """A boundary: the script's own forward calls. What a signal's handler raised passes."""
        if raised_by_handler(error):
            raise error
        self._wait_no_longer()
        message = "%s: nothing is watched: %s: %s"
        say(logger, logging.WARNING, message, type(self).__name__, type(error).__name__, error, error=error)

    def _look(self) -> None:
        if self._calling is None and self._model is None:
            self._searched += 1
            if self._searched & (self._searched - 1):  # each search takes a tenth of a second: it is repeated ever more rarely
                return
            self._calling = self._session.found(self._search)
        self._begin()

    def _search(self) -> weakref.ref[Accelerator] | None:
        """The accelerator that has this tracker, among all objects."""
        found = (one for one in gc.get_objects() if issubclass(type(one), Accelerator) and self in getattr(one, "log_with", ()))
        return next(map(weakref.ref, found), None)

    def _log(self, values: Mapping[str, Any], step: int | None) -> None:
        loss, epoch = (next((values[name] for name in names if name in values), None) for names in (LOSS, EPOCH))
        if loss is not None:
            self._session.logged_loss(loss)
        self._session.observe(epoch=epoch)
        found = self._session.logged()
        if found and self._accelerator is not None:
            for tracker in self._accelerator.trackers:
                if tracker is not self:
                    tracker.log(found, step=step)
