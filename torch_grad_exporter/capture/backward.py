"""BackwardHooks: one backward, from the forward before it to its end, and what it wrote.

It begins when it reaches the first parameter whose node is hooked; with FSDP, whose sharded parameters have no such nodes, when it
reaches the root's output. At its end a nested callback runs after everything that DistributedDataParallel and FSDP2 queued for it,
so the gradients are reduced there, and before clipping. A sample is read there and handed over at once, since a NaN that an
exception or a hang follows must be seen.

Which parameters got a gradient is known by their nodes. Where a wrapper writes gradients that came from other ranks it follows from
`.grad` and its version before and after; a gradient left from an earlier step does not count.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from torch_grad_exporter.capture.armed_round import Lost
from torch_grad_exporter.capture.gradient_versions import GradientVersions, PresentGradients
from torch_grad_exporter.capture.inspections import First, Inspection, Inspections
from torch_grad_exporter.capture.progress import BACKWARD, OUTSIDE
from torch_grad_exporter.capture.torch_hooks import differentiable
from torch_grad_exporter.errors import ErrorLog, say
from torch_grad_exporter.model.parameters import TrackedParameter, reduced
from torch_grad_exporter.torch_compat.autograd import (
    at_end_of_backward,
    graph_is_kept,
    graph_task,
    within_transform,
)

if TYPE_CHECKING:
    from torch_grad_exporter.capture.accumulate_grad import Gradients
    from torch_grad_exporter.capture.cost import SampleCost
    from torch_grad_exporter.capture.counted_rounds import CountedRounds
    from torch_grad_exporter.capture.detection import BackwardDetection
    from torch_grad_exporter.capture.forwards import ForwardHooks
    from torch_grad_exporter.capture.progress import StepClock, TrainingThread
    from torch_grad_exporter.capture.reader import GradientReader, StepView
    from torch_grad_exporter.capture.rounds import RoundTracker
    from torch_grad_exporter.capture.torch_hooks import Hooks
    from torch_grad_exporter.model.layers import LayerIndex
    from torch_grad_exporter.model.replicas import Reductions

logger = logging.getLogger("torch_grad_exporter")

UNANSWERED = 100
"""Backward passes without any step after which a warning is logged."""

NO_STEP = (
    "no optimizer step was seen in %s backward passes; if steps are taken by something that is not a torch.optim.Optimizer, "
    "or whose `step` was replaced, call exporter.step() after each"
)


class BackwardHooks:
    """Receives the hooks of backwards, on autograd's threads, one at a time.

    Attributes:
        task: Autograd's number of the backward that has reached an output or a hooked node and has not ended; -1 for none.
        returned: Whether a training forward has returned something other than a tensor since `StepHooks` cleared this.
    """

    def __init__(
        self,
        *,
        index: LayerIndex,
        clock: StepClock,
        cost: SampleCost,
        hooks: Hooks,
        reader: GradientReader,
        inspections: Inspections,
        rounds: RoundTracker,
        detection: BackwardDetection,
        reductions: Reductions,
        counted: CountedRounds,
        forwards: ForwardHooks,
        thread: TrainingThread,
        errors: ErrorLog,
        periodic: Callable[[], object] | None,
    ) -> None:
        self._index, self._clock, self._cost, self._reader = index, clock, cost, reader
        self._inspections, self._rounds, self._detection = inspections, rounds, detection
        self._reductions, self._counted, self._forwards = reductions, counted, forwards
        self._thread, self._periodic = thread, periodic
        self.task = -1
        self.returned = False
        self._before: GradientVersions | None = None  # all gradients before it, where nodes do not show all that is written
        self._end_hook = hooks.guarded("backward_hook", self._ended)
        self._output_hook = hooks.guarded("backward_hook", self._output_reached)
        detection.nodes.on_first = hooks.guarded("backward_hook", self._node_reached)
        self._reading = errors.boundary("capture", "gradients after a backward")
        self._reading_versions = errors.boundary("capture", "gradients before a backward")
        self._reading_reductions = errors.boundary("reduction", "beginning of a backward")

    # Before it

    def forward_ended(self, model: int, module: torch.nn.Module, _args: object, kwargs: dict[str, Any], output: object) -> None:
        """The forward of the root with this number is over: hook its output."""
        clock = self._clock
        start = clock.clock()
        if graph_task() != -1 or not self._thread.may_be_here():
            return
        clock.phases.enter(OUTSIDE, start)
        if torch.is_grad_enabled():
            self._hook(output)
            if module.training and not isinstance(output, torch.Tensor):
                self.returned = True
                self._inspections.tell(Inspection.forward_ended, model, output, kwargs)
        if self._periodic is not None and not module.training:
            self._periodic()
        clock.spent(start)

    def comes(self, loss: torch.Tensor) -> None:
        """A backward of this loss is about to begin: hook it, where no forward of a root has shown it in this round."""
        if self._clock.forward_came or self._counted.counting is not None or graph_task() != -1:
            return
        start = self._clock.clock()
        self._thread.ident = threading.get_ident()
        self._hook(loss)
        self._clock.spent(start)

    def _hook(self, output: object) -> None:
        if not self._detection.sees_backwards or within_transform():
            return
        if self.task != -1:
            self.abandon()
        for tensor in differentiable(output):
            tensor.register_hook(self._output_hook)  # type: ignore[no-untyped-call]

    def abandon(self) -> None:
        """Outside of any backward: one that began and did not end has raised."""
        self.task, self._detection.nodes.running = -1, False
        self._inspections.tell(Inspection.backward_dropped)

    # How it begins

    def _output_reached(self, _gradient: object) -> None:
        """A backward, or a `torch.autograd.grad`, has reached the output of a root."""
        task = graph_task()
        if task in (-1, self.task) or self._counted.counting is not None:
            return
        start = self._clock.clock()
        self._announced(task, start)
        detection = self._detection
        detection.looked = self._rounds.next_is_sampled and detection.by_nodes
        if detection.looked:  # no parameter is reached yet: hook what was added or thawed since the last step
            self._cost.of(detection.arm_all, within_step=True)
        if self._index.fully_sharded:
            self._begin(None)
        self._clock.spent(start)

    def _announced(self, task: int, start: float) -> None:
        """From here on time is that of the backward, and at its end we are called."""
        self.task, self._detection.nodes.running = task, False
        self._clock.phases.enter(BACKWARD, start)
        at_end_of_backward(self._end_hook)

    def _node_reached(self, tracked: TrackedParameter, gradients: Gradients) -> None:
        """The first parameter whose node is hooked is about to receive its gradient."""
        start = self._clock.clock()
        # A checkpoint runs a backward of its own within the model's, which has reached the output before.
        self._detection.around_roots = self.task != -1
        if self.task == -1:
            self._announced(graph_task(), start)
        if not self._detection.nodes.running:  # else the thread of another device was faster
            self._begin((tracked, gradients))
        self._cost.spent(start, sampled=self._rounds.current.sampled)

    def stepped_within(self) -> None:
        """An optimizer steps while the backward runs, so it writes gradients."""
        if not self._detection.nodes.running:
            start = self._clock.clock()
            if self.task == -1:
                self._announced(graph_task(), start)
            self._begin(None)

    def _begin(self, first: First | None) -> None:
        """A backward that writes gradients has begun. `first`: what has shown it."""
        self._counted.settle()
        rounds, detection = self._rounds, self._detection
        # First: what fails below must not begin it again at each node.
        self._before, detection.nodes.running = None, True
        detection.nodes.fired.clear()
        rounds.backward_began(self._forwards.evidence, within_step=self._clock.phases.stepping)
        if rounds.current.sampled:
            why = self._forwards.backward_began()
            if why is not None:
                rounds.withdraw(why)
        current = rounds.current
        if current.sampled:
            if self._reductions.forwards or self._reductions.coming is not None:
                self._reading_reductions(self._reductions.backward_began)
            if self._index.fully_sharded:
                self._before = self._forwards.early
            elif self._reductions.wrapped:
                self._before = self._reading_versions.result(GradientVersions.of, current.table.tracked)
        elif self._index.fully_sharded and graph_is_kept():  # it may be a `torch.autograd.grad`
            self._before = GradientVersions.of(detection.probes.all())
        self._inspections.tell(Inspection.backward_began, current, current.table, first, self.task)

    # How it ends

    def _ended(self) -> None:
        if self.task == -1:
            return
        start = self._clock.clock()
        nodes, current, before = self._detection.nodes, self._rounds.current, self._before
        self.task, self._before = -1, None
        self._clock.phases.enter(OUTSIDE, start)
        if not nodes.running:  # a `torch.autograd.grad`
            self._clock.spent(start)
            return
        nodes.running = False
        table, sampled, now = current.table, current.sampled, None
        fired: set[int] = set()  # the parameters whose gradient the backward wrote, in a sampled round
        if sampled:
            now = PresentGradients.of(table.tracked, marked=self._reader.readable)
            # A gradient that changed although its node was not reached was written by other code: DDP writes those of other ranks.
            moved = set() if before is None else before.moved(now)
            # Nodes of parameters without elements are not hooked; of their gradients there is nothing to be read.
            empty = {i for i in table.tracked.empty if now.gradients[i] is not None}
            fired = nodes.positions(table) | moved | empty | current.early_fired
            if table.tracked.flat:
                fired = reduced(table, fired)
        # FSDP2 may keep gradients that it has not reduced yet in a place that cannot be observed.
        elif before is not None and self._index.fully_sharded and not before.moved():
            self._inspections.tell(Inspection.backward_dropped)
            self._clock.spent(start)
            return
        reached: Iterable[int] = ()
        if self._index.models > 1:
            reached = {tracked.model for tracked in nodes.fired} or {table.tracked[i].model for i in fired}
        current.models.update(reached or range(self._index.models))
        self._clock.backward_passes += 1
        if self._clock.backward_passes == UNANSWERED and not self._clock.steps:
            say(logger, logging.WARNING, NO_STEP, UNANSWERED)
        complete = self._rounds.backward_ended(fired)
        self._inspections.tell(Inspection.backward_ended, current, start)
        # Gradients that the loop reduces after the backward are read at the step, see `StepHooks`.
        by_loop = sampled and self.reduces_by_itself
        if complete and (not by_loop or self._detection.trusts_backwards):
            self.read(now=now)
        if by_loop or current.behind:
            current.left = GradientVersions.of(table.tracked)
        if nodes.table is not None and not sampled:  # it is not known which parameters report backwards
            self._detection.follow(nodes.table, nodes.positions(nodes.table))
        self._detection.misses = 0
        self._detection.probes.backward_over(current.models)
        self._cost.spent(start, sampled=sampled)

    @property
    def reduces_by_itself(self) -> bool:
        """Whether the loop makes the gradients of ranks equal, as `ranks="first"` says, and no wrapper does."""
        return self._index.replicas.by_loop and not self._reductions.wrapped and not self._index.fully_sharded

    def catch_up(self) -> None:
        """At the step of a round with fewer backwards than any recent one: read its gradients, if they are untouched since."""
        left = self._rounds.current.left
        if left is not None and left.unchanged():
            self.read()
        else:
            self._rounds.withdraw(Lost.EDITED)

    def read(self, step: StepView | None = None, *, now: PresentGradients | None = None) -> None:
        """Read the round's gradients, and choose the probes until the next sample. `step`, `now`: see `GradientReader.read`."""
        rounds = self._rounds
        current = rounds.current
        divisor = self._forwards.divisor if self._detection.sees_backwards else 1.0
        before = current.parts
        self._reading(self._reader.read, current, rounds.pattern, divisor=divisor, step=step, now=now)
        if current.parts is before:
            rounds.withdraw(Lost.FAILED)
            return
        self._inspections.tell(Inspection.gradients_read, current)
        self._detection.follow(current.table, current.fired)
