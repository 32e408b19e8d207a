"""LayerTimer: what `start_exporter(layer_times=)` asks for, how long the forward and backward of each layer take in sampled rounds.

The forward lasts from the hook before it to the one after it. The backward is that of the nodes which the forward has made: hooks
before and after each, found right after the forward. Never a full backward hook. A layer is timed on the device of its parameters,
by its events or the host's clock, without what the exporter takes meanwhile on the host.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_grad_exporter.capture.armed_round import ArmedRound
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.device_events import EventPool
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.capture.module_outputs import differentiable
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.timeline import HostWatch, Stretch, Timeline
from torch_grad_exporter.capture.torch_hooks import Hooks
from torch_grad_exporter.errors import say
from torch_grad_exporter.inspection.layer_times import BACKWARD, FORWARD, LayerTimes
from torch_grad_exporter.inspection.modules import InnerModules
from torch_grad_exporter.inspection.own_nodes import own_nodes
from torch_grad_exporter.inspection.round_hooks import Hooked, Moments, RoundHooks
from torch_grad_exporter.statistics.device import capturing_graph
from torch_grad_exporter.store.mailbox import Mailbox
from torch_grad_exporter.store.records import Inspected
from torch_grad_exporter.torch_compat.autograd import BACKWARDS_ARE_SEEN, next_sequence, within_transform
from torch_grad_exporter.torch_compat.compiler import called_from_compiled, compiles_backwards, something_is_compiled
from torch_grad_exporter.torch_compat.modules import parameters_in

logger = logging.getLogger("torch_grad_exporter")

SOURCE = "layer_times"

CALLS = 1 << 14
"""Calls of layers in one round, at most; a round with more is not timed."""

BEHIND = 64
"""Rounds that a device may be behind, at most; while it is, further ones are not timed."""

COMPILED = "%d layers are not timed, since they are compiled; a hook in compiled code would compile it anew"


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """A pass of one call of a layer: what a timeline's marks are of."""

    layer: str
    name: str


Line = Timeline[Span, Any]


@dataclass(slots=True, eq=False)
class Call:
    """A call of a layer, on the timeline of its device; the nodes that it makes are numbered from `first` on."""

    module: int
    line: Line
    forward: Span
    backward: Span
    first: int


@dataclass(slots=True, eq=False)
class _Round:
    """A sampled round, until its times are known. `lost`: some of them are missing."""

    number: int = -1
    lost: bool = False
    stretches: deque[Stretch[Span, Any]] = field(default_factory=deque)
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)

    def read(self) -> bool:
        """Adds up what devices have passed by now; whether that is all."""
        while self.stretches and self.stretches[0].passed():
            stretch = self.stretches.popleft()
            found = stretch.seconds()
            self.lost |= found is None
            for span, seconds in (found or {}).items():
                key = span.layer, span.name
                self.seconds[key] = self.seconds.get(key, 0.0) + seconds
            stretch.release()
        return not self.stretches

    def release(self) -> None:
        """Forgets all of it."""
        for stretch in self.stretches:
            stretch.release()
        self.stretches.clear()
        self.seconds = {}


class _Lines:
    """The timelines, by device. Their moments on the host are those at which our hooks begin, without what these have taken."""

    def __init__(self, events: EventPool, clock: StepClock) -> None:
        self._events, self._clock = events, clock
        self._host: Line = Timeline(HostWatch(self._moment))
        self._by_device: dict[torch.device, Line | None] = {torch.device("cpu"): self._host}
        self.at = 0.0
        """When the running hook of a layer on the host began."""

    def _moment(self) -> float:
        return self.at - self._clock.own_seconds

    def of(self, module: torch.nn.Module) -> Line | None:
        """That of the device that a layer's parameters are on; `None` of one that is not timed."""
        parameter = next((one for one in parameters_in(module).values() if one is not None), None)
        if parameter is None:
            return None
        device = parameter.device
        if device not in self._by_device:
            events = self._events.of(device)
            self._by_device[device] = None if events is None else Timeline(events)
        return self._by_device[device]

    def starts(self, line: Line, moment: float) -> None:
        """A hook begins that marks something on this timeline."""
        if line is self._host:
            self.at = moment

    def __iter__(self) -> Iterator[Line]:
        return (line for line in self._by_device.values() if line is not None)


