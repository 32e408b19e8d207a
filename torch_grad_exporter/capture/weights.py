"""WeightProbe: norms of parameters and of their last update, for a rotating few layers per sample.

An update is known only by a copy of the parameters from before it, so a sample copies a bounded part of the
model; over the samples every layer gets its turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from torch_grad_exporter.metrics.families import IntArray
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics.batches import dense_local
from torch_grad_exporter.statistics.device import wide
from torch_grad_exporter.transfer.events import Mailbox, Weights
from torch_grad_exporter.transfer.transfer import HostTransfer

LAYERS = 8
ELEMENTS = 1 << 24
"""Layers, and elements of parameters, that a sample covers at most; one layer at least."""


@dataclass(slots=True)
class _Watched:
    """Copies of some parameters from before a step."""

    table: ParameterTable
    copies: list[tuple[int, torch.nn.Parameter, torch.Tensor]]


class WeightProbe:
    """Measures the next few layers around a sampled step. `before` and `after` belong to the training thread."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._transfer = HostTransfer()
        self._next: dict[int, int] = {}
        self._watched: dict[int, _Watched] = {}

    @torch.no_grad()
    def before(self, table: ParameterTable, optimizer: int, owners: IntArray) -> None:
        """Copies the parameters of the next layers that the optimizer owns."""
        copies = []
        for position in self._choose(table, optimizer, owners):
            parameter = table.tracked[position].parameter()
            if parameter is not None:
                copies.append((position, parameter, local(parameter).clone()))
        self._watched[optimizer] = _Watched(table, copies)

    @torch.no_grad()
    def after(self, optimizer: int) -> None:
        """Measures the copied parameters against what the step made of them, and hands over."""
        watched = self._watched.pop(optimizer, None)
        if watched is None:
            return
        for device in dict.fromkeys(copy.device for _, _, copy in watched.copies):
            here = [(i, local(parameter), copy) for i, parameter, copy in watched.copies if copy.device == device]
            norms = [
                torch.linalg.vector_norm(tensor, dtype=wide(device)) for _, now, copy in here for tensor in (copy, now, now - copy)
            ]
            ticket = self._transfer.send(torch.stack(norms))
            if ticket is not None:
                positions = np.array([position for position, _, _ in here], dtype=np.int64)
                self._mailbox.append(Weights(watched.table, positions, ticket))

    def _choose(self, table: ParameterTable, optimizer: int, owners: IntArray) -> list[int]:
        layers = np.unique(table.layer_of[owners == optimizer])
        chosen: list[int] = []
        elements = 0
        for _ in range(min(LAYERS, len(layers))):
            place = self._next.get(optimizer, 0) % len(layers)
            members = np.flatnonzero((table.layer_of == layers[place]) & (owners == optimizer))
            elements += int(table.elements[members].sum())
            if chosen and elements > ELEMENTS:
                break
            chosen.extend(members.tolist())
            self._next[optimizer] = place + 1
        return chosen


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's own plain, real tensor of a parameter."""
    return dense_local(parameter, keep_sparse=False)
