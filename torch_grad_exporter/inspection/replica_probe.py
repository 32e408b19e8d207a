"""ReplicaProbe: checksums of what copies of the model on several ranks must have in common, after some sampled steps.

Ranks compare what they have of the same step, so they have to choose the same ones without asking each other. A step is chosen if
its scattered number ends in enough zero bits. How many, each rank decides by its own clock, so that `SECONDS` pass between two.
What a rank with many asks for is among what one with few does, as it is with the sampled rounds themselves.

Read after an optimizer's step: the gradients of its parameters, which are those that it used; and, of `EACH` such steps one, all
parameters, frozen ones included, and the buffers that no wrapper copies from rank 0 before each forward. Modules such as BatchNorm
write those that it does copy in the forward, and so these differ until the next one.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from torch_grad_exporter.capture.armed_round import ArmedRound
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.capture.schedule import scattered
from torch_grad_exporter.errors import warn
from torch_grad_exporter.inspection.measuring import InspectionContext, VectorSender, by_device
from torch_grad_exporter.model.folding import fold
from torch_grad_exporter.model.names import LayerFilter, clean, joined, places_of
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.model.replicas import Reductions
from torch_grad_exporter.statistics.checksums import Checksums
from torch_grad_exporter.torch_compat.autograd import capturing_graph
from torch_grad_exporter.torch_compat.replicas import copied_buffers
from torch_grad_exporter.torch_compat.tensors import is_plain

SOURCE = "replicas"

GRADIENT, WEIGHTS, BUFFERS = KINDS = ("gradient", "weights", "buffers")

# Seconds between two steps of which checksums are made, at least; and of how many of these steps one is for weights and buffers.
SECONDS, EACH = 5.0, 4

LEFT_OUT = (
    "replicas: %d of %d parameters are left out: they are sharded, parallel or of a class of their own, so other ranks have "
    "no copy of them"
)
SEVERAL = "replicas: nothing is compared: parts of the model are wrapped for different groups of ranks"


@dataclass(frozen=True, slots=True)
class Copied:
    """One tensor of which other ranks have a copy: one of `KINDS`, the layer, and its type and shape."""

    kind: str
    layer: str
    form: str


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaMeasurement:
    """The data of a record of checksums.

    Attributes:
        step: Which step it was: how many there were, and the number of the round. A rank whose numbers differ is not compared.
        ranks: Those with a copy; None for all.
        copied: The tensors, in the order of the model.
        places: For each ticket, the tensors whose checksums it has, as positions in `copied`. One that is in none does not exist,
            as a gradient that a parameter did not get.
    """

    step: tuple[int, int]
    ranks: tuple[int, ...] | None
    copied: tuple[Copied, ...]
    places: tuple[tuple[int, ...], ...]


class ReplicaProbe(Inspection):
    """The inspection. Belongs to the training thread. Beyond `max_layers` layers are folded."""

    def __init__(
        self, context: InspectionContext, models: Mapping[str, torch.nn.Module], layers: LayerFilter, *, max_layers: int,
        optimizers: Optimizers, reductions: Reductions,
    ) -> None:  # fmt: skip
        self._models = [(number, name, weakref.ref(module)) for number, (name, module) in enumerate(models.items())]
        self._layers, self._max_layers, self._optimizers = layers, max_layers, optimizers
        self._reductions, self._clock, self._cost = reductions, context.clock, context.cost
        self._sender, self._checksums = VectorSender(SOURCE, context), Checksums()
        self._wrappers: weakref.WeakSet[torch.nn.parallel.DistributedDataParallel] = weakref.WeakSet()
        self._zeros, self._last = 0, -math.inf
        self._said: set[str] = set()

    def forward_began(self, _root: object, _args: object, _kwargs: object, *, sampled: bool) -> None:
        """Note the wrappers that the forward runs through."""
        if sampled:
            self._wrappers.update(wrapper for reference, _ in self._reductions.forwards if (wrapper := reference()) is not None)

    @torch.no_grad()
    def step_ended(self, current: ArmedRound, optimizer: int, _left_out: object) -> None:
        """Make the checksums of a step that is chosen, and hand them over."""
        if capturing_graph():
            return
        steps = sum(self._clock.steps.values())
        number = scattered(max(0, steps - 1))
        with_state = math.isinf(self._last) or number % (EACH << self._zeros) == 0
        if not self._chosen(number):
            return
        groups = {tuple(torch.distributed.get_process_group_ranks(wrapper.process_group)) for wrapper in self._wrappers}
        if len(groups) > 1:
            self._say(SEVERAL)
            return
        read = [*self._gradients(current, optimizer)]
        if with_state:
            read += self._state(current)
        devices = by_device((place, tensor) for place, (_, tensor) in enumerate(read) if tensor is not None)
        vectors = []
        for device, here in devices.items():
            begun = self._cost.begin((device,))
            vectors.append(self._checksums.of(tensor for _, tensor in here))
            self._cost.end(begun)
        copied, places = tuple(copied for copied, _ in read), tuple(tuple(place for place, _ in here) for here in devices.values())
        measured = ReplicaMeasurement((steps, current.number), next(iter(groups), None), copied, places)
        self._sender.send(current.number, vectors, measured)

    def release(self) -> None:
        """Release memory on devices, and forget wrappers; idempotent, from any thread."""
        self._checksums, self._wrappers = Checksums(), weakref.WeakSet()

    def _chosen(self, number: int) -> bool:
        """Return whether a step is one of those that are compared, and learn how many there should be."""
        now = self._clock.clock()
        since = now - self._last
        if number % (1 << self._zeros):
            self._zeros -= self._zeros > 0 and since > EACH * SECONDS
            return False
        self._zeros += since < SECONDS
        self._last = now
        return True

    def _gradients(self, current: ArmedRound, optimizer: int) -> Iterator[tuple[Copied, torch.Tensor | None]]:
        """Yield the optimizer's parameters with their gradients, as far as they are copies."""
        table = current.table
        if table.tracked.flat:
            return
        for position in self._optimizers.positions_of(table, optimizer):
            parameter = table.tracked[position].parameter()
            if parameter is not None and is_copied(parameter):
                gradient = parameter.grad
                if gradient is None or is_copied(gradient):
                    layer = table.layers[table.layer_of[position]]
                    yield Copied(GRADIENT, layer, form_of(parameter)), gradient

    def _state(self, current: ArmedRound) -> list[tuple[Copied, torch.Tensor | None]]:
        """Return all parameters and buffers that are copies; say once how many parameters are none."""
        roots = [(number, name, root) for number, name, reference in self._models if (root := reference()) is not None]
        places = [place for place in places_of(roots) if self._layers.accepts(place.layer)]
        cut = bool(current.table.tracked.flat)
        parameters = [(place.layer, place.parameter) for place in places if not cut and is_copied(place.parameter)]
        if len(parameters) < len(places):
            self._say(LEFT_OUT, len(places) - len(parameters), len(places))
        if cut:
            return []
        buffers: dict[int, tuple[str, torch.Tensor]] = {}
        for _, name, root in roots:
            for raw, module in root.named_modules():
                for attribute, buffer in module.named_buffers(recurse=False):
                    layer = joined(name, clean(raw) or attribute)
                    if self._layers.accepts(layer) and is_copied(buffer):
                        buffers.setdefault(id(buffer), (layer, buffer))
        for written in {id(buffer) for wrapper in self._wrappers for buffer in copied_buffers(wrapper)}:
            buffers.pop(written, None)
        state: list[tuple[Copied, torch.Tensor | None]] = []
        for kind, tensors in ((WEIGHTS, parameters), (BUFFERS, [*buffers.values()])):
            names = [*dict.fromkeys(layer for layer, _ in tensors)]
            labels = dict(zip(names, fold(names, self._max_layers), strict=True))
            state += [(Copied(kind, labels[layer], form_of(tensor)), tensor) for layer, tensor in tensors]
        return state

    def _say(self, message: str, *arguments: object) -> None:
        if message not in self._said:
            self._said.add(message)
            warn(message, *arguments)


def is_copied(tensor: torch.Tensor) -> bool:
    """Return whether other ranks may have a copy of a tensor whose bits can be read: it is plain and dense."""
    return is_plain(tensor) and tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta)


def form_of(tensor: torch.Tensor) -> str:
    """Return the type and shape of a tensor."""
    return f"{tensor.dtype}{[*tensor.shape]}"
