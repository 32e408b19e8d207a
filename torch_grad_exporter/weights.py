"""WeightProbe: norms of parameters and of their last update, for a rotating few layers per sample.

An update is known only by a copy of the parameters from before it, so a sample copies a bounded part of the
model; over the samples every layer gets its turn.
"""

from __future__ import annotations

import numpy as np
import torch

from torch_grad_exporter.events import Mailbox, Weights
from torch_grad_exporter.layers import Plan
from torch_grad_exporter.statistics.device import wide
from torch_grad_exporter.transfer import HostTransfer

LAYERS = 8
ELEMENTS = 1 << 24
"""Layers, and elements of parameters, that a sample looks at; one layer at least."""


class WeightProbe:
    """Measures the next few layers around a sampled step. `before` and `after` belong to the training thread."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._transfer = HostTransfer()
        self._next = 0
        self._plan: Plan | None = None
        self._copies: list[tuple[int, torch.nn.Parameter, torch.Tensor]] = []

    @torch.no_grad()
    def before(self, plan: Plan) -> None:
        """Copies the parameters of the next layers."""
        self._plan, self._copies = plan, []
        for position in self._choose(plan):
            parameter = plan.tracked[position].reference()
            if parameter is not None:
                self._copies.append((position, parameter, local(parameter).clone()))

    @torch.no_grad()
    def after(self) -> None:
        """Measures the copied parameters against what the step made of them, and hands over."""
        copies, self._copies = self._copies, []
        devices = dict.fromkeys(copy.device for _, _, copy in copies)
        for device in devices:
            here = [(position, local(parameter), copy) for position, parameter, copy in copies if copy.device == device]
            dtype = wide(device)
            norms = [torch.linalg.vector_norm(tensor, dtype=dtype) for _, now, copy in here for tensor in (copy, now, now - copy)]
            ticket = self._transfer.send(torch.stack(norms))
            if ticket is not None and self._plan is not None:
                positions = np.array([position for position, _, _ in here], dtype=np.int64)
                self._mailbox.append(Weights(self._plan, positions, ticket))

    def _choose(self, plan: Plan) -> list[int]:
        chosen: list[int] = []
        elements = 0
        for _ in range(min(LAYERS, len(plan.layers))):
            layer = self._next % len(plan.layers)
            members = np.flatnonzero(plan.layer_of == layer)
            elements += int(plan.elements[members].sum())
            if chosen and elements > ELEMENTS:
                break
            chosen.extend(members.tolist())
            self._next = layer + 1
        return chosen


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's own plain, real tensor of a parameter."""
    tensor = parameter.detach()
    to_local = getattr(tensor, "to_local", None)
    tensor = tensor if to_local is None else to_local()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
