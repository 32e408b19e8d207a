"""Numbers that the user or the model gives, on their way to the host, from any thread. Nothing waits for a device."""

from __future__ import annotations

import numbers
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from torch_grad_exporter.arguments import check_whole, shown
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.statistics.device import wide
from torch_grad_exporter.store.host_transfer import HostTransfer, Ticket
from torch_grad_exporter.store.logged_values import SOURCE, LoggedCall
from torch_grad_exporter.store.records import Inspected, Mailbox

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
