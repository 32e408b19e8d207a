"""RoundTracker: the rules of rounds, steps and skipped steps. It measures nothing.

It holds the current round and what is usual for rounds (`armed_round.py`). Its methods are called with what happens in the
training; nothing else ends a round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torch_grad_exporter.capture.armed_round import ArmedRound, ClearingEvidence, Lost, RoundPattern
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.inspections import Inspection, Inspections
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.reader import GradientReader
from torch_grad_exporter.capture.schedule import SamplingSchedule
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.store.host_transfer import HostTransfer, Ticket
from torch_grad_exporter.store.records import Mailbox, Outcome, RoundEnded

PASSES = 2
"""Clearings in a round after each of which parameters have changed, as in SAM; more are those of steps that nothing reports."""


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
        """Count the step of an optimizer in a round with answers; `found_inf`: a scaler's one, not zero if nothing was done."""
        ticket = None if found_inf is None else self.transfer.send(found_inf.detach().reshape(1))
        answer = None if ticket is None else ticket.ready()
        if answer is None or not answer[0]:
            self.clock.step_done(optimizer)
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


class RoundTracker:
    """Decides where a round ends and what became of it. Belongs to the training thread and that of the backward.

    Attributes:
        current: The current round.
        pattern: What is usual for rounds.
        stepping: The optimizers that have begun a step and not ended it.
        closures: Those of them whose backward comes within the step.
        lost: Rounds that were due and were not read, by the reason.
        fused: Corrects counts of steps that a fused optimizer may have skipped.
        inputs_wanted: Whether the last forward of a root got an input that is to have a gradient.
    """

    def __init__(
        self,
        *,
        index: LayerIndex,
        optimizers: Optimizers,
        schedule: SamplingSchedule,
        clock: StepClock,
        cost: SampleCost,
        mailbox: Mailbox,
        reader: GradientReader,
        inspections: Inspections,
        errors: ErrorLog,
    ) -> None:
        self._index, self._optimizers, self._schedule = index, optimizers, schedule
        self._clock, self._cost, self._mailbox, self._reader = clock, cost, mailbox, reader
        self._inspections, self.fused = inspections, FusedStepCounter(clock)
        self._ending = errors.boundary("capture", "end of a sample")
        self.current = ArmedRound(0, sampled=schedule.next_due(0) == 0, table=index.table)
        self.pattern = RoundPattern()
        self.stepping: set[int] = set()
        self.closures: set[int] = set()
        self.lost: dict[Lost, int] = dict.fromkeys(Lost, 0)
        self.inputs_wanted = False
        self._wanted = 0  # rounds that are to be sampled besides those that are due
        self._postponed = False  # a sample that could not be taken yet is to be taken of the next round
        self._skipped_unseen = False  # a step was skipped while rounds were only counted
        self._steps_on_inputs = False  # a step was taken on a backward that gives inputs a gradient, which then is not an attack
        self._unreported = False  # parameters were found to change without a step of any optimizer

    @property
    def next_is_sampled(self) -> bool:
        """Whether the backward that comes next belongs to a sampled round."""
        current = self.current
        if not current.stepped:
            return current.sampled
        number = current.number + 1
        return self._postponed or self._schedule.next_due(number) == number or (self._wanted > 0 and self._schedule.affords_another)

    def sample_more(self, rounds: int) -> None:
        """Sample this many of the next rounds besides those that are due, within the budget.

        Not of a sharded model: the parts of a norm must be of the same rounds on all ranks.
        """
        if not self._index.table.sharded.any():
            self._wanted = max(self._wanted, rounds)

    def forward_began(self) -> None:
        """A forward with gradients begins after steps: an optimizer that steps later uses other gradients than were read.

        Such as those that a loop writes itself, from second derivatives or `torch.func`.
        """
        if self.current.stepped:
            self._end(Outcome.STEPPED)

    # Backwards

    def backward_began(self, evidence: Callable[[], ClearingEvidence], *, within_step: bool) -> None:
        """A backward begins. `within_step`: in an optimizer's step, by its closure. `evidence` is asked only where it matters."""
        current = self.current
        # It may follow a skipped step.
        asks = current.backwards and not current.stepped and (current.abandoned or not (within_step and self.stepping))
        if not within_step:
            self.stepping.clear()
        if current.stepped:
            self._begin_round()
        elif asks:
            seen = evidence()
            if self.pattern.cleared(current.backwards, seen) and (seen.scaler_known or not current.of_inputs):
                self._gradients_were_cleared(seen)
        current = self.current
        current.of_inputs = self.inputs_wanted and not self._steps_on_inputs
        current.early, current.early_fired = [], set()

    def _gradients_were_cleared(self, evidence: ClearingEvidence) -> None:
        """The gradients of the last backward are gone, and no step was seen."""
        if evidence.scaler_known or not self.pattern.hold():
            self._clock.skipped += 1 + self.pattern.release()
            self._begin_round(skipped=True)
        elif evidence.updated and not evidence.reporting and (self._unreported or self.current.passes >= PASSES):
            # Steps are taken that nothing reports: what became of each round is not known.
            self._unreported = True
            self._begin_round()
        else:
            self.current.begin_again()

    def withdraw(self, why: Lost) -> None:
        """Some gradients of the round cannot be read: what was read of it, if anything, is not all of it."""
        current = self.current
        if current.open or current.again:
            self._inspections.tell(Inspection.round_over, current.number, kept=False)
            self._reader.withdraw(current)
            self._cost.sample_over()
        if current.captured or not current.extra:
            self._lose(why)
        current.sampled = current.captured = current.open = False

    def postpone(self) -> None:
        """Take the sample of this round of the next one."""
        self.current.sampled, self._postponed = False, True

    def backward_ended(self, fired: set[int]) -> bool:
        """A backward that wrote gradients is over; return whether the round's gradients are to be read now.

        `fired`: the parameters that received one, in a sampled round.
        """
        current = self.current
        current.backwards += 1
        current.fired |= fired
        # A step within the backward waits for no other backward.
        return bool(fired) and (bool(current.early_fired) or current.backwards >= (self.pattern.backwards or 1))

    # Steps

    def step_to_be_read(self, optimizer: int) -> None:
        """An optimizer's gradients are about to be read, since no backward is seen: a round that it has ended is over."""
        current = self.current
        if optimizer in current.stepped or (current.captured and not current.open):
            self._begin_round()

    def step_taken(self, optimizer: int) -> bool:
        """An optimizer has stepped; return whether no backward was seen since its last step, or at all in this round."""
        self.stepping.discard(optimizer)
        again = optimizer in self.current.stepped
        if again:
            self._begin_round()
        return again or not self.current.backwards

    def step_ended(self, optimizer: int, *, every: bool) -> None:
        """An optimizer's step is over. `every`: see `GradientReader.waited_for`."""
        current = self.current
        self.closures.discard(optimizer)
        current.stepped.add(optimizer)
        self._steps_on_inputs |= current.of_inputs
        if current.observed:
            self._resolve(Outcome.STEPPED)
        if current.open:
            # Whether no other optimizer will step on the captured gradients in this round, as far as the last rounds show.
            active = self.pattern.active(current.models)
            complete = active is not None and active <= current.stepped
            if not complete:
                waited = self._reader.waited_for(current, every=every)
                complete = (waited if active is None else waited & active) <= current.stepped
            if complete:
                self._end(Outcome.STEPPED)
            else:
                self._ending(self._reader.ended, current, Outcome.STEPPED, final=False)

    def step_abandoned(self) -> None:
        """A step that had begun raised and will not end."""
        self.stepping.clear()
        self.closures.clear()
        self.current.abandoned = bool(self.current.backwards)

    def step_skipped(self) -> None:
        """The step of this round was skipped, which the gradients do not show."""
        self._clock.skipped += 1
        self._begin_round(skipped=True)

    # Norms that the user gives, and rounds that were only counted

    def norm_observed(self) -> None:
        """The user gave the global norm of the current round; a sample carries its outcome, else it is reported by itself."""
        self.current.observed = not self.current.captured
        if self.current.observed and self.current.stepped:
            self._resolve(Outcome.STEPPED)

    def norm_resolved(self, outcome: Outcome) -> None:
        """Report what became of the round whose norm was observed last."""
        self._mailbox.append(RoundEnded(self.current.number, outcome, None, frozenset(), {}))

    def rounds_counted(self, rounds: int, skipped: int) -> None:
        """Take in this many rounds like the last one that were only counted, and this many skipped steps between them."""
        last = self.current
        if rounds:  # the current round is the last one that was counted: like the one that was followed, but not sampled
            self.current = ArmedRound(
                last.number, sampled=False, table=last.table, backwards=last.backwards, models=last.models, stepped=last.stepped
            )
        self.current.number += rounds + skipped
        if skipped:
            self._skipped_unseen = True
            self._clock.skipped += skipped

    def backwards_counted(self, backwards: int) -> None:
        """Take in this many backwards of a round that is not over, which were only counted."""
        models = set(self.current.models)
        self._begin_round()
        self.current.backwards, self.current.models = backwards, models

    # Where a round ends

    def _begin_round(self, *, skipped: bool = False) -> None:
        """End the current round and begin the next one."""
        last, number = self.current, self.current.number + 1
        due = self._schedule.next_due(number) == number  # as at the forward; the end of a sample may change the interval
        wanted = self._wanted > 0 and self._schedule.affords_another
        self._wanted = max(0, self._wanted - 1)
        self._end(Outcome.SKIPPED if skipped else Outcome.UNKNOWN)
        self._clock.skipped += self.pattern.learn(last.models, last.stepped, last.backwards)
        if last.behind:
            self._lose(Lost.EDITED)
        # After a skipped step that was not sampled the next round is: to see whether, and where, something is wrong.
        # The answer of a fused optimizer comes late: the step before may turn out to be a skipped one now.
        late = bool(self.fused.undecided) and self.fused.settle(number)
        surprising = (skipped or self._skipped_unseen or late) and not last.sampled
        sampled = due or wanted or ((surprising or self._postponed) and self._schedule.shown_interval is not None)
        self._skipped_unseen = self._postponed = False
        self.current = ArmedRound(number, sampled=sampled, table=self._index.table, extra=not due)
        self._cost.settle()
        if last.stepped:
            self._optimizers.settled = True

    def training_over(self, *, failed: bool) -> None:
        """The exporter is being closed: a whole round without a step is a skipped one, unless an exception ended it, `failed`."""
        current = self.current
        skipped = not failed and not current.stepped and self.pattern.is_whole(current.backwards)
        self._clock.skipped += skipped
        self._end(Outcome.SKIPPED if skipped else Outcome.UNKNOWN)
        current.backwards = 0  # another call finds no round

    def _end(self, outcome: Outcome) -> None:
        """Report what is open of the current round. `outcome`: of a round without a step."""
        current = self.current
        if current.observed:
            self._resolve(outcome)
        if not current.open:
            return
        if current.stepped and outcome is Outcome.UNKNOWN:
            outcome = Outcome.STEPPED
        current.open = False
        # First, since its cost is part of the sample's.
        self._inspections.tell(Inspection.round_over, current.number, kept=True)
        self._ending(self._reader.ended, current, outcome, self.pattern.steppers(current.models), final=True)
        self._cost.sample_over()

    def _resolve(self, outcome: Outcome) -> None:
        self.current.observed = False
        self.norm_resolved(outcome)

    def _lose(self, why: Lost) -> None:
        """Count a sample that was not taken, once."""
        self.lost[why] += not self.current.lost
        self.current.lost = True
