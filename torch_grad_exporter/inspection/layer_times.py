"""What `start_exporter(layer_times=)` asks for: how long the forward and backward of each layer take in sampled rounds.

The forward lasts from the hook before it to the one after it. The backward is that of the nodes which the forward has made: hooks
before and after each, found right after the forward. Never a full backward hook. A layer is timed on the device of its parameters,
by its events or the host's clock, without what the exporter takes meanwhile on the host.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_grad_exporter.capture.armed_round import ArmedRound
from torch_grad_exporter.capture.device_events import EventPool, Stretch, Timeline
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.capture.torch_hooks import differentiable
from torch_grad_exporter.inspection.inner_hooks import ForwardObserver, SampledHooks
from torch_grad_exporter.inspection.layer_rows import LayerRows
from torch_grad_exporter.inspection.measuring import InspectionContext
from torch_grad_exporter.inspection.modules import InnerModules
from torch_grad_exporter.store.records import Inspected
from torch_grad_exporter.torch_compat.autograd import capturing_graph, next_sequence, number_of
from torch_grad_exporter.torch_compat.compiler import compiles_backwards
from torch_grad_exporter.torch_compat.modules import parameters_in

SOURCE = "layer_times"

# Calls of layers in one round, at most; a round with more is not timed.
CALLS = 1 << 14

# Moments of the host in use at once, at most: eight to a call.
HOST_MOMENTS = 8 * CALLS

# Rounds that a device may be behind, at most; while it is, further ones are not timed.
BEHIND = 64

# Nodes that are visited for one call, at most; and of a call whose nodes are all hooked.
VISITED, FEW = 1 << 12, 128

COMPILED = "%d layers are not timed, since they are compiled; a hook in compiled code would compile it again"

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, slots=True, eq=False)
class TimedCall:
    """A call of a layer, on the timeline of its device; the nodes that it makes are numbered from `first` on."""

    layer: str
    line: Timeline[Pass]
    first: int


# A pass of one call, `FORWARD` or `BACKWARD`: the key of a timeline's marks.
Pass = tuple[TimedCall, str]


@dataclass(slots=True, eq=False)
class RoundTimes:
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


@dataclass(frozen=True, slots=True)
class LayerTime:
    """The seconds of a layer by pass, and the sampled rounds in which it was timed."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    rounds: Mapping[str, int] = field(default_factory=dict)

    def with_totals_of(self, other: LayerTime) -> LayerTime:
        """Return the times of both."""
        names = dict.fromkeys((*self.rounds, *other.rounds))
        seconds = {name: self.seconds.get(name, 0.0) + other.seconds.get(name, 0.0) for name in names}
        return LayerTime(seconds, {name: self.rounds.get(name, 0) + other.rounds.get(name, 0) for name in names})


