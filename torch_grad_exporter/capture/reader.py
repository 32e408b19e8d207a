"""GradientReader: measures the gradients of sampled rounds on request, and hands over what it read.

A failure costs one sample: callers guard each reading. When a reading is due, and which gradients count, is decided in `rounds.py`.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from torch_grad_exporter.capture.armed_round import ArmedRound, RoundPattern
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.gradient_versions import GradientsAsRead, PresentGradients
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.metrics.families import IntArray
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.statistics.eager import EagerStatistics, Measurement
from torch_grad_exporter.store.host_transfer import HostTransfer, Tail, Ticket
from torch_grad_exporter.store.records import Mailbox, OptimizerView, Outcome, RoundEnded, SamplePart, SampleRead
from torch_grad_exporter.torch_compat.optimizers import LossScale

IN_FULL = 8
"""Of this many samples of an optimizer, one is measured again at the step although nothing seems to have written to it."""

CROWDED = 1 << 12
"""Records in the mailbox, half of what it takes, beyond which no sample is taken: the worker has fallen behind."""

DIVISORS = 4
"""Rounds whose divisors are kept: the current one, and those that the loop has reported since."""


@dataclass(slots=True)
class StepView:
    """An optimizer that is about to use its gradients, or has just used them.

    Attributes:
        optimizer: Its number.
        grad_scale: The loss scale that a fused optimizer divides by itself.
        found_inf: Not zero if a fused optimizer is to skip its step.
    """

    optimizer: int
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None


class GradientReader:
    """Reads, and reports what a sample has cost. Belongs to the training thread and that of the backward.

    Attributes:
        samples: Rounds whose gradients were read.
        readable: Whether the last sample's gradients can be compared at the step: plain tensors on the host.
    """

    def __init__(
        self,
        *,
        optimizers: Optimizers,
        statistics: EagerStatistics,
        clock: StepClock,
        cost: SampleCost,
        mailbox: Mailbox,
        errors: ErrorLog,
        loss_scale: LossScale,
    ) -> None:
        self._optimizers, self._statistics, self._clock, self._cost = optimizers, statistics, clock, cost
        self._mailbox = mailbox
        self._forgetting = errors.boundary("capture", "units that do not count")
        self._transfer = HostTransfer(pressed=mailbox.press)
        self._loss_scale = loss_scale
        self._bypass: set[int] = set()  # optimizers whose gradients were once edited in a way that versions do not show
        self._looks: Counter[int] = Counter()  # by optimizer, how often its view was taken
        self.samples = 0
        self.readable = True
        self._places: frozenset[torch.device] = frozenset()
        self._divisors: dict[int, Ticket | float] = {}  # by round, as the loop has reported them

    @property
    def devices(self) -> frozenset[str]:
        """Kinds of devices that were read from."""
        return frozenset(device.type for device in self._places)

    def divide(self, current: ArmedRound, divisor: Ticket | float) -> None:
        """Take what the loop divides the gradients of the current round by or, after its step, those of the coming one."""
        number = current.number + bool(current.stepped)
        if current.captured and number == current.number:
            current.divided_again |= number in self._divisors
        self._divisors.pop(number, None)
        self._divisors[number] = divisor
        if len(self._divisors) > DIVISORS:
            del self._divisors[next(iter(self._divisors))]

    # Reading

    def read(
        self,
        current: ArmedRound,
        pattern: RoundPattern,
        *,
        divisor: float = 1.0,
        step: StepView | None = None,
        now: PresentGradients | None = None,
    ) -> None:
        """Measure the gradients of a round and hand them over, in place of an earlier reading of the same round.

        Sets `parts` of the round, and that it was captured; both stay as they were if its gradients cannot be read.

        Args:
            current: The round.
            pattern: What is usual for rounds.
            divisor: By what a pipeline schedule divides gradients after the backward.
            step: The optimizer that is about to use them, where they are read at the step.
            now: The table's gradients, where they were looked up already.
        """
        if len(self._mailbox) >= CROWDED:
            return
        table, at = current.table, self._clock.now()
        if now is None or now.tracked is not table.tracked:
            now = PresentGradients.of(table.tracked, marked=self.readable)
        if not now.in_place:
            return
        begun = self._cost.begin(self._places)
        gradients = now.at(current.fired - current.early_fired if current.early_fired else current.fired)
        readings = [*current.early, *self._statistics.read(table, gradients)]
        # At a step a scaler has divided them, or leaves that to a fused optimizer.
        loss_scale = self._loss_scale.value if step is None else step.grad_scale
        parts, scale = self._sent(self._statistics.finish(readings, current.number), loss_scale)
        self._cost.end(begun)
        if not parts:
            return
        self.readable = all(map(operator.attrgetter("group.readable"), readings))
        compared = now.marks if self.readable and not current.early_fired else None
        current.as_read = None if compared is None else GradientsAsRead(gradients, compared, self.samples)
        # A gradient that a hook of the user removed at once counts as none.
        there = current.early_fired | gradients.keys() if current.early_fired else gradients.keys()
        missing: list[int] = []
        if len(there) < len(now.parameters):
            rows = enumerate(now.parameters)
            missing = [i for i, parameter in rows if i not in there and parameter is not None and parameter.requires_grad]
        # Where no backward is seen, each optimizer's step reads the round again, with what those before have left.
        if current.views:
            current.views = [view for view in current.views if view.ours and step is not None and current.captured]
        current.divided_again = False
        self._mailbox.append(
            SampleRead(
                round=current.number,
                table=table,
                parts=parts,
                missing=np.array(missing, dtype=np.int64),
                owners=self._optimizers.owners(table, new_sample=True),
                at=at,
                likely_last=pattern.backwards is not None,
                usual=pattern.steppers(current.models),
                scale_known=self._loss_scale.is_known,
                scale=scale,
                again=current.again,
                divisor=divisor,
                at_step=step is not None,
            )
        )
        current.parts, current.again = parts, False
        self.samples += not current.counted
        current.counted = current.captured = current.open = True

    def read_early(self, current: ArmedRound, positions: Iterable[int]) -> None:
        """Read gradients that an optimizer is about to use up before the backward is over, or that no backward has shown.

        If this fails, the sample lacks them: the caller has to withdraw it.
        """
        tracked = current.table.tracked
        there = ((i, tracked[i].gradient()) for i in positions if i not in current.early_fired)
        gradients = {int(i): gradient for i, gradient in there if gradient is not None}
        begun = self._cost.begin(self._places)
        current.early += self._statistics.read(current.table, gradients)
        self._cost.end(begun)
        current.early_fired |= gradients.keys()

    def read_again(self, current: ArmedRound, seen: StepView, *, ours: bool = False) -> None:
        """Measure norms as an optimizer sees them. `ours`: after `clip=` has clipped them."""
        table, optimizer = current.table, seen.optimizer
        fired, owners = self._owners_of_fired(current, {optimizer})
        mine: list[int] = fired[owners[fired] == optimizer].tolist()
        tracked = table.tracked if len(mine) == len(table.tracked) else [table.tracked[i] for i in mine]
        compared = current.as_read if not ours and optimizer not in self._bypass else None
        now = PresentGradients.of(tracked, marked=compared is not None)
        if not now.in_place:
            return
        loss_scale = self._loss_scale.value
        # A scaler's own division leaves no trace in versions.
        in_full = self._looks[optimizer] % IN_FULL == 0 or (loss_scale is not None and seen.grad_scale is None)
        self._looks[optimizer] += 1
        unchanged = compared is not None and compared.unchanged(mine, now)
        parts: tuple[SamplePart, ...] = ()
        if unchanged and not in_full:
            scale = None if loss_scale is None else self._send_one(loss_scale)
        else:
            gradients = {i: g for i, g in zip(mine, now.gradients, strict=True) if g is not None}
            begun = self._cost.begin(self._places)
            parts, scale = self._sent(self._statistics.norms(table, gradients), loss_scale)
            self._cost.end(begun)
            if unchanged and not _same_norms(current.parts, parts, len(table.tracked)):
                self._bypass.add(optimizer)
            if not parts and not ours:  # where clipping has left nothing, that is what is handed over
                return
        own_scale = None if seen.grad_scale is None else self._send_one(seen.grad_scale)
        answer = None if seen.found_inf is None else self._send_one(seen.found_inf)
        current.views.append(
            OptimizerView(
                optimizer, parts, unchanged=unchanged and not in_full, loss_scale=scale, own_scale=own_scale, found_inf=answer,
                ours=ours,
            )
        )  # fmt: skip

    def _send_one(self, value: torch.Tensor) -> Ticket | None:
        return self._transfer.send(value.detach().reshape(1))

    def _sent(self, measured: Iterable[Measurement], value: torch.Tensor | None) -> tuple[tuple[SamplePart, ...], Ticket | None]:
        """Start the copies to the host, one per device; the loss scale travels with the first of its device."""
        parts, scale = [], None
        for measurement in measured:
            vector = measurement.vector
            self._places |= {vector.device}
            rides = value is not None and scale is None and value.device == vector.device
            if rides and value is not None:
                vector = torch.cat((vector, value.detach().reshape(1).to(vector.dtype)))
            ticket = self._transfer.send(vector)
            if ticket is None:
                return (), None
            scale = Tail(ticket) if rides else scale
            parts.append(SamplePart(measurement.positions, measurement.elements, measurement.units, ticket, measurement.packing))
        return tuple(parts), scale

    # The end of a sample

    def waited_for(self, current: ArmedRound, *, every: bool) -> frozenset[int]:
        """Return the optimizers whose steps on a sample are still to come, or have been; -1 stands for parameters of none.

        `every`: whether each known one is waited for, since each is read when it steps.
        """
        fired, owners = self._owners_of_fired(current, current.stepped)
        waited = frozenset(owners[fired].tolist())
        return waited.union(number for number, _ in self._optimizers.numbered()) if every else waited

    def _owners_of_fired(self, current: ArmedRound, stepped: Collection[int]) -> tuple[IntArray, IntArray]:
        """Return the positions of what the round has read, and the owners of all parameters. `stepped`: see `owners`."""
        owners = self._optimizers.owners(current.table, stepped)
        every = len(current.fired) == len(owners)
        return np.arange(len(owners)) if every else np.array(sorted(current.fired), dtype=np.int64), owners

    def ended(self, current: ArmedRound, outcome: Outcome, usual: frozenset[int] = frozenset(), *, final: bool) -> None:
        """Hand over what became of the sample. A failure costs this sample; the next round begins all the same.

        Args:
            current: The round.
            outcome: What became of its step.
            usual: The optimizers that usually step.
            final: Whether no other optimizer will step on it; then what belongs to those that did not is subtracted.
        """
        did_step = frozenset(current.stepped)
        fired, owners = self._owners_of_fired(current, did_step)
        mine = frozenset(owners[fired].tolist()) if final else did_step
        stepped = did_step or usual & mine or mine
        # Where several own what was written, and no step on it was ever seen, the owner of these gradients is unknown.
        guessed = not (did_step or usual & mine) and len(mine) > 1
        unsure = current.divided_again and outcome is Outcome.SKIPPED
        divisor = None if unsure else self._divisors.get(current.number)
        views, steps, earlier = tuple(current.views), self._clock.steps, self._clock.earlier
        if earlier:  # the numbers in the whole training
            steps = {optimizer: count + earlier for optimizer, count in steps.items()}
        self._mailbox.append(
            RoundEnded(current.number, outcome, owners, stepped, steps, views, divisor, final=final, guessed=guessed)
        )
        if not mine <= stepped:
            others = fired[~np.isin(owners[fired], list(stepped))].tolist()
            self._forgetting(self._statistics.forget, current.table, others, current.number)

    def withdraw(self, current: ArmedRound) -> None:
        """Take back what was read of the round."""
        owners = self._optimizers.owners(current.table)
        self._mailbox.append(RoundEnded(current.number, Outcome.UNKNOWN, owners, frozenset(), {}, withdrawn=True))
        self._forgetting(self._statistics.forget, current.table, sorted(current.fired), current.number)


def _same_norms(before: Iterable[SamplePart], after: Iterable[SamplePart], parameters: int) -> bool:
    """Return whether the norms in `after` equal those in `before`; both are on the host already."""
    known = np.zeros(parameters)
    for part in before:
        known[part.positions] = part.rows()[:, 0]
    now = ((part.positions, part.rows()[:, 0]) for part in after)
    return all(bool((np.isclose(known[i], norms, rtol=1e-6, atol=0) | ~np.isfinite(norms)).all()) for i, norms in now)
