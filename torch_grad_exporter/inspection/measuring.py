"""What inspections share on the training thread: tensors to measure, their way to the host, and whose turn a layer is."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.torch_hooks import Hooks
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.model.sharding import is_partial
from torch_grad_exporter.store.host_transfer import HostTransfer
from torch_grad_exporter.store.records import Inspected, Mailbox
from torch_grad_exporter.torch_compat.optimizers import LossScale
from torch_grad_exporter.torch_compat.tensors import local

# Measurements of a sample that are timed on devices; each stands for all since the one before.
TIMED = 16

# Layers, and elements of parameters, that a sample covers at most; one layer at least.
LAYERS, ELEMENTS = 8, 1 << 24

# Tensors of an input or output that are looked at, and items that are visited, at most: it may be a cache of thousands.
TENSORS, VISITED = 16, 64

Item = TypeVar("Item")


def tensors_in(value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in what a module got or gave, with their place in it; containers are searched level by level.

    An object of the user's own is searched as well, but not those within it.
    """
    if isinstance(value, torch.Tensor):
        yield "", value
        return
    count = 0
    known = isinstance(value, dict | list | tuple)
    level: deque[tuple[str, object]] = deque([("", value if known else getattr(value, "__dict__", None))])
    for _ in range(VISITED):
        if not level or count == TENSORS:
            return
        where, item = level.popleft()
        if isinstance(item, torch.Tensor):
            count += 1
            yield where, item
        elif isinstance(item, dict | list | tuple):
            inside = item.items() if isinstance(item, dict) else enumerate(item)
            level.extend((f"{where}.{key}" if where else str(key), part) for key, part in itertools.islice(inside, VISITED))


def dense(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of a tensor, plain, real and without its graph; the magnitudes of a complex one.

    None if it is empty or its elements cannot be measured: sparse, quantised or nested tensors, subclasses other than a DTensor,
    and a DTensor of partial sums.
    """
    if is_partial(tensor):
        return None
    part = local(tensor).detach()
    if type(part) not in (torch.Tensor, torch.nn.Parameter) or part.layout is not torch.strided:
        return None
    if part.is_quantized or part.device.type == "meta" or part.numel() == 0:
        return None
    return part.abs() if part.is_complex() else part


@dataclass(frozen=True, slots=True)
class InspectionContext:
    """What inspections work with: the hooks that the exporter disconnects at its end, and what is charged with their time."""

    hooks: Hooks
    clock: StepClock
    cost: SampleCost
    mailbox: Mailbox
    loss_scale: LossScale


class VectorSender:
    """Sends vectors to the host, each with a record that says what it has. Belongs to the training thread.

    `source`: the name under which the totals of the inspection take its records.
    """

    def __init__(self, source: str, context: InspectionContext) -> None:
        self._source, self._mailbox = source, context.mailbox
        self._transfer = HostTransfer(pressed=context.mailbox.press)

    def send(self, number: int, vectors: Sequence[torch.Tensor], data: object = None) -> bool:
        """Post a record of the round of this number; return False where there is no vector, or too much is under way."""
        tickets = [self._transfer.send(vector) for vector in vectors]
        sent = tuple(ticket for ticket in tickets if ticket is not None)
        complete = bool(sent) and len(sent) == len(tickets)
        if complete:
            self._mailbox.append(Inspected(self._source, number, sent, data))
        return complete


def by_device(measured: Iterable[tuple[Item, torch.Tensor]]) -> dict[torch.device, list[tuple[Item, torch.Tensor]]]:
    """Return tensors, each with what it is of, by their device."""
    devices: dict[torch.device, list[tuple[Item, torch.Tensor]]] = {}
    for item, tensor in measured:
        devices.setdefault(tensor.device, []).append((item, tensor))
    return devices


class MeasurementTimer:
    """Times about `TIMED` measurements of a sample on their devices, if it has as many as the last one."""

    def __init__(self, context: InspectionContext) -> None:
        self._cost = context.cost
        self._measured, self._every = 0, 1

    @contextlib.contextmanager
    def measuring(self, device: torch.device) -> Iterator[None]:
        """Measure something on a device, without autocast, which would take copies in float32 on other devices than the CPU."""
        self._measured += 1
        times = self._every if self._measured % self._every == 0 else 0
        begun = self._cost.begin((device,)) if times else []
        with without_autocast(device.type):
            yield
        self._cost.end(begun, times=times)

    def sample_over(self) -> None:
        """Choose which measurements of the next sample are timed."""
        self._every, self._measured = max(1, self._measured // TIMED), 0


def without_autocast(kind: str) -> contextlib.AbstractContextManager[object]:
    """Disable autocast on this kind of device."""
    enabled = kind != "cpu" and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if enabled else contextlib.nullcontext()


class LayerTurns:
    """Remembers of each optimizer whose turn it is. Belongs to the training thread."""

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = optimizers
        self._next: dict[int, int] = {}

    def take(self, table: ParameterTable, optimizer: int) -> Iterator[list[int]]:
        """Yield the positions of the parameters of each of the next layers, of those that the optimizer owns."""
        owners = self._optimizers.owners(table, {optimizer})
        layers = np.unique(table.layer_of[owners == optimizer])
        elements = 0
        for number in range(min(LAYERS, len(layers))):
            place = self._next.get(optimizer, 0) % len(layers)
            members = np.flatnonzero((table.layer_of == layers[place]) & (owners == optimizer))
            elements += int(table.elements[members].sum())
            if number and elements > ELEMENTS:
                return
            self._next[optimizer] = place + 1
            yield members.tolist()
