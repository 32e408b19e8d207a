"""The events that a `RoundTracker` takes, and its decisions: small frozen records, no tensor among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch_grad_exporter.capture.round_pattern import ClearingEvidence
from torch_grad_exporter.transfer.outcomes import Outcome

# Events


@dataclass(frozen=True, slots=True)
class BackwardBegan:
    """A backward begins. `within_step`: in an optimizer's step, by its closure. `evidence`: where `asks_for_evidence` says so."""

    within_step: bool = False
    evidence: ClearingEvidence = field(default_factory=ClearingEvidence)


@dataclass(frozen=True, slots=True)
class ModelReached:
    """The running backward has reached the output, or a parameter, of a model."""

    model: int


@dataclass(frozen=True, slots=True)
class SampleImpossible:
    """The gradients of the backward that begins cannot be read."""


@dataclass(frozen=True, slots=True)
class BackwardEnded:
    """A backward that wrote gradients is over. `fired`: the parameters that got one, on a sampled round.

    `stepped_within`: optimizers have used up gradients before it was over.
    """

    fired: frozenset[int] = frozenset()
    stepped_within: bool = False


@dataclass(frozen=True, slots=True)
class GradientsFound:
    """Gradients of these parameters were found at an optimizer's step, where no backward is seen."""

    fired: frozenset[int]


@dataclass(frozen=True, slots=True)
class SampleRead:
    """The round's gradients were read, or could not be (`taken`)."""

    taken: bool


@dataclass(frozen=True, slots=True)
class StepBegan:
    """An optimizer begins a step. `closure`: the backward is yet to come, within the step."""

    optimizer: int
    closure: bool = False


@dataclass(frozen=True, slots=True)
class StepWithinBackward:
    """An optimizer begins a step while the backward runs; what it uses is read now."""

    optimizer: int


@dataclass(frozen=True, slots=True)
class ReadByOptimizer:
    """The gradients were read again as this optimizer sees them."""

    optimizer: int


@dataclass(frozen=True, slots=True)
class RoundOfStep:
    """This optimizer has taken a step whose round is to be found: a round in which it has stepped before is over.

    `reads`: this optimizer's gradients are about to be read, since no backward is seen.
    """

    optimizer: int
    reads: bool = False


@dataclass(frozen=True, slots=True)
class StepEnded:
    """An optimizer's step is over. `waited`: the optimizers that own captured gradients, where a sample is open."""

    optimizer: int
    waited: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class StepAbandoned:
    """A step that had begun raised and will not end."""


@dataclass(frozen=True, slots=True)
class ForeignStep:
    """An optimizer that owns nothing of the models has stepped on the training thread."""


@dataclass(frozen=True, slots=True)
class NormObserved:
    """The user gave the global norm of the current round; a sample carries its outcome, else it is reported by itself."""


@dataclass(frozen=True, slots=True)
class RoundNumbered:
    """The user numbers the current round, so that ranks or restarted runs sample the same rounds."""

    number: int


@dataclass(frozen=True, slots=True)
class RoundsCounted:
    """So many rounds like the last one were only counted, and so many steps in between skipped."""

    rounds: int
    skipped: int


@dataclass(frozen=True, slots=True)
class BackwardsCounted:
    """So many backwards of a round that is not over were only counted."""

    backwards: int


@dataclass(frozen=True, slots=True)
class EarlierStepSkipped:
    """An answer that came late shows that the step before the round that has just begun was skipped."""


@dataclass(frozen=True, slots=True)
class TrainingOver:
    """The exporter is being closed."""


RoundEvent = (
    BackwardBegan | ModelReached | SampleImpossible | BackwardEnded | GradientsFound | SampleRead | StepBegan | StepWithinBackward
    | ReadByOptimizer | RoundOfStep | StepEnded | StepAbandoned | ForeignStep | NormObserved | RoundNumbered | RoundsCounted
    | BackwardsCounted | EarlierStepSkipped | TrainingOver
)  # fmt: skip

# Decisions


@dataclass(frozen=True, slots=True)
class ReadGradients:
    """The gradients of the current round are complete, as far as is known: read them."""


@dataclass(frozen=True, slots=True)
class CountSkipped:
    """So many rounds ended without a step."""

    steps: int


@dataclass(frozen=True, slots=True)
class CountUnseen:
    """So many steps were taken that no hook saw, by the optimizer of this number."""

    optimizer: int
    steps: int


@dataclass(frozen=True, slots=True)
class CloseSample:
    """What became of the sampled round is known. `stepped`: who stepped, or is taken to; empty if that is not known either."""

    number: int
    fired: frozenset[int]
    outcome: Outcome
    stepped: frozenset[int]
    did_step: frozenset[int]


@dataclass(frozen=True, slots=True)
class ResolveNorm:
    """What became of the round of the norm that was observed is known."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class BeginRound:
    """A round begins. `after_step`: a step ended the round before."""

    number: int
    after_step: bool


@dataclass(frozen=True, slots=True)
class NoBackwardSeen:
    """A step was taken before which no backward was seen: another rung may see what this one does not."""


RoundDecision = ReadGradients | CountSkipped | CountUnseen | CloseSample | ResolveNorm | BeginRound | NoBackwardSeen
Decided = Iterator[RoundDecision]
