"""The descendants of a process, such as the workers of a DataLoader: which there are, their memory and their CPU time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil

from torch_grad_exporter.resources.readings import ABSENT, SHARE, Paced, attempt

HIDDEN = (FileNotFoundError, ProcessLookupError, PermissionError)
"""What reading a list of children raises where its process has just ended, or may not be read by this user."""

ENDED = frozenset({psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD})

_LISTINGS = 3
"""How often the kernel's lists of children are read anew, where they leave out one that is there."""


def unique_memory(process: psutil.Process) -> int | None:
    """Bytes in pages that only this process has; `None` where that cannot be read. The kernel walks all its pages for it."""
    return attempt(lambda: process.memory_full_info().uss, ABSENT)


class Descendants:
    """Lists the descendants of a process, parents before their children; `None` where they cannot be listed.

    Linux has a list of children for each thread; elsewhere psutil visits every process of the host. A list is not
    exact while children end (proc_pid_task(5)): it is read again where it lacks one that was there before and still is.
    One that cannot be read, as without a free file descriptor, does not mean that all children have ended.
    """

    def __init__(self, process: psutil.Process, proc: str = "/proc") -> None:
        self._process = process
        self._proc = Path(proc)
        # `Path.exists` raises where a directory above is closed to this user.
        self._lists = os.path.exists(self._proc / f"{process.pid}" / "task" / f"{process.pid}" / "children")  # noqa: PTH110
        self._last: Sequence[psutil.Process] = ()

    def __call__(self) -> Sequence[psutil.Process] | None:
        """The present ones, including those that have ended and that no process has waited for."""
        return attempt(self._found, ABSENT)

    def _found(self) -> Sequence[psutil.Process]:
        for _ in range(_LISTINGS if self._lists else 0):
            listed = self._listed()
            if not self._left_out(listed):
                self._last = listed
                return listed
        return self._process.children(recursive=True)

    def _listed(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for parent in itertools.chain((self._process,), found):  # which grows meanwhile
            children = (attempt(partial(psutil.Process, pid), (psutil.Error,)) for pid in self._children(parent.pid))
            found += (child for child in children if child is not None)
        return found

    def _children(self, pid: int) -> Iterator[int]:
        tasks = self._proc / f"{pid}" / "task"
        for task in attempt(partial(os.listdir, tasks), HIDDEN) or ():
            listed = attempt((tasks / task / "children").read_bytes, HIDDEN)  # which may have ended meanwhile
            yield from map(int, (listed or b"").split())

    def _left_out(self, listed: Sequence[psutil.Process]) -> bool:
        family = {self._process.pid, *(process.pid for process in listed)}
        gone = set(self._last).difference(listed)
        return any(process.is_running() and attempt(process.ppid, (psutil.Error,)) in family for process in gone)


class CpuSeconds(NamedTuple):
    """CPU time of one process: its own, and that of its children which have ended and which it has waited for."""

    own: float
    waited_for: float


NOTHING = CpuSeconds(0.0, 0.0)


class ChildrenCpu:
    """CPU time of a process' descendants, of those that have ended too, as a total that never falls.

    The time of a child that ends moves to the process that waits for it: to this one, or to another descendant. Where that
    is not seen yet, as for a child that ended in the midst of a reading, the total has what was last seen of it until
    it arrives. What has not arrived by a reading from which no child is missing never will (`SIGCHLD` ignored, a
    descendant that outlived its own parent) and is kept permanently. Until that reading, time of children that no reading
    saw may be taken for it: then the total is too low, by at most what was lost.

    A reading takes parents before their children, this process first; otherwise time that moves meanwhile would count
    twice. Children are distinguished by keys that are never used again. `shown`: whether the platform shows what a child
    has waited for; where it does not, time may arrive at any later moment.
    """

    def __init__(self, *, shown: bool = True) -> None:
        self._shown = shown
        self._waited_for = 0.0
        self._last: Mapping[Hashable, CpuSeconds] = {}
        self._awaited = 0.0
        self._lost = 0.0
        self._total = 0.0

    def __call__(self, waited_for: float, children: Mapping[Hashable, CpuSeconds | None]) -> float:
        """The total as of a reading: what this process waited for, and every child; `None` for one that lets nothing be read."""
        now = {key: seconds or self._last.get(key, NOTHING) for key, seconds in children.items()}
        gone = [sum(seconds) for key, seconds in self._last.items() if key not in now]
        moved = [now[key].waited_for - self._last[key].waited_for for key in now if key in self._last]
        arrived = waited_for - self._waited_for + sum(moved)
        self._awaited = max(0.0, self._awaited + sum(gone) - arrived)
        if self._shown and not gone and None not in children.values():
            self._lost, self._awaited = self._lost + self._awaited, 0.0
        self._waited_for, self._last = waited_for, now
        alive = sum(map(sum, now.values()))
        self._total = max(self._total, waited_for + alive + self._awaited + self._lost)
        return self._total


class Children(NamedTuple):
    """All descendants of the process that run at one moment, and the CPU time of all there ever were, in seconds."""

    running: Sequence[psutil.Process]
    cpu_seconds: float


class ChildrenReading:
    """Reads the descendants of a process. For one thread at a time. `times`: those of this process, as `os.times`."""

    def __init__(self, descendants: Callable[[], Sequence[psutil.Process] | None], times: Callable[[], os.times_result]) -> None:
        self._descendants = descendants
        self._times = times
        self._cpu = ChildrenCpu(shown=not (psutil.MACOS or psutil.WINDOWS))

    def __call__(self) -> Children | None:
        """As of now; `None` where children cannot be listed."""
        times = self._times()
        processes = self._descendants()
        if processes is None:
            return None
        # A process is its own key: psutil compares them by pid and creation.
        seen = {process: child for process in processes if (child := _look_at(process)) is not None}
        waited_for = times.children_user + times.children_system
        cpu_seconds = self._cpu(waited_for, {process: cpu for process, (_, cpu) in seen.items()})
        return Children([process for process, (running, _) in seen.items() if running], cpu_seconds)


def _look_at(process: psutil.Process) -> tuple[bool, CpuSeconds | None] | None:
    """Whether a child runs, and its CPU time where that can be read.

    `None` if it has gone since it was listed, so that its time is with the process that waited for it.
    """
    try:
        with process.oneshot():
            times = process.cpu_times()
            running = process.status() not in ENDED
    except psutil.ZombieProcess:
        return False, None
    except psutil.NoSuchProcess:
        return None
    except ABSENT:
        return True, None
    return running, CpuSeconds(times.user + times.system, times.children_user + times.children_system)


class ChildrenMemory:
    """Unique memory of processes that come and go. A new one is read at once, all again at a pace; for one thread at a time."""

    def __init__(self, clock: Callable[[], float], spent: Callable[[], float]) -> None:
        self._clock = clock
        self._spent = spent
        self._readings: dict[psutil.Process, Paced[int | None]] = {}

    def __call__(self, processes: Sequence[psutil.Process]) -> int | None:
        """The sum in bytes; `None` where there are processes and none lets its memory be read."""
        self._readings = {process: self._readings.get(process) or self._reading(process) for process in processes}
        known = [memory for read in self._readings.values() if (memory := read(SHARE / len(processes))) is not None]
        return sum(known) if known or not processes else None

    def _reading(self, process: psutil.Process) -> Paced[int | None]:
        return Paced(partial(unique_memory, process), self._clock, self._spent)
