"""Values: single numbers that the user or the model gives, on their way to the host. Nothing waits for a device."""

from __future__ import annotations

import numbers
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torch_grad_exporter.statistics.device import wide
from torch_grad_exporter.store.host_transfer import HostTransfer, Ticket

Number = float | int | torch.Tensor | np.number[Any]


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
