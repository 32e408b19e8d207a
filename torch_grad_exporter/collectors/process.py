"""Collector `process`: this process as all Prometheus clients show it, and its children, such as a DataLoader's workers."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import prometheus_client
import psutil
from prometheus_client.samples import Sample

from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, LabelledRows, scalar
from torch_grad_exporter.resources.children import ChildrenMemory, ChildrenReading, unique_memory
from torch_grad_exporter.resources.readings import ABSENT, Paced, attempt

STANDARD = Section("Process")
"""The metrics that `prometheus_client` collects itself, under the names that all Prometheus clients use.

Those of `process_*` have the help texts of the clients, too: node_exporter's textfile collector drops a metric with two texts.
"""

PROCESS_VIRTUAL_MEMORY = STANDARD.gauge("process_virtual_memory_bytes", "Virtual memory size in bytes.", unit="bytes")
PROCESS_RESIDENT_MEMORY = STANDARD.gauge("process_resident_memory_bytes", "Resident memory size in bytes.", unit="bytes")
PROCESS_START_TIME = STANDARD.gauge(
    "process_start_time_seconds", "Start time of the process since unix epoch in seconds.", unit="seconds"
)
PROCESS_CPU_SECONDS = STANDARD.counter(
    "process_cpu_seconds_total",
    "Total user and system CPU time spent in seconds.",
    unit="seconds",
    older=True,
)
PROCESS_OPEN_FDS = STANDARD.gauge("process_open_fds", "Number of open file descriptors.")
PROCESS_MAX_FDS = STANDARD.gauge("process_max_fds", "Maximum number of open file descriptors.")
PYTHON_INFO = STANDARD.gauge(
    "python_info",
    "The Python interpreter as labels; the value is always 1.",
    "implementation", "major", "minor", "patchlevel", "version",
)  # fmt: skip
PYTHON_GC_COLLECTIONS = STANDARD.counter(
    "python_gc_collections_total", "Runs of the garbage collector, by generation.", "generation", older=True
)
PYTHON_GC_OBJECTS_COLLECTED = STANDARD.counter(
    "python_gc_objects_collected_total",
    "Objects that the garbage collector freed, by generation.",
    "generation",
    older=True,
)
PYTHON_GC_OBJECTS_UNCOLLECTABLE = STANDARD.counter(
    "python_gc_objects_uncollectable_total",
    "Objects that the garbage collector could not free, by generation.",
    "generation",
    older=True,
)

METRICS = Section("Process")
"""The metrics that psutil gives for the process and its children."""

PROCESS_THREADS = METRICS.gauge("torch_process_threads", "Threads of the process.")
PROCESS_IO_READ = METRICS.counter(
    "torch_process_io_read_bytes_total",
    "Bytes that the process had storage read for it; on Linux also its children that have ended.",
    unit="bytes",
    older=True,
)
PROCESS_IO_WRITE = METRICS.counter(
    "torch_process_io_write_bytes_total",
    "Bytes that the process had written to storage; on Linux also its children that have ended.",
    unit="bytes",
    older=True,
)
PROCESS_UNIQUE_MEMORY = METRICS.gauge(
    "torch_process_unique_memory_bytes",
    "Memory that only this process uses, which its end would free; what it shares with forked workers is left out. Up to a minute old, or minutes where the process has tens of gigabytes.",
    unit="bytes",
)
PROCESS_CHILDREN = METRICS.gauge(
    "torch_process_children",
    "Child processes that run, such as the workers of a DataLoader, and theirs.",
)
PROCESS_CHILDREN_MEMORY = METRICS.gauge(
    "torch_process_children_memory_bytes",
    "Memory of the child processes that run, without what a forked worker shares with its parent. Up to a minute old, or minutes where they have tens of gigabytes.",
    unit="bytes",
)
PROCESS_CHILDREN_CPU_SECONDS = METRICS.counter(
    "torch_process_children_cpu_seconds_total",
    "CPU time of the child processes, also of those that have ended.",
    unit="seconds",
    older=True,
)

# The share of all time that listing children may take: most often they are those of the scrape.
CHILDREN_SHARE = 5e-3


def standard_registry(proc: str = "/proc") -> prometheus_client.CollectorRegistry:
    """Return a registry of its own with what `prometheus_client` collects about a process."""
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.ProcessCollector(proc=proc, registry=registry)
    prometheus_client.PlatformCollector(registry=registry)
    prometheus_client.GCCollector(registry=registry)
    return registry


class PsutilFamilies:
    """Families of what psutil reads of a process and its children; a value that cannot be read here has no series.

    `clock` paces expensive readings, by the CPU time that `spent` says they took: walking all pages of a process' memory, and
    listing children, for which psutil visits every process of the host.
    """

    def __init__(
        self,
        process: psutil.Process,
        *,
        times: Callable[[], os.times_result] = os.times,
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        self._process = process
        self._unique_memory = Paced(lambda: unique_memory(process), clock, spent)
        self._children = Paced(ChildrenReading(process, times), clock, spent)
        self._children_memory = ChildrenMemory(clock, spent)

    def collect(self) -> Iterator[Family]:
        """Yield the families of now, or of the last reading where they are expensive."""
        process = self._process
        io = attempt(lambda: process.io_counters(), ABSENT)  # noqa: PLW0108 - macOS has no such function to name
        yield scalar(PROCESS_THREADS, attempt(process.num_threads, ABSENT))
        yield scalar(PROCESS_IO_READ, _known(io.read_bytes) if io else None)
        yield scalar(PROCESS_IO_WRITE, _known(io.write_bytes) if io else None)
        yield scalar(PROCESS_UNIQUE_MEMORY, self._unique_memory())
        children = self._children(CHILDREN_SHARE)
        yield scalar(PROCESS_CHILDREN, len(children.running) if children else None)
        yield scalar(PROCESS_CHILDREN_MEMORY, self._children_memory(children.running) if children else None)
        yield scalar(PROCESS_CHILDREN_CPU_SECONDS, children.cpu_seconds if children else None)


def _known(count: int) -> int | None:
    # The BSDs count operations only and say -1 for bytes.
    return count if count >= 0 else None


class ProcessCollector:
    """Families of this process. `standard`: a registry with `prometheus_client`'s own collectors; `psutil_families`: the rest."""

    def __init__(
        self,
        *,
        standard: prometheus_client.CollectorRegistry | None = None,
        psutil_families: PsutilFamilies | None = None,
    ) -> None:
        self._standard = standard or standard_registry()
        self._rows = LabelledRows()
        # Where there is no /proc, psutil does not even find this process.
        if psutil_families is None and (process := attempt(psutil.Process, ABSENT)) is not None:
            psutil_families = PsutilFamilies(process)
        self._psutil_families = psutil_families

    def collect(self) -> Iterator[Family]:
        """Yield the families of now; none of a metric that is not there, such as `process_*` without /proc."""
        standard: defaultdict[str, list[Sample]] = defaultdict(list)
        for metric in self._standard.collect():
            for sample in metric.samples:
                standard[sample.name].append(sample)
        for spec in STANDARD.specs:
            if samples := standard.get(spec.name):
                values = {tuple(sample.labels.get(name, "") for name in spec.labels): sample.value for sample in samples}
                yield self._rows.family(spec, values)
        if self._psutil_families is not None:
            yield from self._psutil_families.collect()


COLLECTOR = Declaration("process", (STANDARD, METRICS), lambda _: ProcessCollector(), place=60, judged=False)
