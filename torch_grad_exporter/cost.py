"""What samples cost: on the host by its clock, on CUDA devices by pairs of events that nobody waits for.

The host's clock only times launches there. An event is recorded before and after the work in the stream that it runs in,
and the time between the two is read when the device has passed both, a step later or so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from torch_grad_exporter.progress import StepClock
from torch_grad_exporter.schedule import SamplingSchedule

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


class SampleCost:
    """Adds up what a sample costs, in seconds, and tells the schedule. Belongs to the training thread."""

    def __init__(self, clock: StepClock, schedule: SamplingSchedule, timer: DeviceTimer) -> None:
        self._clock = clock
        self._schedule = schedule
        self._timer = timer
        self._seconds = 0.0
        self._unsettled: float | None = None
        """What the last sample cost on the host, while that on the devices is not known yet."""

    def of(self, action: Callable[..., object], *arguments: object) -> None:
        """Runs a part of a sample. The time of the whole hook that it is in is counted by the loop."""
        start = self._clock.clock()
        action(*arguments)
        self._seconds += self._clock.clock() - start

    def spent(self, start: float, *, sampled: bool) -> None:
        """Counts the time since `start`, in a hook of our own."""
        seconds = self._clock.clock() - start
        self._clock.own_seconds += seconds
        if sampled:
            self._seconds += seconds

    def sample_over(self) -> None:
        """The sample is complete on the host; what the one before took on devices came too late to be known."""
        if self._unsettled is not None:
            self._schedule.sampled(self._unsettled)
        self._unsettled, self._seconds = self._seconds, 0.0

    def settle(self) -> None:
        """Tells the schedule what the last sample cost, once the devices have said how long they took. A CUDA call."""
        if self._unsettled is not None and not self._timer.busy:
            seconds = self._timer.taken()
            self._clock.device_seconds += seconds
            self._schedule.sampled(self._unsettled + seconds)
            self._unsettled = None
