"""A device that is none: what is launched on it takes a given time, and it has come as far as the test says."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from torch_grad_exporter.capture.device_events import EventPool
from torch_grad_exporter.errors import Guard

CUDA = torch.device("cuda", 0)


def raise_again(error: Exception) -> None:
    """What a guard of a test does with a failure."""
    raise error


@dataclass(eq=False)
class FakeEvent:
    """An event of the fake device, in whose time it is at `moment`."""

    device: FakeDevice
    moment: float | None = None
    records: int = 0

    def record(self, stream: object) -> None:
        assert stream == f"stream of {self.device.place}"
        self.device.launched += self.device.seconds
        self.moment = self.device.launched
        self.records += 1

    def query(self) -> bool:
        assert self.moment is not None
        self.device.queries += 1
        return self.device.passed >= self.moment

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.moment is not None
        assert end.moment is not None
        if not (self.device.passed >= self.moment and self.device.passed >= end.moment):
            raise AssertionError("this would wait for the device")
        return 1000 * (end.moment - self.moment)


@dataclass(eq=False)
class FakeDevice:
    """A device on which everything up to an event takes `seconds`, and `work` what it says; it has come as far as `passed`."""

    seconds: float = 0.0
    place: torch.device = CUDA
    launched: float = 0.0
    passed: float = 0.0
    queries: int = 0
    captures: bool = False
    made: list[FakeEvent] = field(default_factory=list)

    def work(self, seconds: float) -> None:
        """Launches something that takes so long."""
        self.launched += seconds

    def catch_up(self) -> None:
        """It has done all that was launched."""
        self.passed = self.launched

    def pool(self) -> EventPool:
        """A pool of its events; what fails in there fails the test."""
        return EventPool(Guard(raise_again), self.of)

    def of(self, kind: str) -> FakeDevice | None:
        """This one, of its kind of devices, and none of others."""
        return self if kind == self.place.type else None

    # As of `Device`

    def event(self) -> FakeEvent:
        self.made.append(FakeEvent(self))
        return self.made[-1]

    def stream(self, device: torch.device) -> object:
        assert device == self.place
        return f"stream of {device}"

    def capturing(self) -> bool:
        return self.captures
