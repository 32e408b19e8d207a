"""Rounds: where one ends and the next begins, and what rounds of this training usually look like.

A *round* is everything between the first backward after a step and the last optimizer step before the
next backward. It is the unit of sampling and of the step duration: two optimizers that share a backward
share a round, and a GAN's two alternating ones do not.

A second backward without a step in between either continues an accumulation or follows a step that was
skipped. The gradient itself tells: gone means that `zero_grad` was called. Zeroed in place cannot be told from
clipped in place without looking at the data; there the usual number of backwards of a round decides.

A training may clear within every step (SAM takes two passes to a step). Before there was a step without a clearing
the two look alike, so the first clearings are held back until that is known.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from torch_grad_exporter.model.layers import ParameterTable, TrackedParameter, parameters_of
from torch_grad_exporter.torch_compat import local, version_of

PROBES = 4
"""Parameters per model whose gradient is looked at to see whether it was cleared."""

MULTI_PASS = 4
"""Steps in a row with a clearing in between, after which that is how this training works (SAM), not a skip."""

MEMORY = 8
"""Rounds whose optimizers are remembered."""

PASSES = 3
"""Passes of such a step at most: what is cleared more often was skipped."""


_ATTRIBUTE = "_torch_grad_exporter_number"
_NUMBERS = itertools.count()


def _number_of(gradient: torch.Tensor) -> int | None:
    return getattr(gradient, _ATTRIBUTE, None)


def _numbered(gradient: torch.Tensor) -> int:
    """The gradient's number; it gets one if it has none yet."""
    number = _number_of(gradient)
    if number is None:
        number = next(_NUMBERS)
        setattr(gradient, _ATTRIBUTE, number)
    return number


def _version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; what is written to a DTensor shows in its local tensor only."""
    return version_of(local(tensor))


@dataclass(slots=True)
class GradientVersion:
    """Which tensor a parameter's gradient was at one moment, and how often it had been written to.

    Knows the tensor by a number that it wears as an attribute: a mark must not keep a gradient's memory, a weak reference
    would forbid `torch.utils.swap_tensors` on it, and an `id` may by now be that of another one.
    """

    tracked: TrackedParameter
    gradient: int | None
    version: int
    value_version: int

    @classmethod
    def of(cls, tracked: TrackedParameter) -> GradientVersion:
        """The mark of a parameter as it is now."""
        parameter = tracked.parameter()
        value_version = -1 if parameter is None else _version_of(parameter)
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            return cls(tracked, None, -1, value_version)
        return cls(tracked, _numbered(gradient), _version_of(gradient), value_version)

    def replaced(self) -> bool:
        """Whether the parameter no longer has that gradient."""
        parameter = self.tracked.parameter()
        return parameter is not None and (parameter.grad is None or _number_of(parameter.grad) != self.gradient)

    def updated(self) -> bool:
        """Whether the parameter's value was written to."""
        parameter = self.tracked.parameter()
        return parameter is not None and _version_of(parameter) != self.value_version

    def moved(self) -> bool:
        """Whether there is a gradient now that is another tensor than then, or was written to."""
        now = self.tracked.gradient()
        return now is not None and (_number_of(now) != self.gradient or _version_of(now) != self.version)


@dataclass(frozen=True, slots=True)
class GradientVersions:
    """GradientVersions of the gradients of many parameters at one moment, in columns."""

    tracked: Sequence[TrackedParameter]
    numbers: list[int | None]
    versions: list[int]

    @classmethod
    def of(cls, tracked: Sequence[TrackedParameter]) -> GradientVersions:
        """The marks of parameters as they are now."""
        gradients = [None if p is None else p.grad for p in parameters_of(tracked)]
        numbers = [None if g is None else _numbered(g) for g in gradients]
        return cls(tracked, numbers, [-1 if g is None else _version_of(g) for g in gradients])

    def moved(self) -> set[int]:
        """The positions of those that have a gradient now that is another tensor than then, or was written to."""
        rows = zip(parameters_of(self.tracked), self.numbers, self.versions, strict=True)
        return {
            position
            for position, (parameter, number, version) in enumerate(rows)
            if parameter is not None
            and (gradient := parameter.grad) is not None
            and (number is None or _number_of(gradient) != number or _version_of(gradient) != version)
        }


@dataclass(slots=True)
class Round:
    """One round. `sampled`: whether its gradients are read.

    `fired`: positions in the table of the parameters that got a gradient. `again`: what was there before in this round was
    thrown away. `stepped`: optimizers that have stepped; `read`: those whose view of the gradients was taken; `foreign`: one
    stepped that owns nothing of ours. `lost`: there was something to read that could not be read; `abandoned`: a step raised
    after a backward. `observed`: the user gave the global norm, and its outcome is still to be told; `open`:
    the same of what was captured.
    """

    number: int
    table: ParameterTable
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


