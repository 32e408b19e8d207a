"""Collector `exporter`: what the exporter itself costs and how it is doing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from torch_grad_exporter.aggregation.worker import Snapshot
from torch_grad_exporter.capture.build import Capture
from torch_grad_exporter.capture.schedule import SamplingSchedule
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.metrics import catalogue as c
from torch_grad_exporter.metrics.families import Family, RowCache, scalar
from torch_grad_exporter.transfer.outcomes import Mode


class ExporterCollector:
    """Families about the exporter. `series`: the number of series of the scrape before, `None` at the first."""

    name = "exporter"

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        capture: Capture,
        schedule: SamplingSchedule,
        errors: ErrorLog,
        series: Callable[[], int | None],
    ) -> None:
        self._snapshot = snapshot
        self._capture = capture
        self._schedule = schedule
        self._errors = errors
        self._series = series
        self._modes, self._sources = RowCache(), RowCache()

    def collect(self) -> Iterator[Family]:
        """The families as of now."""
        snapshot, schedule = self._snapshot(), self._schedule
        table = snapshot.gradients.table
        yield scalar(c.EXPORTER_OVERHEAD_RATIO, snapshot.totals.overhead_ratio)
        yield scalar(c.EXPORTER_OVERHEAD_BUDGET, schedule.budget if schedule.every is None else None)
        yield scalar(c.EXPORTER_SAMPLING_INTERVAL, schedule.interval)
        yield scalar(c.EXPORTER_TIMING_INTERVAL, schedule.counting.timing_interval)
        yield scalar(c.EXPORTER_LAYERS, len(table.layers))
        yield scalar(c.EXPORTER_LAYERS_FOLDED, table.folded)
        yield scalar(c.EXPORTER_SERIES, self._series())
        modes = self._modes.get(tuple((mode.value,) for mode in Mode))
        yield Family(c.EXPORTER_CAPTURE_MODE, np.array([float(mode is self._capture.mode) for mode in Mode]), modes)
        yield scalar(c.EXPORTER_OVERHEAD_SECONDS, snapshot.totals.overhead_seconds)
        yield scalar(c.EXPORTER_CAPTURES, self._capture.samples)
        yield scalar(c.EXPORTER_CAPTURES_SKIPPED, self._capture.skipped + snapshot.gradients.undelivered)
        counts = self._errors.counts()
        sources = self._sources.get(tuple((source,) for source in counts))
        yield Family(c.EXPORTER_ERRORS, np.array(list(counts.values()), dtype=np.float64), sources)
