"""Gradient scalers: the scale of the loss, and steps that a fused optimizer skips because of it."""

from __future__ import annotations

import types
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch

from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.store.host_transfer import HostTransfer, Ticket
from torch_grad_exporter.torch_compat.optimizers import scale_of

NEAREST = 12
"""Callers of an optimizer's step that are searched for a gradient scaler."""


class Scaler(Protocol):
    """A `torch.amp.GradScaler`: `_scale` is a tensor, `None` before its first use; a disabled one has none."""

    def is_enabled(self) -> bool:
        """Return whether it scales."""


class LossScale:
    """Finds the scaler, and holds it weakly. Belongs to the training thread.

    Args:
        scaler: One that the user has named.
    """

    def __init__(self, scaler: Scaler | None = None) -> None:
        self._scaler = None if scaler is None else weakref.ref(scaler)
        self._searched = False

    def search(self, frame: types.FrameType | None) -> None:
        """Search the callers of an optimizer's step for a scaler whose `step` called it."""
        self._searched = True
        for _ in range(NEAREST):
            if frame is None:
                return
            if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
                scaler = frame.f_locals.get("self")
                if scaler is not None:
                    self._scaler = weakref.ref(scaler)
                return
            frame = frame.f_back

    @property
    def scaler(self) -> Scaler | None:
        """The scaler, if one was given or found, and is alive."""
        return None if self._scaler is None else self._scaler()

    @property
    def has_scaler(self) -> bool:
        """Whether a scaler was given or found, and is alive."""
        return self.scaler is not None

    @property
    def is_known(self) -> bool:
        """Whether it is known if there is a scaler, as it is from the first step on."""
        return self._searched or self.has_scaler

    @property
    def value(self) -> torch.Tensor | None:
        """The loss scale now, if there is a scaler that has one."""
        return None if self._scaler is None else scale_of(self.scaler)


UNDECIDED = 64
"""Rounds at most whose answers are waited for."""


@dataclass(slots=True)
class _UndecidedRound:
    """What its optimizers found: the answers under way, and how many of them were steps after all."""

    number: int
    waiting: dict[int, Ticket] = field(default_factory=dict)
    took_place: int = 0


@dataclass(slots=True)
class FusedStepCounter:
    """Corrects the clock's counts of steps and of skipped steps."""

    clock: StepClock
    transfer: HostTransfer = field(default_factory=lambda: HostTransfer(ring=UNDECIDED))
    answering: set[int] = field(default_factory=set)
    """The optimizers that were ever given an answer."""
    undecided: deque[_UndecidedRound] = field(default_factory=lambda: deque(maxlen=UNDECIDED))
    """Rounds whose answers may still come; empty where no optimizer was given any."""

    def stepped(self, round_number: int, optimizer: int, found_inf: torch.Tensor | None) -> None:
        """Count the step of an optimizer; `found_inf`: a scaler's answer, not zero if nothing was done."""
        ticket = None if found_inf is None else self.transfer.send(found_inf.detach().reshape(1))
        answer = None if ticket is None else ticket.ready()
        if answer is None or not answer[0]:
            self.clock.step_done(optimizer)
        if found_inf is None and not self.undecided:
            return
        if found_inf is not None:
            self.answering.add(optimizer)
        if not self.undecided or self.undecided[-1].number != round_number:
            self.undecided.append(_UndecidedRound(round_number))
        current = self.undecided[-1]
        if ticket is not None and answer is None:
            current.waiting[optimizer] = ticket
        else:
            current.took_place += answer is None or not answer[0]

    def settle(self, current_round: int) -> bool:
        """Take in the answers that have come, up to the current round; return whether a round before it was skipped."""
        for earlier in self.undecided:
            for optimizer, answer in [(o, a) for o, ticket in earlier.waiting.items() if (a := ticket.ready()) is not None]:
                del earlier.waiting[optimizer]
                if answer[0]:
                    self.clock.step_undone(optimizer)
                else:
                    earlier.took_place += 1
        skipped = 0
        while self.undecided and self.undecided[0].number != current_round and not self.undecided[0].waiting:
            skipped += not self.undecided.popleft().took_place
        self.clock.skipped += skipped
        return bool(skipped)
