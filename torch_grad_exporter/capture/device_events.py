"""Moments of accelerators: events that are recorded in a device's stream, and read once it has passed them. Nothing waits for it.

The host runs ahead of a device, so that its clock only times launches there. An event is put into the stream that the work runs
in; the device notes its own time when it comes to it. All that times devices takes its events from one pool and gives them back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from torch_grad_exporter.errors import Guard

EVENTS = 1 << 14
"""Events of one device that are under way at once, at most."""

WITHOUT = frozenset(("cpu", "meta", "mps"))
"""Kinds of devices that are not timed by events. On `mps` the time between two events is not to be had without a wait."""


class Event(Protocol):
    """As `torch.cuda.Event`."""

    def record(self, stream: Any) -> None:  # noqa: ANN401 - of the device's own kind
        """Puts it into a stream, anew."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def elapsed_time(self, end: Any) -> float:  # noqa: ANN401 - an event of the same kind
        """Milliseconds from this one to a later one; both must have been passed."""


class Device(Protocol):
    """What there is to be known of a kind of devices."""

    def event(self) -> Event:
        """A new event that notes the time."""

    def stream(self, device: torch.device) -> object:
        """The stream in which the calling thread works on a device."""

    def capturing(self) -> bool:
        """Whether a graph is being captured in it, during which nothing may be recorded or asked."""


class Kind:
    """A kind of devices, by its module `torch.<kind>`, which has what `torch.cuda` has."""

    def __init__(self, module: Any) -> None:  # noqa: ANN401 - a module
        self._module = module
        self._capturing: Callable[[], bool] = getattr(module, "is_current_stream_capturing", lambda: False)

    @classmethod
    def named(cls, name: str) -> Kind | None:
        """That of a name, such as `cuda`; `None` if it has no events, or none that are read without waiting."""
        module = getattr(torch, name, None)
        has = name not in WITHOUT and hasattr(module, "Event") and hasattr(module, "current_stream")
        return cls(module) if has else None

    def event(self) -> Event:
        """As of `Device`."""
        event: Event = self._module.Event(enable_timing=True)
        return event

    def stream(self, device: torch.device) -> object:
        """As of `Device`."""
        return self._module.current_stream(device)

    def capturing(self) -> bool:
        """As of `Device`."""
        return self._capturing()


class DeviceEvents:
    """The events of one device. Belongs to the training thread and that of the backward: each call may be one to the device.

    A failure is counted, and then nothing is timed; after some in a row nothing is tried any more.
    """

    def __init__(self, device: torch.device, kind: Device, guard: Guard) -> None:
        self._device, self._kind, self._guard = device, kind, guard
        self._free: list[Event] = []
        self._made = 0

    def now(self) -> Event | None:
        """The present place in the device's current stream; `None` if too many are under way, or a graph is being captured."""
        if self._guard.off:
            return None
        try:
            return self._now()
        except Exception as error:  # noqa: BLE001 - the boundary; a call of the guard would take as long as the event
            self._guard.failed(error)
            return None

    def _now(self) -> Event | None:
        if (not self._free and self._made == EVENTS) or self._kind.capturing():
            return None
        if self._free:
            event = self._free.pop()
        else:
            event = self._kind.event()
            self._made += 1
        event.record(self._kind.stream(self._device))
        self._guard.succeeded()
        return event

    def passed(self, moments: Sequence[Event]) -> bool:
        """Whether the device has come so far, past all of them."""
        return self._guard.result(self._passed, moments) or False

    def _passed(self, moments: Sequence[Event]) -> bool:
        # The last one first: mostly it decides.
        return not self._kind.capturing() and all(moment.query() for moment in reversed(moments))

    def between(self, moments: Sequence[Event]) -> list[float] | None:
        """The device's seconds from each to the next, all of which it has passed; 0 where another stream was ahead."""
        return self._guard.result(self._between, moments)

    def _between(self, moments: Sequence[Event]) -> list[float]:
        return [max(0.0, begin.elapsed_time(end) / 1000) for begin, end in itertools.pairwise(moments)]

    def give_back(self, moments: Iterable[Event]) -> None:
        """These are not needed any more, whether they were passed or not."""
        self._free.extend(moments)


class EventPool:
    """The events of all devices. `guard`: the boundary of all calls to them; `kind`: what is known of a kind, if it has any."""

    def __init__(self, guard: Guard, kind: Callable[[str], Device | None] = Kind.named) -> None:
        self._guard, self._kind = guard, kind
        self._by_device: dict[torch.device, DeviceEvents | None] = {}

    def of(self, device: torch.device) -> DeviceEvents | None:
        """Those of a device; `None` where it has none that are read without waiting."""
        if device not in self._by_device:
            kind = self._kind(device.type)
            self._by_device[device] = None if kind is None else DeviceEvents(device, kind, self._guard)
        return self._by_device[device]
