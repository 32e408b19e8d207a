"""Tape: what the host needs to know of an armed forward and backward to find where a value became non-finite.

A tape holds no tensors. `Flags` has those that wait on their devices for the end of the recording.

A value of the autograd graph is known by the node that gives it and the number of that output; a node by its sequence number,
which autograd counts up on each thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from torch_grad_exporter.metrics.families import FloatArray, IntArray
from torch_grad_exporter.statistics.device import wide
from torch_grad_exporter.torch_compat.autograd import intercepting_modes, within_transform
from torch_grad_exporter.torch_compat.tensors import is_plain, local

# Tensors that are flagged in one tape, at most.
MOST = 1 << 15

FLOATS = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))


class Flags:
    """The smallest and the largest value of tensors so far, on their devices, in slots that are numbered from 0.

    Both are NaN where any value is, and one is infinite where no value is NaN and any is infinite. One pass over a tensor, without
    a copy of it; nothing is read, so nothing synchronises.
    """

    def __init__(self) -> None:
        self._ends: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, tensor: torch.Tensor) -> int | None:
        """Flag a tensor and return its slot; None if its values cannot be read, or there are too many tensors."""
        tensor = local(tensor)
        if not is_plain(tensor) or tensor.layout is not torch.strided or not tensor.numel() or tensor.device.type == "meta":
            return None
        if len(self._ends) >= MOST or intercepting_modes() or within_transform():
            return None
        tensor = tensor.detach()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.dtype not in FLOATS:
            return None
        low, high = torch.aminmax(tensor)
        self._ends.append((low, high))
        return len(self._ends) - 1

    def vectors(self) -> tuple[list[torch.Tensor], tuple[IntArray, ...]]:
        """Return a vector for each device and type, with all smallest values, then all largest; and the slots of each."""
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for slot, (low, _) in enumerate(self._ends):
            groups.setdefault((low.device, low.dtype), []).append(slot)
        vectors = [
            torch.stack([self._ends[slot][end] for end in (0, 1) for slot in slots]).to(wide(device))
            for (device, _), slots in groups.items()
        ]
        return vectors, tuple(np.array(slots, dtype=np.int64) for slots in groups.values())


# The sequence number of a node and the number of its output; `LEAF` and the number of a parameter, -1 if it is unknown.
Value = tuple[int, int]

# In the place of a node: a leaf of the graph, such as a parameter.
LEAF = -1

# Operations that move values only: their gradient has the values that it gets, so they are not hooked.
MOVES = frozenset((
    "T", "View", "Transpose", "Permute", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Clone", "Alias",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class TapedCall:
    """One call of a module. `layer`: its name; `kind`: its class; `parent`: the number of the call around it, -1 for none.

    `number`: which call of this module it is, from 1. `module`: a key of the module. `hidden`: compiled modules in it that show
    nothing of their inside.
    """

    layer: str
    kind: str
    parent: int
    number: int
    module: int
    training: bool
    hidden: tuple[str, ...] = ()
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor that a call got (an input) or gave. `value`: where it is in the graph, None outside of any."""

    call: int
    output: bool
    name: str
    slot: int
    value: Value | None


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A parameter or buffer. `name`: its full name; `layer`: of the module that owns it; `module`: a key of that module."""

    name: str
    attribute: str
    layer: str
    module: int
    buffer: bool
    slot: int


@dataclass(frozen=True, slots=True)
class TapedNode:
    """A node of the graph. `name`: of its operation. `edges`: the values that it was computed from, whose gradients it gives.

    `leaves`: for each whether its gradient goes into a leaf without another operation between.
    """

    name: str
    edges: tuple[Value | None, ...]
    leaves: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class GradientEvent:
    """Gradients that a node has got and given in a backward, by the number of its output or edge; in the order in which it ran."""

    node: int
    got: tuple[tuple[int, int], ...]
    given: tuple[tuple[int, int], ...]


@dataclass(slots=True, eq=False)
class Tape:
    """One or more forwards and the backward through them. Filled while they run, and not changed after that.

    `slots` are those of `Flags`.

    Attributes:
        step: Optimizer steps before it.
        began: For each change of the running call, the sequence number from which nodes belong to it, and the call, -1 for none.
        roots: Calls of whole models.
        losses: Slot and value of each tensor that the backward started from, empty if that is unknown.
        backward: Whether there was a backward.
        before: Slots of all gradients before the forward, by parameter.
        after: Likewise after the backward.
        ranks: Whether gradients are reduced over several ranks.
        scaled: Whether a gradient scaler is in use.
        full: Whether there was more than is flagged.
        slots: Of the vectors with its flags, see `Flags.vectors`.
    """

    step: int
    calls: list[TapedCall] = field(default_factory=list)
    places: list[TensorPlace] = field(default_factory=list)
    held: list[HeldTensor] = field(default_factory=list)
    nodes: dict[int, TapedNode] = field(default_factory=dict)
    events: list[GradientEvent] = field(default_factory=list)
    began: list[tuple[int, int]] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)
    losses: list[tuple[int, Value | None]] = field(default_factory=list)
    backward: bool = False
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    ranks: bool = False
    scaled: bool = False
    full: bool = False
    slots: tuple[IntArray, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class FlaggedTape:
    """A tape with the smallest and largest value of each slot."""

    tape: Tape
    low: FloatArray
    high: FloatArray

    @classmethod
    def of(cls, tape: Tape, values: tuple[FloatArray, ...]) -> FlaggedTape:
        """Return a tape with its flags, once their vectors have arrived."""
        low, high = np.zeros((2, sum(map(len, tape.slots))))
        for slots, vector in zip(tape.slots, values, strict=True):
            low[slots], high[slots] = vector.reshape(2, len(slots))
        return cls(tape, low, high)

    def kind(self, slot: int) -> str:
        """Return "nan", "inf", or an empty string where all values are finite."""
        low, high = float(self.low[slot]), float(self.high[slot])
        if math.isnan(low) or math.isnan(high):
            return "nan"
        return "inf" if math.isinf(low) or math.isinf(high) else ""

    def is_mask(self, slot: int) -> bool:
        """Return whether it looks like a mask that is added: -inf, and nothing above zero."""
        return self.low[slot] == -math.inf and self.high[slot] in (0.0, -math.inf)

    def sinks(self, slot: int) -> bool:
        """Return whether its only values that are not finite are -inf."""
        return self.low[slot] == -math.inf and self.high[slot] != math.inf and not math.isnan(self.high[slot])

    def any_of(self, slots: Iterable[int]) -> str:
        """Return the worst kind of these."""
        kinds = {self.kind(slot) for slot in slots}
        return "nan" if "nan" in kinds else "inf" if "inf" in kinds else ""
