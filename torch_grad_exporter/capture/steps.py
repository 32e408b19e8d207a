"""StepWatch: what the steps of optimizers mean for the round, and the gradients as the optimizer sees them.

On the rung `optimizer` the gradients of a round are read here, since no backward is seen.
"""

from __future__ import annotations

import torch

from torch_grad_exporter.capture.accumulate_grad import AccumulateGradNodes, NodeHook
from torch_grad_exporter.capture.backward import BackwardWatch
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.gradient_versions import GradientProbes
from torch_grad_exporter.capture.preparation import RoundPreparation
from torch_grad_exporter.capture.reader import OptimizerView
from torch_grad_exporter.capture.reduction_watch import ReductionWatch
from torch_grad_exporter.capture.round_events import (
    GradientsFound,
    NoBackwardSeen,
    ReadByOptimizer,
    ReadGradients,
    RoundOfStep,
    SampleRead,
    StepAbandoned,
    StepBegan,
    StepEnded,
    StepWithinBackward,
)
from torch_grad_exporter.capture.round_executor import Rounds
from torch_grad_exporter.capture.sampler import Sampler, capturing_graph
from torch_grad_exporter.capture.triggers import Ladder
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.torch_compat import compiled_backwards
from torch_grad_exporter.transfer.outcomes import Mode


