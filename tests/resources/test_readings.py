from __future__ import annotations

import threading
from collections.abc import ItemsView
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tools import PATIENCE
from torch_grad_exporter.resources.readings import ABSENT, KEPT, SHARE, Paced, Rising, attempt


class Slow:
    """A source that takes `seconds` of its own clock to read; gives what is next in `results`, or raises it."""

    def __init__(self, results: list[object], seconds: float = 2.0) -> None:
        self.results = results
        self.seconds = seconds
        self.now = 100.0
        self.reads = 0

    def clock(self) -> float:
        return self.now

    def read(self) -> object:
        self.now += self.seconds
        self.reads += 1
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


def test_an_attempt_gives_the_value_none_or_the_unexpected() -> None:
    """What was said to mean "absent" becomes None, subclasses too; everything else passes."""

    def fail(error: Exception) -> int:
        raise error

    assert attempt(lambda: 3, (OSError,)) == 3
    assert attempt(lambda: fail(FileNotFoundError()), (OSError, RuntimeError)) is None
    assert attempt(lambda: fail(NotImplementedError()), (OSError, RuntimeError)) is None
    with pytest.raises(ValueError, match="unexpected"):
        attempt(lambda: fail(ValueError("unexpected")), (OSError, RuntimeError))


@pytest.mark.parametrize(
    "error",
    [
        psutil.AccessDenied(1),
        psutil.ZombieProcess(1),
        OSError(24, "files"),
        RuntimeError("empty"),
        ValueError("field"),
        AttributeError("name"),
    ],
    ids=repr,
)
def test_what_psutil_cannot_read_is_absent(error: Exception) -> None:
    """Each kind of error that psutil has for it; not one that only a mistake raises."""

    def fail(error: Exception) -> int:
        raise error

    assert attempt(lambda: fail(error), ABSENT) is None
    with pytest.raises(TypeError):
        attempt(lambda: fail(TypeError()), ABSENT)


def test_counters_that_come_and_go_are_one_that_rises() -> None:
    """A new counter counts as a whole, one that is gone keeps what it had, and one that starts again goes on from there."""
    total = Rising[str]()
    assert total({"a": 10.0}) == 10
    assert total({"a": 12.0, "b": 5.0}) == 17
    assert total({"a": 13.0}) == 18
    assert total({}) == 18
    assert total({"b": 2.0}) == 20  # Another "b" than the one that is gone.
    assert total({"b": 1.0}) == 20
    assert total({"b": 4.0}) == 23


def test_a_counter_that_comes_back_does_not_count_again() -> None:
    """After any number of readings without it: what it has gained meanwhile, also nothing."""
    total = Rising[str]()
    assert total({"a": 1000.0, "b": 5000.0}) == 6000
    assert total({"a": 1000.0}) == 6000
    assert total({"a": 1000.0, "b": 5000.0}) == 6000
    assert [total({}), total({}), total({"b": 5003.0})] == [6000, 6000, 6003]
    assert total({"a": 7.0, "b": 5003.0}) == 6010  # Another "a" than before.


def test_a_bounded_number_of_counters_is_remembered() -> None:
    """Those that went last are known again; one that went before them is a new one. A million names take no more memory."""
    total = Rising[int]()
    for name in range(KEPT + 1):
        total({name: 10.0})
    total({})
    assert total({0: 10.0}) == 10 * (KEPT + 1) + 10
    assert total({0: 10.0, 2: 10.0, KEPT: 11.0}) == 10 * (KEPT + 1) + 11
    for name in range(KEPT, 4 * KEPT):
        total({name: 1.0})
    assert len(total._gone) == KEPT


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 10**12))))
def test_a_rising_sum_is_what_the_counters_gained(readings: list[dict[str, int]]) -> None:
    """Whatever comes, the sum never falls, and gains as much as each counter on its own gained."""
    total, expected = Rising[str](), 0
    last: dict[str, int] = dict.fromkeys("abc", 0)
    away = set("abc")
    for reading in readings:
        for key in "abc":
            if (value := reading.get(key)) is None:
                away.add(key)
                continue
            if value >= last[key]:
                expected += value - last[key]
            elif key in away:
                expected += value
            last[key] = value
            away.discard(key)
        assert total(reading) == expected


class Held(dict[str, float]):
    """Counters whose reading waits for `go`, but not for ever, and says that it has begun."""

    def __init__(self, values: dict[str, float], go: threading.Event) -> None:
        super().__init__(values)
        self.begun = threading.Event()
        self._go = go

    def items(self) -> ItemsView[str, float]:
        self.begun.set()
        self._go.wait(0.2)
        return super().items()


def test_two_threads_add_to_one_sum() -> None:
    """A thread that comes while another adds waits for it; neither's gain is lost."""
    total, done = Rising[str](), threading.Event()
    first = Held({"a": 10.0}, go=done)
    with ThreadPoolExecutor() as pool:
        one = pool.submit(total, first)
        assert first.begun.wait(PATIENCE)
        other = pool.submit(total, {"a": 11.0, "b": 5.0})
        other.add_done_callback(lambda _: done.set())
    assert (one.result(), other.result()) == (10, 16)


def test_a_dear_value_is_read_for_a_share_of_the_time() -> None:
    """A reading of two seconds stays for a thousand, then there is another one."""
    source = Slow(["first", "second"])
    value = Paced(source.read, source.clock, source.clock)
    assert value() == "first"
    end = source.now
    source.now = end + 2.0 / SHARE - 1
    assert value() == "first"
    assert source.reads == 1
    source.now = end + 2.0 / SHARE
    assert value() == "second"
    assert source.reads == 2


def test_a_value_that_costs_no_time_is_always_read() -> None:
    """Where the clock does not move, nothing is kept back."""
    source = Slow([1, 2, 3], seconds=0.0)
    value = Paced(source.read, source.clock, source.clock)
    assert [value(), value(), value()] == [1, 2, 3]


def test_a_share_may_be_given() -> None:
    """A reading that may take a tenth of the time stays ten times as long as it took."""
    source = Slow(["first", "second"])
    value = Paced(source.read, source.clock, source.clock)
    assert value(0.1) == "first"
    source.now += 19
    assert value(0.1) == "first"
    source.now += 1
    assert value(0.1) == "second"


def test_waiting_is_not_spent() -> None:
    """A reading that waits long and uses nothing of a processor may be repeated at once."""
    source = Slow(["first", "second"])
    value = Paced(source.read, source.clock, lambda: 0.0)
    assert [value(), value()] == ["first", "second"]


def test_a_failing_reading_is_paced_as_well() -> None:
    """A failure reaches the caller; until the next reading is due there is the value before it, at first none."""
    source = Slow([OSError("first"), "good", OSError("later")])
    value = Paced(source.read, source.clock, source.clock)
    with pytest.raises(OSError, match="first"):
        value()
    assert value() is None
    source.now += 2.0 / SHARE
    assert value() == "good"
    source.now += 2.0 / SHARE
    with pytest.raises(OSError, match="later"):
        value()
    assert value() == "good"
    assert source.reads == 3


def test_threads_share_one_reading() -> None:
    """A thread that asks while another reads gets what that one reads."""
    begun, go, source = threading.Event(), threading.Event(), Slow(["only"])

    def read() -> object:
        begun.set()
        assert go.wait(PATIENCE)
        return source.read()

    value = Paced(read, source.clock, source.clock)
    with ThreadPoolExecutor() as pool:
        one = pool.submit(value)
        assert begun.wait(PATIENCE)
        other = pool.submit(value)
        go.set()
    assert (one.result(), other.result(), source.reads) == ("only", "only", 1)
