"""Memory that stays on a device between samples of several CUDA streams; CUDA is faked."""

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
    """Marks what a stream was given up to `record`."""

    of: Stream

    def record(self, stream: Stream) -> None:
        self.of = stream


class Kept:
    """A tensor that notes which streams use it."""

    def __init__(self) -> None:
        self.used_by: list[Stream] = []

    def record_stream(self, stream: Stream) -> None:
        self.used_by.append(stream)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """Make the last stream of this list the current one of the device."""
    streams: list[Stream] = []

    def current_stream(device: torch.device) -> Stream:
        assert device == CUDA
        return streams[-1]

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return streams


def test_a_stream_waits_for_the_one_before(current: list[Stream]) -> None:
    """A stream waits for the one before it once at each change, and memory is reused only after it was read."""
    first, second, order, kept = Stream(), Stream(), StreamOrder(CUDA), Kept()
    for stream in (first, first, second, second, first):
        current.append(stream)
        order.begin(kept)  # type: ignore[arg-type]
        order.end()
    assert (first.waits_for, second.waits_for) == ([second], [first])
    assert kept.used_by == [second, first]
