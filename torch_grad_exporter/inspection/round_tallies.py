"""RoundTallies: what the backwards of a sampled round have confirmed, until it is sent to the host."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.loss_scale import LossScale
from torch_grad_exporter.inspection.tallies import SentTallies, Tally, packed
from torch_grad_exporter.store.host_transfer import HostTransfer
from torch_grad_exporter.store.mailbox import Mailbox
from torch_grad_exporter.store.records import Inspected
from torch_grad_exporter.torch_compat.autograd import graph_task

TASKS = 4
"""Backwards at most of which something is kept before it is known whether they are of the round."""

TIMED = 16
"""Measurements of a sample that are timed on devices; each stands for as many as came since the one before."""


class Key(NamedTuple):
    """What a tally is of: a module by `id`, or whatever tells it from others; its label; and the device of its tensors."""

    of: Hashable
    label: str
    device: torch.device


Tallies = dict[Key, Tally]


def include(into: Tallies, found: Mapping[Key, Tally]) -> None:
    """Adds these to those."""
    for key, tally in found.items():
        if key in into:
            into[key].include(tally)
        else:
            into[key] = tally


@dataclass(slots=True, eq=False)
class Backward:
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
    """Sends records of this inspection. Belongs to the training thread and to that of the backward."""

    def __init__(self, inspection: str, loss_scale: LossScale, cost: SampleCost, mailbox: Mailbox) -> None:
        self._inspection = inspection
        self._loss_scale, self._cost, self._mailbox = loss_scale, cost, mailbox
        self._transfer = HostTransfer(pressed=mailbox.press)
        self._backwards: dict[int, Backward] = {}
        """By autograd's number, those that are not over."""
        self._round = _ConfirmedRound()
        self._measured = 0
        self._every = 1

    def backward(self, task: int) -> Backward:
        """The backward of this number, which runs."""
        if task not in self._backwards and len(self._backwards) >= TASKS:
            del self._backwards[min(self._backwards)]
        return self._backwards.setdefault(task, Backward())

    def measure(self, key: Key, how: Callable[[], Tally], into: Tallies) -> None:
        """Measures, and times some of it on devices: about `TIMED`, if this sample has as many measurements as the last."""
        self._measured += 1
        times = self._every if self._measured % self._every == 0 else 0
        begun = self._cost.timer.begin((key.device,)) if times else []
        include(into, {key: how()})
        self._cost.timer.end(begun, times=times)

    def backward_ended(self, number: int) -> Backward:
        """A backward of this sampled round has ended, which this returns: what it has shown is confirmed."""
        found, self._backwards = self._backwards, {}
        backward = found.get(graph_task(), found[max(found)]) if found else Backward()
        if self._round.number != number:
            self._round = _ConfirmedRound(number)
        self.confirm(backward.tallies)
        scale, self._round.scaler = self._loss_scale.value, self._loss_scale.has_scaler
        self._round.scale = None if scale is None else scale.detach().clone()  # the scaler changes it in place
        return backward

    def confirm(self, tallies: Tallies) -> None:
        """These are of the round."""
        include(self._round.tallies, tallies)

    def forget_backwards(self) -> None:
        """No backward is under way."""
        self._backwards = {}

    def forget(self) -> None:
        """Nothing is to be sent."""
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
        by_device: dict[torch.device, list[Key]] = {}
        for key, tally in over.tallies.items():
            if tally.peaks is not None:  # else there are gradients only, of outputs that an earlier round has confirmed
                by_device.setdefault(key.device, []).append(key)
        # A scaler that was found only after the backward has scaled its loss, unless it is disabled.
        known = over.scaler or (self._loss_scale.is_known and self._loss_scale.value is None)
        sent, tickets = [], []
        for device, keys in by_device.items():
            begun = self._cost.timer.begin((device,))
            packing, vector = packed([over.tallies[key] for key in keys])
            tickets.append(self._transfer.send(vector))
            sent.append((tuple(key.label for key in keys), packing))
            self._cost.timer.end(begun)
        if over.scale is not None:
            tickets.append(self._transfer.send(over.scale.reshape(1)))
        arriving = tuple(ticket for ticket in tickets if ticket is not None)
        if sent and len(arriving) == len(tickets):
            self._mailbox.append(Inspected(self._inspection, over.number, arriving, SentTallies(tuple(sent), known)))
