"""RegularRounds: rounds that are followed by all hooks, are not sampled, and are like the ones before.

Of such a round the rules have nothing to learn, and nothing is to be prepared. So the watches ask here first whether what happens
is what a regular round has next: a training forward, its backwards, the step of its optimizer. If it is, the clock counts and times
it, and that is all; what the round means is told to the rules when the regular rounds end, in one go, as a number of rounds.
Durations are handed over together then, too. Anything else ends them first, by `settle`, and leaves the state as if each round had
been followed by itself.

They last half a second at most, and the round after them is followed by itself: what is looked at now and then, such as learning
rates and the memory of devices, is looked at there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from torch_grad_exporter.capture.count_only.budget import COUNTED_ROUNDS, COUNTING_SECONDS, HOOKS_SECONDS
from torch_grad_exporter.capture.examples import batch_size
from torch_grad_exporter.capture.parts import Parts
from torch_grad_exporter.capture.phases import BACKWARD, FORWARD, OPTIMIZER, OUTSIDE
from torch_grad_exporter.store.records import Outcome
from torch_grad_exporter.torch_compat.autograd import graph_is_kept, graph_task

AT_LEAST = 4
"""Rounds: fewer are followed one by one, since to begin and to end costs as much as one of them."""

AFTER_OTHERS = 64
"""Rounds that are followed one by one after regular ones ended before the first of them was over."""


def _nothing() -> None:
    """Where there is no optimizer, and nothing to remember."""


class RegularRounds:
    """Belongs to the training thread and that of the backward.

    `active`: whether the present round is a regular one, as far as it has come. `backwards`: those of it that are over. `wrapped`:
    as of `ReductionWatch`.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._clock = parts.clock
        self._phases = parts.clock.phases
        self._rounds = parts.rounds
        self.active = False
        self.backwards = 0
        self.wrapped = False
        self._remember: Callable[[], object] = _nothing
        """Notes what gradients look like at the end of a backward."""
        self._in_backward = False
        self._to_a_step = 0
        self._thread = -1
        self._optimizer: Callable[[], torch.optim.Optimizer | None] = _nothing
        """A weak reference."""
        self._number = -1
        """That of the optimizer."""
        self._over = self._most = 0
        """How many rounds are over, and how many may be before they end."""
        self._until = 0.0
        self._norm_given = False
        """Whether the user gave the global norm of the present round."""
        self._one_by_one_until = 0

    def may_begin(self) -> bool:
        """Whether the round that comes next may be the first of some. Call it right after a step."""
        parts, number = self._parts, self._rounds.current.number
        if number < self._one_by_one_until or parts.schedule.next_due(number + 1) - number <= AT_LEAST:
            return False
        return not (parts.cost.waiting or self._clock.tells_steps or parts.inspections.any or parts.reductions.local is not None)

    def begin(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """The next rounds are taken for regular ones, like the last, in which the optimizer of this number has stepped alone."""
        last = self._rounds.current
        self._number, self._optimizer, self._thread = number, weakref.ref(optimizer), threading.get_ident()
        self._to_a_step, self.backwards, self._in_backward = last.backwards, 0, False
        # The step before a sampled round prepares it.
        self._over, self._most = 0, min(self._parts.schedule.next_due(last.number + 1) - last.number - 2, COUNTED_ROUNDS)
        self._until = self._clock.clock() + COUNTING_SECONDS
        self.wrapped = self._parts.reductions.wrapped
        self._remember = self._parts.probes.backwards_alike(last.models)
        self._clock.begin_alike()
        self.active = True

    # What happens: each of these takes it in if a regular round goes on with it, and says whether it does. If not, nothing changes.
    # Each enters few functions: a step of training has emptied the processor's caches, so that each one that is entered costs a
    # third of a microsecond, however little it does.

    def forward_began(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A forward of a root begins."""
        clock, phases = self._clock, self._phases
        start = clock.clock()
        goes_on = (
            module.training
            and torch.is_grad_enabled()
            and graph_task() == -1
            and not self._in_backward
            and phases.current != OPTIMIZER
            and threading.get_ident() == self._thread
        )
        if goes_on:
            phases.enter(FORWARD, start)
            clock.forward_alike(batch_size(args, kwargs) if clock.examples_known else 0)
            clock.spent(clock.clock() - start)
        return goes_on

    def backward_began(self, moment: float) -> bool:
        """A backward begins, which the root's output shows, at this moment of the clock."""
        phases = self._phases
        goes_on = (
            self.backwards < self._to_a_step
            and not self._in_backward
            and phases.current != OPTIMIZER
            # Only a graph that is kept can have been passed by `autograd.grad` on the way to a second derivative.
            and not graph_is_kept()
        )
        if goes_on:
            self._in_backward = True
            phases.enter(BACKWARD, moment)
        return goes_on

    def backward_ended(self, moment: float) -> bool:
        """The backward is over, at this moment of the clock."""
        if not self._in_backward:
            return False
        self._in_backward = False
        self.backwards += 1
        self._phases.enter(OUTSIDE, moment)
        self._clock.backwards_passed(1)
        self._remember()
        return True

    def step_began(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """An optimizer is about to step. `args` begin with the optimizer itself."""
        clock, phases = self._clock, self._phases
        start = clock.clock()
        goes_on = (
            optimizer is self._optimizer()
            and self.backwards == self._to_a_step
            and not self._in_backward
            and phases.current != OPTIMIZER
            and (args[1] if len(args) > 1 else kwargs.get("closure")) is None
            and getattr(optimizer, "found_inf", None) is None
            and graph_task() == -1
            and threading.get_ident() == self._thread
        )
        if goes_on:
            phases.enter(OPTIMIZER, start)
            clock.spent(clock.clock() - start)
        return goes_on

    def step_ended(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer has stepped. The last of these rounds ends with a step that is followed by itself."""
        clock = self._clock
        start = clock.clock()
        if optimizer is not self._optimizer() or self._phases.current != OPTIMIZER:
            return False
        if self._over >= self._most or start >= self._until:
            return False
        self._over += 1
        self.backwards = 0
        clock.round_alike(self._number, start)
        if self._norm_given:
            self._norm_given = False
            self._parts.norm_resolved(Outcome.STEPPED)
        clock.spent(clock.clock() - start)
        return True

    def norm_observed(self) -> None:
        """The global norm of the present round was posted, or of the one before, if no backward came since."""
        if self.backwards or self._in_backward:
            self._norm_given = True
        elif self._over:
            self._parts.norm_resolved(Outcome.STEPPED)
        else:
            self._rounds.norm_observed()

    # The end

    def settle(self) -> None:
        """Ends them, if there are any, wherever in a round that is: everything is as if each had been followed by itself."""
        if not self.active:
            return
        self.active = False
        durations, own = self._clock.end_alike(HOOKS_SECONDS)
        if durations:
            self._parts.schedule.followed(durations, own)
        self._rounds.rounds_counted(len(durations), 0)
        if self.backwards or self._in_backward:
            self._rounds.backwards_counted(self.backwards)
        if self._clock.stepping:
            self._rounds.step_began(self._number)
        if self._norm_given:
            self._norm_given = False
            self._rounds.norm_observed()
        self._one_by_one_until = self._rounds.current.number + (1 if durations else AFTER_OTHERS)
