"""Collector `process`: this process as all Prometheus clients show it, and its children, such as a DataLoader's workers."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import prometheus_client
import psutil
from prometheus_client.samples import Sample

from torch_grad_exporter.metrics import catalogue as c
from torch_grad_exporter.metrics.families import NO_LABELS, Family, LabelRows, RowCache, Spec, scalar
from torch_grad_exporter.resources.children import ChildrenMemory, ChildrenReading, Descendants, unique_memory
from torch_grad_exporter.resources.readings import ABSENT, Paced, attempt

CHILDREN_SHARE = 5e-3
"""Of all time, what looking for children may take: most often they are as of the scrape."""

STANDARD = (
    c.PROCESS_VIRTUAL_MEMORY,
    c.PROCESS_RESIDENT_MEMORY,
    c.PROCESS_START_TIME,
    c.PROCESS_CPU_SECONDS,
    c.PROCESS_OPEN_FDS,
    c.PROCESS_MAX_FDS,
    c.PYTHON_INFO,
    c.PYTHON_GC_COLLECTIONS,
    c.PYTHON_GC_OBJECTS_COLLECTED,
    c.PYTHON_GC_OBJECTS_UNCOLLECTABLE,
)
"""The metrics that `prometheus_client` collects itself."""


def standard_registry(proc: str = "/proc") -> prometheus_client.CollectorRegistry:
    """A registry of its own with what `prometheus_client` says about a process."""
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.ProcessCollector(proc=proc, registry=registry)
    prometheus_client.PlatformCollector(registry=registry)
    prometheus_client.GCCollector(registry=registry)
    return registry


class StandardFamilies:
    """What a registry of `prometheus_client` has, as families under our own declarations; unknown names are left out."""

    def __init__(self, registry: prometheus_client.CollectorRegistry) -> None:
        self._registry = registry
        self._rows = {spec: RowCache() for spec in STANDARD if spec.labels}

    def collect(self) -> Iterator[Family]:
        """The families as of now; none of a metric that the registry does not have, as `process_*` without /proc."""
        found: defaultdict[str, list[Sample]] = defaultdict(list)
        for metric in self._registry.collect():
            for sample in metric.samples:
                found[sample.name].append(sample)
        for spec in STANDARD:
            if samples := found.get(spec.name):
                values = np.array([sample.value for sample in samples], dtype=np.float64)
                yield Family(spec, values, self._labels(spec, samples))

    def _labels(self, spec: Spec, samples: list[Sample]) -> LabelRows:
        if not spec.labels:
            return NO_LABELS
        return self._rows[spec].get(tuple(tuple(sample.labels.get(name, "") for name in spec.labels) for sample in samples))


class PsutilFamilies:
    """What psutil says about a process and its children; of what cannot be read here there is no sample.

    `clock` paces what is dear, by the CPU time that `spent` says it took: walking all pages of a process' memory, and
    looking for children.
    """

    def __init__(
        self,
        process: psutil.Process,
        *,
        proc: str = "/proc",
        times: Callable[[], os.times_result] = os.times,
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        self._process = process
        self._unique_memory = Paced(lambda: unique_memory(process), clock, spent)
        self._children = Paced(ChildrenReading(Descendants(process, proc), times), clock, spent)
        self._children_memory = ChildrenMemory(clock, spent)

    def collect(self) -> Iterator[Family]:
        """The families as of now, or where they are dear as of a moment ago."""
        process = self._process
        io = attempt(lambda: process.io_counters(), ABSENT)  # noqa: PLW0108 - macOS has no such function to name
        yield scalar(c.PROCESS_THREADS, attempt(process.num_threads, ABSENT))
        yield scalar(c.PROCESS_IO_READ, _known(io.read_bytes) if io else None)
        yield scalar(c.PROCESS_IO_WRITE, _known(io.write_bytes) if io else None)
        yield scalar(c.PROCESS_UNIQUE_MEMORY, self._unique_memory())
        children = self._children(CHILDREN_SHARE)
        yield scalar(c.PROCESS_CHILDREN, len(children.running) if children else None)
        yield scalar(c.PROCESS_CHILDREN_MEMORY, self._children_memory(children.running) if children else None)
        yield scalar(c.PROCESS_CHILDREN_CPU_SECONDS, children.cpu_seconds if children else None)


def _known(count: int) -> int | None:
    """The BSDs count operations only and say -1 for bytes."""
    return count if count >= 0 else None


class ProcessCollector:
    """Families of this process. `standard`: a registry with `prometheus_client`'s own collectors; `psutil_families`: the rest."""

    name = "process"

    def __init__(
        self,
        *,
        standard: prometheus_client.CollectorRegistry | None = None,
        psutil_families: PsutilFamilies | None = None,
    ) -> None:
        self._sources: list[StandardFamilies | PsutilFamilies] = [StandardFamilies(standard or standard_registry())]
        # Where there is no /proc, psutil does not even find this process.
        if psutil_families is None and (process := attempt(psutil.Process, ABSENT)) is not None:
            psutil_families = PsutilFamilies(process)
        if psutil_families is not None:
            self._sources.append(psutil_families)

    def collect(self) -> Iterator[Family]:
        """The families as of now."""
        for source in self._sources:
            yield from source.collect()
