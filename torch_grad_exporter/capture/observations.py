"""Observations: values that the user, the model's own output or an optimizer gives, on their way to the host side.

A value is never waited for: what is on a device is copied in the background. `observe` may be called from any thread, except
for `grad_norm`, which belongs to the round of the training thread.
"""

from __future__ import annotations

import numbers
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from torch_grad_exporter.capture.count_only.counting import CountOnly
from torch_grad_exporter.capture.parts import Parts
from torch_grad_exporter.transfer.events import Observed
from torch_grad_exporter.transfer.transfer import Arrived, HostTransfer, Ticket

READ_SECONDS = 0.5
"""Learning rates, and losses that models return, are read at sampled steps and otherwise this often at most."""

GROUPS = 64
"""Parameter groups of an optimizer whose learning rates are shown."""

Number = float | int | torch.Tensor | np.number[Any]


class _Ring(threading.local):
    """The buffers of copies to the host: each thread has its own, since a ring has no lock."""

    def __init__(self) -> None:
        self.transfer = HostTransfer(ring=64)


class Observations:
    """Posts `Observed`."""

    def __init__(self, parts: Parts, count_only: CountOnly) -> None:
        self._parts = parts
        self._clock = parts.clock
        self._count_only = count_only
        self._ring = _Ring()
        self._settings_read = self._loss_read = float("-inf")

    def observe(self, values: Iterator[tuple[str, Number]]) -> None:
        """Takes observed values, by name; a tensor's first element is copied without waiting for it.

        A global norm from another thread than the one that trains raises a `RuntimeError`: of which step it is cannot be known.
        Behind a value that cannot be taken the others are still to come from `values`.
        """
        start, here = self._clock.clock(), self._parts.thread.may_be_here()
        try:
            for name, value in values:
                if name == "grad_norm":
                    self._norm(value, here=here)
                else:
                    if name == "samples":
                        self._clock.examples_unknown()
                    self._post(name, value)
        finally:
            if here:
                self._clock.spent(self._clock.clock() - start)

    def _norm(self, value: Number, *, here: bool) -> None:
        if not here:
            raise RuntimeError("observe(grad_norm=...) has to be called on the thread that trains")
        ticket = self._sent(value)
        if ticket is not None:
            self._count_only.norm_comes()
            self._parts.mailbox.append(Observed("grad_norm", ticket))
            self._count_only.norm_observed()

    def _post(self, name: str, value: object, labels: tuple[str, str] | tuple[()] = ()) -> None:
        ticket = self._sent(value)
        if ticket is not None:
            self._parts.mailbox.append(Observed(name, ticket, labels))

    def output(self, output: object) -> None:
        """Takes the loss in what a model has returned, if there is one."""
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return
        moment = self._clock.clock()
        if self._parts.rounds.current.sampled or moment - self._loss_read > READ_SECONDS:
            self._loss_read = moment
            self._post("loss", loss)

    def settings(self, moment: float, *, sampled: bool) -> None:
        """Takes learning rates and the loss scale at a step at this moment of the clock, if they are due."""
        if not sampled and moment - self._settings_read <= READ_SECONDS:
            return
        self._settings_read = self._clock.clock()
        # Those that share a number step within the backward, one per parameter; the first stands for them.
        for number, optimizer in dict(reversed(self._parts.optimizers.numbered())).items():
            for group, settings in enumerate(optimizer.param_groups[:GROUPS]):
                if settings.get("lr") is not None:
                    self._post("learning_rate", settings["lr"], (self._parts.optimizers.names[number], str(group)))
        if self._parts.reader.scale is not None:
            self._post("loss_scale", self._parts.reader.scale)

    def _sent(self, value: object) -> Ticket | float | None:
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(f"expected a number or a tensor of one element, got one of shape {tuple(value.shape)}")
            if value.device.type == "cpu":
                if type(value) is torch.Tensor:
                    return float(value.item())  # there is no device to wait for, and one call is what a step's loss may cost
                return Arrived(value.detach().reshape(1).double().clone().numpy())
            return self._ring.transfer.send(value.detach().reshape(1))
        if isinstance(value, numbers.Real):
            return float(value)
        raise TypeError(f"expected a number or a tensor of one element, got {type(value).__name__}")
