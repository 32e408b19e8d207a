"""Flags: the smallest and the largest value of many tensors, on their devices, for the host to see which is not finite.

Both are NaN where any value is, and one is infinite where no value is NaN and any is infinite. One pass over a tensor, without a
copy of it; nothing is read, so nothing synchronises.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from torch_grad_exporter.metrics.families import FloatArray, IntArray
from torch_grad_exporter.statistics.device import wide
from torch_grad_exporter.store.host_transfer import HostTransfer, Ticket
from torch_grad_exporter.torch_compat.autograd import dispatch_is_intercepted, within_transform
from torch_grad_exporter.torch_compat.tensors import is_plain, local

MOST = 1 << 15
"""Tensors that are flagged in one tape, at most."""

TENSORS, VISITED = 16, 64
"""Tensors of an input or output that are flagged, and items that are visited, at most: it may be a cache of thousands."""

FLOATS = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """Flags on their way. `places`: for each ticket the slots of what it brings: all smallest values, then all largest."""

    tickets: tuple[Ticket, ...]
    places: tuple[IntArray, ...]
    slots: int

    def values(self, arrived: tuple[FloatArray, ...]) -> tuple[FloatArray, FloatArray]:
        """The smallest and the largest values, shape (slots,) each."""
        low, high = np.zeros((2, self.slots))
        for places, found in zip(self.places, arrived, strict=True):
            count = len(places)
            low[places], high[places] = found[:count], found[count : 2 * count]
        return low, high


class Flags:
    """What has been flagged so far, in slots that are numbered from 0."""

    def __init__(self) -> None:
        self._found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, tensor: torch.Tensor) -> int | None:
        """Flags a tensor, and returns its slot; `None` where it has no values that can be looked at, or there are too many."""
        tensor = local(tensor)
        if not is_plain(tensor) or tensor.layout is not torch.strided or not tensor.numel() or tensor.device.type == "meta":
            return None
        if len(self._found) >= MOST or dispatch_is_intercepted() or within_transform():
            return None
        tensor = tensor.detach()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.dtype not in FLOATS:
            return None
        low, high = torch.aminmax(tensor)
        self._found.append((low, high))
        return len(self._found) - 1

    def send(self, transfer: HostTransfer) -> Sent | None:
        """Starts one copy to the host for each device; `None` if too much is under way, or nothing was flagged."""
        devices: dict[torch.device, dict[torch.dtype, list[int]]] = {}
        for slot, (low, _) in enumerate(self._found):
            devices.setdefault(low.device, {}).setdefault(low.dtype, []).append(slot)
        tickets, places = [], []
        for device, kinds in devices.items():
            slots = [slot for some in kinds.values() for slot in some]
            ends = (
                torch.stack([self._found[slot][end] for slot in some]).to(wide(device)) for end in (0, 1) for some in kinds.values()
            )
            ticket = transfer.send(torch.cat([*ends]))
            if ticket is None:
                return None
            tickets.append(ticket)
            places.append(np.array(slots, dtype=np.int64))
        return Sent(tuple(tickets), tuple(places), len(self._found)) if tickets else None


def tensors_in(value: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in what a module got or gave, with where in it they are; containers are searched level by level."""
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    found = 0
    known = isinstance(value, dict | list | tuple)
    start = value if known else getattr(value, "__dict__", None)
    level: deque[tuple[str, object]] = deque([(name, start)])
    for _ in range(VISITED):
        if not level or found == TENSORS:
            return
        where, item = level.popleft()
        if isinstance(item, torch.Tensor):
            found += 1
            yield where, item
        elif isinstance(item, dict):
            level.extend((_joined(where, key), one) for key, one in itertools.islice(item.items(), VISITED))
        elif isinstance(item, list | tuple):
            level.extend((_joined(where, at), one) for at, one in enumerate(itertools.islice(item, VISITED)))


def _joined(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)
