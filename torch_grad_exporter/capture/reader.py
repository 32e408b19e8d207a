"""GradientReader: reads the gradients of sampled rounds on request, and posts what it read to the host side.

A failure costs one sample. When a reading is due, and which gradients count, is decided in `rounds.py`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import InitVar, dataclass
from typing import Protocol

import numpy as np
import torch

from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.gradient_versions import GradientsAsRead, GradientVersions, PresentGradients
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.rounds import Round, RoundTracker
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.metrics.families import IntArray
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics.device import Reading, capturing_graph
from torch_grad_exporter.statistics.eager import EagerStatistics, Measurement
from torch_grad_exporter.store import records
from torch_grad_exporter.store.host_transfer import HostTransfer, Tail, Ticket
from torch_grad_exporter.store.mailbox import Mailbox
from torch_grad_exporter.store.records import Outcome, Part, RoundEnded, SampleRead
from torch_grad_exporter.store.sample import rows_of
from torch_grad_exporter.torch_compat.optimizers import scale_of

IN_FULL = 8
"""Of so many samples of an optimizer one is measured again at the step though nothing seems to have written to its gradients."""

CROWDED = 1 << 12
"""Records in the mailbox, half of what it takes, beyond which no sample is taken: the host side has fallen behind."""

DIVISORS = 4
"""Rounds of which divisors are remembered: the current one, and those that the loop has said of since."""

BEFORE, AFTER, AT_A_STEP, AGAIN, END, OTHERS = BOUNDARIES = (
    "gradients before a backward", "gradients after a backward", "gradients at a step", "gradients as the optimizer sees them",
    "end of a sample", "units that do not count",
)  # fmt: skip
"""Each has a guard of its own."""


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


class StepsWithinBackward:
    """What optimizers use that step, and clear, before the backward is over, or where no backward is seen.

    When such a backward is over there is nothing left to read. So each optimizer's gradients are read before its step, and put
    together to one sample. `fired`: positions in the table of what was read.
    """

    def __init__(self, statistics: EagerStatistics) -> None:
        self._statistics = statistics
        self._table: ParameterTable | None = None
        self._position: dict[int, int] = {}
        self.readings: list[Reading] = []
        self.fired: set[int] = set()

    def clear(self) -> None:
        """A backward begins."""
        self.readings, self.fired = [], set()

    def read_of(self, table: ParameterTable, optimizer: torch.optim.Optimizer) -> None:
        """Reads what this optimizer is about to use."""
        if table is not self._table:
            self._table, self._position = table, {t.identity: i for i, t in enumerate(table.tracked)}
        owned = (self._position.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"])
        self.read(table, (position for position in owned if position is not None))

    def read(self, table: ParameterTable, positions: Iterable[int]) -> None:
        """Reads the gradients at these positions of the table that are there and were not read before in this backward."""
        found = ((i, table.tracked[i].gradient()) for i in positions if i not in self.fired)
        gradients = table.tracked.own({int(i): gradient for i, gradient in found if gradient is not None})
        self.readings += self._statistics.read(table, gradients)
        self.fired |= gradients.keys()


@dataclass(kw_only=True, eq=False)
class GradientReader:
    """Reads, and reports what a sample has cost. Belongs to the training thread and that of the backward.

    `table`: the parameters of the current round. Holds a gradient scaler weakly.
    """

    index: LayerIndex
    optimizers: Optimizers
    statistics: EagerStatistics
    clock: StepClock
    cost: SampleCost
    mailbox: Mailbox
    errors: InitVar[ErrorLog]
    scaler: InitVar[Scaler | None] = None

    def __post_init__(self, errors: ErrorLog, scaler: Scaler | None) -> None:
        self._guards = {part: errors.boundary("capture", part) for part in BOUNDARIES}
        self._scaler = None if scaler is None else weakref.ref(scaler)
        self._steps_seen = False
        """Whether the callers of a step were searched for a gradient scaler."""
        self._transfer = HostTransfer(pressed=self.mailbox.press)
        self._early = StepsWithinBackward(self.statistics)
        self._as_read = GradientsAsRead()
        self._parts_read: tuple[Part, ...] = ()
        self._bypass: set[int] = set()
        """The optimizers whose gradients were once written to in a way that versions do not show."""
        self._looks: Counter[int] = Counter()
        """By optimizer, how often it was looked at what it sees."""
        self._places: frozenset[torch.device] = frozenset()
        self.table: ParameterTable = self.index.table
        self._before: GradientVersions | None = None
        """The gradients when the table was renewed, until they are asked for."""
        self.divisor = 1.0
        """By what a pipeline schedule divides the gradients of the next capture."""
        self._views: list[records.OptimizerView] = []
        """What optimizers have seen of the last sample."""
        self._divisors: dict[int, Ticket | float] = {}
        """Of the last rounds of which the loop has said it, by what their gradients are divided."""
        self._divided_again = False
        """Whether the loop has said it once more since the capture: where the step is skipped it may have meant the next round."""

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
    def scale_known(self) -> bool:
        """Whether it is known if there is a gradient scaler, as it is from the first step on."""
        return self._steps_seen or self.knows_scaler

    @property
    def scale(self) -> torch.Tensor | None:
        """The loss scale now, if a scaler is known that has one."""
        return scale_of(None if self._scaler is None else self._scaler())

    # The round

    def begin_round(self) -> None:
        """A round begins."""
        self._settle_cost()
        self._early.clear()
        self.table = self.index.table

    def backward_began(self) -> None:
        """A backward begins: what was read within the one before is no part of it."""
        self._early.clear()

    def renew_table(self, *, within_step: bool = True, versions: bool = False) -> ParameterTable:
        """Takes the parameters that are trained now. `within_step`: FSDP2 may have gathered them. `versions`: will be asked for."""
        present, self._before = self.index.present(), None
        if present is None:
            self.table = self.index.refresh(within_step=within_step)
        else:
            self.table = self.index.table
            if versions:  # what is looked up for one serves the other
                self._before = self._guards[BEFORE].result(GradientVersions.of, self.table.tracked, present)
        return self.table

    def divided(self, number: int, divisor: Ticket | float, *, captured: bool) -> None:
        """The loop says by what it divides the gradients of a round. `captured`: they were read."""
        self._divided_again |= captured and number in self._divisors
        self._divisors.pop(number, None)
        self._divisors[number] = divisor
        if len(self._divisors) > DIVISORS:
            del self._divisors[next(iter(self._divisors))]

    # Reading

    def versions(self) -> GradientVersions | None:
        """The gradients' versions before a backward of a sampled round; `None` if they cannot be had."""
        before, self._before = self._before, None
        if before is not None and before.tracked is self.table.tracked:
            return before
        return self._guards[BEFORE].result(GradientVersions.of, self.table.tracked)

    def read(self, rounds: RoundTracker, step: OptimizerView | None = None, now: PresentGradients | None = None) -> bool:
        """Measures the gradients of the round so far and hands them over, in place of an earlier capture; whether that was done.

        `step`: the one that is about to use them, on the rung `optimizer`: a scaler has divided them, or leaves that to it. `now`:
        what there is of the table's parameters, where that was looked up already.
        """
        return self._guards[AFTER].result(self._read, rounds, step, now) or False

    def _read(self, rounds: RoundTracker, step: OptimizerView | None, now: PresentGradients | None) -> bool:
        if len(self.mailbox) >= CROWDED:
            return False
        current, table, pattern, at = rounds.current, self.table, rounds.pattern, self.clock.now()
        if now is None or now.tracked is not table.tracked:
            now = PresentGradients.of(table.tracked)
        if not now.in_place:
            return False
        early, begun = self._early, self.cost.timer.begin(self._places)
        gradients = table.tracked.own(now.at(current.fired - early.fired))
        readings = [*early.readings, *self.statistics.read(table, gradients)]
        loss_scale = self.scale if step is None else step.grad_scale
        parts, scale = self._sent(self.statistics.finish(readings, current.number), loss_scale)
        self.cost.timer.end(begun)
        if parts:
            self._as_read.read(now.gradients)
            self._parts_read = parts
            # A gradient that a hook of the user removed at once counts as none.
            there = early.fired | gradients.keys()
            every = enumerate(now.parameters) if len(there) < len(now.parameters) else ()
            missing = [i for i, parameter in every if i not in there and parameter is not None and parameter.requires_grad]
            owners = self.optimizers.owners(table)
            # Where no backward is seen, each optimizer's step reads the round anew, with what those before have left.
            self._views = [view for view in self._views if view.ours and step is not None and current.captured]
            self._divided_again = False
            self.mailbox.append(
                SampleRead(
                    round=current.number,
                    table=table,
                    parts=parts,
                    missing=np.array(missing, dtype=np.int64),
                    owners=owners,
                    at=at,
                    likely_last=pattern.backwards is not None,
                    usual=pattern.steppers(current.models),
                    scale_known=self.scale_known,
                    scale=scale,
                    again=current.again,
                    divisor=self.divisor,
                    at_step=step is not None,
                )
            )
        return bool(parts)

    def read_within_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Reads what an optimizer is about to use up before the backward is over."""
        begun = self.cost.timer.begin(self._places)
        self.cost.of(self._guards[AT_A_STEP], self._early.read_of, self.table, optimizer)
        self.cost.timer.end(begun)

    def read_of(self, optimizer: int) -> frozenset[int]:
        """Reads what an optimizer is about to use, where no backward is seen; what was found in this round so far."""
        begun = self.cost.timer.begin(self._places)
        self._guards[AT_A_STEP](self._early.read, self.table, self.positions_of(optimizer))
        self.cost.timer.end(begun)
        return self.found_early

    def positions_of(self, optimizer: int) -> list[int]:
        """The positions in the table of what an optimizer owns."""
        owners = self.optimizers.owners(self.table, {optimizer})
        found: list[int] = np.flatnonzero(owners == optimizer).tolist()
        return found

    @property
    def found_early(self) -> frozenset[int]:
        """What was read at steps, of this backward or, where none is seen, of this round."""
        return frozenset(self._early.fired)

    def read_again(self, rounds: RoundTracker, seen: OptimizerView, *, ours: bool = False) -> None:
        """Measures norms again where the optimizer sees them; `ours`: as of `records.OptimizerView`."""
        self._guards[AGAIN](self._read_again, rounds, seen, ours)

    def _read_again(self, rounds: RoundTracker, seen: OptimizerView, ours: bool) -> None:
        current, table, optimizer = rounds.current, self.table, seen.optimizer
        owners = self.optimizers.owners(table, {optimizer})
        fired = np.array(sorted(current.fired), dtype=np.int64)
        mine = fired[owners[fired] == optimizer].tolist()
        tracked = table.tracked if len(mine) == len(table.tracked) else [table.tracked[i] for i in mine]
        now = PresentGradients.of(tracked, self.optimizers.parameters_at(optimizer, mine))
        if not now.in_place:
            return
        # A scaler's own division leaves no trace in versions.
        in_full = self._looks[optimizer] % IN_FULL == 0 or (self.scale is not None and seen.grad_scale is None)
        self._looks[optimizer] += 1
        unchanged = not ours and optimizer not in self._bypass and self._as_read.unchanged(mine, now.gradients)
        if unchanged and not in_full:
            own_scale, answer = self._one(seen.grad_scale), self._one(seen.found_inf)
            loss_scale = None if self.scale is None else self._one(self.scale)
            self._views.append(
                records.OptimizerView(optimizer, (), unchanged=True, loss_scale=loss_scale, own_scale=own_scale, found_inf=answer)
            )
            return
        gradients = table.tracked.own({i: g for i, g in zip(mine, now.gradients, strict=True) if g is not None})
        begun = self.cost.timer.begin(self._places)
        parts, scale = self._sent(self.statistics.norms(table, gradients), self.scale)
        self.cost.timer.end(begun)
        if unchanged and not _same_norms(self._parts_read, parts, len(table.tracked)):
            self._bypass.add(optimizer)
        if parts or ours:  # where a step is left out, none is left
            own_scale, answer = self._one(seen.grad_scale), self._one(seen.found_inf)
            self._views.append(
                records.OptimizerView(optimizer, parts, loss_scale=scale, own_scale=own_scale, found_inf=answer, ours=ours)
            )

    def _one(self, value: torch.Tensor | None) -> Ticket | None:
        return None if value is None else self._transfer.send(value.detach().reshape(1))

    def _sent(self, measured: Iterable[Measurement], value: torch.Tensor | None) -> tuple[tuple[Part, ...], Ticket | None]:
        """Starts the copies to the host, one per device; the loss scale rides along with the first of its device."""
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

    # The end of a sample

    def owners_of(self, positions: Iterable[int], stepped: Iterable[int] = ()) -> frozenset[int]:
        """The optimizers that own these parameters; -1 stands for none."""
        owners = self.optimizers.owners(self.table, frozenset(stepped))
        return frozenset(owners[sorted(positions)].tolist())

    def close(self, current: Round, outcome: Outcome, usual: frozenset[int]) -> None:
        """The outcome of the sample is known: hands it over, and subtracts what belongs to optimizers that did not step.

        `usual`: the optimizers that usually step. A failure costs this sample; the next round begins all the same.
        """
        self._guards[END](self._close, current, outcome, usual)
        self.cost.sample_over(once=self.statistics.taken_once())
        self._settle_cost()

    def stepped(self, current: Round) -> None:
        """An optimizer has stepped on the sample, and others may still do so: hands over what is known so far."""
        self._guards[END](self._post_step, current)

    def _post_step(self, current: Round) -> None:
        stepped = frozenset(current.stepped)
        self._post_end(current, Outcome.STEPPED, stepped, self.optimizers.owners(self.table, stepped), final=False)

    def _post_end(
        self,
        current: Round,
        outcome: Outcome,
        stepped: frozenset[int],
        owners: IntArray,
        *,
        final: bool = True,
        guessed: bool = False,
    ) -> None:
        steps = self.clock.numbers(self.clock.steps)
        unsure = self._divided_again and outcome is Outcome.SKIPPED
        divisor = None if unsure else self._divisors.get(current.number)
        self.mailbox.append(
            RoundEnded(current.number, outcome, owners, stepped, steps, tuple(self._views), divisor, final=final, guessed=guessed)
        )

    def _close(self, current: Round, outcome: Outcome, usual: frozenset[int]) -> None:
        table, did_step = self.table, frozenset(current.stepped)
        owners = self.optimizers.owners(table, did_step)
        fired = np.array(sorted(current.fired), dtype=np.int64)
        mine = frozenset(owners[fired].tolist())
        stepped = did_step or usual & mine or mine
        # Where several own what was written, and it was never seen who steps on it, nobody knows whose these gradients were to be.
        self._post_end(current, outcome, stepped, owners, guessed=not (did_step or usual & mine) and len(mine) > 1)
        if not mine <= stepped:
            others = fired[~np.isin(owners[fired], list(stepped))].tolist()
            self._guards[OTHERS](self.statistics.forget, table, others, current.number)

    def withdraw(self, current: Round) -> None:
        """What was read of the round is not to be shown."""
        owners = self.optimizers.owners(self.table)
        self.mailbox.append(RoundEnded(current.number, Outcome.UNKNOWN, owners, frozenset(), {}, withdrawn=True))
        self._guards[OTHERS](self.statistics.forget, self.table, sorted(current.fired), current.number)
        self.cost.sample_over(once=self.statistics.taken_once())
        self._settle_cost()

    def _settle_cost(self) -> None:
        if not capturing_graph():
            self.cost.settle()


def _same_norms(before: Iterable[Part], after: Iterable[Part], parameters: int) -> bool:
    """Whether the norms of some of so many parameters, which are on the host already, are those that were read before."""
    known = np.zeros(parameters)
    for part in before:
        known[part.positions] = rows_of(part)[:, 0]
    now = ((part.positions, rows_of(part)[:, 0]) for part in after)
    return all(bool((np.isclose(known[i], norms, rtol=1e-6, atol=0) | ~np.isfinite(norms)).all()) for i, norms in now)
