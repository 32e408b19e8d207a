"""PhaseTimes: how long each phase of training was, by the host's clock or, where the host runs ahead of a device, by its events.

On a device a phase lasts from when the device comes to what was launched first in it until it comes to what was launched first in
the next one. So `data` and `outside` are how long the device waits for the host in them, and all phases together are its time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

import torch

from torch_grad_exporter.capture.device_events import EventPool, Stretch, Timeline

PHASES = ("outside", "data", "forward", "backward", "optimizer")
OUTSIDE, DATA, FORWARD, BACKWARD, OPTIMIZER = PHASES

# Rounds that a device may be behind, at most; while it is, further ones are not timed.
BEHIND = 64


class PhaseTimes:
    """The seconds of each phase of training. Belongs to the training thread and to that of the backward.

    By the host's clock they are without what the exporter takes, which mostly comes in sampled rounds.

    Args:
        clock: Seconds from any origin.
        events: Those of devices; without them there is the host's clock alone.

    Attributes:
        seconds: By phase.
        seen: The phases that there were.
        own: What the exporter has taken so far, in seconds.
        untimed: Rounds that were followed and are in no phase: the device was too far behind, or a graph was being captured.
        paused: Whether no phase is entered, since rounds are only counted.
        device: Where the time passes; None while that is not known, and then like on the CPU.
        by_events: Whether they are the times of a device.
    """

    def __init__(self, clock: Callable[[], float], events: EventPool | None = None) -> None:
        self._clock, self._events = clock, events
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.seen: set[str] = set()
        self.current = OUTSIDE
        self.own = 0.0
        self.untimed = 0
        self.paused = False
        self.device: torch.device | None = None
        self.by_events = False
        self._since, self._own_since = clock(), 0.0
        self._on_device: Timeline[str] | None = None
        self._pending: deque[Stretch[str]] = deque()

    @property
    def known(self) -> bool:
        """Whether the time of the phases is known on this kind of device."""
        return self.by_events or self.device is None or self.device.type == "cpu"

    def on(self, device: torch.device) -> None:
        """The parameters are on this device, which times the phases from now on if it was another one before."""
        if device == self.device:
            return
        for stretch in self._pending:
            stretch.release()
        self._pending.clear()
        if self._on_device is not None:
            self._on_device.restart()
        events = None if self._events is None else self._events.of(device)
        self._on_device, self.device = None if events is None else Timeline(events), device
        self.by_events = events is not None
        self.restart(self.current)

    def enter(self, phase: str, moment: float | None = None, *, step_over: bool = False) -> None:
        """The time from now on belongs to this phase, unless an optimizer is stepping: with a closure everything is `optimizer`.

        Args:
            phase: The phase.
            moment: The present time of the clock, if known.
            step_over: Whether an optimizer has stepped, or raised in its step.
        """
        if self.paused or (self.current == OPTIMIZER and not step_over):
            return
        self.seen.add(phase)
        if self._on_device is None:
            moment = self._clock() if moment is None else moment
            self.seconds[self.current] += max(0.0, moment - self._since - (self.own - self._own_since))
            self.current, self._since, self._own_since = phase, moment, self.own
        elif phase != self.current:
            self.current = phase
            self._on_device.enter(phase)

    def restart(self, phase: str = OUTSIDE) -> None:
        """Enter a phase; the time since the last one began belongs to none."""
        self.current, self._since, self._own_since = phase, self._clock(), self.own
        if self._on_device is not None:
            self._on_device.restart()
            self._on_device.enter(phase)

    def round_over(self) -> None:
        """A round is over: read the times of earlier rounds that the device has passed by now. Its own are read later."""
        if self._on_device is None:
            return
        stretch = self._on_device.cut()
        if stretch is not None and len(self._pending) < BEHIND:
            self._pending.append(stretch)
        else:
            self.untimed += 1
            if stretch is not None:
                stretch.release()
        self._on_device.enter(self.current)
        while self._pending and (seconds := self._pending[0].read()) is not None:
            self.untimed += self._pending.popleft().failed
            for phase, added in seconds.items():
                self.seconds[phase] += added


def main_device(parameters: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the device with the most parameters, the first of several; None if there are no parameters."""
    most = Counter(parameter.device for parameter in parameters).most_common(1)
    return most[0][0] if most else None
