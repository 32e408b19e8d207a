"""Batches as plain containers, and the ring in which the last of them stay for a while."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import torch

from torch_grad_exporter.inspection.black_box.random_states import States
from torch_grad_exporter.torch_compat.autograd import version_of
from torch_grad_exporter.torch_compat.tensors import is_plain

SOURCE = "black_box"

# All batches that are kept, their random states included; and one of them.
RING_BYTES, BATCH_BYTES = 1 << 29, 1 << 28

# Tensors of a batch that are copied, together: what the model or the loop writes into them later does not matter then.
COPIED_BYTES = 1 << 20

# What a batch takes without its tensors; most of it is the state of Python's generator.
STATES_BYTES = 1 << 15

# Batches that are kept at most, and at least, where there is memory.
MOST, LEAST = 4096, 4

# Batches that are looked at in one forward, whether they can be dropped.
DROPPED = 64

# Values in a batch, and containers within each other.
VALUES, DEPTH = 1024, 16

PLAIN_TYPES = (bool, int, float, str, type(None))

WRITTEN = "it was written to after the forward had begun"
PART = "it is a small part of a larger tensor, which would have to be kept as a whole"
INFERENCE = "it is a large tensor of torch.inference_mode, of which it cannot be seen whether it is written to later"
LARGE = f"the batch is larger than {BATCH_BYTES >> 20} MiB"


@dataclasses.dataclass(slots=True, eq=False)
class KeptTensor:
    """A tensor of a batch: a copy, or the one that the model was given, without its graph; None once it is dropped.

    `place`: such as `args.0`. `version`: how often a given one had been written to when the forward began; None for a copy.
    """

    place: str
    tensor: torch.Tensor | None
    version: int | None = None

    @property
    def changed(self) -> bool:
        """Whether PyTorch has written to it since. What NumPy, a data loader or a raw pointer writes does not show."""
        return self.tensor is not None and self.version is not None and version_of(self.tensor) != self.version


@dataclasses.dataclass(slots=True, eq=False)
class KeptBatch:
    """What a root was given in one forward, as plain containers with a `KeptTensor` for each tensor.

    Attributes:
        number: Of the forward; the first is 0.
        step: Optimizer steps before it.
        root: Name of the model.
        states: The random states when it began.
        left_out: By the place, why something is absent.
        nbytes: The memory that it keeps.
        round: In which its gradients were read, or would have been; -1 while that is unknown.
        on_host: Whether the background may read the tensors: all are on the host.
    """

    number: int
    step: int
    root: str
    states: States
    args: list[object] = dataclasses.field(default_factory=list)
    kwargs: dict[str, object] = dataclasses.field(default_factory=dict)
    tensors: list[KeptTensor] = dataclasses.field(default_factory=list)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    nbytes: int = STATES_BYTES
    round: int = -1
    on_host: bool = False

    def fill(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take what the root is given. A batch that is too large keeps none of its tensors."""
        room = [COPIED_BYTES, VALUES]
        self.args = [self._plain(value, f"args.{place}", room, DEPTH) for place, value in enumerate(args)]
        self.kwargs = {name: self._plain(value, f"kwargs.{name}", room, DEPTH) for name, value in kwargs.items()}
        if self.nbytes > BATCH_BYTES:
            self.left_out |= dict.fromkeys((kept.place for kept in self.tensors), LARGE)
            for kept in self.tensors:
                kept.tensor = None
            self.nbytes = STATES_BYTES
        self.on_host = all(kept.tensor is None or kept.tensor.device.type == "cpu" for kept in self.tensors)

    def _plain(self, value: Any, place: str, room: list[int], depth: int) -> object:  # noqa: ANN401 - anything
        """Return a value as plain containers. `room`: bytes that may still be copied, and values that may still come."""
        room[1] -= 1
        if room[1] < 0 or depth < 0:
            self.left_out.setdefault("further values", f"there are more than {VALUES} values, or {DEPTH} containers in each other")
            return None
        if dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping):
            value = {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)}
        if isinstance(value, torch.Tensor):
            value = self._tensor(value, place, room)
        elif isinstance(value, Mapping):
            keys = [key for key in value if type(key) in (str, int)]
            value = {key: self._plain(value[key], f"{place}.{key}", room, depth - 1) for key in keys}
        elif isinstance(value, list | tuple):
            parts = [self._plain(part, f"{place}.{number}", room, depth - 1) for number, part in enumerate(value)]
            value = parts if isinstance(value, list) else tuple(parts)
        elif type(value) not in PLAIN_TYPES:
            self.left_out[place] = f"it is a {type(value).__qualname__}"
            value = None
        return value

    def _tensor(self, tensor: torch.Tensor, place: str, room: list[int]) -> KeptTensor | None:
        if not is_plain(tensor) or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            self.left_out[place] = f"it is a {type(tensor).__qualname__} that is not plain and dense"
            return None
        kept = KeptTensor(place, tensor.detach())
        if tensor.nbytes <= room[0]:
            room[0] -= tensor.nbytes
            kept.tensor = tensor.detach().clone()
            self.nbytes += tensor.nbytes
        elif tensor.is_inference():
            self.left_out[place] = INFERENCE
            return None
        elif (held := tensor.untyped_storage().nbytes()) > 2 * tensor.nbytes:
            self.left_out[place] = PART
            return None
        else:
            kept.version = version_of(tensor)
            self.nbytes += max(held, tensor.nbytes)
        self.tensors.append(kept)
        return kept


class BatchRing:
    """The batches that are kept. The training thread adds and drops them; the worker reads them and pins some.

    No lock is taken: each operation on the dictionaries is one step for other threads.

    Attributes:
        batches: By the number of the forward, the oldest first.
        seen: The last forward of which the worker knows all that there is to know; set by the worker.
        pins: By the reason, the forwards that are not to be dropped; set by the worker.
        lost: Batches that were dropped before the worker knew of them.
        full: Whether all boxes of the run are written, so that no batch is needed any more; set by the recorder.
    """

    def __init__(self) -> None:
        self.batches: dict[int, KeptBatch] = {}
        self.seen = -1
        self.pins: dict[str, tuple[int, ...]] = {}
        self.lost = 0
        self.full = False
        self._nbytes = 0

    def add(self, batch: KeptBatch) -> None:
        """Add the batch of a forward, and drop those that are not needed any more, or do not fit."""
        self.batches[batch.number] = batch
        self._nbytes += batch.nbytes
        pinned = {number for numbers in tuple(self.pins.values()) for number in numbers}
        for number in list(itertools.islice(self.batches, DROPPED)):
            full = self._nbytes > RING_BYTES or len(self.batches) > MOST
            if not full and (number > self.seen or len(self.batches) <= LEAST + len(pinned)):
                break
            if number not in pinned:
                self.lost += number > self.seen
                self._nbytes -= self.batches.pop(number).nbytes

    def latest(self, number: int | None = None) -> tuple[int, ...]:
        """Return the forwards up to this one, or up to the last: two at most."""
        numbers = [other for other in tuple(self.batches) if number is None or other <= number]
        return tuple(numbers[-2:])

    def clear(self) -> None:
        """Drop all batches, when no more forwards come."""
        self.batches, self.pins, self._nbytes = {}, {}, 0
