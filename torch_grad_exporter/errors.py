"""The guard at every boundary: a failure of ours is logged once, counted, and never reaches the user.

A boundary is a place where foreign code calls ours: a hook, an iteration of a background thread, a collector, a request.
Each has a `Guard` of its own, which counts what it catches under the boundary's source. A boundary with a limit is disabled after
that many failures in a row, whatever succeeds elsewhere under the same source. `BaseException` (an interrupt, an exit) always
passes, and so does what a signal handler of the user raises while the main thread is in code of ours: it is meant for the
training.

Logging runs foreign code, too. A handler that raises loses its line. A handler that blocks is the user's own, and blocks the
thread that logs; a line is logged once per source.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import signal
import threading
import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

logger = logging.getLogger("torch_grad_exporter")

# Of every line that is logged.
PREFIX = "torch_grad_exporter: "

# Failures in a row after which a boundary is disabled.
LIMIT = 10

P = ParamSpec("P")
_Result = TypeVar("_Result")


class BusyError(TimeoutError):
    """Another thread of ours takes long with what this one waits for, as on a busy machine.

    It is not a failure: what is there is shown, and the next look has the rest.
    """


class UserError(Exception):
    """What a command or the gate cannot do. The message is for the user, as it is."""


class Guard:
    """One boundary: what an action raises goes to `on_error`, and no further.

    It counts its own failures in a row, which only a success of its own ends. After `limit` of them it calls `gave_up` and is
    disabled: it runs nothing any more. Without a limit it is never disabled. Thread-safe.

    Args:
        on_error: Takes what was raised; what it raises itself, passes.
        limit: Failures in a row after which it is disabled, None for never.
        gave_up: Called when it is disabled.
    """

    __slots__ = ("_gave_up", "_in_a_row", "_limit", "_on_error")

    def __init__(
        self,
        on_error: Callable[[Exception], None],
        *,
        limit: int | None = None,
        gave_up: Callable[[], None] | None = None,
    ) -> None:
        self._on_error = on_error
        self._limit = math.inf if limit is None else limit
        self._gave_up = gave_up
        self._in_a_row = 0

    def __call__(self, action: Callable[P, object], *arguments: P.args, **named: P.kwargs) -> bool:
        """Run `action`, unless it is disabled; return whether it ran and raised nothing."""
        if self._in_a_row >= self._limit:
            return False
        try:
            action(*arguments, **named)
        except Exception as error:  # noqa: BLE001 - the boundary: nothing of ours may reach the caller
            self.failed(error)
            return False
        if 0 < self._in_a_row < self._limit:  # if another thread has disabled it, it stays so
            self._in_a_row = 0
        return True

    def result(self, action: Callable[P, _Result], *arguments: P.args, **named: P.kwargs) -> _Result | None:
        """Return what `action` returns, None if it fails or the guard is disabled."""
        results: list[_Result] = []
        self(lambda: results.append(action(*arguments, **named)))
        return results[0] if results else None

    def failed(self, error: Exception) -> None:
        """Count a failure that was not raised in a call; one that a signal's handler raised is raised again."""
        if raised_by_handler(error):
            raise error
        self._on_error(error)
        self._in_a_row += 1
        if self._in_a_row == self._limit and self._gave_up is not None:
            self._gave_up()

    def succeeded(self) -> None:
        """Count a success outside of a call: end the row of failures, and enable what was disabled."""
        self._in_a_row = 0

    @property
    def off(self) -> bool:
        """Whether it is disabled."""
        return self._in_a_row >= self._limit


class ErrorLog:
    """Counts failures by source; the first of each source is logged, with its traceback unless the system refused something.

    A `BusyError` does not count.
    """

    def __init__(self, sources: tuple[str, ...], log: logging.Logger = logger) -> None:
        self._log = log
        self._counts = dict.fromkeys(sources, 0)
        # Reentrant: a signal's handler may close the exporter while its own thread is in here.
        self._lock = threading.RLock()

    def boundary(self, source: str, part: str = "", *, limit: int | None = LIMIT) -> Guard:
        """Return a guard of one boundary.

        Args:
            source: Under which its failures are counted; several may count under the same one.
            part: What is disabled, for the line that says so.
            limit: Failures in a row after which it is disabled, None for never.
        """
        name = f"{source} ({part})" if part else source
        return Guard(functools.partial(self.count, source), limit=limit, gave_up=functools.partial(self.gave_up, name))

    def count(self, source: str, error: BaseException, times: int = 1) -> None:
        """Count a failure, or several at once; log the first one of the source.

        Raises the error if it is not ours, see `raised_by_handler`.
        """
        if self._counted(source, error, times) == times:
            message = "%s failed; training goes on, further failures are only counted: %s: %s"
            # The system's errors, such as those of a folder that cannot be written, say all in their message.
            trace = None if isinstance(error, OSError) else error
            say(self._log, logging.WARNING, message, source, type(error).__name__, error, error=trace)

    def report(self, source: str, error: BaseException) -> None:
        """Count one failure whose message is for the user, such as a wrong file, and log each of them, in a line."""
        if self._counted(source, error):
            say(self._log, logging.WARNING, "%s: %s; training goes on", source, error)

    def report_first(self, source: str, error: BaseException) -> None:
        """Count one failure whose message is for the user, and log the first of a source, in a line."""
        if self._counted(source, error) == 1:
            message = "%s: %s; training goes on, further failures are only counted"
            say(self._log, logging.WARNING, message, source, error)

    def _counted(self, source: str, error: BaseException, times: int = 1) -> int:
        """Count failures; return how many the source has now, 0 for what does not count."""
        if raised_by_handler(error):
            raise error
        if isinstance(error, BusyError):
            return 0
        with self._lock:
            count = self._counts[source] = self._counts.get(source, 0) + times
        return count

    def gave_up(self, source: str) -> None:
        """Log that a source is disabled."""
        say(self._log, logging.ERROR, "%s failed %d times in a row and is switched off", source, LIMIT)

    def counts(self) -> dict[str, int]:
        """Return the failures by source since the start, with 0 for a known source that never failed."""
        with self._lock:
            return dict(self._counts)


