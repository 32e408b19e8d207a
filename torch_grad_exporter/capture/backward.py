"""BackwardWatch: one backward, from the forward before it to its end, and what it wrote.

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

import numpy as np

from torch_grad_exporter.capture.accumulate_grad import Gradients
from torch_grad_exporter.capture.counted_rounds import CountedRounds
from torch_grad_exporter.capture.gradient_versions import GradientVersions, PresentGradients
from torch_grad_exporter.capture.inspections import First, Inspection
from torch_grad_exporter.capture.module_outputs import differentiable
from torch_grad_exporter.capture.outcomes import Lost
from torch_grad_exporter.capture.parts import Parts
from torch_grad_exporter.capture.phases import BACKWARD, OUTSIDE
from torch_grad_exporter.capture.preparation import RoundPreparation
from torch_grad_exporter.capture.reader import StepView
from torch_grad_exporter.errors import say
from torch_grad_exporter.model.parameters import TrackedParameter, reduced
from torch_grad_exporter.torch_compat.autograd import (  # fmt: skip
    after_backward,
    at_end_of_backward,
    graph_is_kept,
    graph_task,
    on_gradient,
    within_transform,
)

logger = logging.getLogger("torch_grad_exporter")

UNANSWERED = 100
"""Backward passes without any step after which a warning is logged."""

NO_STEP = (
    "no optimizer step was seen in %s backward passes; if steps are taken by something that is no torch.optim.Optimizer, "
    "or whose `step` was replaced, call exporter.step() after each"
)


class BackwardWatch:
    """Receives the hooks of backwards, on autograd's threads, one at a time. `preparation`: of sampled rounds, before them."""

    def __init__(self, parts: Parts, counted: CountedRounds) -> None:
        self._parts = parts
        self._counted = counted
        self._clock = parts.clock
        self._rounds = parts.rounds
        self._task = -1
        """Autograd's number of the backward that has reached the root's output, or else the first hooked node; -1 for none."""
        self._writes = False
        """Whether it writes gradients: it has begun for the rules of rounds."""
        self._before: GradientVersions | None = None
        """The versions of all gradients before it, where nodes do not show all that is written."""
        self._at_start: GradientVersions | None = None
        """The gradients when the exporter was started, until the first backward that was seen is over."""
        hooks = parts.hooks
        self._end_hook = hooks.guarded("backward_hook", self._ended)
        self._output_hook = hooks.guarded("backward_hook", self._reached)
        parts.nodes.on_first = hooks.guarded("backward_hook", self._node_reached)
        self.preparation = RoundPreparation(parts)
        self._versions = parts.errors.boundary("capture", "gradients before a backward")
        self._reduction = parts.errors.boundary("reduction", "beginning of a backward")

    # Before it

    def watch(self) -> None:
        """The training may begin: a backward that comes before any forward of a root is not seen, but what it has left."""
        # Another thread may be training already, whose gradients are not to be looked at meanwhile.
        if not self._parts.index.fully_sharded and threading.current_thread() is threading.main_thread():
            self._at_start = GradientVersions.of(self._parts.index.table.tracked)

    def forward_ended(self, output: object) -> None:
        """A forward of a root is over: hooks its output."""
        if not self._parts.mode.sees_backwards or within_transform():
            return
        if self._task != -1:
            self.abandoned()
        for tensor in differentiable(output):
            on_gradient(tensor, self._output_hook)

    def abandoned(self) -> None:
        """Outside of any backward: one that began and did not end has raised."""
        if self.running:
            self._task, self._writes = -1, False
            self._parts.nodes.end()
            self._parts.inspections.tell(Inspection.backward_dropped)

    @property
    def running(self) -> bool:
        """Whether a backward has begun and not ended."""
        return self._task != -1

    # How it begins

    def _reached(self, _gradient: object) -> None:
        """A backward, or a `torch.autograd.grad`, has reached the output of a root."""
        task = graph_task()
        if task in (-1, self._task) or self._counted.counting:
            return
        start = self._clock.clock()
        self._announced(task, start)
        self.preparation.backward_announced()
        if self._parts.index.fully_sharded:
            self._begin()
        self._clock.spent(self._clock.clock() - start)

    def _announced(self, task: int, start: float) -> None:
        """From here on time is that of the backward, and at its end we are called."""
        self._task, self._writes = task, False
        self._clock.switch(BACKWARD, start)
        # What a wrapper waits for at the end is part of the backward.
        nested = self._rounds.next_is_sampled or self._parts.reductions.wrapped or self._parts.index.fully_sharded
        (at_end_of_backward if nested else after_backward)(self._end_hook)

    def _node_reached(self, tracked: TrackedParameter, gradients: Gradients) -> None:
        """The first parameter whose node is hooked is about to receive its gradient."""
        start = self._clock.clock()
        # A checkpoint runs a backward of its own within the model's, which has reached the output before.
        self._parts.mode.around_roots = self._task != -1
        if self._task == -1:
            self._announced(graph_task(), start)
        if not self._writes:
            self._begin((tracked, gradients))
        self._parts.cost.spent(start, sampled=self._rounds.current.sampled)

    def stepped_within(self) -> None:
        """An optimizer steps while the backward runs, so it writes gradients."""
        if not self._writes:
            start = self._clock.clock()
            if self._task == -1:
                self._announced(graph_task(), start)
            self._begin()

    def _begin(self, first: First | None = None) -> None:
        """A backward that writes gradients has begun."""
        self._counted.settle()
        parts, rounds = self._parts, self._rounds
        # First: what fails below must not begin it again at each node.
        self._writes, self._before = True, None
        parts.nodes.begin()
        rounds.backward_began(self.preparation.evidence, within_step=self._clock.stepping)
        if rounds.current.sampled:
            why = self.preparation.backward_began()
            if why is not None:
                rounds.withdraw(why)
        if rounds.current.sampled:
            self._reduction(parts.reductions.backward_began)
            if parts.index.fully_sharded:
                self._before = self.preparation.early
            elif parts.reductions.wrapped:
                self._before = self._versions.result(GradientVersions.of, rounds.current.table.tracked)
        elif parts.index.fully_sharded and graph_is_kept():  # it may be a `torch.autograd.grad`
            self._before = GradientVersions.of(parts.probes.all())
        parts.inspections.tell(Inspection.backward_began, rounds.current, rounds.current.table, first, self._task)

    # How it ends

    def _ended(self) -> None:
        if self._task == -1:
            return
        start = self._clock.clock()
        writes, before = self._writes, self._before
        self._task, self._writes, self._before = -1, False, None
        parts, rounds = self._parts, self._rounds
        self._clock.switch(OUTSIDE, start)
        parts.nodes.end()
        current = rounds.current
        table = current.table
        if not writes:  # a `torch.autograd.grad`
            self._clock.spent(self._clock.clock() - start)
            return
        sampled = current.sampled
        now = PresentGradients.of(table.tracked) if sampled else None
        fired = reduced(table, self._fired(before, now)) if sampled else set()
        written = self._written(before, fired, sampled=sampled)
        if not written:
            parts.inspections.tell(Inspection.backward_dropped)
        else:
            models = {tracked.model for tracked in parts.nodes.fired} or {table.tracked[i].model for i in fired}
            current.models.update(models or range(parts.index.models))
            parts.mode.seen()
            self._clock.backwards_passed(1)
            if self._clock.backward_passes == UNANSWERED and not self._clock.steps:
                say(logger, logging.WARNING, NO_STEP, UNANSWERED)
            complete = rounds.backward_ended(fired)
            parts.inspections.tell(Inspection.backward_ended, current, start)
            # Gradients that the loop reduces after the backward are read at the step; see `StepWatch._reduced_since`.
            may_read = not sampled or parts.mode.trusts_backwards or not self.reduces_by_itself
            if complete and may_read:
                self.read(now=now)
            if current.behind or (sampled and self.reduces_by_itself):
                current.left = GradientVersions.of(table.tracked)
            if parts.nodes.table is not None and not sampled:  # it is not known which parameters report backwards
                parts.mode.follow(parts.nodes.table, parts.nodes.positions(parts.nodes.table))
            parts.probes.backward_over(current.models)
        parts.cost.spent(start, sampled=sampled)

    def _written(self, before: GradientVersions | None, fired: set[int], *, sampled: bool) -> bool:
        """Whether gradients were written, as far as can be known."""
        if not self._parts.index.fully_sharded:
            return True
        # FSDP2 may keep gradients that it has not reduced yet in a place that cannot be observed.
        return bool(fired) or sampled or before is None or bool(before.moved())

    def _fired(self, before: GradientVersions | None, now: PresentGradients | None) -> set[int]:
        """The parameters whose gradient the backward wrote, on a sampled round. `now`: what there is of the table's."""
        current = self._rounds.current
        table = current.table
        # A gradient that changed although its node was not reached was written by other code: DDP writes those of other ranks.
        moved = set() if before is None else before.moved(now)
        at_start, self._at_start = self._at_start, None
        if at_start is not None and at_start.tracked is table.tracked:
            moved |= {position for position in at_start.moved() if at_start.numbers[position] is None}
        # Nodes of parameters without elements are not hooked; of their gradients there is nothing to be read.
        empty = {i for i in np.flatnonzero(table.elements == 0).tolist() if table.tracked[i].gradient() is not None}
        return self._parts.nodes.positions(table) | moved | empty | current.early_fired

    @property
    def reduces_by_itself(self) -> bool:
        """Whether the loop makes the gradients of ranks equal, as `ranks="first"` says, and no wrapper does."""
        parts = self._parts
        return parts.index.replicas.by_hand and not parts.reductions.wrapped and not parts.index.fully_sharded

    def catch_up(self) -> None:
        """At the step of a round with fewer backwards than any lately: reads its gradients, if they are untouched since."""
        left = self._rounds.current.left
        if left is not None and left.unchanged():
            self.read()
        else:
            self._rounds.sample_read(taken=False, why=Lost.EDITED)

    def read(self, step: StepView | None = None, *, now: PresentGradients | None = None) -> None:
        """Reads the round's gradients, and chooses the probes until the next sample. `step`, `now`: as of `GradientReader.read`."""
        parts, rounds = self._parts, self._rounds
        divisor = self.preparation.divisor if parts.mode.sees_backwards else 1.0
        taken = parts.reader.read(rounds.current, rounds.pattern, divisor=divisor, step=step, now=now)
        rounds.sample_read(taken=taken)
        if taken:
            parts.inspections.tell(Inspection.gradients_read, rounds.current)
            parts.mode.follow(rounds.current.table, rounds.current.fired)
