"""HostTransfer: device vectors to the host, without synchronising and with CUDA calls on the training thread only.

A vector is copied asynchronously into a pinned buffer that was filled with a sentinel, a NaN of a bit
pattern that no arithmetic yields. The reader polls that plain memory: when no sentinel is left, the copy is
done. So a value arrives even if the training loop hangs right after it. A buffer is used again only after
its event has completed, which is queried on the training thread. Vectors that are on the CPU already are
handed over as they are.

A ring that fills says so: `pressed` is called when half of it is taken, so that a training with many short sampled steps need
not wait for the reader's next look.

Both kinds are bounded: while the vectors are not taken, no more are sent. A vector that can no longer be taken, because its
ticket is gone, does not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.statistics.device import Wide, wide

_Bits = np.ndarray[tuple[int], np.dtype[np.unsignedinteger[Any]]]

SENTINEL = np.uint64(0x7FF8_7047_5244_4558)
SENTINEL_OF_FLOAT32 = np.uint32(0x7FC7_4758)
"""Quiet NaNs with a payload; the hardware's own NaNs have the payload 0."""

RING = 64
"""Buffers per device unless said otherwise: vectors that may be under way at once."""

FEW = 8
"""Buffers that a device may have however long the vectors are."""

HELD_BYTES = 1 << 26
"""Of vectors that were on the CPU, at most, and one vector at least, until they are taken; of a ring that has more than a few."""


class Ticket(Protocol):
    """A vector on its way to the host. Polled by the worker thread."""

    def ready(self) -> FloatArray | None:
        """The vector as a numpy array, shape (n,), or `None` while it is still under way."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Arrived:
    """A vector that is on the host."""

    values: FloatArray

    def ready(self) -> FloatArray:
        """The vector."""
        return self.values


@dataclass(frozen=True, slots=True)
class Tail:
    """The last value of another vector, which travels with it."""

    ticket: Ticket

    def ready(self) -> FloatArray | None:
        """That value alone, shape (1,)."""
        values = self.ticket.ready()
        return None if values is None else values[-1:]


@dataclass(slots=True)
class _Buffer:
    """One buffer of the ring. `taken` is set by the training thread and cleared by the reader of `ticket`.

    `bits`: the memory as integers, in which a value that has not arrived is the `sentinel`.
    """

    memory: torch.Tensor
    bits: _Bits
    sentinel: np.unsignedinteger[Any]
    taken: bool = False
    done: torch.cuda.Event | None = None
    ticket: weakref.ref[_UnderWay] | None = None
    size: int = 0

    def free(self) -> bool:
        """Whether no reader will use it any more, and no copy writes to it."""
        if self.taken and not self._given_up():
            return False
        return self.done is None or self.done.query()  # type: ignore[no-untyped-call]

    def lend(self, size: int) -> _UnderWay:
        """A ticket for a vector whose copy was launched into it."""
        ticket = _UnderWay(self, size)
        self.taken, self.ticket, self.size = True, weakref.ref(ticket), size
        return ticket

    def clear(self) -> None:
        """Makes it ready for another vector, if the one before was not read."""
        if self.taken:
            self.bits[: self.size] = self.sentinel
            self.taken = False

    def _given_up(self) -> bool:
        """Whether the ticket is gone, without having been read, and the copy that it stood for has arrived."""
        gone = self.ticket is not None and self.ticket() is None
        return gone and not (self.bits[: self.size] == self.sentinel).any()


@dataclass(slots=True, weakref_slot=True)
class _UnderWay:
    """A vector whose copy was launched into `buffer`. See `Ticket`."""

    buffer: _Buffer | None
    size: int
    _values: FloatArray | None = None

    def ready(self) -> FloatArray | None:
        """The vector once the copy is done; the buffer is free from then on."""
        if self._values is None and self.buffer is not None:
            buffer = self.buffer
            bits = buffer.bits[: self.size]
            if (bits == buffer.sentinel).any():
                return None
            self._values = buffer.memory[: self.size].numpy().astype(np.float64)
            bits[:] = buffer.sentinel
            # The ring alone keeps the buffer: freeing pinned memory may be a CUDA call, and this is another thread.
            buffer.taken, self.buffer = False, None
        return self._values


@dataclass(slots=True)
class HostTransfer:
    """Sends vectors to the host. `send` belongs to the training thread, the tickets to the worker.

    `wide`: the widest type that a device has: vectors travel in it. `pressed`: called by `send` while half of a ring is taken or
    more, until somebody reads.
    """

    ring: int = RING
    wide: Wide = wide
    pressed: Callable[[], object] = lambda: None
    _rings: dict[torch.device, list[_Buffer]] = field(default_factory=dict)
    _held: weakref.WeakSet[Arrived] = field(default_factory=weakref.WeakSet)
    """Vectors that were on the CPU and are still referenced."""

    def send(self, vector: torch.Tensor) -> Ticket | None:
        """Starts the copy of a vector of shape (n,).

        `None` when too much is under way, a graph is being captured, or there is no data to copy.
        """
        vector = vector.detach()
        if vector.device.type == "meta":
            return None
        if vector.device.type == "cpu":
            return self._hand_over(vector)
        on_cuda = vector.device.type == "cuda"
        if on_cuda and torch.cuda.is_current_stream_capturing():
            return None
        buffer = self._free(vector.device, vector.numel())
        if buffer is None:
            return None
        widest = vector.float() if buffer.memory.dtype is torch.float32 else vector.double()
        buffer.memory[: vector.numel()].copy_(widest, non_blocking=True)
        if on_cuda:
            buffer.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            buffer.done.record(torch.cuda.current_stream(vector.device))
        return buffer.lend(vector.numel())

    def post(self, vector: torch.Tensor) -> Callable[[], FloatArray | None] | None:
        """The same, for who looks by itself whether the vector has arrived: by calling what is returned."""
        ticket = self.send(vector)
        return None if ticket is None else ticket.ready

    def _hand_over(self, vector: torch.Tensor) -> Arrived | None:
        held, size = sum(ticket.values.nbytes for ticket in self._held), 8 * vector.numel()
        if held and held + size > HELD_BYTES:
            return None
        ticket = Arrived(vector.double().numpy())
        self._held.add(ticket)
        return ticket

    def _free(self, device: torch.device, size: int) -> _Buffer | None:
        """The first buffer that is free, or a new one: so those before it are taken."""
        ring = self._rings.setdefault(device, [])
        position = next((place for place, buffer in enumerate(ring) if buffer.free()), len(ring))
        if position >= self.ring // 2:
            self.pressed()
        if position < len(ring):
            ring[position].clear()
            if ring[position].bits.size >= size:
                return ring[position]
        if position == self.ring or (position >= FEW and sum(buffer.bits.nbytes for buffer in ring) + 8 * size > HELD_BYTES):
            return None
        ring[position : position + 1] = [_allocate(device, size, self.wide(device))]
        return ring[position]


def _allocate(device: torch.device, size: int, dtype: torch.dtype) -> _Buffer:
    memory = torch.empty(max(size, 64), dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    sentinel: np.unsignedinteger[Any] = SENTINEL_OF_FLOAT32 if dtype is torch.float32 else SENTINEL
    bits: _Bits = memory.numpy().view(sentinel.dtype)
    bits[:] = sentinel
    return _Buffer(memory, bits, sentinel)