def caught(action: Callable[P, object], *arguments: P.args, **named: P.kwargs) -> Exception | None:
    """Run `action` and return what it raised, None if nothing, for code that judges it. What a signal's handler raised passes."""
    failures: list[Exception] = []
    Guard(failures.append)(action, *arguments, **named)
    return failures[0] if failures else None


def contained(function: Callable[P, _Result], *arguments: P.args, **named: P.kwargs) -> _Result:
    """Call a user's function in a thread of ours. An end of the program, such as `sys.exit`, becomes a `RuntimeError`.

    It would end only the thread.
    """
    try:
        return function(*arguments, **named)
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"it raised {type(error).__name__}, which ends no training from here; use Stop()") from error


def without_addresses(text: str) -> str:
    """Return a message without the addresses in it, which may hold secrets, such as those of webhooks."""
    # Also in parts, as urllib3 reports them.
    return re.sub(r"\b[a-zA-Z][\w+.-]*://\S+|(?<=\burl: )\S+|(?<=\bhost=)'[^']*'", "<address>", text)


def say(
    log: logging.Logger, level: int, message: str, *arguments: object, error: BaseException | None = None, stacklevel: int = 2
) -> None:
    """Log a line, with the traceback of `error`. A handler that raises, as on a full disk, costs the line and nothing else.

    Few programs set up logging, and without that a line does not show where it comes from: each line names the package.
    """
    try:
        log.log(level, PREFIX + message, *arguments, exc_info=error, stacklevel=stacklevel)  # noqa: G003 - still one template to each message
    except Exception as failure:  # the boundary: handlers are foreign code
        if raised_by_handler(failure):
            raise


def warn(message: str, *arguments: object, error: BaseException | None = None) -> None:
    """Log a warning of the package; see `say`."""
    say(logger, logging.WARNING, message, *arguments, error=error, stacklevel=3)


def inform(message: str, *arguments: object) -> None:
    """Log a line of the package that a program shows only if it asks for `INFO`; see `say`."""
    say(logger, logging.INFO, message, *arguments, stacklevel=3)


def show(log: logging.Logger, message: str, *arguments: object) -> None:
    """Log a line at `INFO` that a program which has not set a level shows as well, on standard error if it has no handler.

    As Werkzeug does for the address of a server. A level on `log`, or one above `WARNING` on the root, decides as usual.
    """
    if log.level != logging.NOTSET or log.getEffectiveLevel() > logging.WARNING:
        say(log, logging.INFO, message, *arguments)
        return
    handler = None if log.hasHandlers() else logging.StreamHandler()
    if handler is not None:
        log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        say(log, logging.INFO, message, *arguments)
    finally:
        log.setLevel(logging.NOTSET)
        if handler is not None:
            log.removeHandler(handler)


def leave_traceback(error: BaseException) -> None:
    """Take our frames out of the end of the traceback of an interrupt: Ctrl-C in a backward meets the first hook behind it.

    Frames behind the last one of the user's code, which is neither ours nor PyTorch's, end before the first of ours.
    """
    last: types.TracebackType | None = None
    before, trace = None, error.__traceback__
    while isinstance(error, KeyboardInterrupt) and trace is not None:
        package = str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0]
        if package not in ("torch", "torch_grad_exporter"):
            last = None
        elif package == "torch_grad_exporter":
            last = last or before
        before, trace = trace, trace.tb_next
    if last is not None:
        last.tb_next = None


def raised_by_handler(error: BaseException) -> bool:
    """Return whether a signal's handler raised this, wherever the main thread was: a DataLoader's does when a worker has died."""
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
    """Return the code that a call of a handler runs, if it is Python's."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler):
        return None
    return getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