class StepWatch:
    """Receives the steps of the model's own optimizers. Belongs to the training thread."""

    def __init__(
        self,
        *,
        index: LayerIndex,
        optimizers: Optimizers,
        rounds: Rounds,
        ladder: Ladder,
        nodes: AccumulateGradNodes,
        probes: GradientProbes,
        sampler: Sampler,
        reductions: ReductionWatch,
        preparation: RoundPreparation,
        backward: BackwardWatch,
        cost: SampleCost,
    ) -> None:
        self._index = index
        self._optimizers = optimizers
        self._rounds = rounds
        self._ladder = ladder
        self._nodes = nodes
        self._probes = probes
        self._sampler = sampler
        self._reductions = reductions
        self._preparation = preparation
        self._backward = backward
        self._cost = cost
        self._found_inf: dict[int, torch.Tensor] = {}
        self._compiled_before = compiled_backwards()

    def began(self, seen: OptimizerView, *, closure: bool) -> None:
        """An optimizer is about to step, with these gradients. `closure`: the backward is yet to come, within the step."""
        self._rounds.handle(StepBegan(seen.optimizer, closure))
        if seen.found_inf is not None:
            self._found_inf[seen.optimizer] = seen.found_inf
        if closure:
            return
        if self._ladder.current.sees_backwards:
            self._look(seen)
        else:
            self._cost.of(self._read, seen.optimizer)

    def tool_steps(self, optimizers: frozenset[int]) -> None:
        """Optimizers with a closure, in whose steps another one does the work, are about to use what the closure left."""
        if self._ladder.current.sees_backwards:
            for optimizer in optimizers.intersection(self._rounds.tracker.closures):
                self._look(self._view(optimizer))

    def within_backward(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step while the backward runs. `ended` is due when the backward is over."""
        self._backward.stepped_within()
        self._rounds.handle(StepWithinBackward(number))
        if self._rounds.tracker.current.sampled:
            self._sampler.read_within_backward(optimizer)

    def ended(self, optimizer: int) -> bool | None:
        """An optimizer has stepped: whether it was the first of its round; `None` if the call was nested.

        An optimizer whose `step` calls `super().step()` reports twice; the inner call counts.
        """
        tracker = self._rounds.tracker
        if optimizer not in tracker.stepping:
            return None
        self._rounds.step_counted(optimizer, self._found_inf.pop(optimizer, None))
        late = optimizer in tracker.closures
        if late and not self._ladder.current.sees_backwards:
            self._cost.of(self._read, optimizer)
        armed = self._nodes.armed
        if NoBackwardSeen() in self._rounds.handle(RoundOfStep(optimizer)):
            self._no_backward_seen(armed=armed)
        if late and self._ladder.current.sees_backwards:
            self._look(self._view(optimizer))
        first = not tracker.current.stepped
        self._rounds.handle(StepEnded(optimizer, self._waited(optimizer) if tracker.sample_is_open else frozenset()))
        self._preparation.step_over(self._backward.node_hook)
        return first

    def abandoned(self) -> None:
        """A step that had begun raised and will not end."""
        self._rounds.handle(StepAbandoned())
        self._found_inf.clear()

    @property
    def node_hook(self) -> NodeHook:
        """What receives the parameters whose armed nodes fire."""
        return self._backward.node_hook

    def regular_optimizer(self) -> int | None:
        """The only optimizer that ever steps, if all rounds lately were alike and the next ones may be taken for the same.

        Call it right after a step.
        """
        settled = self._ladder.mode is Mode.OUTPUT and not (self._nodes.armed or self._backward.running)
        if not settled or self._index.fully_sharded or self._index.models != 1 or self._rounds.answers_may_come:
            return None
        found = self._rounds.tracker.regular_optimizer()
        return None if found in self._optimizers.copying else found

    def _view(self, optimizer: int) -> OptimizerView:
        return OptimizerView(optimizer, found_inf=self._found_inf.get(optimizer))

    def _look(self, seen: OptimizerView) -> None:
        """What is left to read of a round that an optimizer is using now, or has just used."""
        tracker = self._rounds.tracker
        if tracker.behind:
            self._cost.of(self._catch_up)
        # Where the model's gradients were copied to those of another optimizer, it is not known what that one saw.
        copied = seen.optimizer in self._optimizers.copying or (tracker.current.foreign and not self._optimizers.reporting)
        if tracker.sample_is_open and seen.optimizer not in tracker.current.read and not copied:
            self._rounds.handle(ReadByOptimizer(seen.optimizer))
            self._cost.of(self._sampler.read_again, tracker, seen)

    def _catch_up(self) -> None:
        """A round with fewer backwards than any lately: reads its gradients at the step, if they are untouched."""
        if self._probes.untouched():
            self._backward.read()
        else:
            self._rounds.handle(SampleRead(taken=False))

    def _read(self, optimizer: int) -> None:
        """The rung `optimizer`: reads what the optimizer is about to use."""
        self._rounds.handle(RoundOfStep(optimizer, reads=True))
        current = self._rounds.tracker.current
        if not current.sampled or capturing_graph():
            return
        self._reductions.look()
        if not current.captured:
            self._sampler.renew_table(within_step=False)
        if ReadGradients() in self._rounds.handle(GradientsFound(self._sampler.read_of(optimizer))):
            self._backward.read()

    def _waited(self, optimizer: int) -> frozenset[int]:
        """The optimizers whose steps on the captured gradients are still to come, or have been."""
        current = self._rounds.tracker.current
        owners = self._sampler.owners_of(current.fired, {*current.stepped, optimizer})
        if self._ladder.current.sees_backwards:
            return owners
        return owners.union(number for number, _ in self._optimizers.numbered())  # each is read when it steps

    def _no_backward_seen(self, *, armed: bool) -> None:
        """A step that no backward was seen before: another rung may see what this one does not. `armed`: nodes were, before it."""
        mode = self._ladder.mode
        if mode is Mode.OPTIMIZER or (mode is Mode.PARAMETER and not armed):
            return
        table = self._sampler.table
        has_gradients = any(tracked.gradient() is not None for tracked in table.tracked)
        if has_gradients and self._probes.written_between_steps(table):
            self._nodes.disarm()  # they may be those of tensors that were replaced
            compiled = compiled_backwards() > self._compiled_before
            self._ladder.missed(compiled=compiled, fully_sharded=self._index.fully_sharded)
            if not self._ladder.current.sees_backwards:
                self._reductions.disarm()  # no end of a backward will do it
