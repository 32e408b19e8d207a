"""ArmedRound: one round of training that hooks follow; RoundPattern: what is usual for rounds, in counts and numbers of optimizers.

A round is everything between the first backward after a step and the last optimizer step before the next backward. It is the
unit of sampling and of the step duration: two optimizers that share a backward share a round, and the two alternating ones of a
GAN do not.

A second backward without a step in between either continues an accumulation or follows a step that was skipped. Where the
gradient itself does not show which, the usual number of backwards of a round decides.

A training may clear its gradients within every step: SAM takes two passes to a step, gradient surgery one for each task. Before
the first step without a clearing the two cannot be distinguished, so all clearings are held back until that step decides.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch_grad_exporter.capture.gradient_versions import GradientsAsRead, GradientVersions
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics.device import GroupReading
from torch_grad_exporter.store.records import OptimizerView, SamplePart


class Lost(enum.Enum):
    """Why a sample that was due is not shown; the values of the label `reason`."""

    EDITED = "edited"
    """A round shorter than those before changed its gradients before they were read."""
    PARAMETERS_CHANGED = "parameters_changed"
    """Parameters were added, replaced or thawed within the round, so that not all that came into gradients was seen."""
    GATHERED = "gathered"
    """FSDP2 had not shown its sharded parameters before the backward."""
    GRAPH_CAPTURE = "graph_capture"
    """A CUDA graph was being captured."""
    FAILED = "failed"
    """The gradients could not be read, or the host is too far behind to take more."""
    UNATTRIBUTED = "unattributed"
    """No step followed, and of which optimizer it would have been is not known yet."""
    UNDELIVERED = "undelivered"
    """What was read never arrived from its device."""


@dataclass(slots=True, eq=False)
class ArmedRound:
    """The state of one round. `RoundTracker` applies the rules to it, `GradientReader` enters what it reads.

    It is dropped when the next backward after a step begins, and no gradient outlives it.
    """

    number: int
    sampled: bool
    """Whether its gradients are to be read."""
    table: ParameterTable
    """The parameters, as they were when its last backward began."""
    extra: bool = False
    """Whether it is sampled although it was not due, to see what follows a skipped step."""

    # Backwards

    backwards: int = 0
    models: set[int] = field(default_factory=set)
    """Models that received gradients."""
    fired: set[int] = field(default_factory=set)
    """Positions in the table of the parameters that received a gradient."""
    again: bool = False
    """Whether earlier gradients of this round were thrown away."""
    passes: int = 0
    """How often gradients were cleared in it."""
    of_inputs: bool = False
    """Whether the last backward gives an input a gradient, as an adversarial attack does; a clearing then is not a skipped step."""
    left: GradientVersions | None = None
    """The gradients at the end of the last backward, where it matters at the step whether they are still the same."""

    # The sample

    counted: bool = False
    """Whether gradients were read of it, also if they were thrown away since."""
    captured: bool = False
    """Whether its gradients were read."""
    open: bool = False
    """Whether they were, and the outcome is unknown yet."""
    lost: bool = False
    """Whether there were gradients that could not be read."""
    as_read: GradientsAsRead | None = None
    parts: tuple[SamplePart, ...] = ()
    early: list[GroupReading] = field(default_factory=list)
    """Gradients that optimizers used before the backward was over, or without a backward that was seen."""
    early_fired: set[int] = field(default_factory=set)
    """Positions in the table of these."""
    views: list[OptimizerView] = field(default_factory=list)
    """Gradients as optimizers saw them."""
    divided_again: bool = False
    """Whether the loop gave a divisor again after the capture; if the step is skipped it may be of the next round."""

    # Steps

    stepped: set[int] = field(default_factory=set)
    """Optimizers that have stepped."""
    read: set[int] = field(default_factory=set)
    """Optimizers whose view of the gradients was taken."""
    foreign: bool = False
    """Whether an optimizer stepped that owns none of our parameters."""
    abandoned: bool = False
    """Whether a step raised after a backward."""
    observed: bool = False
    """Whether the user gave the global norm, and its outcome is still to be reported."""

    def begin_again(self) -> None:
        """Forget the backwards so far: gradients were cleared, and it is unknown yet whether that was a skipped step."""
        self.backwards, self.again = 0, True
        self.captured = self.open = False
        self.passes += 1
        self.fired.clear()

    @property
    def behind(self) -> bool:
        """Whether there are gradients to read that were not read when the last backward ended."""
        return self.sampled and bool(self.fired) and not self.captured


MULTI_PASS = 4
"""Steps in a row with a clearing in between, after which that is how this training works (SAM), not a skip."""

MEMORY = 8
"""Rounds whose optimizers are remembered."""

USUALLY = 0.75
"""Share of those rounds in which the same optimizers have stepped, from which on they are the usual ones."""

COMBINATIONS = 64
"""Sets of models at most whose optimizers are remembered."""


@dataclass(frozen=True, slots=True)
class ClearingEvidence:
    """The state of the gradients of the last backward when the next backward of the round begins.

    `gone`: one is gone, or they are zero. `written`: one was written to or replaced, and may be zero. `updated`: a parameter was
    written to. `reporting`: some optimizer of the model reports its steps. `scaler_known`: a gradient scaler is known, which may
    skip steps.
    """

    gone: bool = False
    written: bool = False
    updated: bool = False
    reporting: bool = True
    scaler_known: bool = False


@dataclass(slots=True)
class RoundPattern:
    """What was learned from the rounds so far.

    Attributes:
        backwards: The fewest backwards of the last rounds, None before the first round is over.
    """

    backwards: int | None = None

    _backwards: deque[int] = field(default_factory=lambda: deque(maxlen=64))
    _backwards_to_a_step: deque[int] = field(default_factory=lambda: deque(maxlen=64))
    _steppers: dict[frozenset[int], deque[frozenset[int]]] = field(default_factory=dict)
    _cleared: deque[bool] = field(default_factory=lambda: deque(maxlen=MULTI_PASS))
    _cleared_since_step: bool = False
    _plain: bool = False
    """Whether there was a step with no clearing before it."""
    _held: int = 0
    """Clearings that may have been skipped steps or not."""

    def is_whole(self, backwards: int) -> bool:
        """Return whether steps usually take no more backwards than these; false before the first step."""
        usual = min(self._backwards_to_a_step, default=None)
        return usual is not None and backwards >= usual

    def steppers(self, models: Iterable[int]) -> frozenset[int]:
        """Return the optimizers that step in rounds with backwards of these models; empty if unknown, or if they often differ."""
        rounds = self._steppers.get(frozenset(models))
        if not rounds:
            return frozenset()
        usual = max(rounds, key=rounds.count)
        return usual if rounds.count(usual) >= USUALLY * len(rounds) else frozenset()

    def active(self, models: Iterable[int]) -> frozenset[int] | None:
        """Return which optimizers stepped in the last `MEMORY` rounds with backwards of these models; None while they are fewer."""
        rounds = self._steppers.get(frozenset(models), ())
        return frozenset().union(*rounds) if len(rounds) == MEMORY else None

    def repeats(self, models: Iterable[int], stepped: set[int], backwards: int) -> bool:
        """Return whether all of the last `MEMORY` rounds with a step were like this one, and none of them clears in between."""
        rounds = self._steppers.get(frozenset(models), ())
        alike = len(self._steppers) == 1 and len(rounds) == MEMORY and all(earlier == stepped for earlier in rounds)
        regular = all(earlier == backwards for earlier in itertools.islice(reversed(self._backwards), MEMORY))
        return alike and regular and self._plain and not self._held and not any(self._cleared)

    def learn(self, models: Iterable[int], stepped: Iterable[int], backwards: int) -> int:
        """Take in a round that is over; return how many clearings turn out to have been skipped steps."""
        stepped = frozenset(stepped)
        if backwards:
            self._backwards.append(backwards)
            self.backwards = min(self._backwards)
        if not stepped:
            return 0
        if backwards:
            self._backwards_to_a_step.append(backwards)
        together = frozenset(models)
        if len(self._steppers) < COMBINATIONS or together in self._steppers:
            self._steppers.setdefault(together, deque(maxlen=MEMORY)).append(stepped)
        self._plain |= not self._cleared_since_step
        self._cleared.append(self._cleared_since_step)
        self._cleared_since_step = False
        if not self._held:
            return 0
        if self._several_passes:
            self._held = 0
        return self.release() if self._plain else 0

    def cleared(self, backwards: int, evidence: ClearingEvidence) -> bool:
        """Return whether the last backward's gradients were thrown away: its step was skipped. `backwards`: of the round so far."""
        cleared = evidence.gone or (evidence.written and self.is_whole(backwards))
        self._cleared_since_step |= cleared
        return cleared and not self._several_passes

    def hold(self) -> bool:
        """Hold a clearing until it is known if it was a skipped step or the way of this training; return whether it is held."""
        if self._plain:
            return False
        self._held += 1
        return True

    def release(self) -> int:
        """Return how many clearings were held so far, which were skipped steps after all."""
        held, self._held = self._held, 0
        return held

    @property
    def _several_passes(self) -> bool:
        return len(self._cleared) == MULTI_PASS and all(self._cleared)
