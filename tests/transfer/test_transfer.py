"""The hand-over to the host, with buffers that the test fills where a device would."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from torch_grad_exporter.transfer import transfer as module
from torch_grad_exporter.transfer.transfer import (
    FEW,
    RING,
    SENTINEL,
    SENTINEL_OF_FLOAT32,
    Arrived,
    HostTransfer,
    Tail,
    Ticket,
    _Buffer,
    _UnderWay,
)


class FakeEvent:
    """Stands for the CUDA event behind a copy."""

    def __init__(self) -> None:
        self.done = False
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.done


class FakeVector:
    """Stands for a vector on a device whose copy has been launched and has written nothing yet."""

    device = torch.device("xpu")

    def __init__(self, size: int) -> None:
        self._size = size
        self.asked_for: list[str] = []

    def detach(self) -> FakeVector:
        return self

    def numel(self) -> int:
        return self._size

    def double(self) -> torch.Tensor:
        """What a launched copy leaves in the buffer: what was there."""
        self.asked_for.append("float64")
        return torch.from_numpy(np.full(self._size, SENTINEL).view(np.float64))

    def float(self) -> torch.Tensor:
        """The same of a device that has no float64."""
        self.asked_for.append("float32")
        return torch.from_numpy(np.full(self._size, SENTINEL_OF_FLOAT32).view(np.float32))


@dataclass
class Launched:
    """A vector under way, the buffer it is copied into, and the event behind the copy."""

    ticket: Ticket
    buffer: _Buffer
    event: FakeEvent = field(default_factory=FakeEvent)

    def fill(self, values: list[float], start: int = 0) -> None:
        """What the copy engine does: values appear in the buffer."""
        self.buffer.memory[start : start + len(values)] = torch.tensor(values, dtype=self.buffer.memory.dtype)


class FakeDevice(HostTransfer):
    """Sends vectors of a device whose copy engine is the test."""

    def try_to_send(self, size: int) -> Ticket | None:
        return self.send(FakeVector(size))  # type: ignore[arg-type]

    def launch(self, size: int) -> Launched:
        """Sends a vector; its event is not done and its buffer holds nothing yet."""
        ticket = self.try_to_send(size)
        assert isinstance(ticket, _UnderWay)
        assert ticket.buffer is not None
        launched = Launched(ticket, ticket.buffer)
        launched.buffer.done = launched.event  # type: ignore[assignment]
        return launched


def listed(ticket: Ticket) -> list[float] | None:
    """The values of a ticket, if they are there."""
    values = ticket.ready()
    return None if values is None else values.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64], ids=str)
def test_what_is_on_the_host_is_handed_over_at_once(dtype: torch.dtype) -> None:
    """A CPU vector of any type is ready at once, in float64."""
    ticket = HostTransfer().send(torch.tensor([1, 2, -3], dtype=dtype))
    assert ticket is not None
    values = ticket.ready()
    assert values is not None
    assert values.dtype == np.float64
    assert values.tolist() == [1, 2, -3]


def test_a_vector_with_a_graph_is_detached() -> None:
    """A vector that requires a gradient is handed over without it."""
    ticket = HostTransfer().send(torch.ones(2, requires_grad=True) * 3)
    assert ticket is not None
    assert listed(ticket) == [3, 3]


def test_a_device_without_data_sends_nothing() -> None:
    """A vector that has no data is not sent."""
    assert HostTransfer().send(torch.zeros(3, device="meta")) is None


def test_a_vector_is_ready_when_no_sentinel_is_left() -> None:
    """Half a copy is no vector: it is handed over when its last value has arrived."""
    sent = FakeDevice().launch(3)
    assert sent.ticket.ready() is None
    sent.fill([1.0, 2.0])
    assert sent.ticket.ready() is None
    sent.fill([3.0], start=2)
    assert listed(sent.ticket) == [1, 2, 3]
    assert listed(sent.ticket) == [1, 2, 3]


def test_any_number_can_travel() -> None:
    """NaN, infinities, zeros and subnormals arrive as they are: none is taken for the sentinel."""
    values = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 5e-324, np.inf - np.inf]
    sent = FakeDevice().launch(len(values))
    sent.fill(values)
    found = sent.ticket.ready()
    assert found is not None
    assert np.array_equal(found, np.array(values), equal_nan=True)
    assert np.signbit(found[5])


def test_a_device_without_float64_sends_float32() -> None:
    """Its vectors are converted to no float64 there; each number that float32 has arrives as it is, and as float64 in numpy."""
    transfer = FakeDevice(wide=lambda _device: torch.float32)
    vector = FakeVector(8)
    transfer.send(vector)  # type: ignore[arg-type]
    assert vector.asked_for == ["float32"]
    values = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, float(np.float32(1e-45)), 0.5]
    for _ in range(RING + 3):
        sent = transfer.launch(len(values))
        assert sent.buffer.memory.dtype is torch.float32
        sent.fill(values[:-1])
        assert sent.ticket.ready() is None
        sent.fill(values[-1:], start=len(values) - 1)
        found = sent.ticket.ready()
        assert found is not None
        assert found.dtype == np.float64
        assert np.array_equal(found, np.array(values), equal_nan=True)
        sent.event.done = True


def test_no_arithmetic_of_float32_yields_its_sentinel() -> None:
    """It is a NaN, and neither 0/0, Inf-Inf, nor a conversion of another type's NaN has its bits."""
    assert np.isnan(np.array([SENTINEL_OF_FLOAT32]).view(np.float32))
    zero = torch.zeros(1)
    nans = torch.cat([torch.tensor([np.nan, -np.nan]), zero / zero, 1 / zero - 1 / zero])
    others = [nans.to(dtype).float() for dtype in (torch.float64, torch.bfloat16, torch.float16)]
    for nan in torch.cat([nans, *others, nans * 2, nans + 1, -nans]):
        assert nan.numpy().view(np.uint32) != SENTINEL_OF_FLOAT32


