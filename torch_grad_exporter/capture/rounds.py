"""RoundTracker: decides what a round, a step and a skipped step are. Pure: no torch in it.

A *round* is everything between the first backward after a step and the last optimizer step before the
next backward. It is the unit of sampling and of the step duration: two optimizers that share a backward
share a round, and a GAN's two alternating ones do not.

The tracker holds the current round and what is usual for rounds (`round_pattern.py`). Its methods are told what happens in the
training; nothing else changes a round. What follows from it is done by `RoundEffects`, or by the caller, where a method says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch_grad_exporter.capture.outcomes import Lost
from torch_grad_exporter.capture.round_pattern import ClearingEvidence, RoundPattern
from torch_grad_exporter.store.records import Outcome

PASSES = 2
"""Clearings in a round after each of which parameters have changed, as in SAM's; more are those of steps that nothing reports."""


@dataclass(slots=True)
class Round:
    """One round. `sampled`: whether its gradients are read; `extra`: though it was not due, to see what comes after a skipped step.

    `fired`: positions in the table of the parameters that got a gradient. `again`: what was there before in this round was
    thrown away. `stepped`: optimizers that have stepped; `read`: those whose view of the gradients was taken; `foreign`: one
    stepped that owns nothing of ours. `captured`: the gradients were read; `lost`: there was something to read that could not be
    read; `abandoned`: a step raised after a backward. `observed`: the user gave the global norm, and its outcome is still to be
    reported; `open`: the same of what was captured. `of_inputs`: the last backward gives inputs a gradient, as that of an
    adversarial attack does, whose gradients of parameters are cleared without a skipped step. `passes`: how often gradients were
    cleared in it.
    """

    number: int
    sampled: bool
    backwards: int = 0
    models: set[int] = field(default_factory=set)
    fired: set[int] = field(default_factory=set)
    again: bool = False
    stepped: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    captured: bool = False
    lost: bool = False
    abandoned: bool = False
    foreign: bool = False
    observed: bool = False
    open: bool = True
    extra: bool = False
    of_inputs: bool = False
    passes: int = 0

    def begin_again(self) -> None:
        """The gradients so far were cleared, and it is not known yet whether that was a skipped step."""
        self.backwards, self.again, self.captured = 0, True, False
        self.passes += 1
        self.fired.clear()


@dataclass(frozen=True, slots=True)
class RoundEffects:
    """What does as the tracker decides."""

    steps_skipped: Callable[[int], object]
    """So many rounds ended without a step."""
    norm_resolved: Callable[[Outcome], object]
    """What became of the round of the norm that was observed is known."""
    close_sample: Callable[[Round, Outcome, frozenset[int]], object]
    """What became of the sampled round is known. The optimizers are those that usually step in such a round, none if unknown."""
    step_of_sample: Callable[[Round], object]
    """An optimizer has stepped on what was read of the round, and others may still do so."""
    withdraw: Callable[[Round], object]
    """What was read of the round is not to be shown."""
    step_before_skipped: Callable[[int], bool]
    """The round of this number begins: whether an answer that came late shows that the step before was skipped."""
    round_began: Callable[[bool], object]
    """A round has begun: whether a step ended the one before."""


