"""PhaseTimes: how long each phase of training was, by the host's clock, or by a device that the host runs ahead of.

On a device a phase lasts from when the device comes to what was launched first in it until it comes to what was launched first in
the next one. So `data` and `outside` are there what the device waits for the host in them, and all phases together are its time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

import torch

from torch_grad_exporter.capture.device_events import Event, EventPool
from torch_grad_exporter.capture.timeline import Stretch, Timeline

PHASES = ("outside", "data", "forward", "backward", "optimizer")
OUTSIDE, DATA, FORWARD, BACKWARD, OPTIMIZER = PHASES

BEHIND = 64
"""Rounds that a device may be behind, at most; while it is, further ones are not timed."""

READ = 4
"""Rounds whose times are read at the end of one, at most, so that a device that has come along costs no round much."""


class PhaseTimes:
    """The seconds of each phase of training. Belongs to the training thread and to that of the backward.

    By the host's clock they are without what the exporter takes, which mostly comes in sampled rounds: `own`, in seconds so far.

    `events`: of devices; without them there is the host's clock alone. `seen`: the phases that there were. `untimed`: rounds that
    were followed, and are in no phase, since the device was too far behind, or a graph was being captured.
    """

    def __init__(self, clock: Callable[[], float], events: EventPool | None = None) -> None:
        self._clock, self._events = clock, events
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.seen: set[str] = set()
        self.current = OUTSIDE
        self.own = 0.0
        self.untimed = 0
        self.device: torch.device | None = None
        """Where the time passes; `None` while that is not known, and then as on the CPU."""
        self._since, self._own_since = clock(), 0.0
        self._on_device: Timeline[str, Event] | None = None
        self._behind: deque[Stretch[str, Event]] = deque()

    @property
    def known(self) -> bool:
        """Whether the time of the phases is known on this kind of device."""
        return self._on_device is not None or self.device is None or self.device.type == "cpu"

    @property
    def by_events(self) -> bool:
        """Whether they are those of a device."""
        return self._on_device is not None

    def on(self, device: torch.device) -> None:
        """The parameters are on this device, which times the phases from now on if it is no other than before."""
        if device == self.device:
            return
        for one in self._behind:
            one.release()
        self._behind.clear()
        if self._on_device is not None:
            self._on_device.restart()
        events = None if self._events is None else self._events.of(device)
        self._on_device, self.device = None if events is None else Timeline(events), device
        self.restart(self.current)

    def enter(self, phase: str, moment: float | None = None) -> None:
        """The time from now on belongs to this phase. `moment`: what the clock has just said."""
        self.seen.add(phase)
        if self._on_device is None:
            moment = self._clock() if moment is None else moment
            self.seconds[self.current] += max(0.0, moment - self._since - (self.own - self._own_since))
            self.current, self._since, self._own_since = phase, moment, self.own
        elif phase != self.current:
            self.current = phase
            self._on_device.enter(phase)

    def restart(self, phase: str = OUTSIDE) -> None:
        """Outside of a step, or in this phase; the time since the last phase began belongs to none."""
        self.current, self._since, self._own_since = phase, self._clock(), self.own
        if self._on_device is not None:
            self._on_device.restart()
            self._on_device.enter(phase)

    def round_over(self) -> None:
        """A round is over: its times will be read when the device has passed them, and those of earlier rounds are by now."""
        if self._on_device is None:
            return
        stretch = self._on_device.cut()
        if stretch is None or len(self._behind) >= BEHIND:
            self.untimed += 1
            if stretch is not None:
                stretch.release()
        else:
            self._behind.append(stretch)
        self._on_device.enter(self.current)
        for _ in range(READ):
            if not self._behind or not self._behind[0].passed():
                return
            self._add(self._behind.popleft())

    def _add(self, stretch: Stretch[str, Event]) -> None:
        found = stretch.seconds()
        self.untimed += found is None
        for phase, seconds in (found or {}).items():
            self.seconds[phase] += seconds
        stretch.release()


def main_device(parameters: Iterable[torch.Tensor]) -> torch.device | None:
    """The device with the most parameters, the first of several; `None` where there are none."""
    found = Counter(parameter.device for parameter in parameters).most_common(1)
    return found[0][0] if found else None
