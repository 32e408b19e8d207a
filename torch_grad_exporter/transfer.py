"""HostTransfer: device vectors to the host, without anybody waiting and without CUDA calls elsewhere.

A vector is copied asynchronously into a pinned buffer that was filled with a sentinel, a NaN of a bit
pattern that no arithmetic yields. The reader polls that plain memory: when no sentinel is left, the copy is
done. So a value arrives even if the training loop hangs right after it. A buffer is used again only after
its event has completed, which is queried on the training thread. Vectors that are on the CPU already are
handed over as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from torch_grad_exporter.families import FloatArray

SENTINEL = np.uint64(0x7FF8_7047_5244_4558)
"""A quiet NaN with a payload; the hardware's own NaNs have the payload 0."""

RING = 8
"""Buffers per device unless said otherwise: vectors that may be under way at once."""


class Ticket(Protocol):
    """A vector on its way to the host. Polled by the worker thread."""

    def ready(self) -> FloatArray | None:
        """The vector as a numpy array, shape (n,), or `None` while it is still under way."""


@dataclass(frozen=True, slots=True)
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
    """One buffer of the ring. `taken` is set by the training thread and cleared by the reader."""

    memory: torch.Tensor
    bits: np.ndarray[tuple[int], np.dtype[np.uint64]]
    taken: bool = False
    done: torch.cuda.Event | None = None


@dataclass(slots=True)
class _UnderWay:
    """A vector whose copy was launched into `buffer`. See `Ticket`."""

    buffer: _Buffer | None
    size: int
    _values: FloatArray | None = None

    def ready(self) -> FloatArray | None:
        """The vector once the copy is done; the buffer is free from then on."""
        if self._values is None and self.buffer is not None:
            bits = self.buffer.bits[: self.size]
            if (bits == SENTINEL).any():
                return None
            self._values = bits.view(np.float64).copy()
            bits[:] = SENTINEL
            # The ring alone keeps the buffer: freeing pinned memory may be a CUDA call, and this is another thread.
            self.buffer.taken, self.buffer = False, None
        return self._values


@dataclass(slots=True)
class HostTransfer:
    """Sends vectors to the host. `send` belongs to the training thread, the tickets to the worker."""

    ring: int = RING
    _rings: dict[torch.device, list[_Buffer]] = field(default_factory=dict)

    def send(self, vector: torch.Tensor) -> Ticket | None:
        """Starts the copy of a vector of shape (n,).

        `None` when all buffers are under way, a graph is being captured, or there is no data to copy.
        """
        vector = vector.detach()
        if vector.device.type == "meta":
            return None
        if vector.device.type == "cpu":
            return Arrived(vector.double().numpy())
        on_cuda = vector.device.type == "cuda"
        if on_cuda and torch.cuda.is_current_stream_capturing():
            return None
        buffer = self._free(vector.device, vector.numel())
        if buffer is None:
            return None
        buffer.memory[: vector.numel()].copy_(vector.double(), non_blocking=True)
        if on_cuda:
            buffer.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            buffer.done.record(torch.cuda.current_stream(vector.device))
        buffer.taken = True
        return _UnderWay(buffer, vector.numel())

    def _free(self, device: torch.device, size: int) -> _Buffer | None:
        ring = self._rings.setdefault(device, [])
        for position, buffer in enumerate(ring):
            done = buffer.done is None or buffer.done.query()  # type: ignore[no-untyped-call]
            if buffer.taken or not done:
                continue
            if buffer.bits.size < size:
                ring[position] = _allocate(device, size)
            return ring[position]
        if len(ring) == self.ring:
            return None
        ring.append(_allocate(device, size))
        return ring[-1]


def _allocate(device: torch.device, size: int) -> _Buffer:
    memory = torch.empty(max(size, 64), dtype=torch.float64, device="cpu", pin_memory=device.type == "cuda")
    bits = memory.numpy().view(np.uint64)
    bits[:] = SENTINEL
    return _Buffer(memory, bits)