class RoundTracker:
    """The rules of rounds as a state machine.

    `due`: whether the round of a number is to be sampled. `current`: the current round, to be read only. `stepping`: the optimizers
    that have begun a step and not ended it; `closures`: those of them whose backward comes within the step. `samples`: rounds whose
    gradients were read; `lost`: rounds that were due and were not read, by the reason. `inputs_wanted`: the last forward of a root
    was given an input that is to have a gradient.
    """

    def __init__(self, due: Callable[[int], bool], effects: RoundEffects) -> None:
        self._due = due
        self._effects = effects
        self._skipped_unseen = False
        self._postponed = False
        """Whether a sample that could not be taken yet is to be taken of the next round."""
        self._readable = True
        self.current = Round(0, sampled=due(0))
        self.stepping: set[int] = set()
        self.closures: set[int] = set()
        self.pattern = RoundPattern()
        self.inputs_wanted = False
        self._steps_on_inputs = False
        """Whether a step was taken on a backward that gives inputs a gradient, which then is no attack."""
        self._unreported = False
        """Whether parameters were found to change without a step of any optimizer."""
        self.samples = 0
        self.lost: dict[Lost, int] = dict.fromkeys(Lost, 0)

    # Questions about the state

    @property
    def next_is_sampled(self) -> bool:
        """Whether the backward that comes next belongs to a sampled round."""
        current = self.current
        return (self._postponed or self._due(current.number + 1)) if current.stepped else current.sampled

    @property
    def behind(self) -> bool:
        """Whether the round has gradients to read that were not read when its last backward ended."""
        return self.current.sampled and bool(self.current.fired) and not self.current.captured

    @property
    def sample_is_open(self) -> bool:
        """Whether the round's gradients were read and what became of them is not known yet."""
        return self.current.captured and self.current.open

    def regular_optimizer(self) -> int | None:
        """The only optimizer that ever steps, if the last rounds were all like this one, which has just had its step."""
        current = self.current
        busy = self.stepping or self.closures or self.sample_is_open
        if busy or len(current.stepped) != 1 or not current.backwards:
            return None
        repeats = self.pattern.repeats(current.models, current.stepped, current.backwards)
        return next(iter(current.stepped)) if repeats else None

    # Backwards

    def backward_began(self, evidence: Callable[[], ClearingEvidence], *, within_step: bool = False) -> None:
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
        self.current.of_inputs = self.inputs_wanted and not self._steps_on_inputs

    def _gradients_were_cleared(self, evidence: ClearingEvidence) -> None:
        """The gradients of the last backward are gone, and no step was seen."""
        if evidence.scaler_known or not self.pattern.hold():
            self._effects.steps_skipped(1 + self.pattern.release())
            self._begin_round(skipped=True)
        elif evidence.updated and not evidence.reporting and (self._unreported or self.current.passes >= PASSES):
            # Steps are taken that nothing reports: what became of each round is not known.
            self._unreported = True
            self._begin_round()
        else:
            self.current.begin_again()

    def renumbered(self, fired: set[int]) -> None:
        """The table was replaced within the round: these are now the positions of the parameters that got a gradient."""
        self.current.fired = fired

    def withdraw(self, why: Lost) -> None:
        """The gradients of the backward that begins cannot be read: what was read of the round, if anything, is not all of it."""
        if self.sample_is_open:
            self._effects.withdraw(self.current)
        if self.current.captured or not self.current.extra:
            self._lose(why)
        self.current.sampled = self.current.captured = False

    def postpone(self) -> None:
        """The sample of this round is to be taken of the next one."""
        self.current.sampled, self._postponed = False, True

    def backward_ended(self, fired: set[int], *, stepped_within: bool = False) -> bool:
        """A backward that wrote gradients is over; whether the round's gradients are to be read now.

        `fired`: the parameters that got one, on a sampled round. `stepped_within`: optimizers have used up gradients before.
        """
        current = self.current
        current.backwards += 1
        current.fired |= fired
        # A step within the backward waits for no other backward.
        return bool(fired) and (stepped_within or current.backwards >= (self.pattern.backwards or 1))

    def gradients_found(self, fired: frozenset[int]) -> bool:
        """Gradients were found at a step, where no backward is seen; whether there are any in this round, to be read now."""
        self.current.fired |= fired
        return bool(self.current.fired)

    def sample_read(self, *, taken: bool, why: Lost = Lost.FAILED) -> None:
        """The round's gradients were read, or could not be. `why`: not."""
        current = self.current
        if taken:
            self.samples += not current.captured
            current.captured, current.again = True, False
        else:
            self._lose(why)

    # Steps

    def step_began(self, optimizer: int, *, closure: bool = False) -> None:
        """An optimizer begins a step. `closure`: the backward is yet to come, within the step."""
        self.stepping.add(optimizer)
        if closure:
            self.closures.add(optimizer)

    def step_within_backward(self, optimizer: int) -> None:
        """An optimizer begins a step while the backward runs; what it uses is read now."""
        self.stepping.add(optimizer)
        self.current.read.add(optimizer)

    def read_by(self, optimizer: int) -> None:
        """The gradients were read again as this optimizer sees them."""
        self.current.read.add(optimizer)

    def step_to_be_read(self, optimizer: int) -> None:
        """An optimizer's gradients are about to be read, since no backward is seen: a round that it has ended is over."""
        if optimizer in self.current.stepped or not self.current.open:
            self._begin_round()

    def step_taken(self, optimizer: int) -> bool:
        """An optimizer has stepped, which ends a round in which it has stepped before; whether no backward was seen since."""
        self.stepping.discard(optimizer)
        again = optimizer in self.current.stepped
        if again:
            self._begin_round()
        return again or not self.current.backwards

    def step_ended(self, optimizer: int, waited: frozenset[int] = frozenset()) -> None:
        """An optimizer's step is over. `waited`: the optimizers that own captured gradients, where a sample is open."""
        current = self.current
        self.stepping.discard(optimizer)
        self.closures.discard(optimizer)
        current.stepped.add(optimizer)
        self._steps_on_inputs |= current.of_inputs
        self._resolve(Outcome.STEPPED)
        if self.sample_is_open:
            # No other optimizer will step on the captured gradients in this round, as far as the last rounds show.
            active = self.pattern.active(current.models)
            if (waited if active is None else waited & active) <= current.stepped:
                self._close(Outcome.STEPPED)
            else:
                self._effects.step_of_sample(current)

    def step_abandoned(self) -> None:
        """A step that had begun raised and will not end."""
        self.stepping.clear()
        self.closures.clear()
        self.current.abandoned = bool(self.current.backwards)

    def gradients_elsewhere(self) -> None:
        """No round can be sampled, since gradients are not those of the parameters. The schedule has to know it, too."""
        self._readable = self.current.sampled = False

    def step_skipped(self) -> None:
        """The step of this round was left out, which the gradients do not show."""
        self._effects.steps_skipped(1)
        self._begin_round(skipped=True)

    def foreign_step(self) -> None:
        """An optimizer that owns nothing of the models has stepped on the training thread."""
        self.current.foreign = True

    # Norms that the user gives, numbers, and rounds that were only counted

    def norm_observed(self) -> None:
        """The user gave the global norm of the current round; a sample carries its outcome, else it is reported by itself."""
        self.current.observed = not self.current.captured
        if self.current.stepped:
            self._resolve(Outcome.STEPPED)

    def numbered(self, number: int) -> None:
        """The user numbers the current round, so that ranks or restarted runs sample the same rounds."""
        self.current.number = number

    def rounds_counted(self, rounds: int, skipped: int) -> None:
        """So many rounds like the last one were only counted, and so many steps in between skipped."""
        last = self.current
        if rounds:  # the current round is the last one that was counted: like the one that was followed, but not sampled
            self.current = Round(last.number, False, last.backwards, last.models, stepped=last.stepped)
        self.current.number += rounds + skipped
        if skipped:
            self._skipped_unseen = True
            self._effects.steps_skipped(skipped)

    def backwards_counted(self, backwards: int) -> None:
        """So many backwards of a round that is not over were only counted."""
        models = set(self.current.models)
        self._begin_round()
        self.current.backwards, self.current.models = backwards, models

    # Where a round ends

    def _begin_round(self, *, skipped: bool = False) -> None:
        """Ends the current round and begins the next one."""
        last, number = self.current, self.current.number + 1
        due = self._due(number)  # as the forward was told; the end of a sample may change the interval
        self._end(Outcome.SKIPPED if skipped else Outcome.UNKNOWN)
        released = self.pattern.learn(last.models, last.stepped, last.backwards)
        if released:
            self._effects.steps_skipped(released)
        if self.behind:
            self._lose(Lost.EDITED)
        # After a skipped step that was not sampled the next round is: to see whether, and where, something is wrong.
        late = self._effects.step_before_skipped(number)
        surprising = (skipped or self._skipped_unseen or late) and not last.sampled and self._readable
        self._skipped_unseen = False
        surprising |= self._postponed and self._readable
        self._postponed = False
        self.current = Round(number, due or surprising, extra=not due)
        self._effects.round_began(bool(last.stepped))

    def training_over(self, *, failed: bool) -> None:
        """The exporter is being closed: a whole round without a step is a skipped one, unless an exception ended it, `failed`."""
        current = self.current
        skipped = not failed and not current.stepped and current.open and self.pattern.is_whole(current.backwards)
        self._effects.steps_skipped(skipped)
        self._end(Outcome.SKIPPED if skipped else Outcome.UNKNOWN)
        current.open = False

    def _end(self, outcome: Outcome) -> None:
        """Reports what is open. `outcome`: of a round without a step."""
        self._resolve(outcome)
        if self.sample_is_open:
            self._close(Outcome.STEPPED if self.current.stepped and outcome is Outcome.UNKNOWN else outcome)

    def _close(self, outcome: Outcome) -> None:
        self.current.open = False
        self._effects.close_sample(self.current, outcome, self.pattern.steppers(self.current.models))

    def _resolve(self, outcome: Outcome) -> None:
        if self.current.observed:
            self.current.observed = False
            self._effects.norm_resolved(outcome)

    def _lose(self, why: Lost) -> None:
        """Counts a sample that was not taken, once."""
        self.lost[why] += not self.current.lost
        self.current.lost = True
