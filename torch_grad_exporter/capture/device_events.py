"""Events in a device's stream, which time it without waiting for it, and timelines of what it was busy with.

The host runs ahead of a device, so the host's clock only times launches there. An event is recorded in the stream that the work
runs in; the device notes its own time when it comes to it, and the event is read once the device has passed it. All that times
devices takes its events from one pool and gives them back. So the marks of a round on a `Timeline` are cut off as a `Stretch`,
which is read once the device has passed all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, Protocol, TypeVar

import torch

from torch_grad_exporter.errors import Guard

Key = TypeVar("Key", bound=Hashable)

# Events of one device in use at once, at most.
EVENTS = 1 << 14

# Kinds of devices that are not timed by events. On `mps` the time between two events cannot be read without a wait.
WITHOUT = frozenset(("cpu", "meta", "mps"))


class DeviceEvent(Protocol):
    """Like `torch.cuda.Event`."""

    def record(self, stream: Any) -> None:  # noqa: ANN401 - of the device's own kind
        """Put the event into a stream, again if it was in one."""

    def query(self) -> bool:
        """Return whether the device has passed it."""

    def elapsed_time(self, end: Any) -> float:  # noqa: ANN401 - an event of the same kind
        """Return the milliseconds from this event to a later one; both must have been passed."""


class _HostEvent:
    """A moment of the host's clock, like an event that the device has passed at once."""

    __slots__ = ("_clock", "_moment")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._moment = clock, 0.0

    def record(self, _stream: object) -> None:
        self._moment = self._clock()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _HostEvent) -> float:
        return (end._moment - self._moment) * 1000


class DeviceEvents:
    """The events of one device. Belongs to the training thread and that of the backward: each call may be one to the device.

    A failure is counted, and then nothing is timed; after several in a row nothing is tried any more.

    Args:
        device: The device.
        module: Its `torch.<kind>`, which has what `torch.cuda` has.
        guard: The boundary of all calls to the device.
        most: Events in use at once, at most.
    """

    def __init__(self, device: torch.device, module: ModuleType | SimpleNamespace, guard: Guard, most: int = EVENTS) -> None:
        self._device, self._module, self._guard, self._most = device, module, guard, most
        # While a graph is being captured nothing may be recorded or asked.
        self._capturing: Callable[[], bool] = getattr(module, "is_current_stream_capturing", bool)
        self._free: list[DeviceEvent] = []
        self._made = 0

    def now(self) -> DeviceEvent | None:
        """Record an event in the current stream; None if too many are in use, or a graph is being captured."""
        if self._guard.off:
            return None
        try:
            if self._capturing() or not (self._free or self._made < self._most):
                return None
            if not self._free:
                self._free.append(self._module.Event(enable_timing=True))
                self._made += 1
            event = self._free.pop()
            event.record(self._module.current_stream(self._device))
        except Exception as error:  # noqa: BLE001 - the boundary; a call of the guard would take as long as the event
            self._guard.failed(error)
            return None
        self._guard.succeeded()
        return event

    def passed(self, moments: Sequence[DeviceEvent]) -> bool:
        """Return whether the device has passed all of them."""
        # The last one first: mostly it decides.
        done = self._guard.result(lambda: not self._capturing() and all(moment.query() for moment in reversed(moments)))
        return done or False

    def between(self, moments: Sequence[DeviceEvent]) -> list[float] | None:
        """Return the seconds from each event to the next, all of them passed; None if the device fails.

        They are 0 where another stream was ahead.
        """
        return self._guard.result(lambda: [max(0.0, begin.elapsed_time(end) / 1000) for begin, end in itertools.pairwise(moments)])

    def give_back(self, moments: Iterable[DeviceEvent]) -> None:
        """Take events that are not needed any more, passed or not."""
        self._free.extend(moments)


