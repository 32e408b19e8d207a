"""StepReadings: what is read of a sampled round when an optimizer uses its gradients.

After the backward they were read as they were; at the step it is measured what the optimizer sees, after clipping. Where no
backward is seen all of it is read here.
"""

from __future__ import annotations

import functools

from torch_grad_exporter.capture.armed_round import ArmedRound, Lost
from torch_grad_exporter.capture.backward import BackwardHooks
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.detection import BackwardDetection
from torch_grad_exporter.capture.forwards import ForwardHooks
from torch_grad_exporter.capture.gradient_versions import GradientVersions
from torch_grad_exporter.capture.reader import GradientReader, StepView
from torch_grad_exporter.capture.rounds import RoundTracker
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.torch_compat.autograd import capturing_graph

REDUCED = "gradients were written after the backward, as by an all-reduce; norms are those at the step, after clipping"


class StepReadings:
    """Belongs to the training thread. Its time is charged to the sample."""

    def __init__(
        self,
        *,
        index: LayerIndex,
        optimizers: Optimizers,
        cost: SampleCost,
        reader: GradientReader,
        rounds: RoundTracker,
        detection: BackwardDetection,
        forwards: ForwardHooks,
        backward: BackwardHooks,
    ) -> None:
        self._index, self._optimizers, self._cost, self._reader = index, optimizers, cost, reader
        self._rounds, self._detection, self._forwards, self._backward = rounds, detection, forwards, backward

    def before_step(self, seen: StepView) -> None:
        """An optimizer is about to use these gradients, or has used those that a closure has left."""
        if not self._detection.sees_backwards:
            self._cost.of(self._read, seen)
            return
        current = self._rounds.current
        if current.sampled and current.fired and current.left is not None and self.reduced_since(seen):
            return
        if current.behind:
            self._cost.of(self._backward.catch_up)
        # Where the model's gradients were copied to those of another optimizer, it is not known what that one saw.
        copied = seen.optimizer in self._optimizers.copying or (current.foreign and not self._optimizers.reporting)
        if current.sample_is_open and seen.optimizer not in current.read and not copied:
            current.read.add(seen.optimizer)
            self._cost.of(self._reader.read_again, current, seen)

    def clipped(self, seen: StepView) -> None:
        """Gradients that were looked at just before have been clipped since, as `clip=` asks for."""
        current = self._rounds.current
        looked = seen.optimizer in current.read if self._detection.sees_backwards else current.sampled and current.captured
        if looked and current.sample_is_open and seen.optimizer not in self._rounds.closures:
            self._cost.of(functools.partial(self._reader.read_again, current, seen, ours=True))

    def within_backward(self, optimizer: int, gradients: list[int]) -> None:
        """An optimizer is about to use up these gradients, by their positions in the table, while the backward runs."""
        current = self._rounds.current
        current.read.add(optimizer)
        if current.sampled:
            self._cost.of(self._read_early, current, gradients)

    def inner_step(self, seen: StepView) -> None:
        """A step calls that of its base class: it may have reduced gradients before, as Horovod's does."""
        current = self._rounds.current
        if not (current.sampled and current.fired) or seen.optimizer in self._rounds.closures:
            return
        if self._detection.sees_backwards:
            self.reduced_since(seen)
        elif self._untouched(seen.optimizer) is False:
            current.early, current.early_fired = [], set()  # what was read before is no longer what is used
            self._cost.of(self._read, seen)

    def reduced_since(self, seen: StepView) -> bool:
        """Return whether the loop reduced gradients after the backward; then what the optimizer will use is read instead.

        With `ranks="first"` and no wrapper the loop makes the gradients of ranks equal, in hooks within the backward or after it.
        In the second case gradients are written to, or replaced, before the step. Clipping writes to them, too: which of the two
        it was cannot be seen, so either counts. The first sample waits for its step; if nothing was written, later ones are read
        where the backward ends.
        """
        untouched, current = self._untouched(seen.optimizer), self._rounds.current
        if untouched and current.behind:
            self._cost.of(self._backward.read)
        if untouched is not False or seen.optimizer == self._optimizers.manual_number:
            return False  # a step that the user reports is over: its gradients may be cleared
        self._detection.read_at_steps(REDUCED)
        self._cost.of(self._read, seen)
        return True

    def _untouched(self, optimizer: int) -> bool | None:
        """Return whether an optimizer's gradients are as the backward left them; None where the loop reduces none by itself."""
        current = self._rounds.current
        if current.left is None or not self._backward.reduces_by_itself:
            return None
        untouched = current.left.moved().isdisjoint(self._optimizers.positions_of(current.table, optimizer))
        self._detection.trusts_backwards |= untouched
        return untouched

    def _read_early(self, current: ArmedRound, positions: list[int]) -> bool:
        read = self._reader.read_early(current, positions)
        if not read:
            self._rounds.withdraw(Lost.FAILED)
        return read

    def _read(self, seen: StepView) -> None:
        """Read what the optimizer is about to use, where no backward is seen."""
        self._rounds.step_to_be_read(seen.optimizer)
        current = self._rounds.current
        if not current.sampled or capturing_graph():
            return
        self._forwards.look_for_ranks()
        if not current.captured:
            current.table = self._index.refresh()
        if not self._read_early(current, self._optimizers.positions_of(current.table, seen.optimizer)):
            return
        current.fired |= current.early_fired
        if current.fired:
            if self._backward.reduces_by_itself:
                current.left = GradientVersions.of(current.table.tracked)
            self._backward.read(seen)
