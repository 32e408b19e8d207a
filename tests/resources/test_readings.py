from __future__ import annotations

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_grad_exporter.resources.readings import ABSENT, SHARE, Paced, Rising, attempt


class Slow:
    """A source that takes `seconds` of its own clock to read; it gives or raises the next of `results`."""

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


@pytest.mark.parametrize("error", [psutil.AccessDenied(1), OSError(24, "files"), ValueError("field")], ids=repr)
def test_what_psutil_cannot_read_is_absent(error: Exception) -> None:
    """Each kind of error of psutil gives None, and a TypeError passes."""

    def fail(error: Exception) -> int:
        raise error

    assert attempt(lambda: fail(error), ABSENT) is None
    with pytest.raises(TypeError):
        attempt(lambda: fail(TypeError()), ABSENT)


@pytest.mark.slow
@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 10**12))))
def test_a_rising_sum_is_what_the_counters_gained(readings: list[dict[str, int]]) -> None:
    """The sum never falls, and gains as much as each counter on its own."""
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


def test_an_expensive_value_is_read_rarely() -> None:
    """A value is read for a small share of the time."""
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
    value = Paced(Slow([1, 2]).read, source.clock, lambda: 0.0)
    assert [value(), value()] == [1, 2]  # waiting is not spent


def test_a_failing_reading_is_paced_as_well() -> None:
    """A failure is raised once; until the next reading is due the value before it is returned."""
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
