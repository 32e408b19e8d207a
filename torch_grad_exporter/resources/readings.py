"""Readings of the machine: values that are absent, counters that never fall, and expensive values that are read rarely."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

import psutil

# Errors of psutil if a platform, a sandbox or a file of the kernel has no such value. A zombie is a `psutil.Error`, a missing
# function an `AttributeError`, an empty file a `RuntimeError`, like `NotImplementedError`, and an unexpected line or field a
# `ValueError`.
ABSENT = (psutil.Error, OSError, RuntimeError, ValueError, AttributeError)

# The number of counters that are gone whose last value is kept.
KEPT = 1024

# The share of one processor's time that reading one expensive value may take: the unique memory of a small training, 10 ms to
# read, is read each 20 s, which is every other scrape.
SHARE = 5e-4

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


def attempt(read: Callable[[], _Value], absent: tuple[type[Exception], ...]) -> _Value | None:
    """Return the value, or None if reading it raises one of `absent`. Other errors pass."""
    try:
        return read()
    except absent:
        return None


class Rising(Generic[_Key]):
    """The sum of several counters that come and go, as a counter that never falls. Any thread may call it.

    A new counter counts as a whole. One that is gone keeps its last value in the sum. One that falls has started again, and the
    sum does not fall with it. One that comes back adds its gain, or counts as new if it has less than before. The last `KEPT` that
    went are remembered; an older one counts as new. Readings must come in the order in which they were taken: an older one after a
    newer one would count the difference twice.
    """

    def __init__(self) -> None:
        self._last: Mapping[_Key, float] = {}
        self._gone: dict[_Key, float] = {}
        self._total = 0.0
        self._lock = threading.Lock()

    def __call__(self, values: Mapping[_Key, float]) -> float:
        """Return the sum so far, with these present counters."""
        with self._lock:
            self._total += sum(self._gained(key, value) for key, value in values.items())
            self._gone = {key: last for key, last in {**self._gone, **self._last}.items() if key not in values}
            for oldest in list(self._gone)[:-KEPT]:
                del self._gone[oldest]
            self._last = dict(values)
            return self._total

    def _gained(self, key: _Key, value: float) -> float:
        if key in self._last:
            return max(0.0, value - self._last[key])
        before = self._gone.get(key, 0.0)
        return value - before if value >= before else value


class Paced(Generic[_Value]):
    """A value that is read again only after `1 / SHARE` times as long as its last reading took.

    So its reading takes a small share of a processor at most, however expensive it is. `clock` gives the time and `spent` the CPU
    time of this thread, both in seconds, as waiting costs nothing. Any thread may call it; one reading runs at a time.
    """

    def __init__(
        self,
        read: Callable[[], _Value],
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        self._read = read
        self._clock = clock
        self._spent = spent
        self._lock = threading.Lock()
        self._ended = float("-inf")
        self._took = 0.0
        self._kept: _Value | None = None

    def __call__(self, share: float = SHARE) -> _Value | None:
        """Return the value, which may be some time old, None before a reading has succeeded. Raises what the reading raises."""
        with self._lock:
            if self._clock() >= self._ended + self._took / share:
                start = self._spent()
                try:
                    self._kept = self._read()
                finally:
                    self._took = self._spent() - start
                    self._ended = self._clock()
            return self._kept
