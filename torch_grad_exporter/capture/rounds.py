"""RoundTracker: decides what a round, a step and a skipped step are. Pure: events in, decisions out, no torch in it.

A *round* is everything between the first backward after a step and the last optimizer step before the
next backward. It is the unit of sampling and of the step duration: two optimizers that share a backward
share a round, and a GAN's two alternating ones do not.

The tracker holds the current round and what is usual for rounds (`round_pattern.py`). `handle` takes an event and
returns what is to be done, in this order; `round_executor.py` does it. Nothing else changes a round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from torch_grad_exporter.capture.round_events import (
    BackwardBegan,
    BackwardEnded,
    BackwardsCounted,
    BeginRound,
    CloseSample,
    CountSkipped,
    CountUnseen,
    Decided,
    EarlierStepSkipped,
    ForeignStep,
    GradientsFound,
    ModelReached,
    NoBackwardSeen,
    NormObserved,
    ReadByOptimizer,
    ReadGradients,
    ResolveNorm,
    RoundDecision,
    RoundEvent,
    RoundNumbered,
    RoundOfStep,
    RoundsCounted,
    SampleImpossible,
    SampleRead,
    StepAbandoned,
    StepBegan,
    StepEnded,
    StepWithinBackward,
    TrainingOver,
)
from torch_grad_exporter.capture.round_pattern import ClearingEvidence, RoundPattern
from torch_grad_exporter.transfer.outcomes import Outcome


@dataclass(slots=True)
class Round:
    """One round. `sampled`: whether its gradients are read.

    `fired`: positions in the table of the parameters that got a gradient. `again`: what was there before in this round was
    thrown away. `stepped`: optimizers that have stepped; `read`: those whose view of the gradients was taken; `foreign`: one
    stepped that owns nothing of ours. `captured`: the gradients were read; `lost`: there was something to read that could not be
    read; `abandoned`: a step raised after a backward. `observed`: the user gave the global norm, and its outcome is still to be
    reported; `open`: the same of what was captured.
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

    def begin_again(self) -> None:
        """The gradients so far were cleared, and it is not known yet whether that was a skipped step."""
        self.backwards, self.again, self.captured = 0, True, False
        self.fired.clear()


