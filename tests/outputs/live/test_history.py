"""The history: its records and bins against a naive computation, in a size that does not grow."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.support.properties  # noqa: F401 - the profile
from torch_grad_exporter.outputs.live.history import (
    LAYER_BYTES,
    MOST_GONE,
    QUANTITIES,
    History,
    Moment,
    Window,
)
from torch_grad_exporter.outputs.live.step_rows import SCALARS, scalars
from torch_grad_exporter.outputs.live.track import RECENT, WHOLE, Track

NAN, INF = math.nan, math.inf
NUMBERS = st.one_of(st.sampled_from([NAN, INF, -INF, 0.0, 1.0, -1.0]), st.floats(-1e6, 1e6, width=32))
RECORDS = st.integers(1, 3).flatmap(lambda width: st.lists(st.lists(NUMBERS, min_size=width, max_size=width), max_size=70))
SIZES = {"recent": st.integers(1, 9), "whole": st.integers(1, 6).map(lambda half: 2 * half)}

Row = list[float]


def largest(values: Sequence[float]) -> float:
    """Return the first finite value farthest from zero."""
    return max(filter(math.isfinite, values), key=abs, default=without(values))


def mean(values: Sequence[float]) -> float:
    """Return the mean of the finite values."""
    known = list(filter(math.isfinite, values))
    return math.fsum(known) / len(known) if known else without(values)


def without(values: Sequence[float]) -> float:
    """Return infinity if there is one, else NaN."""
    return INF if any(map(math.isinf, values)) else NAN


NAIVE: dict[bool, Callable[[Sequence[float]], float]] = {False: largest, True: mean}


def naive_bins(records: Sequence[Row], whole: int, means: bool) -> tuple[int, list[Row], list[list[bool]]]:
    """Return the stride (the least power of two with which all records fit), the bins, and where they were not finite."""
    stride = next(2**power for power in range(60) if len(records) <= whole * 2**power)
    chunks = [list(zip(*records[start : start + stride], strict=True)) for start in range(0, len(records), stride)]
    flags = [[any(map(math.isinf, column)) for column in chunk] for chunk in chunks]
    return stride, [[NAIVE[means](column) for column in chunk] for chunk in chunks], flags


def filled(records: Sequence[Row], means: bool, recent: int, whole: int) -> Track:
    """Return a track with these records, number i at time 10 i and step i."""
    track = Track(len(records[0]) if records else 1, means=means, recent=recent, whole=whole)
    for number, record in enumerate(records):
        track.extend([10.0 * number], [number], np.array([record], dtype=np.float32))
    return track


def same(found: np.ndarray, expected: Sequence[Row]) -> None:
    """Assert equality, of means up to 32-bit rounding; NaN equals NaN."""
    wanted = np.array(expected, dtype=np.float32).reshape(found.shape)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1.0)
    exact = ~np.isfinite(wanted)
    np.testing.assert_array_equal(found[exact], wanted[exact])


@pytest.mark.slow
@given(records=RECORDS, since=st.integers(0, 90), **SIZES)
def test_the_recent_part_has_the_last_records(records: list[Row], since: int, recent: int, whole: int) -> None:
    """The recent part has the last records from the requested one on, with both infinities as one."""
    part = filled(records, False, recent, whole).recent(since)
    first = max(since, len(records) - recent, 0)
    expected = np.array(records[first:], dtype=np.float32).reshape(part.values.shape)
    np.testing.assert_array_equal(part.values, np.where(np.isinf(expected), INF, expected))
    np.testing.assert_array_equal(part.nonfinite, np.isinf(expected))
    numbers = list(range(first, len(records)))
    assert (part.steps.tolist(), part.times.tolist(), part.stride) == (numbers, [10.0 * number for number in numbers], 1)
    assert part.first == first or not numbers


@pytest.mark.slow
@pytest.mark.parametrize("means", [False, True])
@given(records=RECORDS, **SIZES)
def test_bins_equal_a_naive_computation(means: bool, records: list[Row], recent: int, whole: int) -> None:
    """Bins of the whole run have the stride, values, marks, times and steps of a naive computation."""
    part = filled(records, means, recent, whole).whole()
    stride, bins, flags = naive_bins(records, whole, means)
    assert (part.first, part.stride, len(part.values)) == (0, stride, len(bins))
    if not means:
        np.testing.assert_array_equal(part.values, np.array(bins, dtype=np.float32).reshape(part.values.shape))
    same(part.values, bins)
    np.testing.assert_array_equal(part.nonfinite, np.array(flags, dtype=bool).reshape(part.values.shape))
    ends = [min(start + stride, len(records)) - 1 for start in range(0, len(records), stride)]
    assert (part.steps.tolist(), part.times.tolist()) == (ends, [10.0 * end for end in ends])


# The history of a run


@dataclass
class Made:
    """A training made by the test."""

    names: list[str] = field(default_factory=lambda: ["a", "b"])
    samples: int = 0
    steps: int = 0
    now: float = 1000.0
    asked: int = 0

    def history(self) -> History:
        return History(self.moment, now=lambda: self.now)

    def moment(self) -> Moment:
        self.asked += 1
        values = np.arange(len(self.names) * len(QUANTITIES), dtype=np.float32).reshape(-1, len(QUANTITIES)) + 1000 * self.steps
        return Moment(self.samples, self.steps, tuple(self.names), values, np.full(len(SCALARS), self.steps, dtype=np.float32))

    def step(self, *, seconds: float = 1.0, sampled: bool = True) -> None:
        self.steps += 1
        self.samples += sampled
        self.now += seconds


def layer_records(history: History) -> list[float]:
    """Return the steps of the layers' records."""
    return history.grid("norm", Window(whole=False))[1].steps.tolist()


