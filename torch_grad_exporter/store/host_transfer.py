"""HostTransfer: device vectors to the host, without synchronising and with CUDA calls on the training thread only.

A vector is copied asynchronously into a pinned buffer that was filled with a sentinel, a NaN of a bit pattern that no
arithmetic yields. The reader polls that plain memory: when no sentinel is left, the copy is done. So a value arrives
even if the training loop hangs right after it. A buffer is used again only after its event has completed, which is
queried on the training thread. Vectors that are on the CPU already are handed over as they are.

Both kinds are bounded: while vectors are not taken, no more are sent. One that can no longer be taken, because its
ticket is gone, does not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.statistics.device import Wide, wide

SENTINEL, SENTINEL_OF_FLOAT32 = np.uint64(0x7FF8_7047_5244_4558), np.uint32(0x7FC7_4758)
"""Quiet NaNs with a payload; the hardware's own NaNs have the payload 0."""

RING, FEW = 64, 8
"""Buffers per device unless said otherwise: vectors that may be under way at once; and those it has at any length."""

HELD_BYTES = 1 << 26
"""Of vectors that were on the CPU, at most, until they are taken, and one vector at least; of a ring beyond `FEW`."""


class Ticket(Protocol):
    """A vector on its way to the host. Polled by the worker thread."""

    def ready(self) -> FloatArray | None:
        """Return the vector, shape (n,), or None while it is still under way."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Arrived:
    """A vector that is on the host."""

    values: FloatArray

    def ready(self) -> FloatArray:
        """Return the vector."""
        return self.values


@dataclass(frozen=True, slots=True)
class Tail:
    """The last value of another vector, which travels with it."""

    ticket: Ticket

    def ready(self) -> FloatArray | None:
        """Return that value alone, shape (1,)."""
        values = self.ticket.ready()
        return None if values is None else values[-1:]


class _Buffer:
    """One buffer of the ring. `taken` is set by the training thread and cleared by the reader of the ticket."""

    def __init__(self, device: torch.device, size: int, dtype: torch.dtype) -> None:
        self.memory = torch.empty(max(size, 64), dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
        self.sentinel: np.unsignedinteger[Any] = SENTINEL_OF_FLOAT32 if dtype is torch.float32 else SENTINEL
        self.bits = self.memory.numpy().view(self.sentinel.dtype)  # where a value is missing it is the sentinel
        self.bits[:] = self.sentinel
        self.taken, self.size = False, 0
        self.done: torch.cuda.Event | None = None
        self.ticket: weakref.ref[_UnderWay] | None = None

    def arrived(self, size: int) -> bool:
        """Return whether the copy of a vector of this size is done."""
        return not (self.bits[:size] == self.sentinel).any()

    def free(self) -> bool:
        """Return whether no reader will use it any more, and no copy writes to it."""
        dropped = self.ticket is not None and self.ticket() is None
        if self.taken and not (dropped and self.arrived(self.size)):
            return False
        return self.done is None or self.done.query()  # type: ignore[no-untyped-call]

    def lend(self, size: int) -> _UnderWay:
        """Return a ticket for a vector whose copy was launched into it."""
        ticket = _UnderWay(self, size)
        self.taken, self.ticket, self.size = True, weakref.ref(ticket), size
        return ticket

    def clear(self) -> None:
        """Make it ready for another vector, if the one before was not read."""
        if self.taken:
            self.bits[: self.size] = self.sentinel
            self.taken = False


@dataclass(slots=True, weakref_slot=True)
class _UnderWay:
    """A vector whose copy was launched into `buffer`. See `Ticket`."""

    buffer: _Buffer | None
    size: int
    _values: FloatArray | None = None

    def ready(self) -> FloatArray | None:
        """Return the vector once the copy is done; the buffer is free from then on."""
        buffer = self.buffer
        if buffer is not None and buffer.arrived(self.size):
            self._values = buffer.memory[: self.size].numpy().astype(np.float64)
            buffer.bits[: self.size] = buffer.sentinel
            # The ring alone keeps the buffer: freeing pinned memory may be a CUDA call, and this is another thread.
            buffer.taken, self.buffer = False, None
        return self._values


class HostTransfer:
    """Sends vectors to the host. `send` belongs to the training thread, the tickets to the worker.

    Args:
        ring: Buffers per device, at most.
        wide: The widest type that a device has: vectors travel in it.
        pressed: Called by `send` while half of a ring is taken or more, so that the reader need not be waited for.
    """

    def __init__(self, ring: int = RING, wide: Wide = wide, pressed: Callable[[], object] = lambda: None) -> None:
        self._ring, self._wide, self._pressed = ring, wide, pressed
        self._rings: dict[torch.device, list[_Buffer]] = {}
        self._held: weakref.WeakSet[Arrived] = weakref.WeakSet()  # vectors on the CPU that are still referenced
        self._largest = 0  # bytes of the largest of them ever

    def send(self, vector: torch.Tensor) -> Ticket | None:
        """Start the copy of a vector of shape (n,).

        Returns None when too much is under way, a graph is being captured, or there is no data to copy.
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
        """Send a vector; return what gives it once it has arrived, for code that does not know tickets."""
        ticket = self.send(vector)
        return None if ticket is None else ticket.ready

    def _hand_over(self, vector: torch.Tensor) -> Arrived | None:
        size = 8 * vector.numel()
        self._largest = max(self._largest, size)
        # What is held is added up only if it may be too much: there may be hundreds of small vectors.
        if (len(self._held) + 1) * self._largest > HELD_BYTES:
            held = sum(ticket.values.nbytes for ticket in self._held)
            if held and held + size > HELD_BYTES:
                return None
        ticket = Arrived(vector.double().numpy())
        self._held.add(ticket)
        return ticket

    def _free(self, device: torch.device, size: int) -> _Buffer | None:
        """Return the first buffer that is free, or a new one: so those before it are taken."""
        ring = self._rings.setdefault(device, [])
        position = next((place for place, buffer in enumerate(ring) if buffer.free()), len(ring))
        if position >= self._ring // 2:
            self._pressed()
        if position < len(ring):
            ring[position].clear()
            if ring[position].bits.size >= size:
                return ring[position]
        held = sum(buffer.bits.nbytes for buffer in ring)
        if position == self._ring or (position >= FEW and held + 8 * size > HELD_BYTES):
            return None
        ring[position : position + 1] = [_Buffer(device, size, self._wide(device))]
        return ring[position]
