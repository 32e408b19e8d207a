"""BackwardWatch: one backward, from the forward before it to its end, and what it wrote.

A backward is known by autograd's number of its graph task. At its end a nested callback runs after everything that
DistributedDataParallel and FSDP2 queued for it, so the gradients are reduced there, and before clipping. A sample is read there
and handed over at once, since a NaN that an exception or a hang follows must be seen.

Which parameters got a gradient follows from `.grad` and its version before and after; a gradient left from an earlier step does
not count.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

from torch_grad_exporter.capture.count_only.counting import CountOnly
from torch_grad_exporter.capture.gradient_versions import GradientVersions, PresentGradients
from torch_grad_exporter.capture.module_outputs import differentiable
from torch_grad_exporter.capture.outcomes import Lost, Mode
from torch_grad_exporter.capture.parts import Parts
from torch_grad_exporter.capture.phases import BACKWARD, OUTSIDE
from torch_grad_exporter.capture.preparation import RoundPreparation
from torch_grad_exporter.capture.reader import OptimizerView
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


@dataclass(slots=True)
class _Backward:
    """The running backward. `task`: autograd's number, -1 while there is none.

    `certain`: it writes gradients, so it is not `torch.autograd.grad`; `unannounced`: only nodes have seen it, as far as it has
    come. `before`: the versions of all gradients on a sampled round, of the probes else, where they are needed.
    """

    task: int = -1
    certain: bool = True
    unannounced: bool = False
    before: GradientVersions | None = None


class BackwardWatch:
    """Receives the hooks of backwards, on autograd's threads, one at a time. `preparation`: of sampled rounds, before them."""

    def __init__(self, parts: Parts, count_only: CountOnly) -> None:
        self._parts = parts
        self._regular = count_only.regular
        self._count_only = count_only
        self._clock = parts.clock
        self._rounds = parts.rounds
        self._running = _Backward()
        self._at_start: GradientVersions | None = None
        """The gradients when the exporter was started, until the first backward that was seen is over."""
        self._left: GradientVersions | None = None
        """The gradients of a sampled round at the end of its last backward, where they were not read."""
        hooks, models = parts.hooks, range(parts.index.models)
        self._end_hook = hooks.guarded("backward_hook", self._ended)
        self._detector_hooks = [hooks.guarded("backward_hook", functools.partial(self._detected, m)) for m in models]
        self._output_hooks = [hooks.guarded("backward_hook", functools.partial(self._reached, m)) for m in models]
        self.preparation = RoundPreparation(parts, hooks.guarded("backward_hook", self._node_fired))

    # Before it

    def watch(self) -> None:
        """The training may begin: a backward that comes before any forward of a root is not seen, but what it has left."""
        if not self._parts.index.fully_sharded:
            self._at_start = GradientVersions.of(self._parts.index.table.tracked)

    def forward_ended(self, model: int, output: object) -> None:
        """A forward of the root of this number is over: hooks its output."""
        if self._parts.ladder.mode is not Mode.OUTPUT or within_transform():
            return
        if self._running.task != -1:
            self.abandoned()
        for tensor in differentiable(output):
            on_gradient(tensor, self._output_hooks[model])

    def abandoned(self) -> None:
        """Outside of any backward: one that began and did not end has raised."""
        if self.running:
            self._running.task = -1
            self._parts.nodes.end()
            self._parts.reductions.disarm()

    @property
    def running(self) -> bool:
        """Whether a backward has begun and not ended."""
        return self._running.task != -1

    # How it begins

    def _reached(self, model: int, _gradient: object = None) -> None:
        """The backward of a model has reached its output."""
        task = graph_task()
        if task != self._running.task:
            if task == -1:
                return
            self._begin(task)
        self._running.unannounced = False  # else a parameter outside of the model's own graph came first
        self._ran_through(model)

    def _detected(self, model: int, _gradient: object) -> None:
        """A parameter is about to receive its gradient, on the rung `parameter`."""
        self._reached(model)
        self._running.certain = True

    def _node_fired(self, tracked: TrackedParameter) -> None:
        """A parameter has received its gradient on a round whose nodes are hooked, in a backward that is not known to run."""
        # A checkpoint runs a backward of its own within the model's; that one needs no announcement.
        if self._parts.ladder.mode is Mode.PARAMETER or not self.running:
            self._begin(graph_task(), unannounced=True)
        self._ran_through(tracked.model)

    def _ran_through(self, model: int) -> None:
        if model not in self._rounds.current.models:  # asked first: it is reached once for each parameter
            self._rounds.model_reached(model)

    def stepped_within(self) -> None:
        """An optimizer steps while the backward runs, so it writes gradients."""
        if graph_task() != self._running.task:
            self._begin(graph_task())
        self._running.certain = True

    def _begin(self, task: int, *, unannounced: bool = False) -> None:
        """A backward has begun, or a `torch.autograd.grad`, which passes the same hooks and writes no gradient.

        Asks to be called at its end, where the two are distinguished.
        """
        start = self._clock.clock()
        if self._regular.active and self._running.task == -1 and not unannounced and self._regular.backward_began(start):
            self._running.task, self._running.certain = task, True
            self._parts.waits.saw(task)
            (at_end_of_backward if self._regular.wrapped else after_backward)(self._end_hook)
            self._clock.spent(self._clock.clock() - start)
            return
        self._count_only.settle()
        # First: what fails below must not begin it again at each hook.
        self._running = running = _Backward(task, unannounced=unannounced and self._parts.ladder.announces)
        self._parts.waits.saw(task)
        self._parts.reader.backward_began()
        self._clock.switch(BACKWARD)
        self._rounds.backward_began(self.preparation.evidence, within_step=self._clock.stepping)
        if self._rounds.current.sampled:
            why = self.preparation.backward_began(unannounced=running.unannounced)
            if why is not None:
                self._rounds.withdraw(why)
                self._parts.nodes.disarm()
        sampled = self._rounds.current.sampled
        # Only a graph that is kept can have been passed by `autograd.grad` on the way to a second derivative.
        running.certain = not graph_is_kept()
        if sampled:
            self._begin_sampled()
        elif not running.certain:
            running.before = GradientVersions.of(self._parts.probes.all())
        if sampled or self._parts.reductions.wrapped:  # what a wrapper waits for at the end is part of the backward
            at_end_of_backward(self._end_hook)
        else:
            after_backward(self._end_hook)
        self._parts.cost.spent(start, sampled=sampled)

    def _begin_sampled(self) -> None:
        backwards = self._rounds.current.backwards
        if self._parts.ladder.mode is Mode.PARAMETER:
            self.preparation.look_for_pipeline(self._parts.thread.frame())
        self._parts.nodes.begin(self._running.task)
        on_host, local = self._parts.reader.devices <= {"cpu"}, self._parts.ladder.mode is Mode.OUTPUT
        self._parts.reductions.begin(self._parts.reader.table, backwards, on_host=on_host, local=local)
        if self._parts.ladder.mode is not Mode.OPTIMIZER:
            self._running.before = self.preparation.early if self._parts.index.fully_sharded else self._parts.reader.versions()

    # How it ends

    def _ended(self) -> None:
        if self._running.task == -1:
            return
        start = self._clock.clock()
        if self._regular.active and self._regular.backward_ended(start):
            self._running.task = -1
            self._clock.spent(self._clock.clock() - start)
            return
        backward, self._running = self._running, _Backward(certain=self._running.certain)
        self._parts.nodes.end()
        self._clock.switch(OUTSIDE)
        current = self._rounds.current
        sampled = current.sampled
        self._parts.waits.end(current.number, start)
        table = self._parts.reader.table
        now = PresentGradients.of(table.tracked) if sampled and backward.before is not None else None
        fired = reduced(table, self._fired(backward, now)) if sampled else set()
        written = self._written(backward, fired, sampled=sampled)
        self._parts.reductions.end(current, table, fired, written=written)
        if written:
            self._parts.ladder.seen()
            self._clock.backwards_passed(1)
            if self._clock.backward_passes == UNANSWERED and not self._clock.steps:
                say(logger, logging.WARNING, NO_STEP, UNANSWERED)
            may_read = not sampled or self._parts.by_hand.may_read(table)
            if self._rounds.backward_ended(fired, stepped_within=bool(self._parts.reader.found_early)) and may_read:
                self.read(now=now)
                self._left = None
            elif self._rounds.behind:
                self._left = self._parts.by_hand.left or GradientVersions.of(table.tracked)
            self._parts.probes.backward_over(current.models)
            self._parts.inspections.backward_ended(current.number, sampled=sampled)
        self._parts.cost.spent(start, sampled=sampled)

    def _written(self, backward: _Backward, fired: set[int], *, sampled: bool) -> bool:
        """Whether it was a backward that writes gradients, as far as can be known."""
        before = backward.before
        if sampled and (before is not None or self._parts.nodes.armed):
            # FSDP2 may keep gradients that it has not reduced yet in a place that cannot be observed.
            return bool(fired) or (self._parts.index.fully_sharded and backward.certain)
        return backward.certain or bool(before is not None and before.moved())

    def _fired(self, backward: _Backward, now: PresentGradients | None) -> set[int]:
        """The parameters whose gradient the backward wrote, on a sampled round. `now`: what there is of the table's."""
        early = self._parts.reader.found_early
        # A gradient that changed although its node did not fire was written by other code: DDP writes gradients of other ranks.
        moved = set() if backward.before is None else backward.before.moved(now)
        at_start, self._at_start = self._at_start, None
        if at_start is not None and at_start.tracked is self._parts.reader.table.tracked:
            moved |= {position for position in at_start.moved() if at_start.numbers[position] is None}
        if not self._parts.nodes.armed:
            return moved | early
        for model in {tracked.model for tracked in self._parts.nodes.fired}:
            self._ran_through(model)
        seen = self._parts.nodes.positions(self._parts.reader.table)
        if seen and backward.unannounced:
            self._parts.ladder.fall_to(Mode.PARAMETER, "a backward does not run through the model's output")
        return seen | moved | early

    def catch_up(self) -> None:
        """At the step of a round with fewer backwards than any lately: reads its gradients, if they are untouched since."""
        if self._left is not None and self._left.unchanged():
            self.read()
        else:
            self._rounds.sample_read(taken=False, why=Lost.EDITED)

    def read(self, step: OptimizerView | None = None, *, now: PresentGradients | None = None) -> None:
        """Reads the round's gradients, and chooses the probes until the next sample. `step`, `now`: as of `GradientReader.read`."""
        parts, rounds = self._parts, self._rounds
        parts.reader.divisor = self.preparation.divisor if parts.ladder.sees_backwards else 1.0
        taken = parts.reader.read(rounds, step, now)
        rounds.sample_read(taken=taken)
        if taken:
            parts.reductions.captured(rounds.current.number)
            parts.ladder.follow(parts.reader.table, rounds.current.fired, self._detector_hooks)
