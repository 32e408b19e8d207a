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
from dataclasses import dataclass, field

import torch

from torch_grad_exporter.capture.armed_round import ArmedRound
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.device_events import EventPool, Stretch, Timeline
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.capture.module_tensors import differentiable
from torch_grad_exporter.capture.progress import StepClock
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

# Calls of layers in one round, at most; a round with more is not timed.
CALLS = 1 << 14

# Moments of the host in use at once, at most: eight to a call.
HOST_MOMENTS = 8 * CALLS

# Rounds that a device may be behind, at most; while it is, further ones are not timed.
BEHIND = 64

COMPILED = "%d layers are not timed, since they are compiled; a hook in compiled code would compile it anew"


@dataclass(frozen=True, slots=True, eq=False)
class TimedCall:
    """A call of a layer, on the timeline of its device; the nodes that it makes are numbered from `first` on."""

    module: int
    layer: str
    line: Timeline[Pass]
    first: int


# A pass of one call, `FORWARD` or `BACKWARD`: the key of a timeline's marks.
Pass = tuple[TimedCall, str]


@dataclass(slots=True, eq=False)
class _RoundTimes:
    """A sampled round, until its times are known. `lost`: some of them are missing."""

    number: int = -1
    lost: bool = False
    stretches: deque[Stretch[Pass]] = field(default_factory=deque)
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)

    def read(self) -> bool:
        """Add up what devices have passed by now; return whether that is all."""
        while self.stretches and (seconds := self.stretches[0].read()) is not None:
            self.lost |= self.stretches.popleft().failed
            for (call, name), added in seconds.items():
                self.seconds[call.layer, name] = self.seconds.get((call.layer, name), 0.0) + added
        return not self.stretches

    def release(self) -> None:
        """Forget all of it."""
        for stretch in self.stretches:
            stretch.release()
        self.stretches.clear()
        self.seconds = {}