@dataclass(slots=True)
class RoundPattern:
    """What was learned from the rounds so far. `probes`: by model, parameters that got a gradient lately."""

    probes: dict[int, list[TrackedParameter]] = field(default_factory=dict)
    _backwards: deque[int] = field(default_factory=lambda: deque(maxlen=64))
    _backwards_to_a_step: deque[int] = field(default_factory=lambda: deque(maxlen=64))
    _steppers: dict[frozenset[int], deque[frozenset[int]]] = field(default_factory=dict)
    _between_steps: list[GradientVersion] = field(default_factory=list)
    _cleared: deque[bool] = field(default_factory=lambda: deque(maxlen=MULTI_PASS))
    _cleared_since_step: bool = False
    _plain: bool = False
    """Whether there was a step with no clearing before it."""
    _held: int = 0
    _held_here: int = 0
    """Clearings that may have been skipped steps or not, in all and in this round."""
    _marks: list[GradientVersion] = field(default_factory=list)

    @property
    def backwards(self) -> int | None:
        """The fewest backwards of the last rounds, `None` before the first round is over."""
        return min(self._backwards, default=None)

    def steppers(self, models: Iterable[int]) -> frozenset[int]:
        """The optimizers that stepped in the last round with backwards of these models; empty if unknown."""
        rounds = self._steppers.get(frozenset(models))
        return rounds[-1] if rounds else frozenset()

    def active(self, models: Iterable[int]) -> frozenset[int] | None:
        """The optimizers that stepped in the last `MEMORY` rounds with backwards of these models; `None` while there are fewer."""
        rounds = self._steppers.get(frozenset(models), ())
        return frozenset().union(*rounds) if len(rounds) == MEMORY else None

    def same_rounds(self, current: Round) -> bool:
        """Whether the current round is like all of the last `MEMORY` rounds with a step, none of which clears in between."""
        rounds = self._steppers.get(frozenset(current.models), ())
        alike = len(self._steppers) == 1 and len(rounds) == MEMORY and all(one == current.stepped for one in rounds)
        regular = all(backwards == current.backwards for backwards in itertools.islice(reversed(self._backwards), MEMORY))
        return alike and regular and self._plain and not self._held and not any(self._cleared)

    def learn(self, over: Round) -> int:
        """Takes in a round that is over; returns how many clearings turn out to have been skipped steps."""
        self._held_here = 0
        if over.backwards:
            self._backwards.append(over.backwards)
        if not over.stepped:
            return 0
        if over.backwards:
            self._backwards_to_a_step.append(over.backwards)
        models = frozenset(over.models)
        if len(self._steppers) < 64 or models in self._steppers:
            self._steppers.setdefault(models, deque(maxlen=MEMORY)).append(frozenset(over.stepped))
        self._plain |= not self._cleared_since_step
        self._cleared.append(self._cleared_since_step)
        self._cleared_since_step = False
        if self._several_passes:
            self._held = 0
        return self.release() if self._plain else 0

    def hold(self) -> bool:
        """Whether a clearing is to be held until it is known if it was a skipped step or the way of this training."""
        if self._plain or self._held_here == PASSES - 1:
            return False
        self._held += 1
        self._held_here += 1
        return True

    def release(self) -> int:
        """The clearings held so far, which were skipped steps after all."""
        held, self._held = self._held, 0
        return held

    @property
    def _several_passes(self) -> bool:
        return len(self._cleared) == MULTI_PASS and all(self._cleared)

    def remember(self, models: Iterable[int]) -> None:
        """GradientVersions the gradients at the end of a backward, one of each model."""
        self._marks = []
        for model in models:
            found = (GradientVersion.of(probe) for probe in self.probes.get(model, ()))
            self._marks += itertools.islice((mark for mark in found if mark.gradient is not None), 1)

    def untouched(self) -> bool:
        """Whether nobody has changed the gradients since the last backward, as far as the probes tell."""
        return bool(self._marks) and not self._gone() and not self._written()

    def cleared(self, current: Round) -> bool:
        """Whether the gradients of the last backward were thrown away: its step was skipped."""
        usual = min(self._backwards_to_a_step, default=None)
        found = self._gone() or (self._written() and usual is not None and current.backwards >= usual)
        self._cleared_since_step |= found
        return found and not self._several_passes

    def updated(self) -> bool:
        """Whether the parameters were written to since the last backward."""
        return any(mark.updated() for mark in self._marks)

    def stepped_unseen(self) -> None:
        """What looked like cleared gradients was a step that no hook saw."""
        self._cleared_since_step = False

    def written_between_steps(self, table: ParameterTable) -> bool:
        """Whether gradients were written since this was last asked, at a step; the first answer is that they were."""
        before = self._between_steps
        self._between_steps = [GradientVersion.of(tracked) for tracked in table.tracked[:PROBES]]
        return not before or any(mark.moved() or mark.tracked.parameter() is None for mark in before)

    def _gone(self) -> bool:
        """Whether a gradient is gone, or is another tensor: on the rung `parameter` this may look after the write."""
        return any(mark.replaced() for mark in self._marks)

    def _written(self) -> bool:
        return any(mark.moved() for mark in self._marks)
