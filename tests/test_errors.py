"""The guard of one boundary: what it catches, what it counts, and when it is switched off."""

from __future__ import annotations

import logging
import signal

import pytest

from torch_grad_exporter.errors import LIMIT, BusyError, ErrorLog, Guard, caught


@pytest.fixture
def errors() -> ErrorLog:
    """Return counts of the source `capture` with a logger of their own."""
    return ErrorLog(("capture",), logging.Logger("test"))  # noqa: LOG001 - see above


def fail() -> None:
    """Raise an error."""
    raise ValueError("broken")


def test_a_success_ends_the_row_of_failures(errors: ErrorLog) -> None:
    """A success after nine failures leaves a boundary on; ten failures in a row switch it off for good."""
    guard = errors.boundary("capture")
    for _ in range(LIMIT - 1):
        guard(fail)
    assert guard(list)
    for _ in range(LIMIT - 1):
        guard(fail)
    assert not guard.off
    guard(fail)
    assert guard.off
    assert not guard(list)
    assert errors.counts() == {"capture": 2 * LIMIT - 1}


def test_what_is_logged(errors: ErrorLog, caplog: pytest.LogCaptureFixture) -> None:
    """The first failure of a source is logged, and each boundary that is switched off, by its name."""
    errors = ErrorLog((), logging.getLogger("torch_grad_exporter"))
    for part in ("at the step", "after the step"):
        guard = errors.boundary("capture", part)
        for _ in range(LIMIT + 1):
            guard(fail)
    assert [record.getMessage().removeprefix("torch_grad_exporter: ") for record in caplog.records] == [
        "capture failed; training goes on, further failures are only counted: ValueError: broken",
        "capture (at the step) failed 10 times in a row and is switched off",
        "capture (after the step) failed 10 times in a row and is switched off",
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_ends_of_the_program_pass(errors: ErrorLog, error: type[BaseException]) -> None:
    """An interrupt or an exit passes a guard and is not counted."""

    def end() -> None:
        raise error

    guard = errors.boundary("capture")
    with pytest.raises(error):
        guard(end)
    assert errors.counts() == {"capture": 0}


def test_a_busy_machine_is_not_an_error(errors: ErrorLog, caplog: pytest.LogCaptureFixture) -> None:
    """Another thread that takes long is neither counted nor logged; what the system refuses is logged without a traceback."""
    errors = ErrorLog((), logging.getLogger("torch_grad_exporter"))
    for error in (BusyError("another drain did not finish within 5 s"), FileNotFoundError(2, "No such file", "/nowhere")):
        errors.count("history", error)
        errors.report("history", error)
        errors.report_first("push", error)
    assert errors.counts() == {"history": 2, "push": 1}
    assert [record.exc_info for record in caplog.records] == [None] * 3
    assert "drain" not in caplog.text


def test_what_a_signal_handler_raises_passes() -> None:
    """A guard passes on what a signal's handler raised meanwhile, whatever takes its own failures."""

    class Stopped(Exception):
        """What the handler raises."""

    def stop(_number: int, _frame: object) -> None:
        raise Stopped

    failures: list[Exception] = []
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        guard = Guard(failures.append)
        for call in (guard, guard.result, caught):
            with pytest.raises(Stopped):
                call(signal.raise_signal, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not failures
