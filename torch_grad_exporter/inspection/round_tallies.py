"""RoundTallies: what the backwards of a sampled round have confirmed, until it is sent to the host."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from torch_grad_exporter.capture.cost import Begun, SampleCost
from torch_grad_exporter.inspection.tallies import SentTallies, Tally, packed, without_autocast
from torch_grad_exporter.store.host_transfer import HostTransfer
from torch_grad_exporter.store.records import Inspected, Mailbox
from torch_grad_exporter.torch_compat.autograd import graph_task
from torch_grad_exporter.torch_compat.optimizers import LossScale

# Backwards at most of which something is kept before it is known whether they are of the round.
TASKS = 4

# Measurements of a sample that are timed on devices; each stands for all since the one before.
TIMED = 16


class TallyKey(NamedTuple):
    """What a tally is of: the `id` of a module, or what else distinguishes it; its label; and the device of its tensors."""

    of: Hashable
    label: str
    device: torch.device


Tallies = dict[TallyKey, Tally]


@dataclass(slots=True, eq=False)
class TalliedBackward:
    """What a backward has shown. `forwards`: the numbers of those that it passed through."""

    tallies: Tallies = field(default_factory=dict)
    forwards: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _ConfirmedRound:
    """What backwards have confirmed. `scale`: of the loss, if a gradient scaler was known that has one; `scaler`: if one was."""

    number: int = -1
    tallies: Tallies = field(default_factory=dict)
    scale: torch.Tensor | None = None
    scaler: bool = False


class RoundTallies:
    """The tallies of an inspection; each sampled round sends a record of them.

    Belongs to the training thread and to that of the backward.
    """

    def __init__(self, inspection: str, loss_scale: LossScale, cost: SampleCost, mailbox: Mailbox) -> None:
        self._inspection = inspection
        self._loss_scale, self._cost, self._mailbox = loss_scale, cost, mailbox
        self._transfer = HostTransfer(pressed=mailbox.press)
        self._backwards: dict[int, TalliedBackward] = {}  # by autograd's number, those that are not over
        self._round = _ConfirmedRound()
        self._measured = 0
        self._every = 1

    def backward(self, task: int) -> TalliedBackward:
        """Return the running backward, which has this number."""
        if task not in self._backwards and len(self._backwards) >= TASKS:
            del self._backwards[min(self._backwards)]
        return self._backwards.setdefault(task, TalliedBackward())

    def measure(self, key: TallyKey, values: torch.Tensor, unit_dim: int | None, into: Tallies) -> None:
        """Measure a tensor; see `Tally.of_values`."""
        begun, times = self._begin(key.device)
        with without_autocast(key.device.type):
            _include(into, {key: Tally.of_values(values, unit_dim)})
        self._cost.end(begun, times=times)

    def measure_gradient(self, key: TallyKey, values: torch.Tensor, into: Tallies) -> None:
        """Measure the gradient of a tensor that is measured itself."""
        begun, times = self._begin(key.device)
        with without_autocast(key.device.type):
            _include(into, {key: Tally.of_gradient(values)})
        self._cost.end(begun, times=times)

    def _begin(self, device: torch.device) -> tuple[Begun, int]:
        """Time some measurements on devices: about `TIMED`, if this sample has as many as the last."""
        self._measured += 1
        times = self._every if self._measured % self._every == 0 else 0
        return self._cost.begin((device,)) if times else [], times

    def backward_ended(self, number: int) -> TalliedBackward:
        """Confirm what the backward of this sampled round that has just ended has shown; return it."""
        backwards, self._backwards = self._backwards, {}
        backward = backwards.get(graph_task(), backwards[max(backwards)]) if backwards else TalliedBackward()
        if self._round.number != number:
            self._round = _ConfirmedRound(number)
        self.confirm(backward.tallies)
        scale, self._round.scaler = self._loss_scale.value, self._loss_scale.has_scaler
        self._round.scale = None if scale is None else scale.detach().clone()  # the scaler changes it in place
        return backward

    def confirm(self, tallies: Tallies) -> None:
        """Count these as part of the round."""
        _include(self._round.tallies, tallies)

    def forget_backwards(self) -> None:
        """Forget backwards that are not over; none is running."""
        self._backwards = {}

    def forget(self) -> None:
        """Forget all that is not sent."""
        self._backwards, self._round = {}, _ConfirmedRound()

    def round_over(self, number: int, *, kept: bool) -> None:
        """Send what the round of this number has shown to the host, if it is to be shown."""
        if number != self._round.number:
            return
        over, self._round = self._round, _ConfirmedRound()
        self._every, self._measured = max(1, self._measured // TIMED), 0
        if kept:
            with torch.no_grad():
                self._send(over)

    def _send(self, over: _ConfirmedRound) -> None:
        by_device: dict[torch.device, list[tuple[str, Tally]]] = {}
        for key, tally in over.tallies.items():
            if tally.peaks is not None:  # else there are gradients only, of outputs that an earlier round has confirmed
                by_device.setdefault(key.device, []).append((key.label, tally))
        # A scaler that was found only after the backward has scaled its loss, unless it is disabled.
        known = over.scaler or (self._loss_scale.is_known and self._loss_scale.value is None)
        packings, tickets = [], []
        for device, tallies in by_device.items():
            begun = self._cost.begin((device,))
            packing, vector = packed(tallies)
            tickets.append(self._transfer.send(vector))
            packings.append(packing)
            self._cost.end(begun)
        if over.scale is not None:
            tickets.append(self._transfer.send(over.scale.reshape(1)))
        arriving = tuple(ticket for ticket in tickets if ticket is not None)
        if packings and len(arriving) == len(tickets):
            self._mailbox.append(Inspected(self._inspection, over.number, arriving, SentTallies(tuple(packings), known)))


def _include(into: Tallies, tallies: Mapping[TallyKey, Tally]) -> None:
    for key, tally in tallies.items():
        if key in into:
            into[key].include(tally)
        else:
            into[key] = tally
