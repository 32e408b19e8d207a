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
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from torch_grad_exporter.events import AfterClip, Captured, Closed, Hints, Mailbox, Outcome, Part
from torch_grad_exporter.hooks import Handle, Hooks, NodeHooks, at_end_of_backward, graph_task
from torch_grad_exporter.layers import LayerIndex, Plan
from torch_grad_exporter.optimizers import Optimizers
from torch_grad_exporter.progress import BACKWARD, OUTSIDE, StepClock
from torch_grad_exporter.schedule import SamplingSchedule
from torch_grad_exporter.statistics.eager import EagerStatistics, Measurement
from torch_grad_exporter.transfer import HostTransfer, Tail, Ticket

logger = logging.getLogger("torch_grad_exporter")

CHECK_EVERY = 64
"""Every so many samples, and at the first, the rung `output` is checked against the parameters' own nodes."""

FULL_EVERY = 8
"""Every so many samples all gradients are measured again where the optimizer sees them."""

MISSES = 2
"""Rounds in a row in which a rung saw no backward, after which the next one is taken."""

OUTPUTS = 16
"""Tensors of an output that are hooked at most; a cache of hundreds of tensors must not cost hundreds of hooks."""


class Mode(enum.Enum):
    """The rungs of the ladder."""

    OUTPUT = "output"
    PARAMETER = "parameter"
    OPTIMIZER = "optimizer"


class Scaler(Protocol):
    """What is needed of a `torch.amp.GradScaler`: its scale as a tensor, `None` before its first use."""

    _scale: torch.Tensor | None


@dataclass(slots=True)
class _Mark:
    """What a parameter's gradient was at one moment: which tensor, and how often it had been written to."""

    parameter: weakref.ref[torch.nn.Parameter]
    gradient: torch.Tensor | None
    version: int

    @classmethod
    def of(cls, parameter: torch.nn.Parameter) -> _Mark:
        gradient = parameter.grad
        return cls(weakref.ref(parameter), gradient, -1 if gradient is None else gradient._version)

    def moved(self) -> bool:
        """Whether the gradient is now another tensor, or the same and written to, or gone."""
        parameter = self.parameter()
        if parameter is None:
            return True
        now = parameter.grad
        return now is not self.gradient or (now is not None and now._version != self.version)


@dataclass(slots=True)
class _WeakMark:
    """A `_Mark` that outlives its backward, and so must not keep the gradient alive."""

    parameter: weakref.ref[torch.nn.Parameter]
    gradient: weakref.ref[torch.Tensor] | None
    version: int

    @classmethod
    def of(cls, parameter: torch.nn.Parameter) -> _WeakMark:
        gradient = parameter.grad
        if gradient is None:
            return cls(weakref.ref(parameter), None, -1)
        return cls(weakref.ref(parameter), weakref.ref(gradient), gradient._version)

    def cleared(self) -> bool:
        """Whether `zero_grad` was called since: the gradient is gone, another tensor, or was written to."""
        parameter = self.parameter()
        if parameter is None or self.gradient is None:
            return False
        now = parameter.grad
        return now is None or now is not self.gradient() or now._version != self.version


@dataclass(slots=True)
class _Backward:
    """A running backward. `before`: the gradients at its begin, on sampled rounds; `probes`: of one per model."""

    new_round: bool
    cleared: bool
    sampled: bool
    plan: Plan
    before: list[_Mark] | None = None
    probes: dict[int, _Mark | None] = field(default_factory=dict)
    nodes: set[int] = field(default_factory=set)
    unannounced: bool = False


@dataclass(slots=True)
class _Round:
    """The current round. `read`: optimizers whose view of the gradients was taken."""

    number: int
    plan: Plan
    sampled: bool = False
    backwards: int = 0
    fired: set[int] = field(default_factory=set)
    captured: bool = False
    models: set[int] = field(default_factory=set)
    stepped: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    open: bool = True


