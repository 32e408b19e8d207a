"""ValueLog: numbers by name that `exporter.log` was given, on their way to the host. From any thread."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torch_grad_exporter.arguments import check_whole, shown
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.values import ValueTransfer, on_host
from torch_grad_exporter.store.host_transfer import Ticket
from torch_grad_exporter.store.logged_values import SOURCE, LoggedCall
from torch_grad_exporter.store.records import Inspected, Mailbox

LONGEST = 200  # characters of a name
REMEMBERED = 1000  # names that are not checked again, at most

# What `log` takes as the end of an error.
EXPECTED = 'pass names and numbers, such as {"reward": 0.5}'


class ValueLog:
    """Posts what is logged. `used`: whether a call was right, so that the next one must not raise into the training."""

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
