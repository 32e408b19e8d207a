"""The callback for the `Trainer` of Transformers, and for trainers built on it, such as those of TRL.

See docs/transformers.md. It reports what only the trainer knows: beginnings and ends, steps, epochs, tokens, and losses that it
logs.
"""

from __future__ import annotations

import gc
import time

import torch

from torch_grad_exporter.integrations.common import TrainingInterrupted, require
from torch_grad_exporter.integrations.session import SessionOwner

require("transformers", "4.57", extra="transformers")

from transformers import (  # noqa: E402 - require() has raised if it is missing
    DefaultFlowCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import CallbackHandler  # noqa: E402

# How far epoch and tokens may be behind: where steps are shorter, reporting each would be a part of their time.
SECONDS = 0.05


class GradExporterCallback(SessionOwner, TrainerCallback):  # type: ignore[misc] # of a package without types here
    """Shows the gradients and the course of a training: `Trainer(..., callbacks=[GradExporterCallback()])`.

    The trainer has no event for an exception. One that ends the process is seen; where your code catches it, train in a `with`:
    `with GradExporterCallback() as callback: Trainer(..., callbacks=[callback]).train()`.

    With `log` the exporter's values are logged with those of the trainer, at its logging steps. See `SessionOwner` for the
    arguments.
    """

    _tokens, _reported_at = 0, -SECONDS

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
        """Start the exporter, unless there is one. The trainer is at the step of its checkpoint by now."""
        # The state stands for the trainer, which no event shows: each training of it has a new one.
        if self._session.reports(state):
            raise ValueError("this GradExporterCallback was added to the trainer twice; add it once")
        if self._session.active:
            self._session.end(TrainingInterrupted())
        scaler = getattr(optimizer, "scaler", None)  # Accelerate's optimizer has it, around the real one
        self._session.begin(model, step=state.global_step or None, trainer=state, grad_scaler=scaler)
        self._tokens = state.num_input_tokens_seen
        if self._logs:
            self._session.during(self._move_forward)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: object) -> None:
        """Report the step, and end the training if a `Stop()` asks for it."""
        self._session.during(self._report, state)
        if self._session.should_stop:
            control.should_training_stop = True
        self._session.during(self._interrupted, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: object) -> None:
        """Report the evaluation or the checkpoint that follows."""
        self._session.during(self._interrupted, control)

    def on_prediction_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: object) -> None:
        """Report that an evaluation goes on, as with the next of several datasets."""
        self._session.during(self._session.evaluating)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: object) -> None:
        """Report that an evaluation is over, and the checkpoint that follows."""
        self._session.during(self._session.evaluating, False)
        self._session.during(self._interrupted, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: object) -> None:
        """Report that a checkpoint is written."""
        self._session.during(self._session.checkpointing, False)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **more: object,
    ) -> None:
        """Show what the trainer logs, and add the exporter's values to those of a training step."""
        if logs is not None:
            self._session.during(self._session.log_values, logs, state.global_step)
        if logs is not None and "loss" in logs:
            self._session.during(self._log, state, logs)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: object) -> None:
        """End the exporter that was started for this training."""
        self._session.during(lambda: self._report(state, now=True))
        self._session.end()

    def _interrupted(self, control: TrainerControl) -> None:
        """Report what the trainer does next; it clears each flag when that is done."""
        if control.should_evaluate:
            self._session.evaluating()
        elif control.should_save:
            self._session.checkpointing()

    def _move_forward(self) -> None:
        """Call this before the callbacks that write values to files and services, after the one that decides what is next."""
        handlers = (each for each in gc.get_objects() if issubclass(type(each), CallbackHandler))
        for handler in handlers:
            if any(callback is self for callback in handler.callbacks):
                others = [callback for callback in handler.callbacks if callback is not self]
                place = max((at for at, each in enumerate(others, 1) if isinstance(each, DefaultFlowCallback)), default=0)
                # A new list: the trainer is going through the old one.
                handler.callbacks = [*others[:place], self, *others[place:]]

    def _report(self, state: TrainerState, *, now: bool = False) -> None:
        moment = time.monotonic()
        if now or moment - self._reported_at >= SECONDS:
            self._reported_at = moment
            # Each rank counts the tokens of all: one reports them, so that a sum over ranks is right.
            tokens, self._tokens = state.num_input_tokens_seen - self._tokens, state.num_input_tokens_seen
            self._session.observe(epoch=state.epoch, tokens=tokens if tokens > 0 and state.is_world_process_zero else None)

    def _log(self, state: TrainerState, logs: dict[str, float]) -> None:
        self._report(state, now=True)
        self._session.logged_loss(logs["loss"])
        values = self._session.logged()
        logs.update(values)
        if values and state.log_history:
            state.log_history[-1].update(values)