def test_the_sentinel_is_a_nan_that_no_arithmetic_yields() -> None:
    """The sentinel is a NaN, and neither 0/0, Inf-Inf, nor a conversion of a smaller type's NaN has its bits."""
    assert np.isnan(np.array([SENTINEL]).view(np.float64))
    zero = torch.zeros(1, dtype=torch.float64)
    nans = torch.cat([torch.tensor([np.nan, -np.nan], dtype=torch.float64), zero / zero, 1 / zero - 1 / zero])
    small = [nans.to(dtype).double() for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    for nan in torch.cat([nans, *small, nans * 2, nans + 1, -nans]):
        assert nan.numpy().view(np.uint64) != SENTINEL


def test_a_buffer_is_used_again_only_when_read_and_done() -> None:
    """A buffer whose vector was read stays out of use until its event is done."""
    transfer = FakeDevice()
    first = transfer.launch(2)
    first.fill([1.0, 2.0])
    assert transfer.launch(2).buffer is not first.buffer
    assert listed(first.ticket) == [1, 2]
    assert transfer.launch(2).buffer is not first.buffer
    first.event.done = True
    assert transfer.launch(2).buffer is first.buffer
    assert listed(first.ticket) == [1, 2]


def test_a_buffer_that_is_done_but_not_read_is_kept() -> None:
    """A vector that arrived is not overwritten before the worker has read it."""
    transfer = FakeDevice()
    first = transfer.launch(1)
    first.fill([7.0])
    first.event.done = True
    assert transfer.launch(1).buffer is not first.buffer
    assert listed(first.ticket) == [7]


def test_a_reused_buffer_starts_empty() -> None:
    """What a buffer held before is never taken for the next vector."""
    transfer = FakeDevice()
    first = transfer.launch(2)
    first.fill([1.0, 2.0])
    first.ticket.ready()
    first.event.done = True
    assert (first.buffer.bits == SENTINEL).all()
    second = transfer.launch(2)
    assert second.buffer is first.buffer
    assert second.ticket.ready() is None
    second.fill([3.0, 4.0])
    assert (listed(first.ticket), listed(second.ticket)) == ([1, 2], [3, 4])


def test_a_full_ring_takes_nothing_more() -> None:
    """With all buffers under way nothing is sent, without an exception, until one is free again."""
    transfer = FakeDevice()
    launched = [transfer.launch(4) for _ in range(RING)]
    assert transfer.try_to_send(4) is None
    assert len({id(sent.buffer) for sent in launched}) == RING
    sent = launched[3]
    sent.fill([1.0] * 4)
    assert listed(sent.ticket) == [1] * 4
    assert transfer.try_to_send(4) is None
    sent.event.done = True
    assert transfer.launch(4).buffer is sent.buffer
    assert transfer.try_to_send(4) is None


def test_a_ring_may_be_larger() -> None:
    """A transfer that is told to have more buffers lends as many."""
    transfer = FakeDevice(ring=20)
    assert len({id(transfer.launch(1).buffer) for _ in range(20)}) == 20
    assert transfer.try_to_send(1) is None


def test_a_ring_tells_when_half_of_it_is_taken() -> None:
    """From the first vector that finds half of the buffers taken, until they are read."""
    told: list[int] = []
    launched: list[Launched] = []
    transfer = FakeDevice(ring=6, pressed=lambda: told.append(len(launched)))
    launched += [transfer.launch(1) for _ in range(3)]
    assert told == []
    launched += [transfer.launch(1) for _ in range(3)]
    assert told == [3, 3, 3]
    assert transfer.try_to_send(1) is None
    assert told == [3, 3, 3, 6]
    for sent in launched:
        sent.fill([1.0])
        sent.ticket.ready()
        sent.event.done = True
    transfer.launch(1)
    assert told == [3, 3, 3, 6]


@pytest.mark.parametrize(("size", "buffers"), [(100, 12), (1000, FEW)])
def test_long_vectors_have_fewer_buffers(size: int, buffers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a bounded memory holds, but a few at least."""
    monkeypatch.setattr(module, "HELD_BYTES", 8 * 1200)
    transfer = FakeDevice()
    assert sum(transfer.try_to_send(size) is not None for _ in range(RING)) == buffers


def test_short_buffers_are_replaced_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the model has grown, only a few of many short buffers become long ones."""
    monkeypatch.setattr(module, "HELD_BYTES", 8 * 1200)
    transfer = FakeDevice()
    for sent in [transfer.launch(1) for _ in range(15)]:
        sent.fill([1.0])
        sent.ticket.ready()
        sent.event.done = True
    assert sum(transfer.try_to_send(1000) is not None for _ in range(RING)) == FEW


def test_a_longer_vector_gets_a_longer_buffer() -> None:
    """After the model has grown, a free buffer that is too short is replaced, and the ring does not grow."""
    transfer = FakeDevice()
    for sent in [transfer.launch(10) for _ in range(RING)]:
        sent.fill([1.0] * 10)
        sent.ticket.ready()
        sent.event.done = True
    grown = transfer.launch(10_000)
    assert grown.buffer.memory.numel() >= 10_000
    grown.fill([2.0] * 9_999)
    assert grown.ticket.ready() is None
    grown.fill([2.0], start=9_999)
    assert listed(grown.ticket) == [2.0] * 10_000
    assert sum(transfer.try_to_send(10) is not None for _ in range(RING)) == RING - 1


def test_a_short_vector_in_a_long_buffer() -> None:
    """Only the vector's own part of a buffer is waited for and handed over."""
    transfer = FakeDevice()
    long = transfer.launch(1000)
    long.fill([1.0] * 1000)
    long.ticket.ready()
    long.event.done = True
    short = transfer.launch(2)
    assert short.buffer is long.buffer
    short.fill([5.0, 6.0])
    assert listed(short.ticket) == [5, 6]


def test_an_event_is_asked_on_sending_only() -> None:
    """Reading a ticket asks no event: that would be a CUDA call on another thread."""
    transfer = FakeDevice()
    sent = transfer.launch(1)
    sent.ticket.ready()
    sent.fill([1.0])
    sent.ticket.ready()
    assert sent.event.asked == 0
    transfer.launch(1)
    assert sent.event.asked == 1


def test_a_ticket_that_was_read_lets_go_of_its_buffer() -> None:
    """A ticket that is kept, and dropped on the worker's thread, does not keep pinned memory alive."""
    transfer = FakeDevice()
    sent = transfer.launch(1)
    sent.fill([1.0])
    assert isinstance(sent.ticket, _UnderWay)
    assert sent.ticket.buffer is sent.buffer
    sent.ticket.ready()
    assert sent.ticket.buffer is None


def test_the_last_value_of_a_vector_as_a_ticket_of_its_own() -> None:
    """A loss scale that rides at the end of a vector is ready when the vector is."""
    sent = FakeDevice().launch(3)
    tail = Tail(sent.ticket)
    assert tail.ready() is None
    sent.fill([1.0, 2.0, 65536.0])
    assert listed(tail) == [65536]
    assert listed(Tail(Arrived(np.array([4.0, 5.0])))) == [5]
