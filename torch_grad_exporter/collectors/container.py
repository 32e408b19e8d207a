"""Collector `container`: the limits of the process' control groups, and how much of them is used."""

from __future__ import annotations

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


class ContainerCollector:
    """Families of the process' control groups; without any, or without limits, they are absent.

    `root`: the root of the file system in which /proc and /sys/fs/cgroup are read.
    """

    def __init__(self, *, root: Path = Path("/")) -> None:
        self._root = root

    def collect(self) -> Iterator[Family]:
        """Yield the families of now, also after the process was moved to other groups."""
        if (group := cgroups.control_group(self._root, "memory")) is not None:
            limit = cgroups.memory_limit(group)
            # Of the group that is limited, so that the ratio of the two shows how close the limit is.
            working_set = cgroups.memory_working_set(group, group.directories[0] if limit is None else limit.directory)
            yield scalar(CONTAINER_MEMORY_LIMIT, None if limit is None else limit.value)
            yield scalar(CONTAINER_MEMORY_WORKING_SET, working_set)
        if (group := cgroups.control_group(self._root, "cpu")) is not None and (limit := cgroups.cpu_limit(group)) is not None:
            yield scalar(CONTAINER_CPU_LIMIT, limit.value)
            yield scalar(CONTAINER_CPU_THROTTLED, cgroups.cpu_throttled(group, limit.directory))


COLLECTOR = Declaration("container", (METRICS,), lambda _: ContainerCollector(), place=80, judged=False)