class LayerTimer(Inspection):
    """An inspection. Belongs to the training thread, and to those of the backward."""

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
        self._events, self._cost, self._mailbox, self._times = events, cost, mailbox, times
        moments = Moments(ended=self._ended, began=self._began, again=self._runs_again)
        self._hooks = RoundHooks(modules, hooks, SOURCE, moments)
        self._before = hooks.guarded(SOURCE, self._node_begins)
        self._after = hooks.guarded(SOURCE, self._node_over)
        # A moment of the host is when the running hook of ours began, without what the exporter has taken until then.
        self._hook_began = 0.0
        host = Timeline[Pass](events.of_host(lambda: self._hook_began - clock.own_seconds, HOST_MOMENTS))
        self._by_device: dict[torch.device, Timeline[Pass] | None] = {torch.device("cpu"): host}
        # The calls that run, the inner ones last, and the numbers of the nodes of those that are over within the outermost.
        self._open: list[TimedCall] = []
        self._taken: set[int] = set()
        self._calls = 0
        self._on = False  # whether the current round is sampled
        self._follows_backwards = True
        self._thread = -1
        self._round = _RoundTimes()
        self._pending: deque[_RoundTimes] = deque()
        # By `id`, models that had a forward before this round, and those that had their first one in it.
        self._roots: set[int] = set()
        self._new_roots: set[int] = set()
        self._warned = False

    # The moments of a round

    def forward_began(self, root: torch.nn.Module, _args: object, _kwargs: object, *, sampled: bool) -> None:
        """Hook the model's layers for a sampled round, if this forward is not part of compiled code."""
        self._on = sampled and BACKWARDS_ARE_SEEN and not within_transform() and not capturing_graph()
        self._open, self._taken = [], set()
        for line in self._lines():  # a forward or backward that has raised left it open
            line.forget()
        if not self._on:
            self._hooks.disarm()
            return
        # Where something is compiled, the first forward of a model may be the one that compiles it. The same in `Activations`.
        if id(root) not in self._roots and something_is_compiled():
            self._new_roots.add(id(root))
            return
        self._thread = threading.get_ident()
        self._follows_backwards = not compiles_backwards()
        chosen = self._hooks.arm(root, compiled=called_from_compiled(sys._getframe(1)))
        if chosen.compiled and not self._warned:
            self._warned = True
            say(logger, logging.WARNING, COMPILED, chosen.compiled)

    def backward_ended(self, current: ArmedRound, at: float) -> None:  # noqa: ARG002
        """What was timed so far belongs to this round."""
        if current.sampled:
            self._cut(current.number)
            self._read()
        else:
            self._restart()

    def round_over(self, number: int, *, kept: bool) -> None:
        """The times of the round are complete. Where no backward was seen, they are those up to now."""
        self._roots |= self._new_roots
        if self._round.number != number:
            self._cut(number)
        over, self._round = self._round, _RoundTimes()
        over.lost |= len(self._pending) >= BEHIND
        self._times.untimed += over.lost and kept
        if over.lost or not kept:
            over.release()
        else:
            self._pending.append(over)
        self._read()

    def step_over(self, *, sampled: bool) -> None:
        """Remove all hooks; the next forward sets those that it needs."""
        self._roots |= self._new_roots
        self._hooks.disarm()
        self._open, self._taken, self._calls, self._on = [], set(), 0, sampled
        if not sampled:
            self._restart()
        self._read()

    def release(self) -> None:
        """Remove all hooks and forget what is not known yet; idempotent, from any thread."""
        self._hooks.disarm()
        self._on = False
        self._open, self._taken = [], set()

    # Timelines

    def _lines(self) -> list[Timeline[Pass]]:
        return [line for line in self._by_device.values() if line is not None]

    def _line_of(self, module: torch.nn.Module) -> Timeline[Pass] | None:
        """Return that of the device that a layer's parameters are on; None if it has none, or is on one that is not timed."""
        parameter = next((parameter for parameter in parameters_in(module).values() if parameter is not None), None)
        if parameter is None:
            return None
        device = parameter.device
        if device not in self._by_device:
            events = self._events.of(device)
            self._by_device[device] = None if events is None else Timeline(events)
        return self._by_device[device]

    def _cut(self, number: int) -> None:
        """Take the marks of all timelines for the round of this number."""
        if self._round.number != number:
            self._round.release()
            self._round = _RoundTimes(number)
        self._hook_began = self._cost.now()
        for line in self._lines():
            if (stretch := line.cut()) is None:
                self._round.lost = True
            else:
                self._round.stretches.append(stretch)

    def _restart(self) -> None:
        for line in self._lines():
            line.restart()

    def _read(self) -> None:
        """Hand over the rounds whose times are known by now."""
        if capturing_graph():
            return
        while self._pending and self._pending[0].read():
            over = self._pending.popleft()
            self._times.untimed += over.lost
            if over.seconds and not over.lost:
                self._mailbox.append(Inspected(SOURCE, over.number, (), over.seconds))
        if not self._pending:
            self._round.read()

    # Forwards

    def _began(self, layer: Hooked) -> None:
        start = self._cost.now()
        line = self._line_of(layer.module)
        if line is None or threading.get_ident() != self._thread:
            return
        self._calls += 1
        if self._calls > CALLS:
            line.lose()
            return
        call = TimedCall(id(layer.module), layer.label, line, next_sequence())
        self._open.append(call)
        self._hook_began = start
        line.enter((call, FORWARD))
        self._cost.spent(start, sampled=True)

    def _ended(self, layer: Hooked, output: object) -> None:
        start = self._cost.now()
        if threading.get_ident() != self._thread or not any(call.module == id(layer.module) for call in self._open):
            return
        while (call := self._open.pop()).module != id(layer.module):
            pass  # a call that has raised within this one
        self._leave(call, start)
        if self._follows_backwards:
            outputs = (tensor.grad_fn for tensor in differentiable(output))
            # Without those of calls within it, which are hooked already.
            nodes = own_nodes(outputs, call.first, next_sequence(), self._taken)
            for node in () if nodes is None else nodes.before:
                node.register_prehook(functools.partial(self._before, call))
            for node in () if nodes is None else nodes.after:
                node.register_hook(functools.partial(self._after, call))
        if not self._open:
            self._taken = set()
        self._cost.spent(start, sampled=True)

    def _leave(self, call: TimedCall, start: float) -> None:
        """From the beginning of the running hook on, it is the innermost call that runs on this device."""
        self._hook_began = start
        call.line.enter(next(((around, FORWARD) for around in reversed(self._open) if around.line is call.line), None))

    # Backwards

    def _node_begins(self, call: TimedCall, _gradients: object) -> None:
        if self._on:
            start = self._hook_began = self._cost.now()
            call.line.go_on((call, BACKWARD))
            self._cost.spent(start, sampled=True)

    def _node_over(self, call: TimedCall, _given: object, _got: object) -> None:
        if self._on:
            start = self._cost.now()
            self._leave(call, start)
            self._cost.spent(start, sampled=True)

    def _runs_again(self) -> None:
        """A layer runs in the second forward of a checkpoint: the node that waits for it has done nothing yet."""
        start = self._hook_began = self._cost.now()
        for line in self._lines():
            if line.current is not None and line.current[1] == BACKWARD:
                line.again()
        self._cost.spent(start, sampled=True)
