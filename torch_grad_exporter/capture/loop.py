"""TrainingLoop: what the hooks of optimizers mean for the clock and the rounds.

Unsampled steps pass here too, so every line counts: a step costs two calls, and nothing here depends on the number of
parameters.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from torch_grad_exporter.capture.callers import calling_scaler
from torch_grad_exporter.capture.count_only.counting import CountOnly
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.reader import GradientReader, OptimizerView
from torch_grad_exporter.capture.round_events import ForeignStep
from torch_grad_exporter.capture.round_executor import Rounds
from torch_grad_exporter.capture.step_end import StepEnd
from torch_grad_exporter.capture.steps import StepWatch
from torch_grad_exporter.capture.torch_hooks import Handle, Hooks
from torch_grad_exporter.capture.training_thread import TrainingThread
from torch_grad_exporter.capture.weight_watch import WeightWatch
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.torch_compat import at_end_of_backward, called_from_step, graph_task


class TrainingLoop:
    """Receives the steps of all optimizers of the process. Belongs to the training thread."""

    def __init__(
        self,
        *,
        clock: StepClock,
        rounds: Rounds,
        steps: StepWatch,
        count_only: CountOnly,
        step_end: StepEnd,
        reader: GradientReader,
        optimizers: Optimizers,
        hooks: Hooks,
        thread: TrainingThread,
        weights: WeightWatch | None,
    ) -> None:
        self._clock = clock
        self._rounds = rounds
        self._steps = steps
        self._count_only = count_only
        self._step_end = step_end
        self._reader = reader
        self._optimizers = optimizers
        self._hooks = hooks
        self._weights = weights
        self._within = StepsBeforeTheEnd()
        self._end_hook = hooks.guarded("optimizer_hook", self._backward_ended)
        self._look_hook = hooks.guarded("optimizer_hook", self._look)
        self._over_hook = hooks.guarded("optimizer_hook", self._counting_over)
        self._late_hook: Handle | None = None
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
        start = self._clock.clock()
        if within:
            self._step_within_backward(number, optimizer)
            self._clock.spent(self._clock.clock() - start)
            return
        self._thread.is_here()
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
            self._step_end.of(number, self._over_hook)
            self.release()

    def _step_within_backward(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps before the backward is over: all that do so are one step, at the backward's end."""
        self._steps.within_backward(number, optimizer)
        if self._within.add(graph_task(), number):
            at_end_of_backward(self._end_hook)

    def _backward_ended(self) -> None:
        for number in self._within.stepped():
            self._step_end.of(number, self._over_hook)

    def _counting_over(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """Rounds are no longer only counted: after a step that was counted, or that of another optimizer."""
        if not self._count_only.step_ends_it(optimizer):
            # No hook announced the step, so that its beginning was not seen.
            self.step_began(optimizer, (), {}, over=True)
            self.step_ended(optimizer, (), {})

    def manual_step(self, number: int | None) -> None:
        """The user says that a step is done, of this number."""
        self._step_end.reported(self._optimizers, number, self._over_hook)

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
