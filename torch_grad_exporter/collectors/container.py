"""Collector `container`: what limits the process through control groups, and how much of it is used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, scalar
from torch_grad_exporter.resources import cgroups

METRICS = Section("Host and container")

CONTAINER_MEMORY_LIMIT = METRICS.gauge(
    "torch_container_memory_limit_bytes",
    "Smallest memory limit of the process' control group and those above it; absent where there is none.",
    unit="bytes",
)
CONTAINER_MEMORY_WORKING_SET = METRICS.gauge(
    "torch_container_memory_working_set_bytes",
    "Memory in use, without what the kernel can drop at once, of the control group with the smallest limit, or else of the process' own.",
    unit="bytes",
)
CONTAINER_CPU_LIMIT = METRICS.gauge(
    "torch_container_cpu_limit_cores",
    "Smallest processor limit of the process' control group and those above it; absent where there is none.",
)
CONTAINER_CPU_THROTTLED = METRICS.counter(
    "torch_container_cpu_throttled_seconds_total",
    "Time for which the control group with the smallest processor limit was throttled; absent without a limit.",
    unit="seconds",
    older=True,
)


class Throttled:
    """How long the limited group was held back, as one counter that never falls, whichever group has the limit.

    The first group's time counts as a whole, that of any later one from when it is first read as the limited one. Any
    thread may call it.
    """

    def __init__(self) -> None:
        self._last: tuple[Path, float] | None = None
        self._total = 0.0
        self._lock = threading.Lock()

    def __call__(self, group: cgroups.ControlGroup, directory: Path) -> float | None:
        """Seconds so far, with those of this directory of the group as of now; `None` where they cannot be read."""
        with self._lock:  # What is read first must be added first.
            seconds = cgroups.cpu_throttled(group, directory)
            if seconds is None:
                return None
            if self._last is None:
                self._total = seconds
            elif self._last[0] == directory:
                self._total += max(0.0, seconds - self._last[1])
            self._last = directory, seconds
            return self._total


class ContainerCollector:
    """Families of the process' control groups; without any, or without limits, they are absent.

    `root`: the root of the file system in which /proc and the mounted hierarchies are read.
    """

    def __init__(self, *, root: Path = Path("/")) -> None:
        self._groups = cgroups.ControlGroups(root)
        self._throttled = Throttled()

    def collect(self) -> Iterator[Family]:
        """The families as of now, also after the process was moved to other groups."""
        yield from self._memory()
        yield from self._cpu()

    def _memory(self) -> Iterator[Family]:
        group = self._groups("memory")
        if group is None:
            return
        limit = cgroups.memory_limit(group)
        # Of the group that is limited, so that the ratio of the two shows how close the limit is.
        working_set = cgroups.memory_working_set(group, group.directories[0] if limit is None else limit.directory)
        yield scalar(CONTAINER_MEMORY_LIMIT, None if limit is None else limit.value)
        yield scalar(CONTAINER_MEMORY_WORKING_SET, working_set)

    def _cpu(self) -> Iterator[Family]:
        group = self._groups("cpu")
        limit = None if group is None else cgroups.cpu_limit(group)
        if group is None or limit is None:
            return
        yield scalar(CONTAINER_CPU_LIMIT, limit.value)
        yield scalar(CONTAINER_CPU_THROTTLED, self._throttled(group, limit.directory))


COLLECTOR = Declaration("container", (METRICS,), lambda _: ContainerCollector(), place=80, judged=False)
