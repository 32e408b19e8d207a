"""RoundPattern: what is usual for rounds of this training. Pure: counts and numbers of optimizers, no tensor.

A second backward without a step in between either continues an accumulation or follows a step that was skipped. Where the
gradient itself does not show which, the usual number of backwards of a round decides.

A training may clear its gradients within every step: SAM takes two passes to a step, gradient surgery one for each task. Before
the first step without a clearing the two cannot be distinguished, so all clearings are held back until that step decides.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

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
