"""Flags: the smallest and the largest value of many tensors, on their devices, for the host to see which is not finite.

Both are NaN where any value is, and one is infinite where no value is NaN and any is infinite. One pass over a tensor, without a
copy of it; nothing is read, so nothing synchronises.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from torch_grad_exporter.metrics.families import FloatArray, IntArray
from torch_grad_exporter.statistics.device import wide
from torch_grad_exporter.store.host_transfer import HostTransfer, Ticket
from torch_grad_exporter.torch_compat.autograd import intercepting_modes, within_transform
from torch_grad_exporter.torch_compat.tensors import is_plain, local

# Tensors that are flagged in one tape, at most.
MOST = 1 << 15

FLOATS = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))


@dataclass(frozen=True, slots=True, eq=False)
class SentFlags:
    """Flags on their way. `slots`: for each ticket those of its vector, which has all smallest values, then all largest."""

    tickets: tuple[Ticket, ...]
    slots: tuple[IntArray, ...]
    count: int

    def values(self, arrived: tuple[FloatArray, ...]) -> tuple[FloatArray, FloatArray]:
        """Return the smallest and the largest values, shape (count,) each."""
        low, high = np.zeros((2, self.count))
        for slots, vector in zip(self.slots, arrived, strict=True):
            low[slots], high[slots] = vector.reshape(2, len(slots))
        return low, high


class Flags:
    """The flags of tensors so far, in slots that are numbered from 0."""

    def __init__(self) -> None:
        self._ends: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, tensor: torch.Tensor) -> int | None:
        """Flag a tensor and return its slot; None if its values cannot be read, or there are too many tensors."""
        tensor = local(tensor)
        if not is_plain(tensor) or tensor.layout is not torch.strided or not tensor.numel() or tensor.device.type == "meta":
            return None
        if len(self._ends) >= MOST or intercepting_modes() or within_transform():
            return None
        tensor = tensor.detach()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.dtype not in FLOATS:
            return None
        low, high = torch.aminmax(tensor)
        self._ends.append((low, high))
        return len(self._ends) - 1

    def send(self, transfer: HostTransfer) -> SentFlags | None:
        """Start one copy to the host for each device; return None if too much is under way, or nothing was flagged."""
        devices: dict[torch.device, dict[torch.dtype, list[int]]] = {}
        for slot, (low, _) in enumerate(self._ends):
            devices.setdefault(low.device, {}).setdefault(low.dtype, []).append(slot)
        tickets, sent = [], []
        for device, by_type in devices.items():
            slots = [slot for group in by_type.values() for slot in group]
            ends = [
                torch.stack([self._ends[slot][end] for slot in group]).to(wide(device))
                for end in (0, 1)
                for group in by_type.values()
            ]
            ticket = transfer.send(torch.cat(ends))
            if ticket is None:
                return None
            tickets.append(ticket)
            sent.append(np.array(slots, dtype=np.int64))
        return SentFlags(tuple(tickets), tuple(sent), len(self._ends)) if tickets else None
