"""ForwardWatch: the forwards of roots: phases, training examples, and the hooks that see the backward coming."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_grad_exporter.capture.backward import BackwardWatch
from torch_grad_exporter.capture.count_only.counting import CountOnly
from torch_grad_exporter.capture.observations import Observations
from torch_grad_exporter.capture.preparation import RoundPreparation
from torch_grad_exporter.capture.progress import FORWARD, OUTSIDE, StepClock
from torch_grad_exporter.capture.steps import StepWatch
from torch_grad_exporter.capture.training_thread import TrainingThread
from torch_grad_exporter.capture.triggers import Ladder, hook_output
from torch_grad_exporter.torch_compat import called_from_step, graph_task, within_transform


class ForwardWatch:
    """Belongs to the training thread. `models`: how many roots there are.

    `periodic`: something else that belongs to that thread, to be done at the end of an evaluation's forwards.
    """

    def __init__(
        self,
        *,
        clock: StepClock,
        ladder: Ladder,
        steps: StepWatch,
        backward: BackwardWatch,
        preparation: RoundPreparation,
        count_only: CountOnly,
        observations: Observations,
        thread: TrainingThread,
        models: int,
        periodic: Callable[[], None] | None,
    ) -> None:
        self._clock = clock
        self._ladder = ladder
        self._steps = steps
        self._backward = backward
        self._preparation = preparation
        self._count_only = count_only
        self._observations = observations
        self._thread = thread
        self._models = models
        self._periodic = periodic
        self._trained = False
        """Whether there was a training forward, outside of a backward, since the last step."""

    def began(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A root's forward begins; outside of training it only shows that the loop is alive."""
        self._count_only.settle()
        clock = self._clock
        start = clock.clock()
        clock.active(evaluating=not module.training)
        if clock.stepping and not called_from_step(sys._getframe(1)):
            clock.leave_step()
            self._steps.abandoned()
        if torch.is_grad_enabled():
            self._preparation.forward_began(module)
        if module.training and torch.is_grad_enabled():
            # Checkpoints run forwards again within the backward; a reentrant one runs its first forward without grad.
            again = graph_task() != -1
            if not again:  # within a backward this may be a thread of autograd's
                self._thread.is_here()
                clock.switch(FORWARD)
            if clock.examples_known and not (again and self._trained):
                self._count_examples(args, kwargs)
            self._trained |= not again
        clock.spent(clock.clock() - start)

    def ended(self, model: int, module: torch.nn.Module, _args: object, _kwargs: object, output: object) -> None:
        """The forward of the root of this number is over: hooks its output, and observes a loss in it."""
        clock = self._clock
        start = clock.clock()
        if graph_task() != -1:
            return
        clock.switch(OUTSIDE)
        if torch.is_grad_enabled():
            self._hook(model, output)
            if module.training and not isinstance(output, torch.Tensor):
                self._observations.output(output)
        if self._periodic is not None and not module.training:
            self._periodic()
        clock.spent(clock.clock() - start)

    def step_over(self) -> None:
        """A step is over."""
        self._trained = False

    def _hook(self, model: int, output: object) -> None:
        """Hooks the output, so that its backward is seen."""
        if not self._ladder.current.announces or within_transform():
            return
        self._backward.raised()
        hook_output(output, self._backward.output_hooks[model])
        self._preparation.forward_ended(self._backward.node_hook)

    def _count_examples(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        size = batch_size(args, kwargs) if self._models == 1 else None
        if size is None:
            self._clock.examples_unknown()
        else:
            self._clock.examples_came(size)


def batch_size(args: tuple[object, ...], kwargs: Mapping[str, object]) -> int | None:
    """The first dimension of the first tensor input; `None` if other tensors disagree or there is none."""
    sizes = [value.shape[0] for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.dim() > 0]
    if any(type(size) is not int for size in sizes):
        return 0  # a tracer's symbols: this forward is no training
    return sizes[0] if len(set(sizes)) == 1 else None
