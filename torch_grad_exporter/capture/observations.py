"""Observations: values that the user, the model's own output or an optimizer gives, on their way to the host side.

A value is never waited for: what is on a device is copied in the background. `observe` may be called from any thread, except
for `grad_norm` and `grad_divisor`, which belong to the round of the training thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from torch_grad_exporter.capture.counted_rounds import CountedRounds
from torch_grad_exporter.capture.detection import BackwardDetection
from torch_grad_exporter.capture.loss_scale import LossScale
from torch_grad_exporter.capture.progress import StepClock, TrainingThread
from torch_grad_exporter.capture.reader import GradientReader
from torch_grad_exporter.capture.rounds import RoundTracker
from torch_grad_exporter.capture.values import Number, ValueTransfer
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.store.records import PLACED, Mailbox, Observed

READ_SECONDS = 0.5
"""Losses that models return, and learning rates, are read in sampled rounds and otherwise this often at most."""

GROUPS = 64
"""Parameter groups of an optimizer whose learning rates are shown."""


class Observations:
    """Posts `Observed`."""

    def __init__(
        self,
        *,
        optimizers: Optimizers,
        clock: StepClock,
        mailbox: Mailbox,
        reader: GradientReader,
        loss_scale: LossScale,
        rounds: RoundTracker,
        detection: BackwardDetection,
        counted: CountedRounds,
        thread: TrainingThread,
    ) -> None:
        self._optimizers, self._clock, self._mailbox = optimizers, clock, mailbox
        self._reader, self._loss_scale = reader, loss_scale
        self._rounds, self._detection, self._counted, self._thread = rounds, detection, counted, thread
        self._values = ValueTransfer(mailbox.press)
        self.loss_given = False
        """Whether the user has given a loss; cleared by `RoundLoss`."""
        self._settings_read = float("-inf")
        self._placed = {"loss": 0, "grad_norm": 0}
        """How many values of each name were given a step."""
        self._early = False
        """Whether the last value came between a forward and its backward, as long as rounds were followed closely."""

    def observe(self, values: Iterator[tuple[str, Number]]) -> None:
        """Take observed values, by name; a tensor's first element is copied without waiting for it.

        A global norm or a divisor from another thread than the one that trains raises a `RuntimeError`: of which step it is cannot
        be known.
        Behind a value that cannot be taken the others are still to come from `values`.
        """
        start, here = self._clock.clock(), self._thread.may_be_here()
        try:
            for name, value in values:
                if name in ("grad_norm", "grad_divisor") and not here:
                    raise RuntimeError(f"observe({name}=...) has to be called on the thread that trains")
                if name == "grad_norm":
                    self._norm(value)
                elif name == "grad_divisor":
                    self._divisor(value)
                else:
                    if name == "samples":
                        self._clock.examples_known = False
                    if name == "loss":
                        self.loss_given = True
                    self.post(name, value, step=self._step_of_value("loss") if name == "loss" else None)
        finally:
            if here:
                self._clock.spent(start)

    def _norm(self, value: Number) -> None:
        ticket = self._values.send(value)
        if ticket is not None:
            self._counted.norm_comes()
            self._mailbox.append(Observed("grad_norm", ticket, step=self._step_of_value("grad_norm")))
            self._counted.norm_observed()

    def _divisor(self, value: Number) -> None:
        """Take the divisor of the gradients of the current round or, after its step, of the next one."""
        rounds = self._rounds
        wanted = rounds.next_is_sampled and self._detection.sees_backwards  # else gradients are read when they are divided
        if not wanted and isinstance(value, torch.Tensor) and value.device.type != "cpu" and value.numel() == 1:
            return
        ticket = self._values.send(value)
        if isinstance(ticket, float) and not 0 < ticket < math.inf:
            raise ValueError(f"expected a number above 0 as grad_divisor, got {ticket}")
        if wanted and ticket is not None:
            self._reader.divide(rounds.current, ticket)

    def post(self, name: str, value: object, labels: tuple[str, str] | tuple[()] = (), step: int | None = None) -> None:
        """Hand over a value; one on a device is copied in the background."""
        ticket = self._values.send(value)
        if ticket is not None:
            self._mailbox.append(Observed(name, ticket, labels, step))

    def _step_of_value(self, name: str) -> int | None:
        """Return the number of the step of a value that is observed now: the next, if a forward or backward came since the last.

        None where it is not needed any more, see `PLACED`. While rounds are only counted no forward is seen; then values are
        assumed to come where they came before: a loop that observes before its backward goes on to do so.
        """
        if self._placed[name] >= PLACED:
            return None
        self._placed[name] += 1
        clock, surplus = self._clock, self._counted.surplus
        if surplus is None:
            current = self._rounds.current
            passed = bool(current.backwards) and not current.stepped
            self._early = clock.forward_came and not passed
            under_way = clock.forward_came or passed
        else:
            under_way = surplus > 0 or self._early
        return clock.number + under_way

    def settings(self, moment: float, *, sampled: bool) -> None:
        """Take learning rates and the loss scale at a step at this moment of the clock, if they are due."""
        if not sampled and moment - self._settings_read <= READ_SECONDS:
            return
        self._settings_read, step = self._clock.clock(), self._clock.number
        # Those that share a number step within the backward, one per parameter; the first stands for them.
        for number, optimizer in dict(reversed(self._optimizers.numbered())).items():
            for group, settings in enumerate(optimizer.param_groups[:GROUPS]):
                rate, labels = settings.get("lr"), (self._optimizers.names[number], str(group))
                if type(rate) is float:
                    self._mailbox.append(Observed("learning_rate", rate, labels, step))
                elif rate is not None:
                    self.post("learning_rate", rate, labels, step)
        scale = self._loss_scale.value
        if scale is not None:
            self.post("loss_scale", scale)
