"""The guard at every boundary: a failure of ours is logged once, counted, and never reaches the user.

A boundary is a place where somebody else's code calls ours: a hook, the worker's loop, a collector, a
request. What a boundary raises is recorded here under its source; a source that fails `LIMIT` times in a
row is switched off. `BaseException` (an interrupt, an exit) always passes, and so does what a signal's handler of the
user's raises while the main thread is in code of ours: it is meant for the training.

Logging is somebody else's code, too. A handler that raises costs its line; one that blocks, blocks: it is the user's, and a
line is logged once per source.
"""

from __future__ import annotations

import functools
import logging
import signal
import threading
from collections.abc import Callable

logger = logging.getLogger("torch_grad_exporter")

PREFIX = "torch_grad_exporter: "
"""Of every line that is logged."""

LIMIT = 10
"""Failures in a row after which a source switches itself off."""


class ErrorLog:
    """Counts failures by source; the first of each source is logged with its traceback."""

    def __init__(self, sources: tuple[str, ...], log: logging.Logger = logger) -> None:
        self._log = log
        self._counts = dict.fromkeys(sources, 0)
        self._in_a_row = dict.fromkeys(sources, 0)
        # Reentrant: a signal's handler may close the exporter while its own thread is in here.
        self._lock = threading.RLock()

    def record(self, source: str, error: BaseException) -> None:
        """Counts one failure of a source that `switched_off` guards; logs the first one and the switching off."""
        self.count(source, error)
        with self._lock:
            in_a_row = self._in_a_row[source] = self._in_a_row.get(source, 0) + 1
        if in_a_row == LIMIT:
            self.gave_up(source)

    def count(self, source: str, error: BaseException, times: int = 1) -> None:
        """Counts a failure of a source that goes on whatever happens, or several at once; logs the first one.

        Raises the error if it is none of ours, see `raised_by_handler`.
        """
        if self._counted(source, error, times) == times:
            message = "%s failed; training goes on, further failures are only counted: %s: %s"
            say(self._log, logging.WARNING, message, source, type(error).__name__, error, error=error)

    def tell(self, source: str, error: BaseException) -> None:
        """Counts one failure whose message is for the user, such as a wrong file, and logs each of them, in a line."""
        self._counted(source, error)
        say(self._log, logging.WARNING, "%s: %s; training goes on", source, error)

    def tell_once(self, source: str, error: BaseException) -> None:
        """Counts one failure whose message is for the user, and logs the first of a source, in a line."""
        if self._counted(source, error) == 1:
            message = "%s: %s; training goes on, further failures are only counted"
            say(self._log, logging.WARNING, message, source, error)

    def _counted(self, source: str, error: BaseException, times: int = 1) -> int:
        """How many failures of the source there are now."""
        if raised_by_handler(error):
            raise error
        with self._lock:
            count = self._counts[source] = self._counts.get(source, 0) + times
        return count

    def gave_up(self, source: str) -> None:
        """Logs that a source is switched off."""
        say(self._log, logging.ERROR, "%s failed %d times in a row and is switched off", source, LIMIT)

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


def say(log: logging.Logger, level: int, message: str, *arguments: object, error: BaseException | None = None) -> None:
    """Logs a line, with the traceback of `error`. A handler that raises, as on a full disk, costs the line and nothing else.

    Few programs set up logging, and without that a line does not show whose it is: it says so itself.
    """
    try:
        log.log(level, PREFIX + message, *arguments, exc_info=error, stacklevel=2)  # noqa: G003 - still one template to each message
    except Exception as failure:  # the boundary: handlers are anybody's code
        if raised_by_handler(failure):
            raise


def raised_by_handler(error: BaseException) -> bool:
    """Whether a signal's handler raised this, wherever the main thread was: a DataLoader's does so when a worker has died."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = {id(code) for number in signal.valid_signals() if (code := _code(signal.getsignal(number))) is not None}
    trace = error.__traceback__
    while trace is not None:
        if id(trace.tb_frame.f_code) in handlers:
            return True
        trace = trace.tb_next
    return False


def _code(handler: object) -> object:
    """The code that a call of a handler runs, if it is Python's."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler):
        return None
    return getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
