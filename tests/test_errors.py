"""One guard for each boundary: what it catches, what it counts, and when it gives up."""

from __future__ import annotations

import logging
import math

import pytest

from torch_grad_exporter.errors import LIMIT, ErrorLog, Guard


@pytest.fixture
def errors() -> ErrorLog:
    """Counts of the source `capture`, with a logger that is not the process' own."""
    return ErrorLog(("capture",), logging.Logger("test"))  # noqa: LOG001 - see above


def fail() -> None:
    """Raises."""
    raise ValueError("broken")


def test_a_guard_says_whether_the_action_succeeded(errors: ErrorLog) -> None:
    """A call returns whether the action raised nothing, passes its arguments on, and counts what it raised."""
    guard, seen = errors.boundary("capture"), list[object]()
    assert guard(seen.append, 3)
    assert not guard(fail)
    assert (seen, errors.counts()) == ([3], {"capture": 1})


def test_what_an_action_returns(errors: ErrorLog) -> None:
    """`result` gives what the action returns, also where that is false, and `None` where it fails or is off."""
    guard = errors.boundary("capture")
    assert guard.result(math.gcd, 12, 18) == 6
    assert guard.result(str) == ""
    assert [guard.result(fail) for _ in range(LIMIT)] == [None] * LIMIT
    assert guard.result(math.gcd, 12, 18) is None


def test_a_success_of_one_boundary_ends_no_row_of_another(errors: ErrorLog) -> None:
    """Of two boundaries that count under one source, the one that fails each time is off after ten, the other goes on."""
    failing, working, calls = errors.boundary("capture"), errors.boundary("capture"), list[str]()

    def count_and_fail() -> None:
        calls.append("failing")
        fail()

    for _ in range(60):
        failing(count_and_fail)
        working(calls.append, "working")
    assert (calls.count("failing"), calls.count("working")) == (LIMIT, 60)
    assert (failing.off, working.off) == (True, False)
    assert errors.counts() == {"capture": LIMIT}


def test_a_success_ends_the_row_of_its_own_boundary(errors: ErrorLog) -> None:
    """Nine failures, a success and nine failures leave it on; a tenth failure in a row switches it off for good."""
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


def test_a_success_that_began_before_it_was_off(errors: ErrorLog) -> None:
    """An action that is under way while others switch its guard off does not switch it on again."""
    guard = errors.boundary("capture")
    assert guard(lambda: [guard(fail) for _ in range(LIMIT)])
    assert guard.off


def test_without_a_limit(errors: ErrorLog) -> None:
    """A boundary without a limit is run again however often it has failed, and each failure counts."""
    guard = errors.boundary("capture", limit=None)
    for _ in range(10 * LIMIT):
        guard(fail)
    assert not guard.off
    assert guard(list)
    assert errors.counts() == {"capture": 10 * LIMIT}


def test_a_failure_and_a_success_that_were_seen_elsewhere() -> None:
    """What was not raised in a call counts in the row as well; it gives up once in a row, and a success switches it on again."""
    failures, given_up = list[Exception](), list[int]()
    guard = Guard(failures.append, limit=LIMIT, gave_up=lambda: given_up.append(len(failures)))
    for _ in range(2 * LIMIT):
        guard.failed(TimeoutError("late"))
    assert (guard.off, given_up) == (True, [LIMIT])
    guard.succeeded()
    assert guard(list)
    for _ in range(LIMIT):
        guard(fail)
    assert (guard.off, given_up) == (True, [LIMIT, 3 * LIMIT])


def test_what_is_logged(errors: ErrorLog, caplog: pytest.LogCaptureFixture) -> None:
    """The first failure of a source is logged, and by each of its boundaries the switching off, with the boundary's name."""
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_ends_of_the_program_pass(errors: ErrorLog, error: type[BaseException]) -> None:
    """An interrupt or an exit passes a guard, and is no failure."""

    def end() -> None:
        raise error

    guard = errors.boundary("capture")
    with pytest.raises(error):
        guard(end)
    assert errors.counts() == {"capture": 0}


def test_a_guard_of_any_other_log() -> None:
    """Made without an `ErrorLog`, it hands each failure over and never gives up."""
    failures: list[Exception] = []
    guard = Guard(failures.append)
    for _ in range(2 * LIMIT):
        guard(fail)
    assert [str(failure) for failure in failures] == ["broken"] * 2 * LIMIT


def test_a_boundary_that_is_off_says_so_once() -> None:
    """Further failures of one that is tried now and then are only counted; after a success it can be switched off anew."""
    failures: list[Exception] = []
    told: list[int] = []
    guard = Guard(failures.append, limit=3, gave_up=lambda: told.append(len(failures)))
    for _ in range(6):
        guard.failed(ValueError("again"))
    assert (guard.off, told) == (True, [3])
    guard.succeeded()
    assert not guard.off
    for _ in range(4):
        guard.failed(ValueError("again"))
    assert (len(failures), told) == (10, [3, 9])
