"""StepWatch: what the steps of optimizers mean for the round, and the gradients as the optimizer sees them.

On the rung `optimizer` the gradients of a round are read here, since no backward is seen.
"""

from __future__ import annotations

import functools

import torch

from torch_grad_exporter.capture.backward import BackwardWatch
from torch_grad_exporter.capture.gradient_versions import GradientVersions
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.capture.parts import Parts
from torch_grad_exporter.capture.reader import StepView
from torch_grad_exporter.statistics.device import capturing_graph
from torch_grad_exporter.torch_compat.compiler import compiled_backwards

REDUCED = "gradients were written after the backward, as by an all-reduce; norms are those at the step, after clipping"


class StepWatch:
    """Receives the steps of the model's own optimizers. Belongs to the training thread."""

    def __init__(self, parts: Parts, backward: BackwardWatch) -> None:
        self._parts = parts
        self._backward = backward
        self._preparation = backward.preparation
        self._rounds = parts.rounds
        self._found_inf: dict[int, torch.Tensor] = {}
        self._compiled_before = compiled_backwards()
        self._nested: set[int] = set()
        """The optimizers whose step calls that of their base class, which PyTorch reports as two."""

    def began(self, seen: StepView, *, closure: bool) -> None:
        """An optimizer is about to step, with these gradients. `closure`: the backward is yet to come, within the step."""
        self._backward.abandoned()
        self._rounds.step_began(seen.optimizer, closure=closure)
        if seen.found_inf is not None:
            self._found_inf[seen.optimizer] = seen.found_inf
        if closure:
            return
        if self._parts.mode.sees_backwards:
            self._look(seen)
        else:
            self._parts.cost.of(self._read, seen)

    def clipped(self, seen: StepView) -> None:
        """Gradients that were looked at just before have been clipped since, as `clip=` asks for."""
        if seen.found_inf is not None:
            self._found_inf[seen.optimizer] = seen.found_inf
        current = self._rounds.current
        looked = seen.optimizer in current.read if self._parts.mode.sees_backwards else current.sampled and current.captured
        if looked and current.sample_is_open and seen.optimizer not in self._rounds.closures:
            self._parts.cost.of(functools.partial(self._parts.reader.read_again, current, seen, ours=True))

    def inner_began(self, optimizer: int) -> None:
        """A step that has begun calls that of its base class: it may have reduced gradients before, as Horovod's does."""
        self._nested.add(optimizer)
        current = self._rounds.current
        if not (current.sampled and current.fired) or optimizer in self._rounds.closures:
            return
        if self._parts.mode.sees_backwards:
            self._reduced_since(self._view(optimizer))
        elif self._untouched(optimizer) is False:
            current.early, current.early_fired = [], set()  # what was read before is no longer what is used
            self._parts.cost.of(self._read, self._view(optimizer))

    def tool_steps(self, optimizers: frozenset[int]) -> None:
        """Optimizers with a closure, in whose steps another one does the work, are about to use what the closure left."""
        if self._parts.mode.sees_backwards:
            for optimizer in optimizers.intersection(self._rounds.closures):
                self._look(self._view(optimizer))

    def within_backward(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step while the backward runs. `ended` is due when the backward is over."""
        self._backward.stepped_within()
        current = self._rounds.current
        self._rounds.stepping.add(number)
        current.read.add(number)
        if current.sampled:
            positions = self._parts.reader.positions_in(current.table, optimizer)
            self._parts.cost.of(self._parts.reader.read_early, current, positions)

    def ended(self, optimizer: int) -> bool | None:
        """An optimizer has stepped: whether it was the first of its round; `None` if the call was nested.

        An optimizer whose `step` calls `super().step()` reports twice; the inner call counts.
        """
        rounds = self._rounds
        if optimizer not in rounds.stepping:
            return None
        self._parts.fused.stepped(rounds.current.number, optimizer, self._found_inf.pop(optimizer, None))
        late = optimizer in rounds.closures
        if late and not self._parts.mode.sees_backwards:
            self._parts.cost.of(self._read, self._view(optimizer))
        if rounds.step_taken(optimizer):
            self._no_backward_seen()
        if late and self._parts.mode.sees_backwards:
            self._look(self._view(optimizer))
        first = not rounds.current.stepped
        rounds.step_ended(optimizer, self._waited(optimizer) if rounds.current.sample_is_open else frozenset())
        self.prepare_next()
        return first

    def left_out_by(self, optimizer: int) -> torch.Tensor | None:
        """What a fused optimizer was told of its step before it: not zero where it does nothing. Until `ended`."""
        return self._found_inf.get(optimizer)

    def prepare_next(self) -> None:
        """A round may begin: what its backward needs is there."""
        self._preparation.step_over()

    def abandoned(self) -> None:
        """A step that had begun raised and will not end."""
        self._rounds.step_abandoned()
        self._found_inf.clear()

    def regular_optimizer(self) -> int | None:
        """The only optimizer that ever steps, if all rounds lately were alike and the next ones may be taken for the same.

        Call it right after a step.
        """
        parts = self._parts
        settled = parts.mode.sees_backwards and not (parts.nodes.held or self._backward.running)
        # FSDP2 with parameters on the host would wait for a hook; an answer may say that a step did not take place.
        if not settled or parts.index.fully_sharded or parts.fused.waiting or parts.optimizers.has_tools:
            return None
        found = self._rounds.regular_optimizer()
        return None if found in parts.optimizers.copying | parts.fused.answering | self._nested else found

    def _view(self, optimizer: int) -> StepView:
        return StepView(optimizer, found_inf=self._found_inf.get(optimizer))

    def _look(self, seen: StepView) -> None:
        """What is left to read of a round that an optimizer is using now, or has just used."""
        current = self._rounds.current
        if current.sampled and current.fired and self._reduced_since(seen):
            return
        if current.behind:
            self._parts.cost.of(self._backward.catch_up)
        # Where the model's gradients were copied to those of another optimizer, it is not known what that one saw.
        optimizers = self._parts.optimizers
        copied = seen.optimizer in optimizers.copying or (current.foreign and not optimizers.reporting)
        if current.sample_is_open and seen.optimizer not in current.read and not copied:
            current.read.add(seen.optimizer)
            self._parts.cost.of(self._parts.reader.read_again, current, seen)

    def _untouched(self, optimizer: int) -> bool | None:
        """Return whether an optimizer's gradients are as the backward left them; None where the loop reduces none by itself."""
        current = self._rounds.current
        if current.left is None or not self._backward.reduces_by_itself:
            return None
        untouched = current.left.moved().isdisjoint(self._parts.reader.positions_of(current.table, optimizer))
        self._parts.mode.trusts_backwards |= untouched
        return untouched

    def _reduced_since(self, seen: StepView) -> bool:
        """Whether the backward has left this rank's own gradients; then what the optimizer is about to use is read instead."""
        parts = self._parts
        untouched = self._untouched(seen.optimizer)
        if untouched and self._rounds.current.behind:
            parts.cost.of(self._backward.read)
        if untouched is not False or seen.optimizer == parts.optimizers.manual_number:
            return False  # a step that the user reports is over: its gradients may be cleared
        parts.mode.read_at_steps(REDUCED)
        parts.nodes.release()
        parts.inspections.tell(Inspection.backward_dropped)
        parts.cost.of(self._read, seen)
        return True

    def _read(self, seen: StepView) -> None:
        """The rung `optimizer`: reads what the optimizer is about to use."""
        self._rounds.step_to_be_read(seen.optimizer)
        current = self._rounds.current
        if not current.sampled or capturing_graph():
            return
        self._preparation.look_for_ranks()
        if not current.captured:
            current.table = self._preparation.table_now(within_step=False)
        self._parts.reader.read_early(current, self._parts.reader.positions_of(current.table, seen.optimizer))
        current.fired |= current.early_fired
        if current.fired:
            if self._backward.reduces_by_itself:
                current.left = GradientVersions.of(current.table.tracked)
            self._backward.read(seen)

    def _waited(self, optimizer: int) -> frozenset[int]:
        """The optimizers whose steps on the captured gradients are still to come, or have been."""
        current = self._rounds.current
        owners = self._parts.reader.owners_of(current, optimizer)
        if self._parts.mode.sees_backwards:
            return owners
        return owners.union(number for number, _ in self._parts.optimizers.numbered())  # each is read when it steps

    def _no_backward_seen(self) -> None:
        """A step that no backward was seen before."""
        parts, mode = self._parts, self._parts.mode
        if not mode.sees_backwards:
            return
        table = parts.index.refresh(within_step=True)
        has_gradients = any(tracked.gradient() is not None for tracked in table.tracked)
        if not (has_gradients and parts.probes.written_between_steps(table)):
            return
        compiled, complete = compiled_backwards() > self._compiled_before, parts.nodes.hooks_all_of(table)
        parts.nodes.disarm()  # they may be those of tensors that were replaced
        if compiled or complete or parts.index.fully_sharded:
            # Where hooked nodes saw nothing, gradients do not come from autograd.
            parts.mode.missed(compiled=compiled)
        mode.unsure = True
        if not parts.mode.sees_backwards:
            parts.nodes.release()
            parts.inspections.tell(Inspection.backward_dropped)  # no end of a backward will do it
