"""The handler for trainers of PyTorch-Ignite.

See docs/frameworks.md. It reports what only the trainer knows: beginnings and ends, steps, epochs, and the loss of iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch_grad_exporter import Exporter
from torch_grad_exporter.arguments import check_whole
from torch_grad_exporter.integrations.common import RoundLosses, TrainingInterrupted, require
from torch_grad_exporter.integrations.session import Models, SessionOwner

require("ignite", "0.5", extra="ignite", package="pytorch-ignite")

from ignite.engine import Engine, Events  # noqa: E402 - require() has raised if it is missing


def loss_of(output: object) -> object:
    """Return the loss in what a trainer's step returns: a number, "loss" of a mapping, or the first of several values."""
    if isinstance(output, Mapping):
        return output.get("loss")
    return output[0] if isinstance(output, list | tuple) and output else output


class GradExporterHandler(SessionOwner):
    """Shows the gradients and the course of a training: `GradExporterHandler(model, port=9100).attach(trainer)`.

    See `SessionOwner` for the other arguments and what is raised.

    Args:
        model: As for `start_exporter`.
        output_transform: Returns the loss, given what the trainer's step returns.
        gradient_accumulation_steps: Iterations of one step of the optimizer, as in `create_supervised_trainer`; the loss is the
            mean over them.
        log: Puts the exporter's values into `trainer.state.metrics`, for Ignite's loggers.
        log_every: Iterations between two times; they are also put there after each epoch.
        log_values: Shows the metrics of the trainer after each epoch.
    """

    def __init__(
        self,
        model: Models,
        exporter: Exporter | None = None,
        *,
        output_transform: Callable[[Any], object] = loss_of,
        gradient_accumulation_steps: int = 1,
        log: bool | str = False,
        log_every: int = 100,
        log_values: bool = True,
        **options: Any,
    ) -> None:
        for name, number in (("gradient_accumulation_steps", gradient_accumulation_steps), ("log_every", log_every)):
            check_whole(f"GradExporterHandler({name}={number!r})", number, example=10)
        super().__init__(exporter, log=log, log_values=log_values, **options)
        self._model, self._transform = model, output_transform
        self._accumulated, self._log_every = gradient_accumulation_steps, log_every
        self._iterations = 0
        self._error: BaseException | None = None

    def attach(self, trainer: Engine) -> None:
        """Add the handlers to a trainer.

        Raises:
            ValueError: This handler is attached to it already.
        """
        if trainer.has_event_handler(self._started, Events.STARTED):
            raise ValueError("this GradExporterHandler is attached to the trainer already; attach it once")
        trainer.add_event_handler(Events.STARTED, self._started)
        trainer.add_event_handler(Events.EPOCH_STARTED, self._epoch_started)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._iteration_completed)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, self._epoch_completed)
        trainer.add_event_handler(Events.EXCEPTION_RAISED, self._raised)
        trainer.add_event_handler(Events.TERMINATE, self._terminated)
        trainer.add_event_handler(Events.COMPLETED, self._completed)

    def _started(self, trainer: Engine) -> None:
        if self._session.active:
            self._session.end(self._error or TrainingInterrupted())
        self._losses, self._error = RoundLosses(), None
        self._iterations = trainer.state.iteration or self._iterations  # a second run goes on
        self._session.begin(self._model, step=self._iterations // self._accumulated or None, trainer=trainer)

    def _epoch_started(self, trainer: Engine) -> None:
        self._session.during(lambda: self._session.observe(epoch=trainer.state.epoch))

    def _iteration_completed(self, trainer: Engine) -> None:
        self._error = None
        self._iterations += 1
        self._session.during(self._report, trainer)
        if self._session.should_stop:
            trainer.terminate()

    def _report(self, trainer: Engine) -> None:
        self._losses.add(self._transform(trainer.state.output))
        if trainer.state.iteration % self._accumulated == 0:
            self._session.observe(loss=self._losses.round_over())
        if self._logs and trainer.state.iteration % self._log_every == 0:
            self._log(trainer)

    def _epoch_completed(self, trainer: Engine) -> None:
        self._session.during(lambda: self._session.log_values(trainer.state.metrics))
        if self._logs:
            self._session.during(self._log, trainer)

    def _log(self, trainer: Engine) -> None:
        trainer.state.metrics.update(self._session.logged())

    def _raised(self, trainer: Engine, error: BaseException) -> None:
        """End a training that has failed, unless a handler of the user's for this event lets it go on.

        A trainer raises what its step has raised only if nothing handles this event: if all that do are of this class, as with
        one for each of two models, the last of them raises it.
        """
        handlers = [getattr(handler, "__self__", None) for handler, *_ in trainer._event_handlers[Events.EXCEPTION_RAISED]]
        if not all(isinstance(handler, GradExporterHandler) for handler in handlers):
            self._error = error
            return
        self._session.end(error)
        if self is handlers[-1]:
            raise error

    def _terminated(self, trainer: Engine) -> None:
        if trainer.should_terminate == "skip_completed":
            self._completed(trainer)

    def _completed(self, trainer: Engine) -> None:
        self._session.end(self._error)
