"""Mailbox: the queue of records from the training thread to the worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch_grad_exporter.store.records import Record

ROOM = 1 << 13  # records in the mailbox, at most
BACKLOG = ROOM // 16  # at which it is drained at once: a scrape that comes meanwhile waits for it


class Mailbox(deque[Record]):
    """A bounded deque, so that a dead worker cannot fill the memory; `append` takes no lock and never waits."""

    __slots__ = ("left_out", "pressing", "wake")

    def __init__(self) -> None:
        super().__init__()
        self.left_out = 0  # records for which there was no room; only grows, the training thread writes it
        self.pressing = False  # a sender of vectors has asked for a drain; the worker clears it when nothing is left
        self.wake: Callable[[], object] = lambda: None  # the worker's

    def press(self) -> None:
        """Ask for a drain at once, since buffers for vectors run short. Wakes once until `pressing` is cleared."""
        if not self.pressing:
            self.pressing = True
            self.wake()

    def append(self, record: Record) -> None:
        """Take a record if there is room, else count it as left out."""
        waiting = len(self)
        if waiting < ROOM:
            super().append(record)
            if waiting == BACKLOG:
                self.wake()
        else:
            self.left_out += 1
