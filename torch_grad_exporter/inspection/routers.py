"""Routers: how mixture-of-experts routers spread tokens, from what they return, count, or give to `exporter.router`.

Tokens are counted on their device by adding ones at the experts' places, so that nothing waits for it. What forwards have shown is
pending until a backward or a step of their round.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import torch

from torch_grad_exporter.capture.armed_round import ArmedRound
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.errors import warn
from torch_grad_exporter.inspection.inner_hooks import ForwardObserver, SampledHooks
from torch_grad_exporter.inspection.measuring import InspectionContext, MeasurementTimer, VectorSender, by_device, dense
from torch_grad_exporter.inspection.modules import InnerModules, ModuleKind, named_modules
from torch_grad_exporter.inspection.router_loads import Load, SentLoad, check_arguments, entropies_of, load_of, logits_and_indices
from torch_grad_exporter.model.names import LayerFilter
from torch_grad_exporter.statistics.device import wide
from torch_grad_exporter.torch_compat.autograd import capturing_graph, graph_task, outside_of_modes, within_transform

SOURCE = "routers"

# Names that `exporter.router` may be given, at most.
NAMES = 100

# Loads that are pending, at most.
LOADS = 1 << 12

# Buffers in which torchtitan and Megatron count tokens: they also count in compiled code.
COUNTERS = ("tokens_per_expert", "tokens_per_expert_E", "local_tokens_per_expert")

COMPILED = "%d routers are not shown, since they are compiled; pass what they count to exporter.router() outside of compiled code"
UNKNOWN = "the router %s is not shown, since a %s returns no known form; pass its counts or indices to exporter.router()"
NONE_FOUND = "routers=True finds no router in the model; pass counts or indices to exporter.router()"


class LayerKey(NamedTuple):
    """A layer, and on which device it has how many experts."""

    layer: str
    device: torch.device
    experts: int


class Counting(NamedTuple):
    """A module that counts the tokens of its experts in a buffer of this name, and its layer. Held weakly."""

    layer: str
    module: weakref.ref[torch.nn.Module]
    buffer: str


def routers_in(models: Mapping[str, torch.nn.Module], layers: LayerFilter, most: int) -> tuple[InnerModules, list[Counting]]:
    """Return the routers that can be hooked, and the modules that count by themselves."""
    counting = [
        Counting(named.name, weakref.ref(named.module), buffer)
        for name, root in models.items()
        for named in named_modules(name, root)
        for buffer in COUNTERS
        if isinstance(getattr(named.module, buffer, None), torch.Tensor) and layers.accepts(named.name)
    ]
    inside = tuple(re.compile(rf"{re.escape(layer)}(\.|$)") for layer, _, _ in counting)
    routers = InnerModules(models, LayerFilter(layers.include, (*layers.exclude, *inside)), ModuleKind.ROUTERS, most)
    selected = routers.selected()
    if not counting and not selected.by_root and not selected.compiled:
        warn(NONE_FOUND)
    return routers, counting[:most]


class Routers(Inspection, ForwardObserver):
    """The inspection of routers. Belongs to the training thread; `take` may be called from any.

    `modules`: the routers to hook; `sampled`: whether the round of a forward that begins now is sampled.
    """

    def __init__(self, context: InspectionContext, modules: InnerModules, counting: list[Counting], *, sampled: bool) -> None:
        self._cost, self._counting = context.cost, counting
        self._sender, self._timed = VectorSender(SOURCE, context), MeasurementTimer(context)
        self._hooks = SampledHooks(modules, context.hooks, SOURCE, self, COMPILED)
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._warned = False
        self._unknown: set[str] = set()  # layers whose router returns something else
        self._sampled = sampled
        self._trains: bool | None = None  # whether the forward that has begun last is of a training; None after a step
        self._pending: deque[tuple[LayerKey, Load]] = deque(maxlen=LOADS)
        self._before: dict[LayerKey, Load] | None = None  # the counters at the first forward of the round
        self._number, self._loads = -1, dict[LayerKey, Load]()
        self._counted = dict[LayerKey, Load]()  # by counters, since then
        self.used = False

    def take(self, name: str, given: torch.Tensor, experts: int | None) -> None:
        """Take counts or indices; see `Exporter.router`. After the first call, rounds that are not sampled cost next to nothing."""
        if self.used and not self._sampled:
            return
        start = self._cost.now()
        check_arguments(name, given, experts)
        self.used = True
        # A checkpoint runs forwards again within the backward; a reentrant one runs its first forward without gradients.
        trains = torch.is_grad_enabled() if self._trains is None else self._trains
        if not self._sampled or graph_task() != -1 or not trains:
            return
        values = None if within_transform() or capturing_graph() else dense(given)
        if values is not None and self._is_shown(name):
            with outside_of_modes():  # such as that of a checkpoint, which keeps results of operations for its second forward
                load = load_of(values, experts)
            self._pending.append((LayerKey(name, values.device, len(load.counts)), load))
        self._cost.spent(start, sampled=True)

    def _is_shown(self, name: str) -> bool:
        """Return whether the name is among the first ones."""
        if name in self._names:
            return True
        with self._lock:
            room = len(self._names) < NAMES
            if room:
                self._names.add(name)
            elif not self._warned:
                self._warned = True
                warn("exporter.router(): only the first %d names are shown; %r is left out", NAMES, name)
        return room

    # The moments of a round

    def forward_began(self, root: torch.nn.Module, _args: object, _kwargs: object, *, sampled: bool) -> None:
        """Hook the model's routers for a sampled round, and note what counters have."""
        self._sampled, self._trains = sampled, root.training
        sampled &= root.training  # else it is an evaluation, with gradients as they may be
        if sampled and self._before is None and self._counting and not capturing_graph():
            self._before = self._counters()
        if self._hooks.due(sampled=sampled):
            self._hooks.arm(root)

    @torch.no_grad()
    def backward_ended(self, current: ArmedRound, at: float) -> None:  # noqa: ARG002
        """Count what forwards have shown until now as part of the round."""
        if not current.sampled:
            self._pending.clear()
            return
        self._confirm(current.number)
        if self._before is None or capturing_graph():
            return
        self._counted = {}
        for key, now in self._counters().items():
            if key in self._before:
                counts, then = now.counts, self._before[key].counts
                # All that a counter has where it was cleared meanwhile.
                self._counted[key] = Load(torch.where((counts >= then).all(), counts - then, counts))

    def step_began(self, current: ArmedRound, optimizer: int) -> None:  # noqa: ARG002
        """Count what the loop has given since the backward."""
        self._confirm(current.number)

    def step_over(self, *, sampled: bool) -> None:
        """Remove all hooks; what comes until the next forward with gradients may be of an evaluation."""
        self._sampled, self._trains = sampled, None
        self._pending.clear()
        self._before = None
        self._hooks.round_over()
        self._hooks.disarm()

    def round_over(self, number: int, *, kept: bool) -> None:
        """Send what the round has shown to the host, if it is to be shown."""
        if number == self._number:
            loads, self._loads, self._counted = self._loads | self._counted, {}, {}
            self._number = -1
            self._timed.sample_over()
            if kept:
                self._send(number, loads)

    def release(self) -> None:
        """Remove all hooks and forget what is not sent; idempotent, from any thread."""
        self._sampled, self._before = False, None
        self._pending.clear()
        self._loads, self._counted = {}, {}
        self._hooks.disarm()

    # Hooks

    @torch.no_grad()
    def left(self, label: str, module: torch.nn.Module, output: object, call: object) -> None:  # noqa: ARG002
        """Count the tokens in what a router has returned."""
        start = self._cost.now()
        if (known := logits_and_indices(output)) is None:
            if label not in self._unknown:
                self._unknown.add(label)
                warn(UNKNOWN, label, type(module).__name__)
            return
        logits, ids = known
        with self._timed.measuring(ids.device):
            load = load_of(ids, logits.shape[-1])
            load.entropies = entropies_of(module, logits)
        load.tokens = 0 if load.entropies is None else logits.shape[:-1].numel()
        self._pending.append((LayerKey(label, ids.device, logits.shape[-1]), load))
        self._cost.spent(start, sampled=True)

    def _confirm(self, number: int) -> None:
        if number != self._number:
            self._number, self._loads, self._counted = number, {}, {}
        while self._pending:
            key, load = self._pending.popleft()
            self._loads[key] = self._loads[key] + load if key in self._loads else load

    @torch.no_grad()
    def _counters(self) -> dict[LayerKey, Load]:
        """Return what the counters have now."""
        counters: dict[LayerKey, Load] = {}
        for layer, reference, name in self._counting:
            counter = getattr(reference(), name, None)
            values = dense(counter) if isinstance(counter, torch.Tensor) else None
            if values is not None:
                load = Load(values.reshape(-1).to(wide(values.device), copy=True))
                counters[LayerKey(layer, values.device, len(load.counts))] = load
        return counters

    @torch.no_grad()
    def _send(self, number: int, loads: Mapping[LayerKey, Load]) -> None:
        vectors, sent = [], []
        for device, here in by_device(((key, load), load.counts) for key, load in loads.items()).items():
            begun = self._cost.begin((device,))
            parts = []
            for (key, load), counts in here:
                parts += [counts, counts.new_zeros(1) if load.entropies is None else load.entropies]
                sent.append(SentLoad(key.layer, key.experts, load.tokens))
            vectors.append(torch.cat(parts))
            self._cost.end(begun)
        self._sender.send(number, vectors, tuple(sent))
