"""Observations: values that the user, the model's own output or an optimizer gives, on their way to the host side.

A value is never waited for: what is on a device is copied in the background. `observe` may be called from any thread, except
for `grad_norm` and `grad_divisor`, which belong to the round of the training thread.
"""

from __future__ import annotations

import math
import numbers
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from torch_grad_exporter.arguments import check_whole, shown
from torch_grad_exporter.capture.counted_rounds import CountedRounds
from torch_grad_exporter.capture.detection import BackwardDetection
from torch_grad_exporter.capture.progress import StepClock, TrainingThread
from torch_grad_exporter.capture.reader import GradientReader
from torch_grad_exporter.capture.rounds import RoundTracker
from torch_grad_exporter.statistics.device import wide
from torch_grad_exporter.store.host_transfer import HostTransfer, Ticket
from torch_grad_exporter.store.logged_values import SOURCE, LoggedCall
from torch_grad_exporter.store.records import PLACED, Inspected, Mailbox, Observed

Number = float | int | torch.Tensor | np.number[Any]

LONGEST = 200  # characters of a name
REMEMBERED = 1000  # names that are not checked again, at most

# What `log` takes as the end of an error.
EXPECTED = 'pass names and numbers, such as {"reward": 0.5}'


def on_host(value: object) -> float:
    """Return a number, or that of a tensor on the CPU.

    Raises:
        TypeError: It is neither a real number nor a tensor of real numbers.
        ValueError: It is a tensor of several elements.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"expected a number or a tensor of one element, got one of shape {tuple(value.shape)}")
        if type(value) is torch.Tensor:
            return float(value.item())  # one call, as it is what a step's loss may cost
        # Of a class of its own, such as a part of a sharded tensor, `item` might ask other ranks.
        return float(value.detach().reshape(1).double().numpy()[0])
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"expected a number or a tensor of one element, got {type(value).__name__}")


class _Ring(threading.local):
    """The buffers of copies to the host: each thread has its own, since a ring has no lock."""

    def __init__(self, pressed: Callable[[], object]) -> None:
        self.transfer = HostTransfer(pressed=pressed)


class ValueTransfer:
    """Sends numbers and tensors of one element. From any thread. `pressed`: see `HostTransfer`."""

    def __init__(self, pressed: Callable[[], object]) -> None:
        self._ring = _Ring(pressed)

    def send(self, value: object) -> Ticket | float | None:
        """Return a number; of a tensor on a device the ticket of a copy, None if too many are under way. Raises like `on_host`."""
        if isinstance(value, torch.Tensor) and value.device.type != "cpu" and value.numel() == 1:
            return self._ring.transfer.send(value.detach().reshape(1))
        return on_host(value)

    def send_together(self, tensors: list[torch.Tensor]) -> Ticket | None:
        """Return the ticket of a copy of tensors of one element on one device, shape (tensors,)."""
        dtype = wide(tensors[0].device)
        return self._ring.transfer.send(torch.cat([tensor.detach().reshape(1).to(dtype) for tensor in tensors]))


class ValueLog:
    """Posts the numbers by name that `exporter.log` was given.

    `used`: whether a call was right, so that the next one must not raise into the training.
    """

    def __init__(self, clock: StepClock, mailbox: Mailbox) -> None:
        self._clock, self._mailbox = clock, mailbox
        self._transfer = ValueTransfer(mailbox.press)
        self._names: set[str] = set()
        self.used = False

    def log(self, values: Mapping[str, object], step: int | None) -> None:
        """Take values; see `Exporter.log`. What is wrong costs itself alone, and is raised at the end."""
        if step is None:
            step = self._clock.number
        else:
            check_whole(f"log(step={shown(step)})", step, least=0, example=100)
        if not isinstance(values, Mapping):
            raise TypeError(f"log({shown(values)}): expected a mapping; {EXPECTED}")
        numbers: dict[str, float] = {}
        on_devices: dict[torch.device, dict[str, torch.Tensor]] = {}
        wrong: Exception | None = None
        for name, value in values.items():
            try:
                if name not in self._names:
                    self._check(name)
                if type(value) is float:
                    numbers[name] = value
                elif isinstance(value, torch.Tensor) and value.device.type != "cpu" and value.numel() == 1:
                    on_devices.setdefault(value.device, {})[name] = value
                else:
                    numbers[name] = on_host(value)
            except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # the last one of a tensor without a number
                wrong = (TypeError if isinstance(error, TypeError) else ValueError)(f"log({shown(name)}): {error}")
        self._post(numbers, on_devices, step)
        if wrong is not None:
            raise wrong
        self.used = True

    def _post(self, numbers: dict[str, float], on_devices: dict[torch.device, dict[str, torch.Tensor]], step: int) -> None:
        names: list[tuple[str, ...]] = []
        tickets: list[Ticket] = []
        for tensors in on_devices.values():
            if (ticket := self._transfer.send_together([*tensors.values()])) is not None:
                names.append((*tensors,))
                tickets.append(ticket)
        if numbers or names:  # not an inspection, but the worker hands it to its table by the same door
            self._mailbox.append(Inspected(SOURCE, 0, (*tickets,), LoggedCall(self._clock.now(), step, numbers, (*names,))))

    def _check(self, name: object) -> None:
        if not isinstance(name, str):
            raise TypeError(f"expected a name; {EXPECTED}")
        if not 1 <= len(name) <= LONGEST:
            raise ValueError(f"expected a name of 1 to {LONGEST} characters")
        if len(self._names) >= REMEMBERED:
            self._names.clear()
        self._names.add(name)


READ_SECONDS = 0.5
"""Losses that models return are read in sampled rounds and otherwise this often at most."""


class Observations:
    """Posts `Observed`."""

    def __init__(
        self,
        *,
        clock: StepClock,
        mailbox: Mailbox,
        reader: GradientReader,
        rounds: RoundTracker,
        detection: BackwardDetection,
        counted: CountedRounds,
        thread: TrainingThread,
    ) -> None:
        self._clock, self._mailbox, self._reader = clock, mailbox, reader
        self._rounds, self._detection, self._counted, self._thread = rounds, detection, counted, thread
        self._values = ValueTransfer(mailbox.press)
        self.loss_given = False
        """Whether the user has given a loss; cleared by `RoundLoss`."""
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