def run_records(history: History) -> list[float]:
    """Return the steps of the run's records."""
    return history.run(Window(whole=False)).steps.tolist()


def test_a_record_needs_a_step_and_a_second() -> None:
    """Nothing is recorded without a new step or within a second; a step without a sample adds no column."""
    made = Made()
    history = made.history()
    for _ in range(3):
        history.record_if_due()
        made.now += 1
    assert (run_records(history), layer_records(history), history.layers) == ([], [], [])
    made.step()
    for _ in range(5):
        history.record_if_due()
        made.now += 1
    made.step(sampled=False)
    history.record_if_due()
    assert (run_records(history), layer_records(history)) == ([1, 2], [1])
    for _ in range(100):
        made.step(seconds=0.1)
        history.record_if_due()
    assert 12 <= len(run_records(history)) <= 13


def test_a_late_sample_joins_the_next_record() -> None:
    """A sample that comes after its step has its norm in the next record, not a record of its own."""
    coming = iter([(0, 1, NAN), (1, 1, 9.0), (1, 2, NAN)])
    times = itertools.count(1000.0)

    def moment() -> Moment:
        samples, steps, norm = next(coming)
        return Moment(samples, steps, (), np.zeros((0, len(QUANTITIES)), dtype=np.float32), scalars(loss=1.0, norm=norm))

    history = History(moment, now=lambda: next(times))
    for _ in range(3):
        history.record_if_due()
    part = history.run(Window(whole=False))
    assert part.steps.tolist() == [1, 2]
    np.testing.assert_array_equal(part.values[:, SCALARS.index("norm")], [NAN, 9.0])


@pytest.mark.slow
def test_removed_layers_are_forgotten_in_the_end() -> None:
    """Of layers that come one after another a bounded number stays, and a reader gets all columns again."""
    made, together = Made(), 250
    history = made.history()
    seen = 0
    for turn in range(20):
        made.names = ["base", *(f"task_{together * turn + place}" for place in range(together))]
        made.step()
        history.record_if_due()
        names, part = history.grid("norm", Window(whole=False))
        assert len(names) <= 1 + MOST_GONE + 2 * together
        first = int(names[1].removeprefix("task_"))
        assert names == ["base", *(f"task_{number}" for number in range(first, together * (turn + 1)))]
        steps, own = np.arange(1, turn + 2)[:, None], np.arange(first, together * (turn + 1))
        known = steps == own // together + 1
        values = np.where(known, 1000.0 * steps + len(QUANTITIES) * (1 + own % together), np.nan)
        assert np.array_equal(part.values, np.column_stack([1000.0 * steps, values]), equal_nan=True)
        assert np.array_equal(history.grid("norm", Window(whole=True))[1].values, part.values, equal_nan=True)
        forgotten = first > seen
        assert history.grid("norm", Window(whole=False, since=turn))[1].first == (0 if forgotten else turn)
        seen = first
    assert seen > 3000


def allocated(layers: int, records: int) -> tuple[int, History]:
    """Return the peak memory of a history of this many layers, and the history."""
    made = Made(names=[f"layers.{number}" for number in range(layers)])
    row = made.moment().values
    tracemalloc.start()
    history = History(
        lambda: Moment(made.samples, made.steps, made.names, row, np.zeros(len(SCALARS), dtype=np.float32)), now=lambda: made.now
    )
    for _ in range(records):
        made.step()
        history.record_if_due()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, history


@pytest.mark.slow
def test_the_memory_has_a_limit() -> None:
    """300 layers take at most 9 MiB over 700 records, also while bins are merged, and 20,000 have fewer records."""
    peak, history = allocated(300, 700)
    assert history.nbytes <= peak <= 9 * 2**20
    assert 5e6 < history.nbytes < 6e6
    assert len(layer_records(history)) == RECENT
    assert WHOLE // 2 <= len(history.grid("norm", Window(whole=True))[1].steps) <= WHOLE
    _, history = allocated(20_000, 3)
    assert history.nbytes <= LAYER_BYTES + 200_000
    assert [history.grid("norm", Window(whole=whole))[1].steps[-1] for whole in (True, False)] == [3, 3]
