"""Control groups of this process, versions 1 and 2: where they are, what limits them, what they use.

Only files are read. A value that is missing, cannot be read or makes no sense is None: a group may vanish at any moment, and in a
container a part of the tree is hidden.
"""
# ruff: noqa: PTH112 - `Path.is_dir` raises where a directory above is closed to this user.

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# From here on a memory limit of version 1 is none: the kernel writes the largest number that a page's size divides.
UNLIMITED = 2**62

# A line of /proc/self/cgroup: number, controllers, path.
_MEMBERSHIP = re.compile(r"^[^:\n]*:([^:\n]*):(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The process' group for one resource: its directory and those above it, own first, as far as they can be seen."""

    version: int
    directories: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """A limit and the directory of the group that has it; of several equal ones the highest, where the most counts."""

    value: float
    directory: Path


def control_group(root: Path, controller: str) -> ControlGroup | None:
    """Return the group that the controller (`memory` or `cpu`) counts the process in, None if there is none.

    Hierarchies are looked for below /sys/fs/cgroup, in a file system that begins at `root`.
    """
    paths = _paths(_text(root / "proc/self/cgroup") or "")
    mounts = root / "sys/fs/cgroup"
    # Version 1 if it has the controller, and is mounted; else version 2.
    if controller in paths and (first := _hierarchy(mounts, controller)) is not None:
        return _group(1, first, paths[controller])
    second = mounts / "unified" if os.path.isdir(mounts / "unified") else mounts
    return _group(2, second, paths[""]) if "" in paths and os.path.isdir(second) else None


def _hierarchy(mounts: Path, controller: str) -> Path | None:
    """Return the directory of a hierarchy of version 1, whose name has its controllers."""
    try:
        return next((path for path in mounts.iterdir() if controller in path.name.split(",")), None)
    except OSError:
        return None


def _group(version: int, mount: Path, path: str) -> ControlGroup:
    parts = PurePosixPath(path).parts[1:]
    if ".." in parts or not os.path.isdir(mount.joinpath(*parts)):
        # In a container the path may belong to the host's namespace: then the mounted directory is the process' group.
        parts = ()
    return ControlGroup(version, tuple(mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)))


def memory_limit(group: ControlGroup) -> GroupLimit | None:
    """Return the smallest memory limit in bytes."""
    if group.version == 2:
        return _smallest(_limits(group, lambda directory: _number(directory / "memory.max")))
    limits = _limits(group, lambda directory: _limited(_number(directory / "memory.limit_in_bytes")))
    smallest = _statistic(group.directories[0] / "memory.stat", "hierarchical_memory_limit")
    if smallest is None:
        return _smallest(limits)
    # The kernel's own number is right: it includes groups that are hidden from here, and those above only if they count.
    unseen = [GroupLimit(smallest, group.directories[-1])] if _limited(smallest) else []
    return next((limit for limit in (*limits, *unseen) if limit.value == smallest), None)


def memory_working_set(group: ControlGroup, directory: Path) -> float | None:
    """Return the bytes in use by a group's directory without the part of the page cache that was not used recently."""
    usage, cache = ("memory.current", "inactive_file") if group.version == 2 else ("memory.usage_in_bytes", "total_inactive_file")
    used, inactive = _number(directory / usage), _statistic(directory / "memory.stat", cache)
    # The two files are not of one moment.
    return None if used is None or inactive is None else max(0.0, used - inactive)


def cpu_limit(group: ControlGroup) -> GroupLimit | None:
    """Return the smallest processor limit in cores."""
    return _smallest(_limits(group, _quota_2 if group.version == 2 else _quota_1))


def cpu_throttled(group: ControlGroup, directory: Path) -> float | None:
    """Return the seconds for which the threads of a group's directory were throttled, added up over processors."""
    name, per_second = ("throttled_usec", 1e6) if group.version == 2 else ("throttled_time", 1e9)
    value = _statistic(directory / "cpu.stat", name)
    return None if value is None else value / per_second


def _quota_2(directory: Path) -> float | None:
    quota, _, period = (_text(directory / "cpu.max") or "").partition(" ")
    return _cores(_integer(quota), _integer(period))


def _quota_1(directory: Path) -> float | None:
    return _cores(_number(directory / "cpu.cfs_quota_us"), _number(directory / "cpu.cfs_period_us"))


def _cores(quota: int | None, period: int | None) -> float | None:
    # Without a quota version 1 writes -1, and version 2 a word.
    return quota / period if quota is not None and quota > 0 and period is not None and period > 0 else None


def _limits(group: ControlGroup, read: Callable[[Path], float | None]) -> list[GroupLimit]:
    """Return the limits of the process' group and those above it, highest first."""
    return [GroupLimit(value, directory) for directory in reversed(group.directories) if (value := read(directory)) is not None]


def _smallest(limits: list[GroupLimit]) -> GroupLimit | None:
    return min(limits, key=lambda limit: limit.value, default=None)  # Of equal ones the first.


def _limited(value: int | None) -> int | None:
    return None if value is None or value >= UNLIMITED else value


def _paths(membership: str) -> dict[str, str]:
    """Return the paths of /proc/self/cgroup by controller; that of version 2 under the empty name."""
    return {name: path for names, path in _MEMBERSHIP.findall(membership) for name in names.split(",")}


def _statistic(path: Path, name: str) -> int | None:
    """Return one value of a file of names and numbers."""
    line = re.search(rf"^{name} (.*)$", _text(path) or "", re.MULTILINE)
    return None if line is None else _integer(line[1])


def _number(path: Path) -> int | None:
    return _integer(_text(path) or "")


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "surrogateescape")
    except OSError:
        return None