class LayerTimeTotals:
    """The times of layers over sampled rounds. Belongs to the worker; `by_layer` and `untimed` may be read from any thread.

    Attributes:
        untimed: Sampled rounds that are in none of the times, see `torch_grad_exporter_untimed_steps_total`.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._table = LayerRows(LayerTime())
        self.untimed = 0

    @property
    def by_layer(self) -> Mapping[str, LayerTime]:
        """The times by layer, at most as many as `most`, and those of other layers in a remainder."""
        return self._table.rows

    def take(self, record: Inspected, values: object) -> None:  # noqa: ARG002 - like any `Taker`; times need no vectors
        """Count a round; the data are its seconds by layer and pass."""
        assert isinstance(record.data, dict)  # noqa: S101 - only `LayerTimer` sends records of this name
        new: dict[str, LayerTime] = {}
        for (layer, name), seconds in record.data.items():
            timed = LayerTime({name: seconds}, {name: 1})
            new[layer] = new.get(layer, self._table.get(layer)).with_totals_of(timed)
        self._table.enter(new, most=self._most)


class LayerTimer(Inspection, ForwardObserver):
    """The inspection. Belongs to the training thread, and to those of the backward."""

    def __init__(self, context: InspectionContext, modules: InnerModules, events: EventPool, times: LayerTimeTotals) -> None:
        hooks, clock, self._cost, self._mailbox = context.hooks, context.clock, context.cost, context.mailbox
        self._events, self._times = events, times
        self._hooks = SampledHooks(modules, hooks, SOURCE, self, COMPILED)
        self._before = hooks.guarded(SOURCE, self._node_begins)
        self._after = hooks.guarded(SOURCE, self._node_over)
        # A moment of the host is when the running hook of ours began, without what the exporter has taken until then.
        self._hook_began = 0.0
        host = Timeline[Pass](events.of_host(lambda: self._hook_began - clock.own_seconds, HOST_MOMENTS))
        self._by_device: dict[torch.device, Timeline[Pass] | None] = {torch.device("cpu"): host}
        self._taken: set[int] = set()  # the numbers of the nodes of calls that are over within the outermost
        self._calls = 0
        self._on = False  # whether the current round is sampled
        self._follows_backwards = True
        self._round = RoundTimes()
        self._pending: deque[RoundTimes] = deque()

    # The moments of a round

    def forward_began(self, root: torch.nn.Module, _args: object, _kwargs: object, *, sampled: bool) -> None:
        """Hook the model's layers for a sampled round, if this forward is not part of compiled code."""
        self._on = self._hooks.due(sampled=sampled)
        self._taken = set()
        for line in self._lines():  # a forward or backward that has raised left it open
            line.forget()
        if self._on and self._hooks.arm(root):
            self._follows_backwards = not compiles_backwards()

    def backward_ended(self, current: ArmedRound, at: float) -> None:  # noqa: ARG002
        """Take what was timed so far for this round."""
        if current.sampled:
            self._cut(current.number)
            self._read()
        else:
            for line in self._lines():
                line.restart()

    def round_over(self, number: int, *, kept: bool) -> None:
        """Complete the times of the round. Where no backward was seen, they are those up to now."""
        self._hooks.round_over()
        if self._round.number != number:
            self._cut(number)
        over, self._round = self._round, RoundTimes()
        over.lost |= len(self._pending) >= BEHIND
        self._times.untimed += over.lost and kept
        if over.lost or not kept:
            over.release()
        else:
            self._pending.append(over)
        self._read()

    def step_over(self, *, sampled: bool) -> None:
        """Remove all hooks; the next forward sets those that it needs."""
        self._hooks.round_over()
        self._hooks.disarm()
        self._taken, self._calls, self._on = set(), 0, sampled
        if not sampled:
            for line in self._lines():
                line.restart()
        self._read()

    def release(self) -> None:
        """Remove all hooks and forget what is not known yet; idempotent, from any thread."""
        self._hooks.disarm()
        self._on, self._taken = False, set()

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
            self._round = RoundTimes(number)
        self._hook_began = self._cost.now()
        for line in self._lines():
            if (stretch := line.cut()) is None:
                self._round.lost = True
            else:
                self._round.stretches.append(stretch)

    def _read(self) -> None:
        """Post the rounds whose times are known by now."""
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

    def entered(self, label: str, module: torch.nn.Module, args: object, kwargs: object) -> TimedCall | None:  # noqa: ARG002 - of `ForwardObserver`
        """Begin to time a layer on its device."""
        start = self._cost.now()
        line = self._line_of(module)
        if line is None:
            return None
        self._calls += 1
        if self._calls > CALLS:
            line.lose()
            return None
        call = TimedCall(label, line, next_sequence())
        self._hook_began = start
        line.enter((call, FORWARD))
        self._cost.spent(start, sampled=True)
        return call

    def left(self, label: str, module: torch.nn.Module, output: object, call: TimedCall | None) -> None:  # noqa: ARG002 - likewise
        """End the time of a layer's forward, and hook the nodes that it has made."""
        start = self._cost.now()
        if call is None:
            return
        self._leave(call, start)
        if self._follows_backwards:
            outputs = (tensor.grad_fn for tensor in differentiable(output))
            # Without those of calls within it, which are hooked already.
            first, last = own_nodes(outputs, call.first, next_sequence(), self._taken)
            for node in first:
                node.register_prehook(functools.partial(self._before, call))
            for node in last:
                node.register_hook(functools.partial(self._after, call))
        if not self._hooks.running:
            self._taken = set()
        self._cost.spent(start, sampled=True)

    def _leave(self, call: TimedCall, start: float) -> None:
        """Time the innermost call that runs on this device, from the beginning of the running hook on."""
        self._hook_began = start
        around = (running.of for running in reversed(self._hooks.running) if running.of is not None)
        call.line.enter(next(((other, FORWARD) for other in around if other.line is call.line), None))

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

    def repeated(self) -> None:
        """Begin the time of the node again that waits for the second forward of a checkpoint; it has done nothing yet."""
        start = self._hook_began = self._cost.now()
        for line in self._lines():
            if line.current is not None and line.current[1] == BACKWARD:
                line.again()
        self._cost.spent(start, sampled=True)


def own_nodes(outputs: Iterable[Any], first: int, last: int, taken: set[int]) -> tuple[list[Any], list[Any]]:
    """Find the nodes that a call has made: those with a number from `first` up to `last`, that excluded, but not in `taken`.

    The backward goes through many nodes one after the other, from the outputs to the lowest number, so only these ends are hooked.
    Those that are found are added to `taken`.

    Returns:
        The nodes before which the call's backward begins or goes on, and those after which it is over; none if there are too many.
    """
    own: dict[int, Any] = {}
    seen: set[int] = set()
    ends = {number_of(node): node for node in outputs if first <= number_of(node) < last}
    nodes = list(ends.values())
    while nodes:
        node = nodes.pop()
        number = number_of(node)
        if number in seen:
            continue
        if len(seen) == VISITED:
            return [], []
        seen.add(number)
        if number not in taken:
            own[number] = node
        nodes += (behind for behind, _ in node.next_functions if behind is not None and first <= number_of(behind) < last)
    taken.update(own)
    if len(own) <= FEW:
        return [*own.values()], [*own.values()]
    return [*ends.values()], [own[min(own)]]
