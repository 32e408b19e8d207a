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

import torch

from torch_grad_exporter.capture.count_only.counting import CountOnly
from torch_grad_exporter.capture.gradient_versions import GradientVersions
from torch_grad_exporter.capture.module_outputs import differentiable
from torch_grad_exporter.capture.parts import Parts
from torch_grad_exporter.capture.progress import BACKWARD, OUTSIDE
from torch_grad_exporter.capture.reader import capturing_graph
from torch_grad_exporter.capture.round_pattern import ClearingEvidence
from torch_grad_exporter.errors import say
from torch_grad_exporter.model.parameters import TrackedParameter
from torch_grad_exporter.torch_compat import (
    after_backward,
    at_end_of_backward,
    graph_is_kept,
    graph_task,
    on_gradient,
    within_transform,
)  # fmt: skip
from torch_grad_exporter.transfer.outcomes import Mode

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

    `certain`: it writes gradients, so it is not `torch.autograd.grad`; `unannounced`: only a node has seen it begin. `before`: the
    versions of all gradients on a sampled round, of the probes else, where they are needed.
    """

    task: int = -1
    certain: bool = True
    unannounced: bool = False
    before: GradientVersions | None = None


class BackwardWatch:
    """Receives the hooks of backwards, on autograd's threads, one at a time."""

    def __init__(self, parts: Parts, count_only: CountOnly) -> None:
        self._parts = parts
        self._count_only = count_only
        self._clock = parts.clock
        self._rounds = parts.rounds
        self._running = _Backward()
        self._early_evidence = ClearingEvidence()
        self._early: GradientVersions | None = None
        """With FSDP2: what was seen before the forward, where it shows its sharded parameters in their places."""
        hooks, models = parts.hooks, range(parts.index.models)
        self._end_hook = hooks.guarded("backward_hook", self._ended)
        self._detector_hooks = [hooks.guarded("backward_hook", functools.partial(self._detected, m)) for m in models]
        self._output_hooks = [hooks.guarded("backward_hook", functools.partial(self._reached, m)) for m in models]
        self._node_hook = hooks.guarded("backward_hook", self._node_fired)

    # Before it

    def forward_began(self, root: torch.nn.Module) -> None:
        """A forward of a root with gradients begins: with FSDP2 the last moment at which sharded parameters are in their places."""
        if graph_task() != -1:
            return
        rounds, index = self._rounds, self._parts.index
        if rounds.next_is_sampled:
            self._parts.reductions.look(root)
        if index.fully_sharded:
            current = rounds.current
            again = bool(current.backwards) and not current.stepped and not rounds.stepping
            self._early_evidence = self._evidence_now() if again else ClearingEvidence()
            if not again or self._early is None:  # else, in the middle of a round, FSDP2 may have left them gathered
                in_place = rounds.next_is_sampled and index.table.parameters() is not None  # `None`: FSDP2 has gathered them
                self._early = GradientVersions.of(index.refresh().tracked) if in_place else None

    def forward_ended(self, model: int, output: object) -> None:
        """A forward of the root of this number is over: hooks its output, and arms the nodes for a check."""
        if not self._parts.ladder.announces or within_transform():
            return
        if self.running:  # one that began and did not end has raised
            self._running.task = -1
            self._parts.reductions.disarm()
        for tensor in differentiable(output):
            on_gradient(tensor, self._output_hooks[model])
        if self._wants_nodes():
            self._parts.cost.of(self._arm)

    def step_over(self) -> None:
        """A step is over: scans the parameters again if the next round is sampled."""
        parts = self._parts
        if parts.index.fully_sharded:
            parts.hooks.come_first()
        if parts.ladder.announces or not parts.rounds.next_is_sampled:  # a check of the rung `output` is over after one round
            parts.nodes.disarm()
        if self._wants_nodes():
            parts.cost.of(parts.index.refresh)
            parts.cost.of(self._arm)

    def _wants_nodes(self) -> bool:
        """Whether nodes are to be armed that are not, and can be."""
        parts = self._parts
        wanted = parts.ladder.wants_nodes(parts.rounds.samples) and parts.rounds.next_is_sampled
        # The nodes of gathered parameters do not show what happens to the sharded ones.
        return wanted and not parts.nodes.armed and not parts.index.fully_sharded

    def _arm(self) -> None:
        """Hooks the AccumulateGrad nodes of all parameters until the round ends."""
        table = self._parts.index.table
        # Not after another scan: `torch.func.functional_call` has put others in the parameters' places if this is in a forward.
        if table.parameters() is not None:
            self._parts.nodes.arm(table, self._node_hook)

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
        self._ran_through(model)

    def _detected(self, model: int, _gradient: object) -> None:
        """A parameter is about to receive its gradient, on the rung `parameter`."""
        self._reached(model)
        self._running.certain = True

    def _node_fired(self, tracked: TrackedParameter, *_gradients: object) -> None:
        """A parameter has received its gradient on a round whose nodes are hooked."""
        task = graph_task()
        # A checkpoint runs a backward of its own within the model's; that one needs no announcement.
        if task != self._running.task and (self._parts.ladder.mode is Mode.PARAMETER or self._running.task == -1):
            self._begin(task)
            self._running.unannounced = self._parts.ladder.announces
        self._parts.nodes.saw(tracked)
        self._ran_through(tracked.model)

    def _ran_through(self, model: int) -> None:
        if model not in self._rounds.current.models:  # asked first: it is reached once for each parameter
            self._rounds.model_reached(model)

    def stepped_within(self) -> None:
        """An optimizer steps while the backward runs, so it writes gradients."""
        if graph_task() != self._running.task:
            self._begin(graph_task())
        self._running.certain = True

    def _begin(self, task: int) -> None:
        """A backward has begun, or a `torch.autograd.grad`, which passes the same hooks and writes no gradient.

        Asks to be called at its end, where the two are distinguished.
        """
        start = self._clock.clock()
        self._count_only.settle()
        self._running = running = _Backward(task)  # first: what fails below must not begin it again at each hook
        self._parts.waits.saw(task)
        self._parts.reader.backward_began()
        self._clock.switch(BACKWARD)
        self._rounds.backward_began(self._evidence, within_step=self._clock.stepping)
        if self._rounds.current.sampled and not self._can_read():
            self._rounds.sample_impossible()
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
        if not backwards:
            self._renew_table()
        self._parts.nodes.begin()
        on_host, local = self._parts.reader.devices <= {"cpu"}, self._parts.ladder.mode is Mode.OUTPUT
        self._parts.reductions.begin(self._parts.reader.table, backwards, on_host=on_host, local=local)
        if self._parts.ladder.mode is not Mode.OPTIMIZER:
            self._running.before = self._early if self._parts.index.fully_sharded else self._parts.reader.versions()

    def _can_read(self) -> bool:
        """Whether the gradients of this backward can be distinguished from earlier ones, and be read."""
        if capturing_graph():
            return False
        if self._parts.ladder.mode is Mode.PARAMETER:
            self._renew_table()
            return self._parts.nodes.armed
        seen = not self._parts.index.fully_sharded or self._early is not None
        return seen or not self._parts.ladder.sees_backwards

    def _renew_table(self) -> None:
        """Takes the parameters that are trained now; nodes that were armed before some of them were added miss those."""
        if self._parts.ladder.mode is not Mode.OUTPUT:
            self._parts.reductions.look()
        table = self._parts.reader.renew_table()
        if self._parts.nodes.armed and not self._parts.nodes.sees_all_of(table):
            self._parts.nodes.disarm()

    def _evidence(self) -> ClearingEvidence:
        """What the gradients of the last backward look like now; with FSDP2, what they looked like before the forward."""
        return self._early_evidence if self._parts.index.fully_sharded else self._evidence_now()

    def _evidence_now(self) -> ClearingEvidence:
        parts, probes = self._parts, self._parts.probes
        gone, written = probes.gone(), probes.written()
        if not (gone or written):
            return ClearingEvidence()
        return ClearingEvidence(gone, written, probes.updated(), parts.optimizers.reporting, parts.reader.knows_scaler)

    # How it ends

    def _ended(self) -> None:
        if self._running.task == -1:
            return
        start = self._clock.clock()
        backward, self._running = self._running, _Backward(certain=self._running.certain)
        self._clock.switch(OUTSIDE)
        current = self._rounds.current
        sampled = current.sampled
        self._parts.waits.end(current.number, start)
        fired = self._fired(backward) if sampled else set()
        written = self._written(backward, fired, sampled=sampled)
        self._parts.reductions.end(current, self._parts.reader.table, fired, written=written)
        if written:
            self._parts.ladder.seen()
            self._clock.backwards_passed(1)
            if self._clock.backward_passes == UNANSWERED and not self._clock.steps:
                say(logger, logging.WARNING, NO_STEP, UNANSWERED)
            if self._rounds.backward_ended(fired, stepped_within=bool(self._parts.reader.found_early)):
                self.read()
            self._parts.probes.backward_over(current.models)
        self._parts.cost.spent(start, sampled=sampled)

    def _written(self, backward: _Backward, fired: set[int], *, sampled: bool) -> bool:
        """Whether it was a backward that writes gradients, as far as can be known."""
        before = backward.before
        if sampled and (before is not None or self._parts.nodes.armed):
            # FSDP2 may keep gradients that it has not reduced yet in a place that cannot be observed.
            return bool(fired) or (self._parts.index.fully_sharded and backward.certain)
        return backward.certain or bool(before is not None and before.moved())

    def _fired(self, backward: _Backward) -> set[int]:
        """The parameters whose gradient the backward wrote, on a sampled round."""
        early = self._parts.reader.found_early
        moved = set() if backward.before is None else backward.before.moved()
        if not self._parts.nodes.armed:
            return moved | early
        table = self._parts.reader.table
        seen = self._parts.nodes.positions(table)
        # Gradients that a hook of the user has already cleared have no version.
        left = {i for i in seen if table.tracked[i].gradient() is not None}
        # A gradient that changed although its node did not fire was written by other code: DDP writes gradients of other ranks.
        if self._parts.ladder.mode is Mode.OUTPUT and seen and (backward.unannounced or left - moved):
            self._parts.ladder.fall_to(Mode.PARAMETER, "a backward does not run through the model's output")
        return seen | moved | early

    def read(self) -> None:
        """Reads the round's gradients, and chooses the probes until the next sample."""
        parts, rounds = self._parts, self._rounds
        taken = parts.reader.read(rounds)
        rounds.sample_read(taken=taken)
        if taken:
            parts.reductions.captured(rounds.current.number)
            parts.ladder.follow(parts.reader.table, rounds.current.fired, self._detector_hooks)
