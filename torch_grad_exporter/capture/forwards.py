"""ForwardWatch: the forwards of roots: phases, training examples, and the hooks that see the backward coming."""

from __future__ import annotations

import sys
from typing import Any

import torch

from torch_grad_exporter.capture.backward import BackwardWatch
from torch_grad_exporter.capture.counted_rounds import CountedRounds
from torch_grad_exporter.capture.examples import batch_size
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.capture.parts import Parts
from torch_grad_exporter.capture.phases import FORWARD, OUTSIDE
from torch_grad_exporter.capture.steps import StepWatch
from torch_grad_exporter.torch_compat.autograd import graph_task
from torch_grad_exporter.torch_compat.optimizers import called_from_step


class ForwardWatch:
    """Belongs to the training thread."""

    def __init__(self, parts: Parts, backward: BackwardWatch, steps: StepWatch, counted: CountedRounds) -> None:
        self._parts = parts
        self._counted = counted
        self._clock = parts.clock
        self._backward = backward
        self._preparation = backward.preparation
        self._steps = steps

    def began(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A root's forward begins; outside of training it only shows that the loop is alive."""
        if not self._parts.thread.may_be_here():  # such as an actor, which runs the same model while one trains
            return
        self._counted.settle()
        clock = self._clock
        start = clock.clock()
        clock.active(evaluating=not module.training)
        if clock.stepping and not called_from_step(sys._getframe(1)):
            clock.leave_step()
            self._steps.abandoned()
        if self._parts.requests.pending:
            requested = self._parts.requests.take()
            self._counted.follow(max(requested.values()) + 1)
            self._parts.inspections.tell(Inspection.requested, requested)
        if torch.is_grad_enabled():
            self._preparation.forward_began(module, args, kwargs)
        if module.training and torch.is_grad_enabled():
            # Checkpoints run forwards again within the backward; a reentrant one runs its first forward without grad.
            again = graph_task() != -1
            if not again:
                clock.switch(FORWARD, start)
                inputs = (one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
                self._parts.rounds.inputs_wanted = any(one.requires_grad and one.is_leaf for one in inputs)
            if clock.examples_known and not (again and clock.forward_came):
                size = batch_size(args, kwargs) if self._parts.index.models == 1 else None
                if size is None:
                    clock.examples_unknown()
                else:
                    clock.examples_came(size)
            clock.forward_came |= not again
        clock.spent(clock.clock() - start)

    def ended(self, model: int, module: torch.nn.Module, _args: object, kwargs: dict[str, Any], output: object) -> None:
        """The forward of the root of this number is over: hooks its output, and observes a loss in it."""
        clock = self._clock
        start = clock.clock()
        if graph_task() != -1 or not self._parts.thread.may_be_here():
            return
        clock.switch(OUTSIDE, start)
        if torch.is_grad_enabled():
            self._backward.forward_ended(output)
            if module.training and not isinstance(output, torch.Tensor):
                self._parts.inspections.tell(Inspection.forward_ended, model, output, kwargs)
        if self._parts.periodic is not None and not module.training:
            self._parts.periodic()
        clock.spent(clock.clock() - start)

    def backward_comes(self, loss: torch.Tensor) -> None:
        """A backward of this loss is about to begin: hooks it, where no forward of a root has shown it in this round."""
        if self._clock.forward_came or self._counted.counting or graph_task() != -1:
            return
        start = self._clock.clock()
        self._parts.thread.is_here()
        self._preparation.backward_comes()
        self._backward.forward_ended(loss)
        self._clock.spent(self._clock.clock() - start)

    def step_over(self) -> None:
        """A step is over."""
        self._clock.forward_came = False
