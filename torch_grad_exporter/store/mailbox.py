"""Mailbox: the queue of records from the training thread to the worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch_grad_exporter.store.records import Record

ROOM = 1 << 13
"""Records in the mailbox, at most."""


class Mailbox(deque[Record]):
    """A bounded deque, so that a dead worker cannot fill the memory; `append` takes no lock and never waits."""

    __slots__ = ("_backlog", "_on_backlog", "left_out", "pressing")

    def __init__(self) -> None:
        super().__init__()
        self.left_out = 0  # records for which there was no room; only grows, the training thread writes it
        self.pressing = False  # a sender of vectors has asked for a drain; cleared by the drain that leaves nothing waiting
        self._backlog = ROOM
        self._on_backlog: Callable[[], object] = lambda: None

    def on_backlog(self, records: int, wake: Callable[[], object]) -> None:
        """Call `wake` on the thread that appends whenever this many records have come to wait."""
        self._backlog, self._on_backlog = records, wake

    def press(self) -> None:
        """Ask for a drain at once, since buffers for vectors run short. Wakes once until `pressing` is cleared."""
        if not self.pressing:
            self.pressing = True
            self._on_backlog()

    def append(self, record: Record) -> None:
        """Take a record if there is room, else count it as left out."""
        waiting = len(self)
        if waiting < ROOM:
            super().append(record)
            if waiting == self._backlog:
                self._on_backlog()
        else:
            self.left_out += 1
