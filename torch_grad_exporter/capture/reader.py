"""GradientReader: reads the gradients of a round and posts what it read to the host side.

When that is done, and which gradients count, is decided in `rounds.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from torch_grad_exporter.capture.cost import DeviceTimer
from torch_grad_exporter.capture.optimizer_in_backward import StepsWithinBackward
from torch_grad_exporter.capture.round_pattern import RoundPattern
from torch_grad_exporter.capture.rounds import Round
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.model.parameters import ParameterTable, parameters_of
from torch_grad_exporter.statistics.eager import EagerStatistics, Measurement
from torch_grad_exporter.torch_compat import scale_of
from torch_grad_exporter.transfer.events import AfterClip, Captured, Decisions, Mailbox, Part
from torch_grad_exporter.transfer.transfer import HostTransfer, Tail, Ticket


class Scaler(Protocol):
    """A `torch.amp.GradScaler`: `_scale` is a tensor, `None` before its first use; a disabled one has none."""

    def is_enabled(self) -> bool:
        """Whether it scales."""


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerView:
    """What an optimizer sees. `grad_scale`: the loss scale that it is to divide by itself, where it is a fused one.

    `found_inf`: not zero if it is to do nothing.
    """

    optimizer: int
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None


class GradientReader:
    """Posts `Captured` and `AfterClip`. Holds a gradient scaler weakly.

    `timer`: times what is read, on every device that was read from before.
    """

    def __init__(
        self,
        *,
        optimizers: Optimizers,
        statistics: EagerStatistics,
        mailbox: Mailbox,
        decisions: Decisions,
        transfer: HostTransfer | None = None,
        scaler: Scaler | None = None,
        timer: DeviceTimer | None = None,
    ) -> None:
        self._optimizers = optimizers
        self._statistics = statistics
        self._mailbox = mailbox
        self._decisions = decisions
        self._transfer = transfer or HostTransfer()
        self._scaler = None if scaler is None else weakref.ref(scaler)
        self.within = StepsWithinBackward(statistics)
        self.timer = timer or DeviceTimer()
        self._places: frozenset[torch.device] = frozenset()
        self._steps_seen = False
        """Whether the callers of a step were searched for a gradient scaler."""

    @property
    def devices(self) -> frozenset[str]:
        """Kinds of devices that were read from."""
        return frozenset(device.type for device in self._places)

    def scaler_looked_for(self, scaler: Scaler | None) -> None:
        """The callers of a step were searched for a scaler; norms are divided by its scale from now on, if there is one."""
        self._steps_seen = True
        if scaler is not None:
            self._scaler = weakref.ref(scaler)

    @property
    def knows_scaler(self) -> bool:
        """Whether a gradient scaler was given or found, and is alive."""
        return self._scaler is not None and self._scaler() is not None

    @property
    def scale(self) -> torch.Tensor | None:
        """The loss scale now, if a scaler is known that has one."""
        return scale_of(None if self._scaler is None else self._scaler())

    def read(self, current: Round, table: ParameterTable, pattern: RoundPattern, at: float) -> bool:
        """Measures what the round's backwards wrote, at the Unix time `at`; whether there was anything, and room for it."""
        parameters = table.parameters()
        if parameters is None:
            return False
        early, begun = self.within, self.timer.begin(self._places)
        gradients = [(i, g) for i in sorted(current.fired - early.fired) if (g := parameters[i].grad) is not None]
        readings = [*early.readings, *self._statistics.read(table, gradients)]
        parts, scale = self._sent(self._statistics.finish(readings, current.number))
        self.timer.end(begun)
        if parts:
            # A gradient that a hook of the user removed at once counts as none.
            there = early.fired.union(i for i, _ in gradients)
            missing = [i for i in range(len(parameters)) if i not in there and parameters[i].requires_grad]
            owners, _ = self._optimizers.owners(table)
            self._mailbox.append(
                Captured(
                    round=current.number,
                    table=table,
                    parts=parts,
                    missing=np.array(missing, dtype=np.int64),
                    owners=owners,
                    at=at,
                    likely_last=pattern.backwards is not None,
                    usual=pattern.steppers(current.models),
                    scale_known=self._steps_seen or self.knows_scaler,
                    scale=scale,
                    again=current.again,
                )
            )
        return bool(parts)

    def forget(self, number: int, table: ParameterTable, positions: Iterable[int]) -> None:
        """Subtracts what the sample of a round counted of the units of these parameters, whose optimizers did not step in it."""
        self._statistics.forget(table, positions, number)

    def read_after(self, current: Round, table: ParameterTable, seen: OptimizerView, *, full: bool) -> None:
        """Measures norms again where the optimizer sees them: the probes, or everything if `full` or nothing is known."""
        optimizer = seen.optimizer
        owners, _ = self._optimizers.owners(table, {optimizer})
        fired = np.array(sorted(current.fired), dtype=np.int64)
        mine = fired[owners[fired] == optimizer].tolist()
        probes = [i for i in mine if i in self._decisions.probes] if self._decisions.table is table else []
        full |= self._decisions.full or not probes
        chosen = mine if full else probes
        parameters = parameters_of(table.tracked[i] for i in chosen)
        if any(p is None for p in parameters):
            return
        gradients = [(i, p.grad) for i, p in zip(chosen, parameters, strict=True) if p is not None and p.grad is not None]
        begun = self.timer.begin(self._places)
        parts, scale = self._sent(self._statistics.norms(table, gradients))
        self.timer.end(begun)
        if parts:
            own_scale, answer = self._one(seen.grad_scale), self._one(seen.found_inf)
            self._mailbox.append(AfterClip(current.number, optimizer, parts, full, scale, own_scale, answer))

    def _one(self, value: torch.Tensor | None) -> Ticket | None:
        return None if value is None else self._transfer.send(value.detach().reshape(1))

    def _sent(self, measured: Iterable[Measurement]) -> tuple[tuple[Part, ...], Ticket | None]:
        """Starts the copies to the host, one per device; the loss scale rides along with the first of its device."""
        value = self.scale
        parts, scale = [], None
        for one in measured:
            vector = one.vector
            self._places |= {vector.device}
            rides = value is not None and scale is None and value.device == vector.device
            if rides and value is not None:
                vector = torch.cat((vector, value.detach().reshape(1).to(vector.dtype)))
            ticket = self._transfer.send(vector)
            if ticket is None:
                return (), None
            scale = Tail(ticket) if rides else scale
            parts.append(Part(one.positions, one.elements, one.units, ticket, one.packing))
        return tuple(parts), scale
