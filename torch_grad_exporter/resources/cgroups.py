"""Control groups of this process, versions 1 and 2: where they are, what limits them, what they use.

Only files are read. A value that is missing, cannot be read or makes no sense is None: a group may vanish at any moment, and in a
container a part of the tree is hidden.
"""
# ruff: noqa: PTH112 - `Path.is_dir` raises where a directory above is closed to this user.

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# From here on a memory limit of version 1 is none: the kernel writes the largest number that a page's size divides.
UNLIMITED = 2**62

# A line of /proc/self/cgroup: number, controllers, path.
_MEMBERSHIP = re.compile(r"^[^:\n]*:([^:\n]*):(.*)$", re.MULTILINE)

# A line of /proc/self/mountinfo: three numbers, root, mount point, options, `-`, kind, source, options of the kind.
_MOUNTED = re.compile(r"^\S+ \S+ \S+ (\S+) (\S+) .*? - cgroup(2?) .*?(\S*)$", re.MULTILINE)


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


@dataclass(frozen=True, slots=True)
class _Mount:
    root: PurePosixPath  # the mounted directory, which may lie deeper than the hierarchy's own root
    point: PurePosixPath
    version: int
    options: frozenset[str]


class ControlGroups:
    """Finds the groups of this process, in a file system that begins at `root`.

    Mounts are listed again only when the process has been moved or its group cannot be seen any more: on a host of many
    containers there are thousands.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._cached: tuple[str, dict[str, ControlGroup | None]] | None = None

    def __call__(self, controller: str) -> ControlGroup | None:
        """Return the group that the controller (`memory` or `cpu`) counts the process in, None if there is none."""
        membership = _text(self._root / "proc/self/cgroup") or ""
        cached = self._cached
        if cached is None or cached[0] != membership:
            # One assignment: another scrape may be doing the same.
            cached = self._cached = (membership, {})
        groups = cached[1]
        if controller not in groups or ((known := groups[controller]) and not os.path.isdir(known.directories[0])):
            groups[controller] = self._find(controller, membership)
        return groups[controller]

    def _find(self, controller: str, membership: str) -> ControlGroup | None:
        # Version 1 if it has the controller, and is mounted; else version 2.
        paths = _paths(membership)
        mounts = list(_mounts(_text(self._root / "proc/self/mountinfo") or ""))
        first = [mount for mount in mounts if mount.version == 1 and controller in mount.options]
        if controller in paths and first:
            return self._group(paths[controller], first)
        second = [mount for mount in mounts if mount.version == 2]
        return self._group(paths[""], second) if "" in paths and second else None

    def _group(self, path: str, mounts: list[_Mount]) -> ControlGroup:
        """Return the group of a path, through the mount that shows the most above it.

        If none shows the path, since it belongs to another namespace, the mounted directory is taken for the process' group.
        """
        shown = [
            (mount, parts)
            for mount in sorted(mounts, key=lambda mount: len(mount.root.parts))
            if (parts := _below(mount.root, path)) is not None and os.path.isdir(self._real(mount.point, *parts))
        ]
        mount, parts = shown[0] if shown else (mounts[0], ())
        return ControlGroup(mount.version, tuple(self._real(mount.point, *parts[:depth]) for depth in range(len(parts), -1, -1)))

    def _real(self, point: PurePosixPath, *parts: str) -> Path:
        return self._root.joinpath(*point.parts[1:], *parts)


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


def _mounts(table: str) -> Iterator[_Mount]:
    """Yield the mounted hierarchies in /proc/self/mountinfo."""
    for root, point, second, options in _MOUNTED.findall(table):
        places = PurePosixPath(_unescape(root)), PurePosixPath(_unescape(point))
        yield _Mount(*places, 2 if second else 1, frozenset(options.split(",")))


def _unescape(field: str) -> str:
    # The kernel writes spaces and the like as three octal digits.
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _below(root: PurePosixPath, path: str) -> tuple[str, ...] | None:
    """Return the way from a mount's root down to a path, None if it does not lie there.

    A directory above the part that this process may see is written with `..`, in both of them.
    """
    if not PurePosixPath(path).is_relative_to(root):
        return None
    parts = PurePosixPath(path).relative_to(root).parts
    return None if ".." in parts else parts


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