class LayerTimer(Inspection):
    """An `Inspection`. Belongs to the training thread, and to those of the backward."""

    def __init__(
        self,
        *,
        modules: InnerModules,
        hooks: Hooks,
        events: EventPool,
        clock: StepClock,
        cost: SampleCost,
        mailbox: Mailbox,
        times: LayerTimes,
    ) -> None:
        self._cost, self._mailbox, self._times = cost, mailbox, times
        self._lines = _Lines(events, clock)
        moments = Moments(ended=self._ended, began=self._began, again=self._runs_again)
        self._hooks = RoundHooks(modules, hooks, SOURCE, moments)
        self._before = hooks.guarded(SOURCE, self._node_begins)
        self._after = hooks.guarded(SOURCE, self._node_over)
        self._open: list[Call] = []
        """The calls that run, the inner ones last."""
        self._taken: set[int] = set()
        """The numbers of the nodes of calls that were made within the outermost of these, and are over."""
        self._calls = 0
        self._on = False
        """Whether the current round is sampled."""
        self._follows_backwards = True
        self._thread = -1
        self._round = _Round()
        self._behind: deque[_Round] = deque()
        self._roots: set[int] = set()
        self._new_roots: set[int] = set()
        """By `id`, models that had a forward before this round, and those that had their first one in it."""
        self._told = False

    # The moments of a round

    def forward_began(self, root: torch.nn.Module, _args: object, _kwargs: object, *, sampled: bool) -> None:
        """Hooks the model's layers for a sampled round, if this forward is not part of compiled code."""
        self._on = sampled and BACKWARDS_ARE_SEEN and not within_transform() and not capturing_graph()
        self._open, self._taken = [], set()
        for line in self._lines:  # a forward or backward that has raised left it open
            line.forget()
        if not self._on:
            self._hooks.disarm()
            return
        if not self._known(id(root)):
            return
        self._thread = threading.get_ident()
        self._follows_backwards = not compiles_backwards()
        chosen = self._hooks.arm(root, compiled=called_from_compiled(sys._getframe(1)))
        if chosen.compiled and not self._told:
            self._told = True
            say(logger, logging.WARNING, COMPILED, chosen.compiled)

    def backward_ended(self, current: ArmedRound, at: float) -> None:  # noqa: ARG002
        """What was timed so far is of this round."""
        if not current.sampled:
            self._restart()
            return
        self._take(current.number)
        self._read()

    def round_over(self, number: int, *, kept: bool) -> None:
        """The times of the round are complete. Where no backward was seen, they are those up to now."""
        self._roots |= self._new_roots
        if self._round.number != number:
            self._take(number)
        over, self._round = self._round, _Round()
        over.lost |= len(self._behind) >= BEHIND
        self._times.untimed += over.lost and kept
        if over.lost or not kept:
            over.release()
        else:
            self._behind.append(over)
        self._read()

    def step_over(self, *, sampled: bool) -> None:
        """Takes all hooks off; the next forward sets those that it needs."""
        self._roots |= self._new_roots
        self._hooks.disarm()
        self._open, self._taken, self._calls, self._on = [], set(), 0, sampled
        if not sampled:
            self._restart()
        self._read()

    def release(self) -> None:
        """Takes all hooks off and forgets what is not known yet; idempotent, from any thread."""
        self._hooks.disarm()
        self._on = False
        self._open, self._taken = [], set()

    def _known(self, root: int) -> bool:
        """Whether a model had a forward before this round; true of all where nothing is compiled. As for activations."""
        if root in self._roots or not something_is_compiled():
            return True
        self._new_roots.add(root)
        return False

    def _take(self, number: int) -> None:
        """Takes the marks of all timelines for the round of this number."""
        if self._round.number != number:
            self._round.release()
            self._round = _Round(number)
        self._lines.at = self._cost.now()
        for line in self._lines:
            if (stretch := line.cut()) is None:
                self._round.lost = True
            else:
                self._round.stretches.append(stretch)

    def _restart(self) -> None:
        for line in self._lines:
            line.restart()

    def _read(self) -> None:
        """Hands over the rounds whose times are known by now."""
        if capturing_graph():
            return
        while self._behind and self._behind[0].read():
            over = self._behind.popleft()
            self._times.untimed += over.lost
            if over.seconds and not over.lost:
                self._mailbox.append(Inspected(SOURCE, over.number, (), over.seconds))
        if not self._behind:
            self._round.read()

    # Forwards

    def _began(self, layer: Hooked) -> None:
        start = self._cost.now()
        line = self._lines.of(layer.module)
        if line is None or threading.get_ident() != self._thread:
            return
        self._calls += 1
        if self._calls > CALLS:
            line.lose()
            return
        call = Call(id(layer.module), line, Span(layer.label, FORWARD), Span(layer.label, BACKWARD), next_sequence())
        self._open.append(call)
        self._lines.starts(line, start)
        line.enter(call.forward)
        self._cost.spent(start, sampled=True)

    def _ended(self, layer: Hooked, output: object) -> None:
        start = self._cost.now()
        if threading.get_ident() != self._thread or not any(one.module == id(layer.module) for one in self._open):
            return
        while (call := self._open.pop()).module != id(layer.module):
            pass  # a call that has raised within this one
        self._lines.starts(call.line, start)
        call.line.enter(self._around(call.line))
        if self._follows_backwards:
            self._hook_nodes(call, output)
        if not self._open:
            self._taken = set()
        self._cost.spent(start, sampled=True)

    def _around(self, line: Line) -> Span | None:
        """The innermost call that runs on this device."""
        return next((one.forward for one in reversed(self._open) if one.line is line), None)

    def _hook_nodes(self, call: Call, output: object) -> None:
        """Hooks the nodes that a call has made, but for those of calls within it, which are hooked already."""
        nodes = own_nodes((one.grad_fn for one in differentiable(output)), call.first, next_sequence(), self._taken)
        if nodes is not None:
            for node in nodes.before:
                node.register_prehook(functools.partial(self._before, call))
            for node in nodes.after:
                node.register_hook(functools.partial(self._after, call))

    # Backwards

    def _node_begins(self, call: Call, _gradients: object) -> None:
        if not self._on:
            return
        start = self._cost.now()
        self._lines.starts(call.line, start)
        call.line.go_on(call.backward)
        self._cost.spent(start, sampled=True)

    def _node_over(self, call: Call, _given: object, _got: object) -> None:
        if not self._on:
            return
        start = self._cost.now()
        self._lines.starts(call.line, start)
        call.line.enter(self._around(call.line))
        self._cost.spent(start, sampled=True)

    def _runs_again(self) -> None:
        """A layer runs in the second forward of a checkpoint: the node that waits for it has done nothing yet."""
        start = self._cost.now()
        for line in self._lines:
            if (span := line.current) is not None and span.name == BACKWARD:
                self._lines.starts(line, start)
                line.again()
        self._cost.spent(start, sampled=True)
