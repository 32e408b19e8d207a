"""Scrape: runs all collectors, each behind its own guard.

A collector that fails costs only itself: its families of this scrape are missing and
`torch_grad_exporter_collector_success` says 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from torch_grad_exporter import catalogue as c
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.families import Collector, Family, RowCache

SOURCE = "collector"


class Scrape:
    """Yields the families of all collectors. `prepare` runs first, once per scrape."""

    def __init__(
        self,
        collectors: Sequence[Collector],
        errors: ErrorLog,
        prepare: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._collectors = collectors
        self._errors = errors
        self._prepare = prepare
        self._clock = clock
        self._rows = RowCache()
        self.series: int | None = None

    def __call__(self) -> Iterator[Family]:
        """One scrape; the last families say how each collector did."""
        try:
            self._prepare()
        except Exception as error:  # noqa: BLE001 - the boundary: the collectors then show what they have
            self._errors.count("worker", error)
        success, seconds = np.zeros((2, len(self._collectors)))
        series = 0
        for position, collector in enumerate(self._collectors):
            start = self._clock()
            families: list[Family] = []
            source = f"{SOURCE}_{collector.name}"
            if self._errors.switched_off(source):
                continue
            try:
                families = list(collector.collect())
            except Exception as error:  # noqa: BLE001 - the boundary: one collector must not cost the others
                self._errors.record(source, error)
            else:
                self._errors.succeeded(source)
                success[position] = 1.0
            seconds[position] = self._clock() - start
            series += sum(family.series for family in families)
            yield from families
        rows = self._rows.get(tuple((collector.name,) for collector in self._collectors))
        yield Family(c.EXPORTER_COLLECTOR_SUCCESS, success, rows)
        yield Family(c.EXPORTER_COLLECTOR_DURATION, seconds, rows)
        self.series = series + 2 * len(self._collectors)
