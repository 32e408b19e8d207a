"""GradientCapture: when gradients are read, and which.

The ladder of rungs, each chosen by itself:

- `output`: a hook on the root module's output says that a backward began; the gradients are read after it.
- `parameter`: backwards that do not run through a root's output (submodules called directly, a compiled root)
  are seen by hooks on the parameters' AccumulateGrad nodes, on sampled rounds only. A few sampled rounds under
  `output` are checked the same way, and a backward that only the nodes saw demotes it for good.
- `optimizer`: where neither sees a backward, gradients are read when the optimizer steps, after clipping.

Gradients are handed over at the end of the backward, not at the step: a NaN that an exception or a hang
follows must be seen. The last capture before the step wins. What became of it is told afterwards.

Everything here runs on the threads of the training loop and of autograd, one at a time. Models, parameters
and optimizers are held weakly, but for the nodes of an armed round.
"""

from __future__ import annotations

import enum
import functools
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from torch_grad_exporter.capture.accumulate_grad import AccumulateGradNodes
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.fused_optimizer import FusedSteps
from torch_grad_exporter.capture.local import LocalGradients
from torch_grad_exporter.capture.module_outputs import differentiable
from torch_grad_exporter.capture.progress import BACKWARD, OUTSIDE, StepClock
from torch_grad_exporter.capture.reader import GradientReader
from torch_grad_exporter.capture.rounds import PROBES, GradientVersions, Round, RoundPattern
from torch_grad_exporter.capture.schedule import SamplingSchedule
from torch_grad_exporter.capture.torch_hooks import Handle, Hooks
from torch_grad_exporter.capture.waits import GradientWaits
from torch_grad_exporter.errors import ErrorLog, say
from torch_grad_exporter.model.layers import LayerIndex, ParameterTable, TrackedParameter
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.model.reduction import Reductions
from torch_grad_exporter.torch_compat import (
    BACKWARDS_ARE_SEEN,
    after_backward,
    at_end_of_backward,
    compiled_backwards,
    graph_is_kept,
    graph_task,
    on_gradient,
    within_transform,
)
from torch_grad_exporter.transfer.events import Closed, Mailbox, Outcome, OutcomeResolved

logger = logging.getLogger("torch_grad_exporter")

CHECK_EVERY = 64
"""Every so many samples, and at the first, the rung `output` is checked against the parameters' own nodes."""

FULL_EVERY = 8
"""Every so many samples all gradients are measured again where the optimizer sees them."""

MISSES = 2
"""Rounds in a row in which a rung saw no backward, after which the next one is taken."""

CROWDED = 1 << 12
"""Records in the mailbox, half of what it takes, beyond which no sample is taken: the host side has fallen behind."""

UNANSWERED = 100
"""Backward passes without any step after which the user is told."""

NO_STEP = (
    "no optimizer step was seen in %s backward passes; if steps are taken by something that is no torch.optim.Optimizer, "
    "or whose `step` was replaced, call exporter.step() after each"
)

DETECTORS = 8
"""Parameters at most that tell of backwards on the rung `parameter` while nothing is sampled."""


class Mode(enum.Enum):
    """The rungs of the ladder."""

    OUTPUT = "output"
    PARAMETER = "parameter"
    OPTIMIZER = "optimizer"


@dataclass(slots=True)
class EarlyLook:
    """What was seen before the forward. `cleared`: the gradients of the backward before it were thrown away."""

    cleared: bool = False
    marks: GradientVersions | None = None


