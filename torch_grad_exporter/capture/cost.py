"""What samples cost: on the host by its clock, on CUDA devices by pairs of events, without synchronising.

The host's clock only times launches there. An event is recorded before and after the work in the stream that it runs in,
and the time between the two is read when the device has passed both, a step later or so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch

from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.schedule import SamplingSchedule

PAIRS = 64
"""Pieces of work of a sample that are timed at most."""

SAMPLES = 64
"""Samples at most whose device times are still outstanding; the cost of older ones stays unknown."""


Pairs = list[tuple[torch.cuda.Event, torch.cuda.Event, int]]
"""Events before and after work, and how often it counts."""


def recorded_event(device: torch.device) -> torch.cuda.Event:
    """An event at the present place of the device's current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class DeviceTimer:
    """Times work on CUDA devices. Belongs to the training thread: querying an event is a CUDA call."""

    def __init__(self, recorded: Callable[[torch.device], torch.cuda.Event] = recorded_event) -> None:
        self._recorded = recorded
        self._pairs: Pairs = []

    def begin(self, devices: Iterable[torch.device]) -> list[tuple[torch.device, torch.cuda.Event]]:
        """Work begins on these devices; what is returned belongs to `end`."""
        if len(self._pairs) >= PAIRS:
            return []
        return [(device, self._recorded(device)) for device in devices if device.type == "cuda"]

    def end(self, begun: Iterable[tuple[torch.device, torch.cuda.Event]], *, times: int = 1) -> None:
        """All work that was begun is launched. `times`: for how many pieces of work it stands; the others are not timed."""
        self._pairs.extend((event, self._recorded(device), times) for device, event in begun)

    def taken(self) -> Pairs:
        """The pairs of all work since the last call."""
        pairs, self._pairs = self._pairs, []
        return pairs


class SampleCost:
    """Adds up what a sample costs, in seconds, and reports it to the schedule. Belongs to the training thread.

    `timer`: times the work on devices.
    """

    def __init__(self, clock: StepClock, schedule: SamplingSchedule, timer: DeviceTimer | None = None) -> None:
        self._clock = clock
        self._schedule = schedule
        self.timer = timer or DeviceTimer()
        self._seconds = 0.0
        self._unsettled: deque[tuple[float, Pairs]] = deque(maxlen=SAMPLES)
        """What samples cost on the host, and the events of what they cost on devices, which may be behind."""

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

    def settle(self) -> None:
        """Reports to the schedule what samples cost, as soon as the devices have passed their ends. A CUDA call."""
        waiting = self._unsettled
        while waiting and all(end.query() for _, end, _ in waiting[0][1]):  # type: ignore[no-untyped-call]
            seconds, pairs = waiting.popleft()
            on_devices = sum(begin.elapsed_time(end) * times for begin, end, times in pairs) / 1000
            self._clock.spent_on_devices(on_devices)
            self._schedule.sampled(seconds + on_devices)
