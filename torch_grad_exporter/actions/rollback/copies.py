"""HostCopies: the last copies of the training's state in the memory of the host.

The memory is taken once for each copy and used again, so that a later copy allocates nothing. Tensors of a CUDA device are copied
into pinned memory in the order of its current stream: nothing waits, and a step that is launched later cannot change them before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torch_grad_exporter.actions.rollback.state import PackedState, TrainingState

# Tensors begin at multiples of this many bytes, and share pieces of memory of this size; a larger tensor has one of its own.
ALIGNED, PIECE = 64, 1 << 28

# Shape, stride and type of each tensor, and whether its copy is pinned.
Layout = tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool], ...]


def _layout(tensors: Sequence[torch.Tensor]) -> Layout:
    return tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_cuda) for tensor in tensors)


def pieces_of(layout: Layout) -> list[tuple[bool, int, list[tuple[int, int]]]]:
    """Return the pieces of memory that hold a copy: whether it is pinned, its bytes, and which tensors begin where in it."""
    pieces: list[tuple[bool, int, list[tuple[int, int]]]] = []
    last = {True: -1, False: -1}
    for number, (shape, _, kind, pinned) in enumerate(layout):
        size = torch.Size(shape).numel() * kind.itemsize
        size += -size % ALIGNED
        there = last[pinned]
        if there < 0 or pieces[there][1] + size > PIECE:
            last[pinned] = there = len(pieces)
            pieces.append((pinned, 0, []))
        _, filled, places = pieces[there]
        places.append((number, filled))
        pieces[there] = pinned, filled + size, places
    return pieces


def bytes_of(layout: Layout) -> int:
    """Return the bytes that a copy takes. PyTorch rounds pinned memory up to a power of two."""
    return sum(1 << max(0, size - 1).bit_length() if pinned else size for pinned, size, _ in pieces_of(layout))


def bytes_for(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes that a copy of the tensors takes."""
    return bytes_of(_layout(tensors))


def _allocated(layout: Layout, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a host tensor for each; dense ones have the strides of the original, so that both are copied as they lie."""
    copies: dict[int, torch.Tensor] = {}
    for pinned, size, places in pieces_of(layout):
        memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        for number, begin in places:
            tensor = tensors[number]
            values = memory[begin : begin + tensor.numel() * tensor.element_size()].view(tensor.dtype)
            stride = torch.empty_like(tensor, device="meta").stride()
            copies[number] = values.as_strided(tensor.shape, stride, values.storage_offset())
    return [copies[number] for number in range(len(tensors))]


@dataclass(eq=False, slots=True)
class HostCopy:
    """One copy of the training's state on the host.

    Attributes:
        step: The step after which it was made, as ranks count; None while it is not whole.
        shown: The same step in the whole training, as metrics and messages have it.
        at: When, by `time.monotonic`.
        state: Where its tensors belong.
        size: The bytes that they take.
        events: One for each CUDA device, after which its tensors are there.
    """

    step: int | None = None
    shown: int = 0
    at: float = 0.0
    state: PackedState | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    layout: Layout = ()
    size: int = 0
    events: dict[torch.device, torch.cuda.Event] = field(default_factory=dict)


class HostCopies:
    """At most `keep` copies. `make`, `write` and `drop_after` are for the training thread, all else for any."""

    def __init__(self, keep: int) -> None:
        self._copies = [HostCopy() for _ in range(keep)]
        self._pinned: HostCopy | None = None
        # Reentrant: a signal's handler may look while its own thread is in here.
        self._lock = threading.RLock()

    def whole(self) -> list[HostCopy]:
        """Return the copies that are whole, the oldest first."""
        with self._lock:
            return sorted((copy for copy in self._copies if copy.step is not None), key=lambda copy: copy.step or 0)

    @property
    def held_bytes(self) -> int:
        """The memory that copies take now."""
        return sum(copy.size for copy in self._copies)

    def hold(self, step: int | None) -> bool:
        """Keep the copy of this step until `hold` is called again; None holds none. Returns whether it is there."""
        with self._lock:
            self._pinned = next((copy for copy in self._copies if step is not None and copy.step == step), None)
            return self._pinned is not None

    def make(self, state: TrainingState, step: int, shown: int) -> None:
        """Copy the training, in place of the oldest copy that is not held. Raises what prevents it; then that one is lost."""
        packed, tensors = state.pack()
        layout = _layout(tensors)
        with self._lock:
            free = [copy for copy in self._copies if copy is not self._pinned]
            if not free:
                return
            copy = min(free, key=lambda copy: -1 if copy.step is None else copy.step)
            copy.step, copy.state = None, None
        if copy.layout != layout:
            copy.tensors, copy.layout, copy.size = [], (), 0  # frees it first
            copy.tensors, copy.layout, copy.size = _allocated(layout, tensors), layout, bytes_of(layout)
        with torch.no_grad():
            for there, tensor in zip(copy.tensors, tensors, strict=True):
                there.copy_(tensor, non_blocking=tensor.is_cuda)
        copy.events = {}
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            copy.events[device] = torch.cuda.current_stream(device).record_event()
        copy.state, copy.shown, copy.at = packed, shown, time.monotonic()
        copy.step = step

    def write(self, state: TrainingState, step: int) -> HostCopy:
        """Write the copy of a step back. Raises `LookupError` if it is gone."""
        copy = next((copy for copy in self.whole() if copy.step == step), None)
        if copy is None or copy.state is None:
            raise LookupError(f"the copy of step {step} is gone")
        for device, event in copy.events.items():
            torch.cuda.current_stream(device).wait_event(event)  # the stream waits if it is another one, the host does not
        state.write(copy.state, copy.tensors)
        return copy

    def drop_after(self, step: int) -> None:
        """Drop the copies that are newer; their memory stays for others."""
        with self._lock:
            for copy in self._copies:
                if copy.step is not None and copy.step > step:
                    copy.step, copy.state = None, None

    def clear(self) -> None:
        """Drop all copies and their memory."""
        with self._lock:
            self._copies, self._pinned = [HostCopy() for _ in self._copies], None