class GradientCapture:
    """Watches backwards and steps, has the reader read and posts `Closed`.

    `local_norm`: whether to measure this rank's own gradients, too, before they are reduced over ranks.
    """

    def __init__(
        self,
        *,
        index: LayerIndex,
        models: int,
        optimizers: Optimizers,
        reader: GradientReader,
        schedule: SamplingSchedule,
        clock: StepClock,
        cost: SampleCost,
        mailbox: Mailbox,
        hooks: Hooks,
        errors: ErrorLog,
        local_norm: bool = False,
    ) -> None:
        self._hooks = hooks
        self._index = index
        self._optimizers = optimizers
        self._reader = reader
        self._schedule = schedule
        self._clock = clock
        self._mailbox = mailbox
        self._errors = errors
        self._output_hooks = [hooks.guarded("backward_hook", functools.partial(self._reached, m)) for m in range(models)]
        self._detector_hooks = [hooks.guarded("backward_hook", functools.partial(self._detected, m)) for m in range(models)]
        self._end_hook = hooks.guarded("backward_hook", self._on_end)
        self.mode = Mode.OUTPUT if BACKWARDS_ARE_SEEN else Mode.OPTIMIZER
        self.samples = self.skipped = self._misses = 0
        self._round = Round(0, index.table, sampled=schedule.due(0))
        self._pattern = RoundPattern()
        self._task = -1
        self._certain = True
        self._unannounced = self._skipped_unseen = False
        self._before: GradientVersions | None = None
        self._fused = FusedSteps(clock)
        self._found_inf: dict[int, torch.Tensor] = {}
        self._check_is_next = True
        self._probed: tuple[ParameterTable, set[int]] | None = None
        self._nodes = AccumulateGradNodes(hooks.guarded("backward_hook", self._on_node))
        self._early = EarlyLook()
        self._compiled_before = compiled_backwards()
        self._reductions = Reductions()
        self._waits = GradientWaits(clock, hooks)
        self._local = LocalGradients(hooks, mailbox, cost, clock) if local_norm else None
        self._detectors: dict[int, Handle] = {}
        self._stepping: set[int] = set()
        self._late: set[int] = set()
        self._cost = cost
        self.on_backward: Callable[[], None] = lambda: None
        """Called before a backward is looked at."""

    # What the training loop does

    def forward_began(self, root: torch.nn.Module) -> None:
        """A forward of a root with gradients begins: with FSDP2 the last moment at which sharded parameters are in their places."""
        if graph_task() == -1 and self._next_is_sampled():
            self._errors.guard("reduction", functools.partial(self._look_at_ranks, root))
        if self._index.fully_sharded and graph_task() == -1:
            current = self._round
            again = bool(current.backwards) and not current.stepped and not self._stepping
            self._early.cleared = again and self._pattern.cleared(current)
            if again and self._early.marks is not None:
                return  # in the middle of a round FSDP2 may have left them gathered
            gathered = self._index.table.parameters() is None
            looked = self._next_is_sampled() and not gathered
            self._early.marks = GradientVersions.of(self._index.refresh().tracked) if looked else None

    def _look_at_ranks(self, root: torch.nn.Module | None = None) -> None:
        """Which ranks have the same gradients, and what reduces them: looked at within a forward of a root, or without one."""
        if self._index.replicas.undecided(self._index.models):
            self._index.find_replicas(root)
        if root is not None:
            self._reductions.forward_began(root)

    def forward_ended(self, model: int, output: object) -> None:
        """A forward of a root is over: hooks its output, so that its backward is seen."""
        if self.mode is not Mode.OUTPUT or graph_task() != -1 or within_transform():
            return
        if self._task != -1:  # no backward is running: one that began and did not end has raised
            self._task = -1
            self._disarm_local()
        hook = self._output_hooks[model]
        for tensor in differentiable(output):
            on_gradient(tensor, hook)
        if self._check_is_next and not self._nodes.armed and self._next_is_sampled():
            self._arm_if_wanted()

    def step_began(
        self,
        optimizer: int,
        *,
        closure: bool,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        """An optimizer is about to step: its view of the gradients, if a backward came before.

        `closure`: the backward is yet to come, within the step. `grad_scale`: the loss scale that the optimizer itself
        is to divide by, where it is a fused one; `found_inf`: not zero if it is to do nothing.
        """
        self._stepping.add(optimizer)
        if found_inf is not None:
            self._found_inf[optimizer] = found_inf
        if closure:
            self._late.add(optimizer)
        elif self.mode is Mode.OPTIMIZER:
            self._cost.of(self._capture_at_step, optimizer)
        else:
            self._look_at_step(optimizer, grad_scale)

    def tool_steps(self, optimizers: frozenset[int]) -> None:
        """Optimizers with a closure, in whose steps another one does the work, are about to use what the closure left."""
        if self.mode is not Mode.OPTIMIZER:
            for optimizer in self._late & optimizers:
                self._look_at_step(optimizer)

    def _look_at_step(self, optimizer: int, grad_scale: torch.Tensor | None = None) -> None:
        """What is left to read of a round that an optimizer is using now, or has just used."""
        current = self._round
        if current.sampled and current.fired and not current.captured:
            self._cost.of(self._catch_up)
        # Where the model's gradients were copied to another optimizer's, nobody knows what that one saw.
        copied = optimizer in self._optimizers.copying or (current.foreign and not self._optimizers.reporting)
        if current.captured and current.open and optimizer not in current.read and not copied:
            self._cost.of(self._read_after, optimizer, grad_scale)

    def step_within_backward(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step while the backward runs. Its `step_ended` is due when the backward is over."""
        if graph_task() != self._task:
            self._begin(graph_task())
        self._certain = True
        self._stepping.add(number)
        self._round.read.add(number)  # it sees what is read now
        if self._round.sampled:
            self._cost.of(self._errors.guard, "capture", lambda: self._reader.within.read_of(self._round.table, optimizer))

    def step_ended(self, optimizer: int) -> bool | None:
        """An optimizer has stepped: whether it was the first of its round; `None` if the call was nested.

        An optimizer whose `step` calls `super().step()` reports twice; the inner call counts.
        """
        if optimizer not in self._stepping:
            return None
        self._stepping.discard(optimizer)
        self._fused.stepped(self._round.number, optimizer, self._found_inf.pop(optimizer, None))
        if optimizer in self._late and self.mode is Mode.OPTIMIZER:
            self._cost.of(self._capture_at_step, optimizer)
        if optimizer in self._round.stepped or not self._round.backwards:
            self._step_without_backward(optimizer)
        current = self._round
        if optimizer in self._late and self.mode is not Mode.OPTIMIZER:
            self._look_at_step(optimizer)
        self._late.discard(optimizer)
        first = not current.stepped
        current.stepped.add(optimizer)
        self._tell(Outcome.STEPPED)
        if current.captured and current.open and self._all_stepped(current):
            self._close_round(Outcome.STEPPED)
        self._prepare_next()
        return first

    def _prepare_next(self) -> None:
        """After a step: looks at the parameters again if the next round is sampled."""
        if self._index.fully_sharded:
            self._hooks.come_first()
        sampled_next = self._next_is_sampled()
        if self.mode is Mode.OUTPUT or not sampled_next:
            self._nodes.disarm()
        if sampled_next:
            self._arm_if_wanted(after_step=True)

    @property
    def stepping(self) -> frozenset[int]:
        """The optimizers that have begun a step and not ended it."""
        return frozenset(self._stepping)

    def step_was_abandoned(self) -> None:
        """A step that had begun raised and will not end."""
        self._stepping.clear()
        self._round.abandoned = bool(self._round.backwards)
        self._late.clear()
        self._found_inf.clear()

    def regular_stepper(self) -> int | None:
        """The only optimizer that ever steps, if all rounds lately were alike and the next ones may be taken for the same.

        To be asked right after a step.
        """
        current = self._round
        settled = self.mode is Mode.OUTPUT and not self._nodes.armed and not self._index.fully_sharded and self._task == -1
        alone = self._index.models == 1 and len(current.stepped) == 1 and not (self._stepping or self._late or current.foreign)
        if not (settled and alone) or (current.open and current.captured) or self._reader.knows_scaler or self._fused.waiting:
            return None
        same = current.backwards and self._pattern.same_rounds(current)
        return next(iter(current.stepped)) if same and not current.stepped & self._optimizers.copying else None

    def witness(self) -> TrackedParameter | None:
        """A parameter that gets a gradient in each backward, as far as the last sample tells."""
        for probe in itertools.chain.from_iterable(self._pattern.probes.values()):
            parameter = probe.parameter()
            if parameter is not None and parameter.requires_grad and parameter.grad is not None:
                return probe
        return None

    def passed_over(self, rounds: int, *, skipped: int, backwards: int) -> None:
        """So many rounds like the last one were only counted, so many steps skipped. `backwards`: of a round that is not over."""
        last = self._round
        last.number += rounds + skipped
        self._clock.skipped += skipped
        self._skipped_unseen |= skipped > 0
        if rounds:
            self._prepare_next()
        if backwards:
            self._start_round()
            self._round.backwards, self._round.models = backwards, set(last.models)
            self._pattern.remember(self._round.models)
        self._waits.missed()
        if self._local is not None:
            self._local.samples_before = None if backwards else self._samples()

    def set_step(self, number: int) -> None:
        """Numbers the current round, so that ranks or restarted runs sample the same rounds."""
        self._round.number = number

    def norm_observed(self) -> None:
        """The user gave the global norm of the current round; a sample tells its outcome, else it is told here."""
        self._round.observed = not self._round.captured
        if self._round.stepped:
            self._tell(Outcome.STEPPED)

    def _tell(self, outcome: Outcome) -> None:
        if self._round.observed:
            self._round.observed = False
            self._mailbox.append(OutcomeResolved(outcome))

    @property
    def current(self) -> Round:
        """The current round."""
        return self._round

    def close(self) -> None:
        """Hands over what is still open and removes the hooks of this round; idempotent."""
        self._tell(Outcome.UNKNOWN)
        self._fused.settle(-1)
        if self._round.open and self._round.captured:
            self._close_round(Outcome.STEPPED if self._round.stepped else Outcome.UNKNOWN)
        self.release()

    def release(self) -> None:
        """Lets go of everything that keeps a parameter alive; idempotent, from any thread."""
        self._nodes.disarm()
        self._disarm_local()
        detectors, self._detectors = self._detectors, {}
        for handle in detectors.values():
            handle.remove()

    # Backwards

    def _reached(self, model: int, _gradient: object = None) -> None:
        """The backward of a model has reached its output."""
        task = graph_task()
        if task != self._task:
            if task == -1:
                return
            self._begin(task)
        self._round.models.add(model)

    def _detected(self, model: int, _parameter: object) -> None:
        """A parameter is about to receive its gradient, on the rung `parameter`."""
        self._reached(model)
        self._certain = True

    def _on_node(self, tracked: TrackedParameter, *_gradients: object) -> None:
        """A parameter has received its gradient on a round whose nodes are hooked."""
        task = graph_task()
        # A checkpoint runs a backward of its own within the model's; that one needs no announcement.
        if task != self._task and (self.mode is Mode.PARAMETER or self._task == -1):
            self._begin(task)
            self._unannounced = self.mode is Mode.OUTPUT
        self._nodes.fired.add(tracked)
        self._round.models.add(tracked.model)

    def _begin(self, task: int) -> None:
        """A backward has begun, or a `torch.autograd.grad`, which passes the same hooks and writes no gradient.

        Asks to be called at its end, where the two are told apart.
        """
        start = self._clock.clock()
        self.on_backward()
        self._task = task
        self._waits.saw(task)
        self._reader.within.clear()
        if not self._clock.stepping:
            self._stepping.clear()
        self._clock.switch(BACKWARD)
        current = self._round
        if current.stepped:
            self._start_round()
        elif current.backwards and (current.abandoned or not self._stepping) and self._cleared(current):
            self._gradients_were_cleared(current)
        if self._round.sampled and not self._can_look():
            self._round.sampled = False
            self.skipped += 1
        sampled = self._round.sampled
        # Only a graph that is kept can have been passed by `autograd.grad` on the way to a second derivative.
        self._certain = not graph_is_kept()
        if sampled:
            if not self._round.backwards:
                self._renew_table()
            self._nodes.fired.clear()
            self._unannounced = False
            self._errors.guard("reduction", self._reduction_begins)
            at_end_of_backward(self._end_hook)
            self._before = None
            if self.mode is not Mode.OPTIMIZER:
                self._errors.guard("capture", self._look)
        else:
            self._before = None if self._certain else self._probe_marks()
            # What a wrapper waits for at the end is part of the backward.
            (at_end_of_backward if self._reductions.wrapped else after_backward)(self._end_hook)
        self._cost.spent(start, sampled=sampled)

    def _reduction_begins(self) -> None:
        """Has what comes before the reduction over ranks looked at, in a backward that is sampled."""
        reduction = self._reductions.coming()
        if reduction is not None and reduction.parameters and self._reader.devices <= {"cpu"}:
            self._waits.begin()
        if self._local is not None and self.mode is Mode.OUTPUT:
            carries_on = self._round.backwards > 0 and self._pattern.untouched()
            self._local.begin(self._round.table, reduction, carries_on=carries_on)

    def _samples(self) -> int | None:
        return self._clock.samples if self._clock.samples_known else None

    def _disarm_local(self) -> None:
        if self._local is not None:
            self._local.disarm()

    def _renew_table(self) -> None:
        """Takes the parameters that are trained now; nodes that were armed before some of them came say too little."""
        if self.mode is not Mode.OUTPUT:
            self._errors.guard("reduction", self._look_at_ranks)
        table = self._round.table = self._index.refresh(within_step=True)
        if self._nodes.armed and not self._nodes.sees_all_of(table):
            self._nodes.disarm()

    def _gradients_were_cleared(self, current: Round) -> None:
        """The gradients of the last backward are gone, and no step was seen."""
        if not self._reader.knows_scaler and self._pattern.hold():
            current.begin_again()
        elif self._pattern.updated() and not self._optimizers.reporting:
            # The parameters have changed: steps were taken that no hook saw, as of a compiled optimizer.
            manual = self._optimizers.manual()
            for _ in range(1 + self._pattern.release()):
                self._clock.step_done(manual)
            self._pattern.stepped_unseen()
            current.stepped.add(manual)
            self._start_round()
        else:
            self._clock.skipped += 1 + self._pattern.release()
            self._start_round(skipped=True)

    def _can_look(self) -> bool:
        """Whether what this backward writes can be told from what was there before, and be read."""
        if _capturing_graph():
            return False
        if self.mode is Mode.PARAMETER:
            self._renew_table()
            return self._nodes.armed
        return self.mode is Mode.OPTIMIZER or not self._index.fully_sharded or self._early.marks is not None

    def _cleared(self, current: Round) -> bool:
        return self._early.cleared if self._index.fully_sharded else self._pattern.cleared(current)

    def _look(self) -> None:
        self._before = self._early.marks if self._index.fully_sharded else GradientVersions.of(self._round.table.tracked)

    def _on_end(self) -> None:
        if self._task == -1:
            return
        start = self._clock.clock()
        self._task = -1
        self._clock.switch(OUTSIDE)
        current = self._round
        self._waits.end(current.number, start)
        before, self._before = self._before, None
        fired = self._fired(before) | self._reader.within.fired if current.sampled else set()
        if current.sampled and (before is not None or self._nodes.armed):
            # FSDP2 may keep what it has not reduced yet where nobody sees it.
            written = bool(fired) or (self._index.fully_sharded and self._certain)
        else:
            written = self._certain or bool(before is not None and before.moved())
        if self._local is not None:
            over = functools.partial(self._local.end, current, fired, self._samples(), written=written)
            self._errors.guard("reduction", over)
        if written:
            self._misses = 0
            current.backwards += 1
            current.fired |= fired
            self._clock.backward_passes += 1
            if self._clock.backward_passes == UNANSWERED and not self._clock.steps:
                say(logger, logging.WARNING, NO_STEP, UNANSWERED)
            # Who steps within the backward does not wait for another one.
            if fired and (self._reader.within.fired or current.backwards >= (self._pattern.backwards or 1)):
                self._capture(current)
            self._pattern.remember(current.models)
        self._cost.spent(start, sampled=current.sampled)

    def _fired(self, before: GradientVersions | None) -> set[int]:
        """The parameters whose gradient the backward wrote, on a sampled round."""
        moved = set() if before is None else before.moved()
        if not self._nodes.armed:
            return moved
        seen = self._nodes.positions(self._round.table)
        # Those that a hook of the user's has cleared again have no mark to show.
        left = {i for i in seen if self._round.table.tracked[i].gradient() is not None}
        # One that moved and did not fire was written by somebody else: DDP brings gradients of other ranks.
        if self.mode is Mode.OUTPUT and seen and (self._unannounced or left - moved):
            self._fall_to(Mode.PARAMETER, "a backward does not run through the model's output")
        return seen | moved

    def _probe_marks(self) -> GradientVersions:
        return GradientVersions.of([probe for probes in self._pattern.probes.values() for probe in probes])

    # Rounds

    def _start_round(self, *, skipped: bool = False) -> None:
        """Ends the current round and begins the next one."""
        last = self._round
        self._tell(Outcome.SKIPPED if skipped else Outcome.UNKNOWN)
        if last.open and last.captured:
            self._close_round(Outcome.SKIPPED if skipped else Outcome.STEPPED if last.stepped else Outcome.UNKNOWN)
        self._clock.skipped += self._pattern.learn(last)
        self._settle_cost()
        if last.sampled and last.fired and not last.captured:
            self._lost(last)
        self._reader.within.clear()
        number = last.number + 1
        skipped |= self._fused.settle(number) or self._skipped_unseen
        self._skipped_unseen = False
        if last.stepped:
            self._optimizers.round_over()
        # After a skipped step that was not sampled the next round is: to see whether, and where, something is wrong.
        sampled = self._schedule.due(number) or (skipped and not last.sampled)
        self._round = Round(number, self._index.table, sampled)
        if not self._round.sampled:
            self._nodes.disarm()

    def _next_is_sampled(self) -> bool:
        """Whether the backward that comes next belongs to a sampled round."""
        current = self._round
        return self._schedule.due(current.number + 1) if current.stepped else current.sampled

    def _close_round(self, outcome: Outcome) -> None:
        current = self._round
        current.open = False
        owners, groups = self._optimizers.owners(current.table, current.stepped)
        stepped = frozenset(current.stepped) or self._pattern.steppers(current.models)
        if not stepped:
            stepped = frozenset(owners[sorted(current.fired)].tolist())
        self._mailbox.append(Closed(current.number, outcome, owners, groups, stepped, dict(self._clock.steps)))
        fired = np.array(sorted(current.fired), dtype=np.int64)
        foreign = set(fired[~np.isin(owners[fired], list(stepped))].tolist())
        if foreign:
            self._errors.guard("capture", lambda: self._reader.forget(current, foreign))
        self._cost.sample_over()
        self._settle_cost()

    def _settle_cost(self) -> None:
        if not _capturing_graph():
            self._cost.settle()

    def _all_stepped(self, current: Round) -> bool:
        """Whether nobody else will step in this round on gradients that it captured, as far as the last rounds tell."""
        owners, _ = self._optimizers.owners(current.table, current.stepped)
        waited = set(owners[sorted(current.fired)].tolist())
        if self.mode is Mode.OPTIMIZER:  # reads only when each of them steps
            waited |= {number for number, _ in self._optimizers.numbered()}
        active = self._pattern.active(current.models)
        return (waited if active is None else waited & active) <= current.stepped

    def _step_without_backward(self, optimizer: int) -> None:
        """A step that no backward was seen before: another rung may see what this one does not."""
        armed = self._nodes.armed
        if optimizer in self._round.stepped:
            self._start_round()
        if self.mode is Mode.OPTIMIZER or (self.mode is Mode.PARAMETER and not armed) or not self._has_gradients():
            return
        if not self._pattern.written_between_steps(self._round.table):
            return
        self._misses += 1
        self._nodes.disarm()  # they may be those of tensors that were replaced
        if compiled_backwards() > self._compiled_before:
            self._fall_to(Mode.OPTIMIZER, "backwards are compiled; norms are those after clipping")
        elif self._misses >= MISSES:
            if self.mode is Mode.OUTPUT and not self._index.fully_sharded:
                self._fall_to(Mode.PARAMETER, "steps were seen, but no backward through the model's output")
            else:
                self._fall_to(Mode.OPTIMIZER, "steps were seen, but no backward; norms are those after clipping")

    def _has_gradients(self) -> bool:
        return any(tracked.gradient() is not None for tracked in self._round.table.tracked)

    def _fall_to(self, mode: Mode, why: str) -> None:
        say(logger, logging.INFO, "gradients are captured by rung %r from now on: %s", mode.value, why)
        self.mode, self._misses = mode, 0
        self._pattern.probes.clear()
        self._probed = None
        if mode is Mode.OPTIMIZER:
            self.release()

    # Captures

    def _capture(self, current: Round) -> None:
        """Measures the round's gradients so far and hands them over; replaces an earlier capture of the round.

        A failure costs this sample and nothing else, least of all the counting of steps.
        """
        done = False

        def measure() -> None:
            nonlocal done
            done = len(self._mailbox) < CROWDED and self._reader.read(current, self._pattern, self._clock.now())

        self._errors.guard("capture", measure)
        if not done:
            self._lost(current)
            return
        self.samples += not current.captured
        self._check_is_next = self.samples < 2 or self.samples % CHECK_EVERY == 0
        current.captured = True
        if self._local is not None:
            self._errors.guard("reduction", functools.partial(self._local.post, current.number))
        self._place_probes(current)

    def _catch_up(self) -> None:
        """A round with fewer backwards than any lately: reads its gradients at the step, if nobody has touched them."""
        if self._pattern.untouched():
            self._capture(self._round)
        else:
            self._lost(self._round)

    def _lost(self, current: Round) -> None:
        """Counts a sample that was not taken, once."""
        self.skipped += not current.lost
        current.lost = True

    def _capture_at_step(self, optimizer: int) -> None:
        """The rung `optimizer`: reads what the optimizer is about to use."""
        if optimizer in self._round.stepped or not self._round.open:
            self._start_round()
        current = self._round
        if not current.sampled or _capturing_graph():
            return
        self._errors.guard("reduction", self._look_at_ranks)
        if not current.captured:
            current.table = self._index.refresh()
        owners, _ = self._optimizers.owners(current.table, {optimizer})
        self._errors.guard("capture", lambda: self._reader.within.read(current.table, np.flatnonzero(owners == optimizer)))
        current.fired |= self._reader.within.fired
        if current.fired:
            self._capture(current)

    def _read_after(self, optimizer: int, grad_scale: torch.Tensor | None = None) -> None:
        """Measures norms again where the optimizer sees them."""
        current = self._round
        current.read.add(optimizer)
        found_inf, full = self._found_inf.get(optimizer), self.samples % FULL_EVERY == 1
        self._errors.guard(
            "capture",
            lambda: self._reader.read_after(current, optimizer, full=full, grad_scale=grad_scale, found_inf=found_inf),
        )

    # Nodes, probes and detectors

    def _arm_if_wanted(self, *, after_step: bool = False) -> None:
        """Hooks the nodes for the next round, which is sampled, if its rung, or a check of it, needs them."""
        wanted = self.mode is Mode.PARAMETER or (self._check_is_next and self.mode is Mode.OUTPUT)
        # The nodes of gathered parameters say nothing about the sharded ones.
        if wanted and not self._nodes.armed and not self._index.fully_sharded:
            if after_step:
                self._cost.of(self._index.refresh)
            self._cost.of(self._arm)

    def _arm(self) -> None:
        """Hooks the AccumulateGrad nodes of all parameters until the round ends."""
        # Not after another look: `torch.func.functional_call` has put others in the parameters' places if this is in a forward.
        if self._index.table.parameters() is not None:
            self._nodes.arm(self._index.table)

    def _place_probes(self, current: Round) -> None:
        """Chooses the parameters that tell of clearing, and on the rung `parameter` of backwards, until the next sample."""
        tracked = current.table.tracked
        if self.mode is Mode.OUTPUT and (current.table, current.fired) == self._probed:
            return
        self._probed = current.table, set(current.fired)
        by_model: dict[int, list[int]] = {}
        for i in sorted(current.fired):
            by_model.setdefault(tracked[i].model, []).append(i)
        if self.mode is Mode.PARAMETER:
            for positions in by_model.values():
                self._place_detectors(current, positions)
            return
        for model, positions in by_model.items():
            step = max(1, len(positions) // PROBES)
            self._pattern.probes[model] = [tracked[i] for i in positions[::step][:PROBES]]

    def _place_detectors(self, current: Round, positions: list[int]) -> None:
        """Lets one parameter per optimizer tell of backwards on the rounds that are not sampled."""
        owners, _ = self._optimizers.owners(current.table)
        for i, owner in zip(positions, owners[positions].tolist(), strict=True):
            if owner in self._detectors or len(self._detectors) >= DETECTORS:
                continue
            tracked = current.table.tracked[i]
            parameter = tracked.parameter()
            if parameter is not None:
                # A hook on the parameter itself runs before the gradient is written: clearing can still be seen.
                hook = self._detector_hooks[tracked.model]
                self._detectors[owner] = parameter.register_hook(hook)  # type: ignore[no-untyped-call]
                self._pattern.probes.setdefault(tracked.model, []).insert(0, tracked)


def _capturing_graph() -> bool:
    """Whether a CUDA graph is being captured: then nothing may be allocated or copied. Never initialises CUDA."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]