class RoundTracker:
    """The rules of rounds as a state machine.

    `due`: whether the round of a number is to be sampled. `unseen_optimizer`: the number under which steps count that no
    optimizer reports. `samples`: rounds whose gradients were read; `lost`: rounds that were due and were not read.
    """

    def __init__(self, due: Callable[[int], bool], unseen_optimizer: Callable[[], int]) -> None:
        self._due = due
        self._unseen_optimizer = unseen_optimizer
        self._round = Round(0, sampled=due(0))
        self._stepping: set[int] = set()
        self._closures: set[int] = set()
        self._skipped_unseen = self._sampled_before = False
        self.pattern = RoundPattern()
        self.samples = self.lost = 0
        self._handlers: dict[type, Callable[..., Decided]] = {
            BackwardBegan: self._backward_began, ModelReached: self._model_reached, SampleImpossible: self._sample_impossible,
            BackwardEnded: self._backward_ended, GradientsFound: self._gradients_found, SampleRead: self._sample_read,
            StepBegan: self._step_began, StepWithinBackward: self._step_within_backward, ReadByOptimizer: self._read_by_optimizer,
            RoundOfStep: self._round_of_step, StepEnded: self._step_ended, StepAbandoned: self._step_abandoned,
            ForeignStep: self._foreign_step, NormObserved: self._norm_observed, RoundNumbered: self._numbered,
            RoundsCounted: self._rounds_counted, BackwardsCounted: self._backwards_counted,
            EarlierStepSkipped: self._earlier_step_skipped, TrainingOver: self._training_over,
        }  # fmt: skip

    def handle(self, event: RoundEvent) -> list[RoundDecision]:
        """What is to be done after this event, in this order."""
        return list(self._handlers[type(event)](event))

    # Questions about the state

    @property
    def current(self) -> Round:
        """The current round; to be read only."""
        return self._round

    @property
    def stepping(self) -> Collection[int]:
        """The optimizers that have begun a step and not ended it."""
        return self._stepping

    @property
    def closures(self) -> Collection[int]:
        """Those of them whose backward comes within the step."""
        return self._closures

    def asks_for_evidence(self, *, within_step: bool) -> bool:
        """Whether a backward that begins now may follow a skipped step, so that the state of the gradients has to be known."""
        current = self._round
        in_the_round = bool(current.backwards) and not current.stepped
        return in_the_round and (current.abandoned or not (within_step and self._stepping))

    @property
    def next_is_sampled(self) -> bool:
        """Whether the backward that comes next belongs to a sampled round."""
        current = self._round
        return self._due(current.number + 1) if current.stepped else current.sampled

    @property
    def behind(self) -> bool:
        """Whether the round has gradients to read that were not read when its last backward ended."""
        return self._round.sampled and bool(self._round.fired) and not self._round.captured

    @property
    def sample_is_open(self) -> bool:
        """Whether the round's gradients were read and what became of them is not known yet."""
        return self._round.captured and self._round.open

    def regular_optimizer(self) -> int | None:
        """The only optimizer that ever steps, if the last rounds were all like this one, which has just had its step."""
        current = self._round
        busy = self._stepping or self._closures or self.sample_is_open
        if busy or len(current.stepped) != 1 or not current.backwards:
            return None
        repeats = self.pattern.repeats(current.models, current.stepped, current.backwards)
        return next(iter(current.stepped)) if repeats else None

    # Backwards

    def _backward_began(self, event: BackwardBegan) -> Decided:
        asked = self.asks_for_evidence(within_step=event.within_step)
        if not event.within_step:
            self._stepping.clear()
        if self._round.stepped:
            yield from self._begin_round()
        elif asked and self.pattern.cleared(self._round.backwards, event.evidence):
            yield from self._gradients_were_cleared(event.evidence)

    def _gradients_were_cleared(self, evidence: ClearingEvidence) -> Decided:
        """The gradients of the last backward are gone, and no step was seen."""
        if not evidence.scaler_known and self.pattern.hold():
            self._round.begin_again()
        elif evidence.updated and not evidence.reporting:
            # The parameters have changed: steps were taken that no hook saw, as of a compiled optimizer.
            optimizer = self._unseen_optimizer()
            yield CountUnseen(optimizer, 1 + self.pattern.release())
            self.pattern.stepped_unseen()
            self._round.stepped.add(optimizer)
            yield from self._begin_round()
        else:
            yield CountSkipped(1 + self.pattern.release())
            yield from self._begin_round(skipped=True)

    def _model_reached(self, event: ModelReached) -> Decided:
        self._round.models.add(event.model)
        return iter(())

    def _sample_impossible(self, _event: SampleImpossible) -> Decided:
        self._round.sampled = False
        self.lost += 1
        return iter(())

    def _backward_ended(self, event: BackwardEnded) -> Decided:
        current = self._round
        current.backwards += 1
        current.fired |= event.fired
        # A step within the backward waits for no other backward.
        if event.fired and (event.stepped_within or current.backwards >= (self.pattern.backwards or 1)):
            yield ReadGradients()

    def _gradients_found(self, event: GradientsFound) -> Decided:
        self._round.fired |= event.fired
        if self._round.fired:
            yield ReadGradients()

    def _sample_read(self, event: SampleRead) -> Decided:
        current = self._round
        if event.taken:
            self.samples += not current.captured
            current.captured, current.again = True, False
        else:
            self._lose(current)
        return iter(())

    # Steps

    def _step_began(self, event: StepBegan) -> Decided:
        self._stepping.add(event.optimizer)
        if event.closure:
            self._closures.add(event.optimizer)
        return iter(())

    def _step_within_backward(self, event: StepWithinBackward) -> Decided:
        self._stepping.add(event.optimizer)
        self._round.read.add(event.optimizer)
        return iter(())

    def _read_by_optimizer(self, event: ReadByOptimizer) -> Decided:
        self._round.read.add(event.optimizer)
        return iter(())

    def _round_of_step(self, event: RoundOfStep) -> Decided:
        if event.reads:
            if event.optimizer in self._round.stepped or not self._round.open:
                yield from self._begin_round()
            return
        self._stepping.discard(event.optimizer)
        again = event.optimizer in self._round.stepped
        if again:
            yield from self._begin_round()
        if again or not self._round.backwards:
            yield NoBackwardSeen()

    def _step_ended(self, event: StepEnded) -> Decided:
        current = self._round
        self._stepping.discard(event.optimizer)
        self._closures.discard(event.optimizer)
        current.stepped.add(event.optimizer)
        yield from self._resolved(Outcome.STEPPED)
        if self.sample_is_open and self._all_stepped(event.waited):
            yield self._close(Outcome.STEPPED)

    def _all_stepped(self, waited: frozenset[int]) -> bool:
        """Whether no other optimizer will step on the captured gradients in this round, as far as the last rounds show."""
        active = self.pattern.active(self._round.models)
        return (waited if active is None else waited & active) <= self._round.stepped

    def _step_abandoned(self, _event: StepAbandoned) -> Decided:
        self._stepping.clear()
        self._closures.clear()
        self._round.abandoned = bool(self._round.backwards)
        return iter(())

    def _foreign_step(self, _event: ForeignStep) -> Decided:
        self._round.foreign = True
        return iter(())

    # Norms that the user gives, numbers, and rounds that were only counted

    def _norm_observed(self, _event: NormObserved) -> Decided:
        self._round.observed = not self._round.captured
        if self._round.stepped:
            yield from self._resolved(Outcome.STEPPED)

    def _numbered(self, event: RoundNumbered) -> Decided:
        self._round.number = event.number
        return iter(())

    def _rounds_counted(self, event: RoundsCounted) -> Decided:
        last = self._round
        if event.rounds:  # the current round is the last one that was counted: like the one that was followed, but not sampled
            self._round = Round(last.number, False, last.backwards, last.models, stepped=last.stepped)
        self._round.number += event.rounds + event.skipped
        self._skipped_unseen |= event.skipped > 0
        if event.skipped:
            yield CountSkipped(event.skipped)

    def _backwards_counted(self, event: BackwardsCounted) -> Decided:
        models = set(self._round.models)
        yield from self._begin_round()
        self._round.backwards, self._round.models = event.backwards, models

    # Where a round ends

    def _begin_round(self, *, skipped: bool = False) -> Decided:
        """Ends the current round and begins the next one."""
        last = self._round
        yield from self._resolved(Outcome.SKIPPED if skipped else Outcome.UNKNOWN)
        if self.sample_is_open:
            yield self._close(Outcome.SKIPPED if skipped else Outcome.STEPPED if last.stepped else Outcome.UNKNOWN)
        released = self.pattern.learn(last.models, last.stepped, last.backwards)
        if released:
            yield CountSkipped(released)
        if self.behind:
            self._lose(last)
        # After a skipped step that was not sampled the next round is: to see whether, and where, something is wrong.
        surprising = (skipped or self._skipped_unseen) and not last.sampled
        self._skipped_unseen, self._sampled_before = False, last.sampled
        self._round = Round(last.number + 1, self._due(last.number + 1) or surprising)
        yield BeginRound(last.number + 1, after_step=bool(last.stepped))

    def _earlier_step_skipped(self, _event: EarlierStepSkipped) -> Decided:
        self._round.sampled |= not self._sampled_before
        return iter(())

    def _close(self, outcome: Outcome) -> CloseSample:
        current = self._round
        current.open = False
        did_step = frozenset(current.stepped)
        stepped = did_step or self.pattern.steppers(current.models)
        return CloseSample(current.number, frozenset(current.fired), outcome, stepped, did_step)

    def _resolved(self, outcome: Outcome) -> Decided:
        if self._round.observed:
            self._round.observed = False
            yield ResolveNorm(outcome)

    def _lose(self, one: Round) -> None:
        """Counts a sample that was not taken, once."""
        self.lost += not one.lost
        one.lost = True

    def _training_over(self, _event: TrainingOver) -> Decided:
        yield from self._resolved(Outcome.UNKNOWN)
        if self.sample_is_open:
            yield self._close(Outcome.STEPPED if self._round.stepped else Outcome.UNKNOWN)