class EventPool:
    """The events of all devices. `guard`: the boundary of all calls to them."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._by_device: dict[torch.device, DeviceEvents | None] = {}

    def of(self, device: torch.device) -> DeviceEvents | None:
        """Return those of a device; None if it has none that are read without waiting."""
        if device not in self._by_device:
            module = None if device.type in WITHOUT else getattr(torch, device.type, None)
            has = hasattr(module, "Event") and hasattr(module, "current_stream")
            self._by_device[device] = DeviceEvents(device, module, self._guard) if module is not None and has else None
        return self._by_device[device]

    def of_host(self, clock: Callable[[], float], most: int) -> DeviceEvents:
        """Return moments of the host's clock in the same form. `clock`: seconds from any origin; `most`: in use at once."""
        module = SimpleNamespace(Event=lambda *, enable_timing: _HostEvent(clock), current_stream=lambda _: None)  # noqa: ARG005 - like `torch.cuda.Event`
        # With a guard of its own, so that a success here does not end the row of failures of a device.
        return DeviceEvents(torch.device("cpu"), module, Guard(self._guard.failed, limit=None), most)


# From this moment on it was this, until the next mark; None for nothing that counts.
Mark = tuple[Key | None, DeviceEvent]


class Stretch(Generic[Key]):
    """Marks that are complete; the last one is an end."""

    def __init__(self, events: DeviceEvents, marks: list[Mark[Key]]) -> None:
        self._events = events
        self._keys = [key for key, _ in marks]
        self._moments = [moment for _, moment in marks]
        self.failed = False

    def read(self) -> dict[Key, float] | None:
        """Return how long each key was, in all, and give the events back; None while the device has not passed all of them.

        If the device fails, the result is empty and `failed` is set.
        """
        if not self._events.passed(self._moments):
            return None
        between = self._events.between(self._moments)
        self.failed = between is None
        sums: dict[Key, float] = {}
        for key, seconds in zip(self._keys, between or (), strict=False):
            if key is not None:
                sums[key] = sums.get(key, 0.0) + seconds
        self.release()
        return sums

    def release(self) -> None:
        """Give all events back; idempotent."""
        moments, self._moments = self._moments, []
        self._events.give_back(moments)


class Timeline(Generic[Key]):
    """The marks since the last cut. If one cannot be made, the stretch that it belongs to is lost as a whole."""

    def __init__(self, events: DeviceEvents) -> None:
        self._events = events
        self._marks: list[Mark[Key]] = []
        self._lost = False

    @property
    def current(self) -> Key | None:
        """What it is now."""
        return self._marks[-1][0] if self._marks else None

    def enter(self, key: Key | None) -> None:
        """From now on it is this."""
        marks = self._marks
        if len(marks) > 1 and marks[-1][0] == marks[-2][0]:
            self._events.give_back((marks.pop()[1],))  # between two spans of the same key, see `go_on`
        if self._lost:
            return
        moment = self._events.now()
        if moment is None:
            self.lose()
        else:
            marks.append((key, moment))

    def go_on(self, key: Key) -> None:
        """Like `enter`; but if it was this until the last mark, and nothing since, the time in between belongs to it as well."""
        marks = self._marks
        if len(marks) > 1 and marks[-1][0] is None and marks[-2][0] == key:
            marks[-1] = key, marks[-1][1]
        else:
            self.enter(key)

    def again(self) -> None:
        """What it is now begins only now: from the last `enter` or `go_on` up to here it was nothing that counts."""
        key = self.current
        if key is not None:
            self.forget()
            self.enter(key)

    def forget(self) -> None:
        """What it is now counts for nothing, from the last `enter` or `go_on`: how long it was is not known."""
        if self._marks:
            self._marks[-1] = None, self._marks[-1][1]

    def cut(self) -> Stretch[Key] | None:
        """Take all marks since the last cut, up to now; None if they are lost."""
        self.enter(None)
        marks, self._marks = self._marks, []
        lost, self._lost = self._lost, False
        return None if lost else Stretch(self._events, marks)

    def lose(self) -> None:
        """Give up the marks since the last cut, and those until the next one."""
        self.restart()
        self._lost = True

    def restart(self) -> None:
        """Forget the marks since the last cut, and begin again."""
        marks, self._marks, self._lost = self._marks, [], False
        self._events.give_back(moment for _, moment in marks)