class GradientCapture:
    """Watches backwards and steps and posts `Captured`, `AfterClip` and `Closed`."""

    def __init__(
        self,
        *,
        index: LayerIndex,
        models: int,
        optimizers: Optimizers,
        statistics: EagerStatistics,
        schedule: SamplingSchedule,
        clock: StepClock,
        mailbox: Mailbox,
        hints: Hints,
        hooks: Hooks,
        transfer: HostTransfer | None = None,
        scaler: Scaler | None = None,
    ) -> None:
        self._index = index
        self._optimizers = optimizers
        self._statistics = statistics
        self._schedule = schedule
        self._clock = clock
        self._mailbox = mailbox
        self._hints = hints
        self._transfer = transfer or HostTransfer()
        self._scaler = None if scaler is None else weakref.ref(scaler)
        self._output_hooks = [hooks.guarded("backward_hook", functools.partial(self._on_output, m)) for m in range(models)]
        self._node_hook = hooks.guarded("backward_hook", self._on_node)
        self._detector_hook = hooks.guarded("backward_hook", self._on_detector)
        self._end_hook = hooks.guarded("backward_hook", self._on_end)
        self.mode = Mode.OUTPUT
        self.samples = 0
        self.skipped = 0
        self.devices: frozenset[str] = frozenset()
        self._round = _Round(0, index.plan)
        self._rounds_of: dict[int, int] = {}
        self._followers: dict[frozenset[int], set[frozenset[int]]] = {}
        self._last_kind: frozenset[int] = frozenset()
        self._usual: dict[frozenset[int], frozenset[int]] = {}
        self._backwards: dict[int, _Backward] = {}
        self._backward_counts: deque[int] = deque(maxlen=8)
        self._marks: dict[int, _WeakMark] = {}
        self._probe_of: dict[int, weakref.ref[torch.nn.Parameter]] = {}
        self._nodes: NodeHooks | None = None
        self._nodes_plan = index.plan
        self._detectors: dict[int, Handle] = {}
        self._stepping: set[int] = set()
        self._late: set[int] = set()
        self._misses = 0
        self._sample_cost = 0.0

    # What the training loop does

    def forward_ended(self, model: int, output: object) -> None:
        """A training forward of a root is over: hooks its output, so that its backward is seen."""
        if self.mode is not Mode.OUTPUT or graph_task() != -1:
            return
        self._backwards.clear()  # outside of every backward, so what is left here raised
        hook = self._output_hooks[model]
        for tensor in differentiable(output):
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        if self._nodes is None and self.samples % CHECK_EVERY == 0 and self._may_be_sampled():
            self._timed(self._arm)

    def step_began(self, optimizer: int, *, closure: bool) -> None:
        """An optimizer is about to step: its view of the gradients, if a backward came before.

        `closure`: the backward is yet to come, within the step.
        """
        self._stepping.add(optimizer)
        if self.mode is Mode.OPTIMIZER:
            if closure:
                self._late.add(optimizer)
            else:
                self._timed(self._capture_at_step, optimizer)
        elif self._round.captured and self._round.open:
            self._timed(self._read_after, optimizer)

    def step_ended(self, optimizer: int) -> bool | None:
        """An optimizer has stepped: whether it was the first of its round; `None` if the call was nested.

        An optimizer whose `step` calls `super().step()` reports twice; the inner call counts.
        """
        if optimizer not in self._stepping:
            return None
        self._stepping.discard(optimizer)
        if optimizer in self._late:
            self._late.discard(optimizer)
            self._timed(self._capture_at_step, optimizer)
        if optimizer in self._round.stepped or (not self._round.backwards and self.mode is not Mode.OPTIMIZER):
            self._timed(self._step_without_backward)
        current = self._round
        if current.captured and current.open and optimizer not in current.read and self.mode is not Mode.OPTIMIZER:
            self._timed(self._read_after, optimizer)
        first = not current.stepped
        current.stepped.add(optimizer)
        self._clock.step_done(optimizer)
        if current.open and current.captured and self._all_stepped(current):
            self._close_round(Outcome.STEPPED)
        if self.mode is Mode.PARAMETER and self._nodes is None and self._may_be_sampled():
            self._timed(self._arm)
        return first

    def set_step(self, number: int) -> None:
        """Numbers the rounds from here: the current one is `number`, for every optimizer."""
        for optimizer in range(len(self._optimizers.names)):
            # The current round of those that stepped in it is counted when the next one begins.
            self._rounds_of[optimizer] = number - (optimizer in self._round.stepped)

    @property
    def sampling(self) -> bool:
        """Whether the current round is sampled."""
        return self._round.sampled

    @property
    def stepped_in_round(self) -> bool:
        """Whether an optimizer has stepped since the last backward."""
        return bool(self._round.stepped)

    @property
    def plan(self) -> Plan:
        """The plan of the current round."""
        return self._round.plan

    def close(self) -> None:
        """Hands over what is still open and removes the hooks of this round; idempotent."""
        if self._round.open and self._round.captured:
            self._close_round(Outcome.STEPPED if self._round.stepped else Outcome.UNKNOWN)
        self.release()

    def release(self) -> None:
        """Lets go of everything that keeps a parameter or a gradient alive; idempotent, from any thread."""
        self._disarm()
        detectors, self._detectors = self._detectors, {}
        for handle in detectors.values():
            handle.remove()
        self._backwards.clear()

    # Backwards

    def _on_output(self, model: int, _gradient: object) -> None:
        self._reached(model)

    def _on_detector(self, parameter: torch.Tensor) -> None:
        self._reached(next((t.model for t in self._round.plan.tracked if t.reference() is parameter), 0))

    def _on_node(self, position: int, *_gradients: object) -> None:
        task = graph_task()
        backward = self._backwards.get(task)
        if backward is None and self.mode is Mode.OUTPUT and self._backwards:
            backward = next(iter(self._backwards.values()))  # a checkpoint's backward within the model's
        if backward is None:
            backward = self._begin(task)
            backward.unannounced = True
        backward.nodes.add(position)

    def _reached(self, model: int) -> None:
        """The backward of a model has reached its output."""
        task = graph_task()
        if task == -1:
            return
        backward = self._backwards.get(task) or self._begin(task)
        if model not in backward.probes:
            reference = self._probe_of.get(model)
            probe = None if reference is None else reference()
            backward.probes[model] = None if probe is None or not probe.requires_grad else _Mark.of(probe)

    def _begin(self, task: int) -> _Backward:
        """Notes that a backward has begun and asks to be called at its end. Not yet known: whether it is one.

        `torch.autograd.grad` passes the same hooks and writes no gradient; `_on_end` tells them apart.
        """
        start = self._clock.clock()
        self._clock.switch(BACKWARD)
        current = self._round
        cleared = bool(current.backwards and not current.stepped and any(m.cleared() for m in self._marks.values()))
        new_round = cleared or bool(current.stepped) or not current.backwards
        sampled = self._may_be_sampled() if new_round else current.sampled
        sampled &= not _capturing_graph()
        plan = current.plan
        if sampled and new_round:
            plan = self._nodes_plan if self._nodes is not None else self._index.refresh()
        backward = _Backward(new_round, cleared, sampled, plan)
        if sampled and self.mode is Mode.OUTPUT:
            backward.before = _marks(plan)
        while len(self._backwards) >= 8:  # left by backwards that raised
            del self._backwards[next(iter(self._backwards))]
        self._backwards[task] = backward
        at_end_of_backward(functools.partial(self._end_hook, task))
        self._spent(start, sampled=sampled)
        return backward

    def _on_end(self, task: int) -> None:
        backward = self._backwards.pop(task, None)
        if backward is None:
            return
        start = self._clock.clock()
        self._clock.switch(OUTSIDE)
        fired = self._fired(backward)
        moved = any(mark is None or mark.moved() for mark in backward.probes.values())
        if fired or (fired is None and moved):
            self._clock.backward_done(skipped=backward.cleared)
            self._count_backward(backward, fired)
        self._spent(start, sampled=self._round.sampled)

    def _fired(self, backward: _Backward) -> set[int] | None:
        """The parameters whose gradient the backward wrote; `None` if nobody looked."""
        if self._nodes is not None and (backward.nodes or self.mode is Mode.PARAMETER):
            seen = set(backward.nodes)
            if self.mode is Mode.OUTPUT and backward.before is not None:
                inferred = {i for i, mark in enumerate(backward.before) if mark.moved()}
                if backward.unannounced or inferred != seen:
                    self._fall_to(Mode.PARAMETER, "a backward does not run through the model's output")
            return seen
        if backward.before is None:
            return None
        return {i for i, mark in enumerate(backward.before) if mark.moved()}

    def _count_backward(self, backward: _Backward, fired: set[int] | None) -> None:
        if backward.new_round:
            self._start_round(backward)
        current = self._round
        self._misses = 0
        current.backwards += 1
        current.models |= backward.probes.keys()
        if current.sampled and fired is not None:
            current.fired |= fired
            if current.backwards >= min(self._backward_counts, default=1):
                self._capture(current)
        self._marks = {m: _WeakMark.of(p) for m in self._probe_of if (p := self._probe_of[m]()) is not None}

    # Rounds

    def _start_round(self, backward: _Backward | None, *, sampled: bool = False) -> None:
        """Ends the current round and begins the next one."""
        last = self._round
        if last.open and last.captured:
            skipped = backward is not None and backward.cleared
            self._close_round(Outcome.SKIPPED if skipped else Outcome.STEPPED if last.stepped else Outcome.UNKNOWN)
        kind = frozenset(last.stepped) or self._usual.get(frozenset(last.models), frozenset())
        if last.backwards or last.stepped:
            self._learn(last, kind)
        plan = self._index.plan if backward is None else backward.plan
        self._round = _Round(last.number + 1, plan, sampled if backward is None else backward.sampled)

    def _learn(self, last: _Round, kind: frozenset[int]) -> None:
        """Remembers what such a round is like, to foresee the next: its backwards, its optimizers, its successor."""
        if last.backwards and last.stepped:
            self._backward_counts.append(last.backwards)
        if last.stepped:
            self._usual[frozenset(last.models)] = kind
        if len(self._followers) < 64:
            self._followers.setdefault(self._last_kind, set()).add(kind)
        self._last_kind = kind
        for optimizer in kind:
            self._rounds_of[optimizer] = self._rounds_of.get(optimizer, 0) + 1

    def _may_be_sampled(self) -> bool:
        """Whether the next round is due for any optimizer that may be the one to step in it.

        Two optimizers that alternate would alias with a global count: one of them would never be sampled.
        """
        last = self._round
        counts = dict(self._rounds_of)
        kind = self._last_kind
        if last.stepped:
            kind = frozenset(last.stepped)
            for optimizer in kind:
                counts[optimizer] = counts.get(optimizer, 0) + 1
        successors = self._followers.get(kind) or {frozenset(counts)}
        nexts = frozenset().union(*successors) or frozenset(counts)
        return any(self._schedule.due(counts.get(optimizer, 0) + 1) for optimizer in nexts) if nexts else True

    def _close_round(self, outcome: Outcome) -> None:
        current = self._round
        current.open = False
        self._disarm()
        owners, groups = self._optimizers.owners(current.plan)
        stepped = frozenset(current.stepped)
        if not stepped:
            stepped = self._usual.get(frozenset(current.models)) or frozenset(np.unique(owners[sorted(current.fired)]).tolist())
        self._mailbox.append(Closed(current.number, outcome, owners, groups, stepped, dict(self._clock.steps)))
        self._schedule.sampled(self._sample_cost)
        self._sample_cost = 0.0

    def _all_stepped(self, current: _Round) -> bool:
        """Whether nobody else will step in this round on gradients that it captured."""
        owners, _ = self._optimizers.owners(current.plan)
        return set(owners[sorted(current.fired)].tolist()) <= current.stepped | {-1}

    def _step_without_backward(self) -> None:
        """A step that no backward preceded: another rung may see what this one does not."""
        had_gradients = any(p is not None and p.grad is not None for p in (t.reference() for t in self._round.plan.tracked))
        armed = self.mode is Mode.OUTPUT or self._nodes is not None
        if self._round.stepped or self.mode is not Mode.OUTPUT:
            self._start_round(None)
        if not (had_gradients and armed) or self.mode is Mode.OPTIMIZER:
            return
        self._misses += 1
        if self._misses >= MISSES:
            if self.mode is Mode.OUTPUT:
                self._fall_to(Mode.PARAMETER, "steps were seen, but no backward through the model's output")
            else:
                self._fall_to(Mode.OPTIMIZER, "steps were seen, but no backward; norms are those after clipping")

    def _fall_to(self, mode: Mode, why: str) -> None:
        logger.info("gradients are captured by rung %r from now on: %s", mode.value, why)
        self.mode, self._misses = mode, 0
        if mode is Mode.OPTIMIZER:
            self.release()

    # Captures

    def _capture(self, current: _Round) -> None:
        """Measures the round's gradients so far and hands them over; replaces an earlier capture of the round."""
        parameters = current.plan.parameters()
        if parameters is None:
            self.skipped += 1
            return
        gradients = [(i, g) for i in sorted(current.fired) if (g := parameters[i].grad) is not None]
        missing = [i for i, p in enumerate(parameters) if p.requires_grad and i not in current.fired]
        parts, scale = self._sent(self._statistics.measure(current.plan, gradients, current.number))
        if not parts:
            self.skipped += 1
            return
        self.samples += not current.captured
        current.captured = True
        owners, _ = self._optimizers.owners(current.plan)
        self._mailbox.append(
            Captured(current.number, current.plan, parts, np.array(missing, dtype=np.int64), owners, self._clock.now(), scale)
        )
        for i in sorted(current.fired, reverse=True):
            self._probe_of[current.plan.tracked[i].model] = current.plan.tracked[i].reference
        if self.mode is Mode.PARAMETER:
            self._place_detectors(current, parameters, owners.tolist())

    def _capture_at_step(self, optimizer: int) -> None:
        """The rung `optimizer`: reads what the optimizer is about to use."""
        if optimizer in self._round.stepped or not self._round.open:
            self._start_round(None, sampled=self._may_be_sampled())
            self._round.plan = self._index.refresh()
        current = self._round
        if not current.sampled or _capturing_graph():
            return
        owners, _ = self._optimizers.owners(current.plan)
        current.fired |= {
            i
            for i, t in enumerate(current.plan.tracked)
            if owners[i] in (optimizer, -1) and (p := t.reference()) is not None and p.grad is not None
        }
        self._capture(current)

    def _read_after(self, optimizer: int) -> None:
        """Measures norms again where the optimizer sees them: the probes, or everything."""
        current = self._round
        current.read.add(optimizer)
        parameters = current.plan.parameters()
        if parameters is None:
            return
        full = self._hints.full or self._hints.plan is not current.plan or self.samples % FULL_EVERY == 1
        owners, _ = self._optimizers.owners(current.plan)
        wanted = current.fired if full else current.fired & self._hints.probes
        mine = [i for i in sorted(wanted) if owners[i] in (optimizer, -1)]
        gradients = [(i, g) for i in mine if (g := parameters[i].grad) is not None]
        parts, _ = self._sent(self._statistics.norms(current.plan, gradients), with_scale=False)
        if parts:
            self._mailbox.append(AfterClip(current.number, parts, full))

    def _sent(self, measured: Iterable[Measurement], *, with_scale: bool = True) -> tuple[tuple[Part, ...], Ticket | None]:
        """Starts the copies to the host, one per device; the loss scale rides along with the first of its device."""
        scaler = self._scaler() if self._scaler is not None and with_scale else None
        value = None if scaler is None else scaler._scale
        parts, scale = [], None
        for one in measured:
            vector = one.vector
            self.devices |= {vector.device.type}
            rides = value is not None and scale is None and value.device == vector.device
            if rides and value is not None:
                vector = torch.cat((vector, value.detach().reshape(1).to(vector.dtype)))
            ticket = self._transfer.send(vector)
            if ticket is None:
                return (), None
            scale = Tail(ticket) if rides else scale
            parts.append(Part(one.positions, one.elements, one.units, ticket, one.width))
        return tuple(parts), scale

    # Nodes and detectors

    def _arm(self) -> None:
        """Hooks the AccumulateGrad nodes of all parameters until the round ends."""
        plan = self._index.rescan()
        parameters = plan.parameters()
        if parameters is not None:
            self._nodes_plan = plan
            self._nodes = NodeHooks(parameters, lambda position: functools.partial(self._node_hook, position))

    def _disarm(self) -> None:
        nodes, self._nodes = self._nodes, None
        if nodes is not None:
            nodes.close()

    def _place_detectors(self, current: _Round, parameters: list[torch.nn.Parameter], owners: list[int]) -> None:
        """Lets one parameter per optimizer tell of backwards on the rounds that are not sampled."""
        for i in sorted(current.fired):
            if owners[i] not in self._detectors:
                handle = parameters[i].register_post_accumulate_grad_hook(self._detector_hook)  # type: ignore[no-untyped-call]
                self._detectors[owners[i]] = handle

    # What it costs

    def _timed(self, action: Callable[..., None], *arguments: object) -> None:
        start = self._clock.clock()
        action(*arguments)
        self._spent(start, sampled=True)

    def _spent(self, start: float, *, sampled: bool) -> None:
        seconds = self._clock.clock() - start
        self._clock.own_seconds += seconds
        if sampled:
            self._sample_cost += seconds


def differentiable(output: object) -> Iterator[torch.Tensor]:
    """The tensors of a module's output that a backward can start from, at most `OUTPUTS`; any nested structure."""
    found = 0
    stack = [output]
    while stack and found < OUTPUTS:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            # A leaf would keep the hook for ever: it belongs to no graph.
            if item.requires_grad and item.grad_fn is not None:
                found += 1
                yield item
        elif isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
        elif hasattr(item, "__dataclass_fields__"):
            stack.extend(vars(item).values() if hasattr(item, "__dict__") else [])


def _marks(plan: Plan) -> list[_Mark]:
    """The gradients of all parameters of the plan as they are now."""
    parameters = plan.parameters()
    return [] if parameters is None else [_Mark.of(parameter) for parameter in parameters]


def _capturing_graph() -> bool:
    """Whether a CUDA graph is being captured: then nothing may be allocated or copied. Never initialises CUDA."""
    initialised = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(initialised and torch.cuda.is_current_stream_capturing())
