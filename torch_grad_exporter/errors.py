"""The guard at every boundary: a failure of ours is logged once, counted, and never reaches the user.

A boundary is a place where somebody else's code calls ours: a hook, the worker's loop, a collector, a
request. What a boundary raises is recorded here under its source; a source that fails `LIMIT` times in a
row is switched off. `BaseException` (an interrupt, an exit) always passes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger("torch_grad_exporter")

LIMIT = 10
"""Failures in a row after which a source switches itself off."""


class ErrorLog:
    """Counts failures by source; the first of each source is logged with its traceback."""

    def __init__(self, sources: tuple[str, ...], log: logging.Logger = logger) -> None:
        self._log = log
        self._counts = dict.fromkeys(sources, 0)
        self._in_a_row = dict.fromkeys(sources, 0)
        self._lock = threading.Lock()

    def record(self, source: str, error: BaseException) -> None:
        """Counts one failure of a source that `switched_off` guards; logs the first one and the switching off."""
        self.count(source, error)
        with self._lock:
            in_a_row = self._in_a_row[source] = self._in_a_row.get(source, 0) + 1
        if in_a_row == LIMIT:
            self.gave_up(source)

    def count(self, source: str, error: BaseException) -> None:
        """Counts one failure of a source that goes on whatever happens; logs the first one."""
        with self._lock:
            count = self._counts[source] = self._counts.get(source, 0) + 1
        if count == 1:
            self._log.warning("%s failed; training goes on, further failures are only counted: %r", source, error, exc_info=error)

    def gave_up(self, source: str) -> None:
        """Logs that a source is switched off."""
        self._log.error("%s failed %d times in a row and is switched off", source, LIMIT)

    def succeeded(self, source: str) -> None:
        """Ends a row of failures."""
        if self._in_a_row.get(source):
            with self._lock:
                self._in_a_row[source] = 0

    def switched_off(self, source: str) -> bool:
        """Whether the source has failed too often in a row to be called again."""
        return self._in_a_row.get(source, 0) >= LIMIT

    def counts(self) -> dict[str, int]:
        """Failures by source since the start; every known source is there, with 0 if it never failed."""
        with self._lock:
            return dict(self._counts)

    def guard(self, source: str, action: Callable[[], None]) -> None:
        """Runs `action`; a failure is recorded, a source that is switched off is not run."""
        if self.switched_off(source):
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the boundary: nothing of ours may reach the caller
            self.record(source, error)
        else:
            self.succeeded(source)
