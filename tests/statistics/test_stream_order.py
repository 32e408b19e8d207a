"""What stays on a device from one sample to the next, where samples come on different streams: CUDA is played here."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from torch_grad_exporter.statistics.device import StreamOrder

CUDA = torch.device("cuda", 1)


@dataclass(eq=False)
class Stream:
    """Notes which streams it was made to wait for."""

    waits_for: list[Stream] = field(default_factory=list)

    def wait_event(self, event: Event) -> None:
        self.waits_for.append(event.of)


class Event:
    """Stands behind all that a stream was given up to `record`."""

    of: Stream

    def record(self, stream: Stream) -> None:
        self.of = stream


class Kept:
    """A tensor that notes by which streams it is used."""

    def __init__(self) -> None:
        self.used_by: list[Stream] = []

    def record_stream(self, stream: Stream) -> None:
        self.used_by.append(stream)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """The last one is the current stream of the device."""
    streams: list[Stream] = []

    def current_stream(device: torch.device) -> Stream:
        assert device == CUDA
        return streams[-1]

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return streams


def test_a_stream_waits_for_the_one_before(current: list[Stream]) -> None:
    """And for that one only, once for each change; what was kept is not reused before it has read it."""
    first, second, order, kept = Stream(), Stream(), StreamOrder(CUDA), Kept()
    for stream in (first, first, second, second, first):
        current.append(stream)
        order.begin(kept)  # type: ignore[arg-type]
        order.end()
    assert (first.waits_for, second.waits_for) == ([second], [first])
    assert kept.used_by == [second, first]


def test_on_a_cpu_nothing_is_asked(current: list[Stream]) -> None:
    """There is no stream there."""
    order = StreamOrder(torch.device("cpu"))
    order.end()
    order.begin(torch.zeros(1))
    assert current == []
