"""Scrape: runs all collectors, each behind its own guard.

A collector that fails costs only itself: its families of this scrape are missing and
`torch_grad_exporter_collector_success` says 0. One that takes longer than `TIMEOUT` costs the scrape no more than that,
and is left out of the next ones until it has come to an end. One that keeps failing is tried once a minute.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from torch_grad_exporter.collectors.exporter import (
    EXPORTER_COLLECTOR_DURATION,
    EXPORTER_COLLECTOR_SUCCESS,
    EXPORTER_SERIES,
)
from torch_grad_exporter.collectors.registry import Collector, source_of
from torch_grad_exporter.errors import ErrorLog, Guard
from torch_grad_exporter.lifecycle import BackgroundThread
from torch_grad_exporter.metrics.families import Family, LabelledRows, scalar

# Seconds that one collector may take.
TIMEOUT = 1.0

# Parts of that time: if the whole process was stopped meanwhile, only one part counts.
SLICES = 10

# Between two tries of a collector that keeps failing.
RETRY_SECONDS = 60.0


class _Result(NamedTuple):
    """The families of a collector, None if it failed, and the seconds that it took."""

    families: list[Family] | None
    seconds: float


class Scrape:
    """All families of all collectors; one scrape at a time.

    Args:
        collectors: By name.
        errors: Counts their failures.
        prepare: Runs first, once in a scrape.
        clock: In seconds.
        timeout: Seconds that one collector may take.
        not_judged: Names of collectors whose metrics no rule reads.
    """

    def __init__(
        self,
        collectors: Mapping[str, Collector],
        errors: ErrorLog,
        prepare: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
        timeout: float = TIMEOUT,
        *,
        not_judged: Collection[str] = (),
    ) -> None:
        self._collectors = collectors
        self._errors = errors
        self._preparing = errors.boundary("worker", limit=None)
        self._prepare = prepare
        self._clock = clock
        self._timeout = timeout
        self._lock = threading.RLock()
        self._late: dict[str, _Walk] = {}
        # A success ends a collector's row of failures only if it came in time.
        self._guards = {name: errors.boundary(source_of(name)) for name in collectors}
        self._retry_at: dict[str, float] = {}
        self._rows = LabelledRows()
        self._series = 0
        self._judged = [name for name in collectors if name not in not_judged]
        self._success: dict[str, bool] = {}  # of each collector, the last time that it was asked

    def __call__(self) -> list[Family]:
        """Return all families; the last ones are the size of the scrape before and the success of each collector."""
        with self._lock:
            families = self._scraped(list(self._collectors))
            self._series = sum(family.series for family in families)
            return families

    def for_rules(self) -> list[Family]:
        """Return the families that rules read. Other collectors, some of which are expensive, only show their last success."""
        with self._lock:
            return self._scraped(self._judged)

    def _scraped(self, asked: list[str]) -> list[Family]:
        self._preparing(self._prepare)  # if that fails the collectors show their last values
        results = self._collect([name for name in asked if self._may_run(name)])
        self._success |= {name: name in results and results[name].families is not None for name in asked}
        return [*(family for result in results.values() for family in result.families or ()), *self._reports(results)]

    def start(self) -> None:
        """Start the collectors that have a `start`; one that fails costs only itself."""
        for name, collector in self._collectors.items():
            if (start := getattr(collector, "start", None)) is not None:
                self._errors.boundary(source_of(name), limit=None)(start)

    def close(self) -> None:
        """Close the collectors that have a `close`. Waits for none that hangs."""
        for collector in self._collectors.values():
            if (close := getattr(collector, "close", None)) is not None:
                close()

    def after_fork_in_child(self) -> None:
        """Replace the lock: the child has none of the threads that may hold it, or be at work in a collector."""
        self._lock = threading.RLock()
        self._late = {}

    def _may_run(self, name: str) -> bool:
        if name in self._late and self._late[name].thread.running:
            return False
        self._late.pop(name, None)
        return not self._guards[name].off or self._clock() >= self._retry_at[name]

    def _collect(self, names: list[str]) -> dict[str, _Result]:
        """Return the result of each collector. They run in another thread, since a call that hangs cannot be stopped."""
        results: dict[str, _Result] = {}
        while names:
            walk = _Walk(names, self)
            walk.begin()
            late = self._wait(walk)
            results |= walk.results
            if late is None:
                break
            self._late[late] = walk
            self._failed(late, TimeoutError(f"no answer within {self._timeout:g} s"))
            names = names[names.index(late) + 1 :]
        for name, result in results.items():
            if result.families is not None:
                self._guards[name].succeeded()
        return results

    def _wait(self, walk: _Walk) -> str | None:
        """Return None when all collectors are done, or the name of the one that takes too long."""
        current, slices = walk.current, 0
        while not walk.thread.join(self._timeout / SLICES):
            slices = slices + 1 if walk.current == current else 0
            current = walk.current
            if slices >= SLICES and walk.give_up(current):
                return current
        return None

    def run(self, name: str) -> _Result:
        """Run one collector, for the thread of a walk."""
        start, collect = self._clock(), self._collectors[name].collect
        families = Guard(functools.partial(self._failed, name)).result(lambda: list(collect()))
        return _Result(families, self._clock() - start)

    def _failed(self, name: str, error: Exception) -> None:
        self._guards[name].failed(error)
        self._retry_at[name] = self._clock() + RETRY_SECONDS

    def _reports(self, results: dict[str, _Result]) -> Iterator[Family]:
        """Yield the size of the scrape before, the success of each collector, and the duration of those that have ended."""
        success = {name: self._success.get(name) for name in self._collectors}
        if "exporter" in self._collectors:
            yield scalar(EXPORTER_SERIES, self._series or None)
        yield self._rows.by_label(EXPORTER_COLLECTOR_SUCCESS, success)
        yield self._rows.by_label(EXPORTER_COLLECTOR_DURATION, {name: result.seconds for name, result in results.items()})


class _Walk:
    """One thread that runs collector after collector, until the last one or until it is given up."""

    def __init__(self, names: list[str], scrape: Scrape) -> None:
        self.thread = BackgroundThread("collect", self._walk)
        self.results: dict[str, _Result] = {}
        self.current: str | None = None
        self._names = names
        self._scrape = scrape
        self._given_up = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Begin, in a thread of its own if the process may have one more."""
        try:
            self.thread.start()
        except RuntimeError:
            self._walk()

    def give_up(self, name: str | None) -> bool:
        """End the walk if this collector still is its current one; return whether it does."""
        with self._lock:
            self._given_up = name is not None and self.current == name
            return self._given_up

    def _walk(self) -> None:
        for name in self._names:
            self.current = name
            result = self._scrape.run(name)
            with self._lock:
                if self._given_up:
                    return
                self.results[name] = result
                self.current = None
