"""TrainingLoop: what the hooks of optimizers and the user's calls mean for the clock, the rounds and the observations.

Unsampled steps pass here too, so every line counts: a forward costs two calls, a step two more, and nothing
here depends on the number of parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from torch_grad_exporter.capture.callers import calling_scaler
from torch_grad_exporter.capture.count_only.budget import HOOKS_SECONDS
from torch_grad_exporter.capture.count_only.counting import CountOnly
from torch_grad_exporter.capture.forwards import ForwardWatch
from torch_grad_exporter.capture.observations import Number, Observations
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.reader import GradientReader, OptimizerView
from torch_grad_exporter.capture.round_events import ForeignStep, RoundNumbered
from torch_grad_exporter.capture.round_executor import Rounds
from torch_grad_exporter.capture.schedule import SamplingSchedule
from torch_grad_exporter.capture.steps import StepWatch
from torch_grad_exporter.capture.torch_hooks import Handle, Hooks
from torch_grad_exporter.capture.training_thread import TrainingThread
from torch_grad_exporter.capture.weight_watch import WeightWatch
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.torch_compat import at_end_of_backward, called_from_step, graph_task
from torch_grad_exporter.transfer.tracing import active_trace


class TrainingLoop:
    """Receives the steps of all optimizers of the process, and the user's calls. Belongs to the training thread.

    `periodic`: something else that belongs to that thread, to be done behind a guard of its own at the end of steps.
    """

    def __init__(
        self,
        *,
        clock: StepClock,
        rounds: Rounds,
        steps: StepWatch,
        forwards: ForwardWatch,
        count_only: CountOnly,
        observations: Observations,
        reader: GradientReader,
        optimizers: Optimizers,
        schedule: SamplingSchedule,
        hooks: Hooks,
        thread: TrainingThread,
        weights: WeightWatch | None,
        periodic: Callable[[], None] | None,
    ) -> None:
        self._clock = clock
        self._rounds = rounds
        self._steps = steps
        self._forwards = forwards
        self._count_only = count_only
        self._observations = observations
        self._reader = reader
        self._optimizers = optimizers
        self._schedule = schedule
        self._hooks = hooks
        self._weights = weights
        self._periodic = periodic
        self._within = StepsBeforeTheEnd()
        self._end_hook = hooks.guarded("optimizer_hook", self._backward_ended)
        self._look_hook = hooks.guarded("optimizer_hook", self._look)
        self._over_hook = hooks.guarded("optimizer_hook", self._counting_over)
        self._late_hook: Handle | None = None
        self._hooked = False
        """Whether an optimizer's hook has reported a step since the user last did."""
        self._thread = thread

    # Hooks

    def step_began(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], *, over: bool = False
    ) -> None:
        """Before any optimizer's step. `args` begin with the optimizer itself.

        `over`: it was not seen until it was over, so that no other hook is to be waited for.
        """
        if not self._optimizers.concerns(optimizer):
            if self._thread.may_be_here():  # on another thread it has nothing to do with these models
                self._foreign_step(self._inside())
            return
        self._count_only.settle()
        within, inside = graph_task() != -1, self._inside()
        number = self._optimizers.number(optimizer, within_backward=within, inside=inside)
        if number is None:
            self._foreign_step(inside)
            return
        self._thread.is_here()
        start = self._clock.clock()
        if within:
            self._step_within_backward(number, optimizer)
            self._clock.spent(self._clock.clock() - start)
            return
        if self._clock.stepping and not called_from_step(sys._getframe(3)):
            self._clock.leave_step()
            self._steps.abandoned()
        if self._clock.stepping and number in self._rounds.tracker.stepping:
            return  # `step` has called `super().step()`
        self._clock.step_began()
        sampled = self._rounds.tracker.current.sampled
        if sampled:
            self._reader.scaler_looked_for(calling_scaler(sys._getframe(1)))
        if sampled and not over and self._hooks.others_follow(optimizer):
            self._late_hook = optimizer.register_step_pre_hook(self._look_hook)
        else:
            self._look(optimizer, args, kwargs)
        self._clock.spent(self._clock.clock() - start)

    def _inside(self) -> frozenset[int]:
        return frozenset(self._rounds.tracker.stepping) if self._clock.stepping else frozenset()

    def _foreign_step(self, inside: frozenset[int]) -> None:
        """An optimizer that owns nothing of the model steps; inside the step of one that does, it works for that one."""
        if inside:
            self._steps.tool_steps(inside)
        else:
            self._rounds.handle(ForeignStep())

    def _look(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Right before an optimizer's step, when no other hook will change the gradients any more."""
        number = self._optimizers.number(optimizer)
        if number is None:
            return
        closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
        sampled = self._rounds.tracker.current.sampled
        # A scaler sets both for the time of a fused optimizer's step.
        found_inf = _tensor(getattr(optimizer, "found_inf", None))
        grad_scale = None if found_inf is None else _tensor(getattr(optimizer, "grad_scale", None))
        self._steps.began(OptimizerView(number, grad_scale, found_inf), closure=closure)
        if sampled and self._weights is not None:
            self._weights.before(number)

    def step_ended(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """After any optimizer's step."""
        number = self._optimizers.number(optimizer)  # None of a foreign one, and then nothing is changed
        if number is not None and graph_task() == -1:
            self._hooked = True
            self._step_ended(number)
            self.release()

    def _step_within_backward(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps before the backward is over: all that do so are one step, at the backward's end."""
        self._steps.within_backward(number, optimizer)
        if self._within.add(graph_task(), number):
            at_end_of_backward(self._end_hook)

    def _backward_ended(self) -> None:
        self._hooked = True
        for number in self._within.stepped():
            self._step_ended(number)

    def _step_ended(self, number: int) -> None:
        clock = self._clock
        start = clock.clock()
        self._forwards.step_over()
        sampled = self._rounds.tracker.current.sampled
        first = self._steps.ended(number)
        if first is None:
            return
        if sampled and self._weights is not None:
            self._weights.after(number)
        self._observations.settings(start, sampled=sampled)
        if self._periodic is not None:
            self._periodic()
        clock.spent(clock.clock() - start + (HOOKS_SECONDS if first else 0.0))
        own = clock.own_seconds
        seconds = clock.step_ended(first_of_round=first, trace=active_trace() if sampled else None)
        if seconds is not None:
            self._schedule.stepped(seconds - own, None if sampled else own)
        if first:
            self._count_only.round_over(self._steps.regular_optimizer, self._over_hook, self._steps.node_hook)

    def _counting_over(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """Rounds are no longer only counted: after a step that was counted, or that of another optimizer."""
        if not self._count_only.step_ends_it(optimizer):
            # No hook announced the step, so that its beginning was not seen.
            self.step_began(optimizer, (), {}, over=True)
            self.step_ended(optimizer, (), {})

    # The user's calls

    def observe(self, name: str, value: Number) -> None:
        """Takes an observed value; a tensor's first element is copied without waiting for it. From any thread."""
        self._observations.observe(name, value, here=self._thread.may_be_here())

    def manual_step(self, number: int | None) -> None:
        """The user says that a step is done; counts it unless an optimizer's hook has said so already."""
        self._count_only.settle()
        if not (self._hooked and self._rounds.tracker.current.stepped):
            optimizer = self._optimizers.manual()
            self._clock.step_began()
            self._steps.began(OptimizerView(optimizer), closure=False)
            self._step_ended(optimizer)
        self._hooked = False
        if number is not None:
            self._rounds.handle(RoundNumbered(number))

    # The end

    def close(self) -> None:
        """Ends the counting, removes the hook of a single step, and hands over what is open; idempotent."""
        self._count_only.settle()
        self.release()

    def release(self) -> None:
        """Removes the hook of a single step; idempotent."""
        hook, self._late_hook = self._late_hook, None
        if hook is not None:
            hook.remove()


class StepsBeforeTheEnd:
    """The optimizers that have stepped in the running backward, which is known by the number of its graph task."""

    def __init__(self) -> None:
        self._task = -1
        self._optimizers: set[int] = set()

    def add(self, task: int, optimizer: int) -> bool:
        """Takes in a step; whether it is the first one in its backward."""
        first = task != self._task
        if first:
            self._task = task
            self._optimizers.clear()
        self._optimizers.add(optimizer)
        return first

    def stepped(self) -> list[int]:
        """All of the backward that is over, in the order of their numbers."""
        return sorted(self._optimizers)


def _tensor(value: object) -> torch.Tensor | None:
    return value if isinstance(value, torch.Tensor) else None
