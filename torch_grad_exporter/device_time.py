"""DeviceTimer: how long our work took on a CUDA device, from pairs of events that nobody waits for.

The host's clock only times launches there. An event is recorded before and after the work in the stream that it runs in,
and the time between the two is read when the device has passed both, a step later or so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

PAIRS = 64
"""Pairs at most that are waited for; beyond it work is not timed."""


class Event(Protocol):
    """A `torch.cuda.Event` that takes times."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def elapsed_time(self, end: Any, /) -> float:  # noqa: ANN401 - an event of the same kind
        """Milliseconds from this event to `end`."""


def recorded_event(device: torch.device) -> Event:
    """An event at the present place of the device's current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    found: Event = event
    return found


class DeviceTimer:
    """Times work on CUDA devices. Belongs to the training thread: querying an event is a CUDA call."""

    def __init__(self, recorded: Callable[[torch.device], Event] = recorded_event) -> None:
        self._recorded = recorded
        self._under_way: deque[tuple[Event, Event]] = deque()

    def begin(self, devices: Iterable[torch.device]) -> list[tuple[torch.device, Event]]:
        """Work begins on these devices; what is returned belongs to `end`."""
        if len(self._under_way) >= PAIRS:
            return []
        return [(device, self._recorded(device)) for device in devices if device.type == "cuda"]

    def end(self, begun: Iterable[tuple[torch.device, Event]]) -> None:
        """All work that was begun is launched."""
        self._under_way.extend((event, self._recorded(device)) for device, event in begun)

    @property
    def busy(self) -> bool:
        """Whether a device has not yet come to the end of what was timed. Not to be asked while a graph is captured."""
        return any(not end.query() for _, end in self._under_way)

    def taken(self) -> float:
        """Seconds that the devices took since the last call, once they are not busy."""
        pairs, self._under_way = self._under_way, deque()
        return sum(begin.elapsed_time(end) for begin, end in pairs) / 1000
