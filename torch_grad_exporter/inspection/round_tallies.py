"""RoundTallies: what the backwards of a sampled round have confirmed, until it is sent to the host."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from torch_grad_exporter.inspection.measuring import InspectionContext, MeasurementTimer, VectorSender
from torch_grad_exporter.inspection.tallies import SentTallies, Tally, packed
from torch_grad_exporter.torch_compat.autograd import graph_task

# Backwards at most of which something is kept before it is known whether they are of the round.
TASKS = 4


class TallyKey(NamedTuple):
    """What a tally is of: the `id` of a module, or what else distinguishes it; its label; and the device of its tensors."""

    of: Hashable
    label: str
    device: torch.device


class Tallies(dict[TallyKey, Tally]):
    """Tallies by what they are of."""

    def add(self, key: TallyKey, tally: Tally) -> None:
        """Add a tally to that of the same key."""
        if key in self:
            self[key].include(tally)
        else:
            self[key] = tally


@dataclass(slots=True, eq=False)
class TalliedBackward:
    """What a backward has shown. `forwards`: the numbers of those that it passed through."""

    tallies: Tallies = field(default_factory=Tallies)
    forwards: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _ConfirmedRound:
    """What backwards have confirmed. `scale`: of the loss, if a gradient scaler was known that has one; `scaler`: if one was."""

    number: int = -1
    tallies: Tallies = field(default_factory=Tallies)
    scale: torch.Tensor | None = None
    scaler: bool = False


class RoundTallies:
    """The tallies of an inspection; each sampled round sends a record of them.

    Belongs to the training thread and to that of the backward.
    """

    def __init__(self, inspection: str, context: InspectionContext) -> None:
        self._loss_scale, self._cost = context.loss_scale, context.cost
        self._sender, self._timed = VectorSender(inspection, context), MeasurementTimer(context)
        self._backwards: dict[int, TalliedBackward] = {}  # by autograd's number, those that are not over
        self._round = _ConfirmedRound()

    def backward(self, task: int) -> TalliedBackward:
        """Return the running backward, which has this number."""
        if task not in self._backwards and len(self._backwards) >= TASKS:
            del self._backwards[min(self._backwards)]
        return self._backwards.setdefault(task, TalliedBackward())

    def measure(self, key: TallyKey, values: torch.Tensor, unit_dim: int | None, into: Tallies) -> None:
        """Measure a tensor; see `Tally.of_values`."""
        with self._timed.measuring(key.device):
            into.add(key, Tally.of_values(values, unit_dim))

    def measure_gradient(self, key: TallyKey, values: torch.Tensor, into: Tallies) -> None:
        """Measure the gradient of a tensor that is measured itself."""
        with self._timed.measuring(key.device):
            into.add(key, Tally.of_gradient(values))

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
        for key, tally in tallies.items():
            self._round.tallies.add(key, tally)

    def forget_backwards(self) -> None:
        """Forget backwards that are not over; none is running."""
        self._backwards = {}

    def forget(self) -> None:
        """Forget all that is not sent."""
        self._backwards, self._round = {}, _ConfirmedRound()

    @torch.no_grad()
    def round_over(self, number: int, *, kept: bool) -> None:
        """Send what the round of this number has shown to the host, if it is to be shown."""
        if number != self._round.number:
            return
        over, self._round = self._round, _ConfirmedRound()
        self._timed.sample_over()
        # Where there are gradients only, they are of outputs that an earlier round has confirmed.
        measured = [(key, tally) for key, tally in over.tallies.items() if tally.peaks is not None]
        if not kept or not measured:
            return
        packings, vectors = [], []
        for device in dict.fromkeys(key.device for key, _ in measured):
            begun = self._cost.begin((device,))
            packing, vector = packed([(key.label, tally) for key, tally in measured if key.device == device])
            packings.append(packing)
            vectors.append(vector)
            self._cost.end(begun)
        if over.scale is not None:
            vectors.append(over.scale.reshape(1))
        # A scaler that was found only after the backward has scaled its loss, unless it is disabled.
        known = over.scaler or (self._loss_scale.is_known and self._loss_scale.value is None)
        self._sender.send(over.number, vectors, SentTallies(tuple(packings), known))
