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
from torch_grad_exporter.statistics.device import wide

# Quiet NaNs with a payload; the hardware's own NaNs have the payload 0.
SENTINEL, SENTINEL_OF_FLOAT32 = np.uint64(0x7FF8_7047_5244_4558), np.uint32(0x7FC7_4758)

RING = 64  # buffers per device unless said otherwise: vectors that may be under way at once
FEW = 8  # buffers that a device has at any length
HELD_BYTES = 1 << 26  # of vectors that were on the CPU, until they are taken, and one at least; of a ring beyond `FEW`


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
    """One buffer of the ring. The training thread lends it to a ticket, whose reader clears it."""

    def __init__(self, device: torch.device, size: int) -> None:
        dtype = wide(device)
        self.memory = torch.empty(max(size, 64), dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
        self.sentinel: np.unsignedinteger[Any] = SENTINEL_OF_FLOAT32 if dtype is torch.float32 else SENTINEL
        self.bits = self.memory.numpy().view(self.sentinel.dtype)  # where a value is missing it is the sentinel
        self.size = 0  # of the vector that is in it, or on the way
        self.clear(self.bits.size)
        self.done: torch.cuda.Event | None = None
        self.ticket: weakref.ref[_UnderWay] | None = None

    def arrived(self) -> bool:
        """Return whether the copy of the vector is done."""
        return not (self.bits[: self.size] == self.sentinel).any()

    def free(self) -> bool:
        """Return whether no reader will use it any more, and no copy writes to it."""
        ticket = None if self.ticket is None else self.ticket()
        if (ticket is not None and ticket.buffer is not None) or not self.arrived():
            return False
        return self.done is None or self.done.query()  # type: ignore[no-untyped-call]

    def clear(self, size: int) -> None:
        """Make it ready for another vector, after one of this size."""
        self.bits[:size] = self.sentinel
        self.size = 0


@dataclass(slots=True, weakref_slot=True)
class _UnderWay:
    """A vector whose copy was launched into `buffer`. See `Ticket`."""

    buffer: _Buffer | None
    _values: FloatArray | None = None

    def ready(self) -> FloatArray | None:
        """Return the vector once the copy is done; the buffer is free from then on."""
        buffer = self.buffer
        if buffer is not None and buffer.arrived():
            self._values = buffer.memory[: buffer.size].numpy().astype(np.float64)
            buffer.clear(buffer.size)
            # The ring alone keeps the buffer: freeing pinned memory may be a CUDA call, and this is another thread.
            self.buffer = None
        return self._values


class HostTransfer:
    """Sends vectors to the host. `send` belongs to the training thread, the tickets to the worker.

    Args:
        ring: Buffers per device, at most.
        pressed: Called by `send` while half of a ring is taken or more, so that the reader need not be waited for.
    """

    def __init__(self, ring: int = RING, pressed: Callable[[], object] = lambda: None) -> None:
        self._ring, self._pressed = ring, pressed
        self._rings: dict[torch.device, list[_Buffer]] = {}
        self._held: weakref.WeakSet[Arrived] = weakref.WeakSet()  # vectors on the CPU that are still referenced
        self._largest = 0  # bytes of the largest of them ever

    def send(self, vector: torch.Tensor) -> Ticket | None:
        """Start the copy of a vector of shape (n,).

        Returns None when too much is under way, a graph is being captured, or there is no data to copy.
        """
        device, size = vector.device, vector.numel()
        if device.type == "meta":
            return None
        if device.type == "cpu":
            self._largest = max(self._largest, 8 * size)
            # What is held is added up only if it may be too much: there may be hundreds of small vectors.
            if (len(self._held) + 1) * self._largest > HELD_BYTES:
                held = sum(ticket.values.nbytes for ticket in self._held)
                if held and held + 8 * size > HELD_BYTES:
                    return None
            values = vector if vector.dtype is torch.float64 else vector.double()
            arrived = Arrived(values.numpy(force=True))
            self._held.add(arrived)
            return arrived
        on_cuda = device.type == "cuda"
        if on_cuda and torch.cuda.is_current_stream_capturing():
            return None
        buffer = self._free(device, size)
        if buffer is None:
            return None
        buffer.memory[:size].copy_(vector.detach().to(buffer.memory.dtype), non_blocking=True)
        if on_cuda:
            buffer.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            buffer.done.record(torch.cuda.current_stream(device))
        ticket = _UnderWay(buffer)
        buffer.ticket, buffer.size = weakref.ref(ticket), size
        return ticket

    def post(self, vector: torch.Tensor) -> Callable[[], FloatArray | None] | None:
        """Send a vector; return what gives it once it has arrived, for code that does not know tickets."""
        ticket = self.send(vector)
        return None if ticket is None else ticket.ready

    def _free(self, device: torch.device, size: int) -> _Buffer | None:
        """Return the first buffer that is free, or a new one: so those before it are taken."""
        ring = self._rings.setdefault(device, [])
        position = next((place for place, buffer in enumerate(ring) if buffer.free()), len(ring))
        if position >= self._ring // 2:
            self._pressed()
        if position < len(ring) and ring[position].bits.size >= size:
            ring[position].clear(ring[position].size)  # of a vector that was not read
            return ring[position]
        held = sum(buffer.bits.nbytes for buffer in ring)
        if position == self._ring or (position >= FEW and held + 8 * size > HELD_BYTES):
            return None
        ring[position : position + 1] = [_Buffer(device, size)]
        return ring[position]
