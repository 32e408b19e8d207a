"""What samples cost: on the host by its clock, on devices by pairs of events, without synchronising.

The host's clock only times launches there. An event is recorded before and after the work in the stream that it runs in,
and the time between the two is read when the device has passed both, a step later or so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from torch_grad_exporter.capture.device_events import DeviceEvents, Event, EventPool
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.schedule import SamplingSchedule

PAIRS = 64
"""Pieces of work of a sample that are timed at most."""

SAMPLES = 64
"""Samples at most whose device times are still outstanding; the cost of older ones stays unknown."""

Begun = list[tuple[DeviceEvents, Event]]
"""Devices on which a piece of work has begun, and when."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Events of a device before and after work, and how often it counts."""

    device: DeviceEvents
    begin: Event
    end: Event
    times: int

    def passed(self) -> bool:
        """Whether the work is done."""
        return self.device.passed((self.end,))

    def seconds(self) -> float:
        """What it took, with what it stands for."""
        between = self.device.between((self.begin, self.end))
        return between[0] * self.times if between else 0.0

    def release(self) -> None:
        """Gives the events back."""
        self.device.give_back((self.begin, self.end))


class DeviceTimer:
    """Times work on devices. Belongs to the training thread: querying an event is a call to the device."""

    def __init__(self, events: EventPool) -> None:
        self._events = events
        self._pairs: list[Pair] = []

    def begin(self, devices: Iterable[torch.device]) -> Begun:
        """Work begins on these devices; what is returned belongs to `end`."""
        if len(self._pairs) >= PAIRS:
            return []
        timed = [events for device in devices if (events := self._events.of(device)) is not None]
        return [(events, moment) for events in timed if (moment := events.now()) is not None]

    def end(self, begun: Begun, *, times: int = 1) -> None:
        """All work that was begun is launched. `times`: for how many pieces of work it stands; the others are not timed."""
        for events, begin in begun:
            end = events.now()
            if end is None:
                events.give_back((begin,))
            else:
                self._pairs.append(Pair(events, begin, end, times))

    def taken(self) -> list[Pair]:
        """The pairs of all work since the last call."""
        pairs, self._pairs = self._pairs, []
        return pairs


class SampleCost:
    """Adds up what a sample costs, in seconds, and reports it to the schedule. Belongs to the training thread.

    `timer`: times the work on devices.
    """

    def __init__(self, clock: StepClock, schedule: SamplingSchedule, timer: DeviceTimer) -> None:
        self._clock = clock
        self._schedule = schedule
        self.timer = timer
        self._seconds = 0.0
        self._unsettled: deque[tuple[float, list[Pair]]] = deque()
        """What samples cost on the host, and the events of what they cost on devices, which may be behind."""

    @property
    def waiting(self) -> bool:
        """Whether it is not known yet what some sample has cost on devices."""
        return bool(self._unsettled)

    def now(self) -> float:
        """The clock that `spent` asks."""
        return self._clock.clock()

    def of(self, action: Callable[..., object], *arguments: object) -> None:
        """Runs a part of a sample. The time of the whole hook that it is in is counted by the loop."""
        start = self._clock.clock()
        action(*arguments)
        self._seconds += self._clock.clock() - start

    def spent(self, start: float, *, sampled: bool) -> None:
        """Counts the time since `start`, in a hook of our own."""
        seconds = self._clock.clock() - start
        self._clock.spent(seconds)
        if sampled:
            self._seconds += seconds

    def sample_over(self, *, once: bool = False) -> None:
        """The sample is complete on the host. `once`: it has cost what no other will, and so says nothing of them."""
        pairs = self.timer.taken()
        if not once:
            self._unsettled.append((self._seconds, pairs))
        self._seconds = 0.0
        if len(self._unsettled) > SAMPLES:
            for pair in self._unsettled.popleft()[1]:
                pair.release()

    def settle(self) -> None:
        """Reports to the schedule what samples cost, as soon as the devices have passed their ends. A CUDA call."""
        waiting = self._unsettled
        while waiting and all(pair.passed() for pair in waiting[0][1]):
            seconds, pairs = waiting.popleft()
            on_devices = sum(pair.seconds() for pair in pairs)
            for pair in pairs:
                pair.release()
            self._clock.spent_on_devices(on_devices)
            self._schedule.sampled(seconds + on_devices)
