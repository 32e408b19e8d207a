"""The callback for the `Trainer` of Transformers, and for trainers built on it, such as those of TRL.

See docs/transformers.md. The exporter follows the model and the optimizer by itself; the callback tells it what only the trainer
knows: when a training begins and ends, its step after a checkpoint, the epoch, tokens, and a loss that the model does not return.
"""

from __future__ import annotations

import time

import torch

from torch_grad_exporter import Exporter
from torch_grad_exporter.integrations.broke_off import TrainingBrokeOff
from torch_grad_exporter.integrations.caller import calling
from torch_grad_exporter.integrations.requirement import require
from torch_grad_exporter.integrations.session import EndsWith, Session

require("transformers", "4.57", extra="transformers")

from transformers import (  # noqa: E402 - what is missing has been said by now
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import CallbackHandler  # noqa: E402

SECONDS = 0.05
"""How far epoch and tokens may be behind: where steps are shorter, telling each would be a part of their time."""


class GradExporterCallback(EndsWith, TrainerCallback):  # type: ignore[misc] # of a package without types here
    """Shows the gradients and the course of a training: `Trainer(..., callbacks=[GradExporterCallback()])`.

    `exporter`: one that you have started yourself, which goes on after the training; without it each `train()` starts one, with the
    `options` of `start_exporter`, and ends it. An exporter that is running on the model is used as well. `log`: whether what the
    exporter shows is also logged as the trainer's own values are, at its logging steps: with `True` norms, clipping and skipped
    steps, or the names in which a regular expression is found.

    The trainer tells no callback of an exception. One that ends the process is seen; where yours catches it, train in a `with`:
    `with GradExporterCallback() as callback: Trainer(..., callbacks=[callback]).train()`.

    Raises `TypeError` or `ValueError` where an argument is wrong: here, or when the training begins. Later failures are counted,
    in `torch_grad_exporter_errors_total{source="integration"}`.
    """

    def __init__(self, exporter: Exporter | None = None, *, log: bool | str = False, **options: object) -> None:
        self._session = Session(type(self).__name__, exporter, options, log=log)
        self._logs = log is not False
        self._tokens = 0
        self._told_at = -SECONDS

    # The trainer's events

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: torch.nn.Module,
        optimizer: object = None,
        **more: object,
    ) -> None:
        """Starts the exporter, unless there is one. The trainer is at the step of its checkpoint by now."""
        handler = calling(CallbackHandler)
        if handler is not None and sum(callback is self for callback in handler.callbacks) > 1:
            raise ValueError("this GradExporterCallback was added to the trainer twice; add it once")
        if self._session.telling:
            self._session.end(TrainingBrokeOff())
        scaler = getattr(optimizer, "scaler", None)  # Accelerate's optimizer has it, around the real one
        # The state stands for the trainer, which no event shows: each training of it has a new one.
        self._session.begin(model, step=state.global_step or None, trainer=state, grad_scaler=scaler)
        self._tokens = state.num_input_tokens_seen
        if self._logs and handler is not None:
            # Before those that write values to files and services. A new list: the trainer is going through the old one.
            handler.callbacks = [self, *(callback for callback in handler.callbacks if callback is not self)]

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: object) -> None:
        """Tells of the step, and ends the training where a `Stop()` wants it."""
        self._session.during(self._tell, state)
        if self._session.should_stop:
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **more: object,
    ) -> None:
        """Adds the exporter's values to those of a training step that are logged."""
        if logs is not None and "loss" in logs:
            self._session.during(self._log, state, logs)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: object) -> None:
        """Ends the exporter that was started for this training."""
        self._session.during(lambda: self._tell(state, now=True))
        self._session.end()

    def _tell(self, state: TrainerState, *, now: bool = False) -> None:
        moment = time.monotonic()
        if now or moment - self._told_at >= SECONDS:
            self._told_at = moment
            # The trainer counts the tokens of all ranks, on each of them: one tells of them, so that a sum over ranks is right.
            tokens, self._tokens = state.num_input_tokens_seen - self._tokens, state.num_input_tokens_seen
            self._session.observe(epoch=state.epoch, tokens=tokens if tokens > 0 and state.is_world_process_zero else None)

    def _log(self, state: TrainerState, logs: dict[str, float]) -> None:
        self._tell(state, now=True)
        self._session.logged_loss(logs["loss"])
        values = self._session.logged()
        logs.update(values)
        if values and state.log_history:
            state.log_history[-1].update(values)
