"""The memory that this process may still take on its host."""

from __future__ import annotations

from pathlib import Path

import psutil

from torch_grad_exporter.resources import cgroups
from torch_grad_exporter.resources.readings import ABSENT, attempt


def available_memory(*, root: Path = Path("/")) -> float | None:
    """Return the bytes available, the least of the host's and of what its control group leaves; None if neither is known.

    `root`: the root of the file system in which /proc and /sys/fs/cgroup are read.
    """
    host = attempt(lambda: float(psutil.virtual_memory().available), ABSENT)
    left: float | None = None
    if (group := cgroups.control_group(root, "memory")) is not None and (limit := cgroups.memory_limit(group)) is not None:
        used = cgroups.memory_working_set(group, limit.directory)
        left = None if used is None else max(0.0, limit.value - used)
    known = [value for value in (host, left) if value is not None]
    return min(known, default=None)
