"""TrainingLoop: what the hooks of optimizers, and the steps that the user reports, mean for the clock and the rounds.

Unsampled steps pass here too, so every line counts: a step costs two calls, and nothing here depends on the number of
parameters.
"""

from __future__ import annotations

import operator
import sys
import types
from typing import Any

import torch

from torch_grad_exporter.capture.counted_rounds import CountedRounds
from torch_grad_exporter.capture.forwards import ForwardWatch
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.capture.observations import Observations
from torch_grad_exporter.capture.parts import Parts
from torch_grad_exporter.capture.reader import Scaler, StepView
from torch_grad_exporter.capture.round_costs import HOOKS_SECONDS
from torch_grad_exporter.capture.steps import StepWatch
from torch_grad_exporter.capture.torch_hooks import Handle
from torch_grad_exporter.capture.tracing import active_trace
from torch_grad_exporter.torch_compat.autograd import at_end_of_backward, graph_task
from torch_grad_exporter.torch_compat.optimizers import called_from_step

NEAREST = 12
"""Frames that are searched for a gradient scaler."""


class TrainingLoop:
    """Receives the steps of all optimizers of the process. Belongs to the training thread."""

    def __init__(
        self,
        parts: Parts,
        steps: StepWatch,
        forwards: ForwardWatch,
        counted: CountedRounds,
        observations: Observations,
    ) -> None:
        self._parts = parts
        self._clock = parts.clock
        self._hooks = parts.hooks
        self._rounds = parts.rounds
        self._steps = steps
        self._forwards = forwards
        self._counted = counted
        self._observations = observations
        self._end_hook = self._hooks.guarded("optimizer_hook", self._backward_ended)
        self._look_hook = self._hooks.guarded("optimizer_hook", self._look)
        self._over_hook = self._hooks.guarded("optimizer_hook", self._counting_over)
        self._late_hook: Handle | None = None
        self._within: tuple[int, set[int]] = -1, set()
        """The graph task of the last backward in which optimizers have stepped, and which."""
        self._hooked = False
        """Whether an optimizer's hook has reported a step since the user last did."""

    # Hooks

    def step_began(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], *, over: bool = False
    ) -> None:
        """Before any optimizer's step. `args` begin with the optimizer itself.

        `over`: it was not seen until it was over, so that no other hook is to be waited for.
        """
        parts, clock = self._parts, self._clock
        if not parts.optimizers.concerns(optimizer):
            if parts.thread.may_be_here():  # on another thread it has nothing to do with these models
                self._foreign_step(self._inside())
            return
        self._counted.settle()
        task, inside = graph_task(), self._inside()
        number = parts.optimizers.number(optimizer, within_backward=task != -1, inside=inside)
        if number is None:
            self._foreign_step(inside)
            return
        start = clock.clock()
        if task != -1:
            self._step_within_backward(task, number, optimizer)
            clock.spent(clock.clock() - start)
            return
        parts.thread.is_here()
        if clock.stepping and not called_from_step(sys._getframe(3)):
            clock.leave_step()
            self._steps.abandoned()
        if clock.stepping and number in self._rounds.stepping:
            self._steps.inner_began(number)  # `step` has called `super().step()`
            return
        clock.step_began(start)
        sampled = self._rounds.current.sampled
        if sampled:
            parts.reader.scaler_searched(_calling_scaler(sys._getframe(1)))
        if sampled and not over and self._hooks.others_follow(optimizer):
            self._late_hook = optimizer.register_step_pre_hook(self._look_hook)
        else:
            self._look(optimizer, args, kwargs)
        clock.spent(clock.clock() - start)

    def _inside(self) -> frozenset[int]:
        return frozenset(self._rounds.stepping) if self._clock.stepping else frozenset()

    def _foreign_step(self, inside: frozenset[int]) -> None:
        """An optimizer that owns nothing of the model steps; inside the step of one that does, it works for that one."""
        if inside:
            self._steps.tool_steps(inside)
        else:
            self._rounds.current.foreign = True

    def _look(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Right before an optimizer's step, when no other hook will change the gradients any more."""
        number = self._parts.optimizers.number(optimizer)
        if number is None:
            return
        closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
        sampled = self._rounds.current.sampled
        # A scaler sets both for the time of a fused optimizer's step.
        found_inf = _tensor(getattr(optimizer, "found_inf", None))
        grad_scale = None if found_inf is None else _tensor(getattr(optimizer, "grad_scale", None))
        self._steps.began(StepView(number, grad_scale, found_inf), closure=closure)
        if sampled:
            self._parts.inspections.tell_and_charge(Inspection.step_began, self._rounds.current, number)

    def clipped(self, optimizer: torch.optim.Optimizer, skip: torch.Tensor | None) -> None:
        """Right before an optimizer's step its gradients have been clipped; `skip`: whether it is told to leave the step out."""
        number, clock = self._parts.optimizers.number(optimizer), self._clock
        if number is None or not (self._rounds.current.sampled or skip is not None):
            return
        start = clock.clock()
        self._steps.clipped(StepView(number, _tensor(getattr(optimizer, "grad_scale", None)), skip))
        clock.spent(clock.clock() - start)

    def step_ended(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """After any optimizer's step."""
        number = self._parts.optimizers.number(optimizer)  # None of a foreign one, and then nothing is changed
        if number is not None and graph_task() == -1:
            self._hooked = True
            self._ended(number)
            self.release()

    def _step_within_backward(self, task: int, number: int, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps before the backward is over: all that do so are one step, at the backward's end."""
        self._steps.within_backward(number, optimizer)
        if task != self._within[0]:
            self._within = task, set()
            at_end_of_backward(self._end_hook)
        self._within[1].add(number)

    def _backward_ended(self) -> None:
        self._hooked = True
        for number in sorted(self._within[1]):
            self._ended(number)

    def _counting_over(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """Rounds are no longer only counted: after a step that was counted, or that of another optimizer."""
        if not self._counted.step_ends_it(optimizer):
            # No hook announced the step, so that its beginning was not seen.
            self.step_began(optimizer, (), {}, over=True)
            self.step_ended(optimizer, (), {})

    # The end of a step

    def manual_step(self, number: int | None) -> None:
        """The user says that a step is done; counts it unless an optimizer's hook has said so already. `number`: of the step.

        Raises `TypeError` where that is not a whole number, and then changes nothing.
        """
        number = None if number is None else operator.index(number)
        self._counted.settle()
        if not (self._hooked and self._rounds.current.stepped):
            optimizer = self._parts.optimizers.manual()
            self._clock.step_began()
            self._steps.began(StepView(optimizer), closure=False)
            self._ended(optimizer)
        self._hooked = False
        if number is not None:
            self._rounds.current.number = number

    def _ended(self, number: int) -> None:
        """The optimizer of this number has stepped, however that became known."""
        parts, clock = self._parts, self._clock
        start = clock.clock()
        self._forwards.step_over()
        sampled = self._rounds.current.sampled
        left_out = self._steps.left_out_by(number)
        first = self._steps.ended(number)
        if first is None:
            return
        if sampled:
            parts.inspections.tell_and_charge(Inspection.step_ended, self._rounds.current, number, left_out)
        self._observations.settings(start, sampled=sampled)
        if first:
            parts.inspections.tell(Inspection.round_stepped)
        if parts.periodic is not None:
            parts.periodic()
        clock.step_over(start, first_of_round=first)
        clock.spent(clock.clock() - start + (HOOKS_SECONDS if first else 0.0))
        own = clock.own_seconds
        seconds = clock.step_ended(first_of_round=first, trace=active_trace() if sampled else None)
        if seconds is not None:
            parts.schedule.stepped(seconds - own, None if sampled else own)
        if first:
            self._counted.round_over(self._steps.regular_optimizer, self._over_hook, self._steps.prepare_next)

    # The end

    def close(self, *, failed: bool) -> None:
        """Ends the counting, and removes the hook of a single step; idempotent. `failed`: an exception has ended the training."""
        self._counted.settle(over=not failed)
        self.release()

    def release(self) -> None:
        """Removes the hook of a single step; idempotent."""
        hook, self._late_hook = self._late_hook, None
        if hook is not None:
            hook.remove()


def _calling_scaler(frame: types.FrameType | None) -> Scaler | None:
    """The `torch.amp.GradScaler` whose `step` called the optimizer's, searched for in the nearest frames."""
    for _ in range(NEAREST):
        if frame is None:
            return None
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


def _tensor(value: object) -> torch.Tensor | None:
    return value if isinstance(value, torch.Tensor) else None
