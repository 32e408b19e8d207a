"""Scrape: runs all collectors, each behind its own guard.

A collector that fails costs only itself: its families of this scrape are missing and
`torch_grad_exporter_collector_success` says 0. One that takes longer than `PATIENCE` costs the scrape no more than that,
and is left out of the next ones until it has come to an end. One that keeps failing is tried once a minute.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from torch_grad_exporter.collectors.context import ScrapeSize
from torch_grad_exporter.collectors.exporter import EXPORTER_COLLECTOR_DURATION, EXPORTER_COLLECTOR_SUCCESS
from torch_grad_exporter.collectors.registry import Collector, source_of
from torch_grad_exporter.errors import ErrorLog, Guard
from torch_grad_exporter.lifecycle import BackgroundThread
from torch_grad_exporter.metrics.families import Family, RowCache

PATIENCE = 1.0
"""Seconds that one collector may take."""

SLICES = 10
"""Parts in which that time is waited for: where the whole process was stopped meanwhile, only one part counts."""

RETRY_SECONDS = 60.0
"""Between two tries of a collector that has kept failing."""


@dataclass(frozen=True, slots=True)
class _Result:
    """What a collector gave, in seconds; `None` if it failed."""

    families: list[Family] | None
    seconds: float


class Scrape:
    """All families of all collectors; one scrape at a time. `prepare` runs first, once per scrape. `clock` in seconds.

    `size`: receives how many series there were.
    """

    def __init__(
        self,
        collectors: Sequence[Collector],
        errors: ErrorLog,
        prepare: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
        patience: float = PATIENCE,
        *,
        size: ScrapeSize | None = None,
    ) -> None:
        self._collectors = collectors
        self._errors = errors
        self._preparing = errors.boundary("worker", limit=None)
        self._prepare = prepare
        self._clock = clock
        self._patience = patience
        self._lock = threading.RLock()
        self._late: dict[str, _Walk] = {}
        self._guards: dict[str, Guard] = {}
        self._retry_at: dict[str, float] = {}
        self._rows = RowCache()
        self._size = ScrapeSize() if size is None else size

    def __call__(self) -> list[Family]:
        """One scrape; the last families say how each collector did."""
        with self._lock:
            self._preparing(self._prepare)  # if that fails the collectors show what they have
            results = self._collect([collector for collector in self._collectors if self._may_run(collector.name)])
            found = [family for result in results.values() for family in result.families or ()]
            found += self._reports(results)
            self._size.note(sum(family.series for family in found))
            return found

    def start(self) -> None:
        """Starts the collectors that have a `start`; one that fails costs only itself."""
        for collector in self._collectors:
            if (start := getattr(collector, "start", None)) is not None:
                self._errors.boundary(source_of(collector.name), limit=None)(start)

    def close(self) -> None:
        """Closes the collectors that have a `close`. Waits for none that hangs."""
        for collector in self._collectors:
            if (close := getattr(collector, "close", None)) is not None:
                close()

    def after_fork_in_child(self) -> None:
        """The child has none of the threads that may hold the lock, or be at work in a collector."""
        self._lock = threading.RLock()
        self._late = {}

    def _may_run(self, name: str) -> bool:
        if name in self._late and self._late[name].running:
            return False
        self._late.pop(name, None)
        return not self._guard(name).off or self._clock() >= self._retry_at.get(name, 0.0)

    def _guard(self, name: str) -> Guard:
        """The row of failures of a collector, which a success ends only where it came in time."""
        return self._guards.setdefault(name, self._errors.boundary(source_of(name)))

    def _collect(self, collectors: Sequence[Collector]) -> dict[str, _Result]:
        """What each collector gave. They run in another thread, since a call that hangs cannot be stopped."""
        results: dict[str, _Result] = {}
        while collectors:
            walk = _Walk(collectors, self._run)
            walk.start()
            late = self._wait(walk)
            results |= walk.results
            if late is None:
                break
            self._late[late.name] = walk
            self._failed(late.name, TimeoutError(f"no answer within {self._patience:g} s"))
            collectors = collectors[collectors.index(late) + 1 :]
        for name, result in results.items():
            if result.families is not None:
                self._guard(name).succeeded()
        return results

    def _wait(self, walk: _Walk) -> Collector | None:
        """Returns when all collectors are done, or with the one that takes too long."""
        current, slices = walk.current, 0
        while not walk.join(self._patience / SLICES):
            slices = slices + 1 if walk.current is current else 0
            current = walk.current
            if slices >= SLICES and (late := walk.give_up(current)) is not None:
                return late
        return None

    def _run(self, collector: Collector) -> _Result:
        start = self._clock()
        families = Guard(functools.partial(self._failed, collector.name)).result(lambda: list(collector.collect()))
        return _Result(families, self._clock() - start)

    def _failed(self, name: str, error: Exception) -> None:
        self._guard(name).failed(error)
        self._retry_at[name] = self._clock() + RETRY_SECONDS

    def _reports(self, results: dict[str, _Result]) -> list[Family]:
        """Success and duration of each collector; no duration of one that was not run, or has not ended."""
        names = [collector.name for collector in self._collectors]
        rows = self._rows.get(tuple((name,) for name in names))
        ran = np.array([name in results for name in names], dtype=np.bool_)
        success = np.array([name in results and results[name].families is not None for name in names], dtype=np.float64)
        seconds = np.array([results[name].seconds if name in results else 0.0 for name in names])
        return [
            Family(EXPORTER_COLLECTOR_SUCCESS, success, rows),
            Family(EXPORTER_COLLECTOR_DURATION, seconds, rows, ran),
        ]


class _Walk:
    """One thread that runs collector after collector, until the last one or until it is given up."""

    def __init__(self, collectors: Sequence[Collector], run: Callable[[Collector], _Result]) -> None:
        self.results: dict[str, _Result] = {}
        self.current: Collector | None = None
        self._collectors = collectors
        self._run = run
        self._given_up = False
        self._lock = threading.Lock()
        self._thread = BackgroundThread("collect", self._walk)

    def start(self) -> None:
        """Begins, in a thread of its own if the process may have one more."""
        try:
            self._thread.start()
        except RuntimeError:
            self._walk()

    @property
    def running(self) -> bool:
        """Whether its thread is under way, also in a collector on which the walk was given up."""
        return self._thread.running

    def join(self, seconds: float) -> bool:
        """Waits for its end, for so long at most; whether it has come."""
        return self._thread.join(seconds)

    def give_up(self, collector: Collector | None) -> Collector | None:
        """Ends the walk if this collector still is its current one, and returns it."""
        with self._lock:
            self._given_up = collector is not None and self.current is collector
            return collector if self._given_up else None

    def _walk(self) -> None:
        for collector in self._collectors:
            self.current = collector
            result = self._run(collector)
            with self._lock:
                if self._given_up:
                    return
                self.results[collector.name] = result
                self.current = None
