"""LoggedValues: the last values that `exporter.log` was given, and those that the history has not taken yet."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.store.records import Inspected

SOURCE = "log"

# Names that are shown, and further ones that are counted, at most.
NAMES, COUNTED = 200, 10_000

# Seconds after which a name that is not logged is no longer shown, or twice the time between its last two values if that is longer.
STALE_SECONDS = 3600.0

# Steps of which the history gets the values by themselves; later ones share a row between two of its looks.
ROWS = 600


@dataclass(frozen=True, slots=True, eq=False)
class LoggedCall:
    """A call of `log`, the data of its record.

    Attributes:
        at: Unix time.
        step: Number of the step that it belongs to.
        numbers: Values that are known.
        on_devices: Names of those that are under way, for each ticket of the record.
    """

    at: float
    step: int
    numbers: Mapping[str, float]
    on_devices: tuple[tuple[str, ...], ...] = ()


@dataclass(slots=True, eq=False)
class LoggedValue:
    """A name's last value. `nonfinite`: how many were NaN or Inf. `stale_at`: Unix time."""

    value: float
    at: float
    nonfinite: int = 0
    stale_at: float = 0.0


@dataclass(slots=True, eq=False)
class LoggedRow:
    """Values for the history, finite ones by name. `nonfinite`: names of which one was not."""

    at: float
    step: int
    values: dict[str, float] = field(default_factory=dict)
    nonfinite: set[str] = field(default_factory=set)


class LoggedValues:
    """The values by name. `take` belongs to the thread that drains, the rest to any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, LoggedValue] = {}
        self._dropped: set[str] = set()
        self._rows: list[LoggedRow] = []
        self._apart = ROWS  # rows that may still begin beside one that waits
        self.calls = 0

    def take(self, record: Inspected, values: tuple[FloatArray, ...]) -> None:
        """Take what one call was given."""
        call = record.data
        if isinstance(call, LoggedCall):
            with self._lock:
                self.calls += 1
                row = self._row(call)
                for name, value in _all(call, values):
                    if (logged := self._logged(name, call.at)) is not None:
                        logged.value = value
                        if math.isfinite(value):
                            row.values[name] = value
                        else:
                            logged.nonfinite += 1
                            row.nonfinite.add(name)

    def _row(self, call: LoggedCall) -> LoggedRow:
        if self._rows and (self._rows[-1].step == call.step or not self._apart):
            row = self._rows[-1]
            row.at, row.step = call.at, call.step
            return row
        self._apart -= self._apart > 0
        self._rows.append(LoggedRow(call.at, call.step))
        return self._rows[-1]

    def _logged(self, name: str, at: float) -> LoggedValue | None:
        """Return the entry of a name, a new one if there is room."""
        logged = self._values.get(name)
        if logged is None:
            if len(self._values) >= NAMES:
                self._forget_stale(at)
            if len(self._values) >= NAMES:
                if len(self._dropped) < COUNTED:
                    self._dropped.add(name)
                return None
            self._dropped.discard(name)
            logged = self._values[name] = LoggedValue(math.nan, at)
        logged.stale_at = at + max(STALE_SECONDS, 2 * (at - logged.at))
        logged.at = at
        return logged

    def _forget_stale(self, now: float) -> None:
        for name in [name for name, logged in self._values.items() if logged.stale_at < now]:
            del self._values[name]

    def snapshot(self, now: float | None = None) -> tuple[dict[str, tuple[float, int]], int]:
        """Return the last value of each name and how many were not finite; and how many names are not shown."""
        with self._lock:
            self._forget_stale(time.time() if now is None else now)
            return {name: (logged.value, logged.nonfinite) for name, logged in self._values.items()}, len(self._dropped)

    def rows(self) -> list[LoggedRow]:
        """Remove and return the rows since the last call, for the history."""
        with self._lock:
            rows, self._rows = self._rows, []
            return rows


def _all(call: LoggedCall, values: tuple[FloatArray, ...]) -> Iterator[tuple[str, float]]:
    yield from call.numbers.items()
    for names, vector in zip(call.on_devices, values, strict=True):
        yield from zip(names, vector.tolist(), strict=True)
