"""The descendants of a process, such as the workers of a DataLoader: their number, memory and CPU time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import psutil

from torch_grad_exporter.resources.readings import ABSENT, SHARE, Paced, attempt

ENDED = frozenset({psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD})


def unique_memory(process: psutil.Process) -> int | None:
    """Return the bytes in pages that only this process has, None if unknown. The kernel walks all its pages for it."""
    return attempt(lambda: process.memory_full_info().uss, ABSENT)


class Children(NamedTuple):
    """All descendants of a process that run at one moment, and the CPU time of all there ever were, in seconds."""

    running: Sequence[psutil.Process]
    cpu_seconds: float


class ChildrenReading:
    """Reads the descendants of a process. For one thread at a time.

    The CPU time is that of the living and of those that this process has waited for, as a total that never falls. The time of a
    child that ends moves to the process that waits for it; until then the total stands still. Time of a child that no process of
    the family waits for, such as one that outlived its parent, is lost: then the total stands still until others have added more.

    Args:
        process: Whose descendants they are.
        times: The times of that process, like `os.times`.
    """

    def __init__(self, process: psutil.Process, times: Callable[[], os.times_result]) -> None:
        self._process, self._times = process, times
        self._cpu_seconds = 0.0

    def __call__(self) -> Children | None:
        """Return the descendants of now, None if they cannot be listed."""
        # Before the children are read: otherwise time that moves meanwhile would count twice.
        times = self._times()
        processes = attempt(lambda: self._process.children(recursive=True), ABSENT)
        if processes is None:
            return None
        running, seconds = [], times.children_user + times.children_system
        for process in processes:
            try:
                with process.oneshot():
                    seconds += sum(process.cpu_times()[:4])  # its own, and of its children that it has waited for
                    if process.status() not in ENDED:
                        running.append(process)
            except psutil.NoSuchProcess:  # it has ended since it was listed, a zombie included
                continue
            except ABSENT:
                running.append(process)
        self._cpu_seconds = max(self._cpu_seconds, seconds)
        return Children(running, self._cpu_seconds)


class ChildrenMemory:
    """Unique memory of processes that come and go. A new one is read at once, all again at a pace; for one thread at a time."""

    def __init__(self, clock: Callable[[], float], spent: Callable[[], float]) -> None:
        self._clock = clock
        self._spent = spent
        self._readings: dict[psutil.Process, Paced[int | None]] = {}

    def __call__(self, processes: Sequence[psutil.Process]) -> int | None:
        """Return the sum in bytes, None if there are processes and the memory of none can be read."""
        self._readings = {process: self._readings.get(process) or self._reading(process) for process in processes}
        known = [memory for read in self._readings.values() if (memory := read(SHARE / len(processes))) is not None]
        return sum(known) if known or not processes else None

    def _reading(self, process: psutil.Process) -> Paced[int | None]:
        return Paced(partial(unique_memory, process), self._clock, self._spent)
