"""SampleCost: what samples take of the host and of devices.

A sample is timed on the host by its clock, which only times launches on devices, and there by pairs of events. An event is recorded
before and after the work in the stream that it runs in, and the time between the two is read when the device has passed both, a
step later or so, without synchronising.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from torch_grad_exporter.capture.device_events import WITHOUT, DeviceEvent, DeviceEvents, EventPool
from torch_grad_exporter.torch_compat.autograd import capturing_graph

if TYPE_CHECKING:
    from torch_grad_exporter.capture.progress import StepClock
    from torch_grad_exporter.capture.schedule import SamplingSchedule
    from torch_grad_exporter.statistics.kernels.choice import Kernels


# What PyTorch takes to call the hooks of a round, which a clock inside them cannot measure; as `make bench` measures it.
HOOKS_SECONDS = 10e-6

# What a round costs that is only counted: 3.4 to 4 us by `python -m benchmarks.whole_step`. A clock around its hooks would cost as
# much again, so it is not measured in the training itself.
COUNTED_SECONDS = 4e-6

# Pieces of work of a sample that are timed on devices, at most.
PAIRS = 64

# Samples whose device times are still outstanding, at most; the cost of older ones stays unknown.
SAMPLES = 64

# Devices on which a piece of work has begun, and when.
Begun = list[tuple[DeviceEvents, DeviceEvent]]

# Events of a device before and after work, and how many pieces of work it stands for.
Pair = tuple[DeviceEvents, DeviceEvent, DeviceEvent, int]


class SampleCost:
    """Adds up what a sample costs, in seconds, and reports it to the schedule.

    Belongs to the training thread: querying an event is a call to the device.

    `kernels`: what measures on GPUs, if anything but torch does; it compiles in a sample.

    Attributes:
        now: Returns the time of the clock that `spent` asks.
    """

    def __init__(self, clock: StepClock, schedule: SamplingSchedule, events: EventPool, kernels: Kernels | None = None) -> None:
        self._clock, self._schedule, self._events, self._kernels = clock, schedule, events, kernels
        self.now = clock.clock
        self._seconds = 0.0
        self._pairs: list[Pair] = []  # of the current sample
        # What samples cost on the host, and the events of what they cost on devices, which may be behind.
        self._pending: deque[tuple[float, list[Pair]]] = deque()

    def of(self, action: Callable[..., object], *arguments: object, **named: object) -> None:
        """Run a part of a sample. The time of the whole hook that it is in is counted by the loop."""
        start = self._clock.clock()
        action(*arguments, **named)
        self._seconds += self._clock.clock() - start

    def charge(self, start: float) -> None:
        """Count the time since `start` as that of a part of a sample; see `of`."""
        self._seconds += self._clock.clock() - start

    def spent(self, start: float, *, sampled: bool) -> None:
        """Count the time since `start`, in a hook of our own."""
        seconds = self._clock.spent(start)
        if sampled:
            self._seconds += seconds

    def begin(self, devices: Iterable[torch.device]) -> Begun:
        """Work begins on these devices. Returns what `end` needs."""
        begun: Begun = []
        if len(self._pairs) < PAIRS:
            for device in devices:
                events = None if device.type in WITHOUT else self._events.of(device)
                moment = None if events is None else events.now()
                if events is not None and moment is not None:
                    begun.append((events, moment))
        return begun

    def end(self, begun: Begun, *, times: int = 1) -> None:
        """All work that was begun is launched. `times`: the pieces of work it stands for; the others are not timed."""
        for events, begin in begun:
            end = events.now()
            if end is None:
                events.give_back((begin,))
            else:
                self._pairs.append((events, begin, end, times))

    def sample_over(self) -> None:
        """The sample is complete on the host."""
        dropped, self._pairs = self._pairs, []
        # The cost of a first time says nothing of other samples.
        if self._kernels is None or not self._kernels.taken_once():
            self._pending.append((self._seconds, dropped))
            dropped = self._pending.popleft()[1] if len(self._pending) > SAMPLES else []
        for events, begin, end, _ in dropped:
            events.give_back((begin, end))
        self._seconds = 0.0
        self.settle()

    def settle(self) -> None:
        """Report to the schedule what samples cost, once the devices have passed their ends. A CUDA call."""
        while self._pending and not capturing_graph():
            seconds, pairs = self._pending[0]
            for events, _, end, _ in pairs:
                if not events.passed((end,)):
                    return
            on_devices = 0.0
            for events, begin, end, times in pairs:
                on_devices += sum(events.between((begin, end)) or ()) * times
                events.give_back((begin, end))
            self._pending.popleft()
            self._clock.device_seconds += on_devices
            self._schedule.sampled(seconds + on_devices, on_devices)
