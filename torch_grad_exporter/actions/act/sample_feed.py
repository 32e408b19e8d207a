"""SampleFeed: the values of single series at each sample of the gradients, however many a second.

Conditions are judged once a second, their windows hold every sample. The values are read on the
thread that drains the mailbox, from a snapshot that exists for each sample, and are picked up at the
next evaluation. Nothing is read while no condition has asked for a window.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Hashable, Mapping

from torch_grad_exporter.actions.act.measurements import MOST_SAMPLES
from torch_grad_exporter.collectors.clipping import (
    CLIPPING,
    GRAD_CLIP_CANDIDATES,
    GRAD_CLIP_THRESHOLD,
)
from torch_grad_exporter.collectors.gradients import (
    GRAD_NORM_RECENT_MAX,
    GRADIENTS,
    LAYER_FROZEN,
    GradientCollector,
)
from torch_grad_exporter.errors import Guard
from torch_grad_exporter.metrics.families import Family, LabelRows, Spec
from torch_grad_exporter.store.records import Outcome
from torch_grad_exporter.store.snapshots import EachSample, GradientSnapshot, Reading
from torch_grad_exporter.store.worker import Worker

_BETWEEN_SAMPLES = {GRAD_CLIP_CANDIDATES, GRAD_CLIP_THRESHOLD, GRAD_NORM_RECENT_MAX, LAYER_FROZEN}  # these change without a sample

OF_SAMPLES = frozenset((*GRADIENTS.specs, *CLIPPING.specs)) - _BETWEEN_SAMPLES


class Series:
    """The values of one series, one per sample. Dropping it ends its part of the feed.

    `add` is for the thread that drains, `take` for the thread that evaluates. If they are not taken for a
    long time, the oldest values are lost.
    """

    def __init__(self, spec: Spec, labels: Mapping[str, str]) -> None:
        self.spec = spec
        self._layer = str(labels["layer"]) if "layer" in labels else None
        self._places = [(spec.labels.index(name), str(value)) for name, value in labels.items()]
        self._values: deque[float] = deque(maxlen=MOST_SAMPLES)
        self._rows: tuple[LabelRows | None, int | None] = (None, None)
        self._table: object = None
        self._place: int | None = None
        self._seen: Hashable = None

    def add(self, family: Family, snapshot: GradientSnapshot) -> None:
        """Add the value in the family if the sample is one of this series."""
        if self._rows[0] is not family.labels:
            rows = enumerate(family.labels.rows)
            matching = [row for row, values in rows if all(values[n] == v for n, v in self._places)]
            self._rows = family.labels, matching[0] if len(matching) == 1 else None
        row = self._rows[1]
        if row is None:
            return
        # A sample of one optimizer's parameters repeats the values of the others.
        seen, self._seen = self._seen, self._mark(row, len(family.labels), snapshot)
        if self._seen in (None, seen):
            return
        if family.present is None or family.present[row]:
            self._values.append(float(family.values[row]))

    def _mark(self, row: int, rows: int, snapshot: GradientSnapshot) -> Hashable:
        """Return what changes with each sample of the series; None if there is no such thing."""
        if self._layer is not None:
            if self._table is not snapshot.table:
                self._table = snapshot.table
                layers = snapshot.table.layers
                self._place = layers.index(self._layer) if self._layer in layers else None
            return None if self._place is None else float(snapshot.layer_values["captures"][self._place])
        totals = snapshot.totals
        if len(totals) == 1:
            return snapshot.samples
        optimizer = row % (rows // len(Outcome) if "outcome" in self.spec.labels else rows)
        return totals[optimizer].tobytes() if optimizer < len(totals) else None

    def take(self) -> list[float]:
        """Return the values since the last call, oldest first."""
        return [self._values.popleft() for _ in range(len(self._values))]


class SampleFeed:
    """Hands the values of each sample to the series that are followed. `follow` is for one thread."""

    def __init__(self, worker: Worker, collector: GradientCollector, guard: Guard) -> None:
        self._worker = worker
        self._collector = collector
        self._guard = guard
        # Never held during a call of the worker, whose lock the draining thread holds.
        self._lock = threading.Lock()
        self._followed: list[weakref.ref[Series]] = []
        self._each: EachSample | None = None

    def follow(self, spec: Spec, labels: Mapping[str, str]) -> Series | None:
        """Return a series that gets the values from now on; None if the metric is not of samples."""
        if spec not in OF_SAMPLES:
            return None
        series = Series(spec, labels)
        with self._lock:
            self._followed.append(weakref.ref(series))
            idle = self._each is None
        if idle:
            self._each = self._worker.each_sample(self._worker.cursor(), self._sampled, sys.maxsize)
        return series

    def _sampled(self, _at: float, reading: Reading) -> None:
        self._guard(self._read, reading.snapshot.gradients)

    def _read(self, snapshot: GradientSnapshot) -> None:
        with self._lock:
            alive = [series for ref in self._followed if (series := ref()) is not None]
            self._followed = [weakref.ref(series) for series in alive]
            if not alive and self._each is not None:
                self._each.left, self._each = 0, None
        wanted = {series.spec for series in alive}
        families = {family.spec: family for family in self._collector.some(snapshot, wanted)}
        for followed in alive:
            family = families.get(followed.spec)
            if family is not None:
                followed.add(family, snapshot)
