"""The history: all that was recorded, against a naive memory of everything, in a size that does not grow."""

from __future__ import annotations

import math
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.support.properties  # noqa: F401 - the profile
from torch_grad_exporter.outputs.live import history as history_module
from torch_grad_exporter.outputs.live.history import (
    LAYER_BYTES,
    LEAST,
    QUANTITIES,
    History,
    Moment,
    Window,
)
from torch_grad_exporter.outputs.live.rows import SCALARS
from torch_grad_exporter.outputs.live.track import RECENT, WHOLE, Part, Together, Track

NAN, INF = math.nan, math.inf
NUMBERS = st.one_of(st.sampled_from([NAN, INF, -INF, 0.0, 1.0, -1.0]), st.floats(-1e6, 1e6, width=32))
RECORDS = st.integers(1, 3).flatmap(lambda width: st.lists(st.lists(NUMBERS, min_size=width, max_size=width), max_size=70))
SIZES = {"recent": st.integers(1, 9), "whole": st.integers(1, 6).map(lambda half: 2 * half)}

Row = list[float]


def largest(values: Sequence[float]) -> float:
    """The first of those that are finite and farthest from zero."""
    return max(filter(math.isfinite, values), key=abs, default=without(values))


def mean(values: Sequence[float]) -> float:
    """Of those that are finite."""
    known = list(filter(math.isfinite, values))
    return math.fsum(known) / len(known) if known else without(values)


def without(values: Sequence[float]) -> float:
    """Where none is finite: infinity if any is not, NaN where there is none at all."""
    return INF if any(map(math.isinf, values)) else NAN


NAIVE: dict[Together, Callable[[Sequence[float]], float]] = {Together.LARGEST: largest, Together.MEAN: mean}


def naive_bins(records: Sequence[Row], whole: int, together: Together) -> tuple[int, list[Row], list[list[bool]]]:
    """The stride, the least power of two with which all records fit, the bins, and in which of them anything is not finite."""
    stride = next(2**power for power in range(60) if len(records) <= whole * 2**power)
    chunks = [list(zip(*records[start : start + stride], strict=True)) for start in range(0, len(records), stride)]
    flags = [[any(map(math.isinf, column)) for column in chunk] for chunk in chunks]
    return stride, [[NAIVE[together](column) for column in chunk] for chunk in chunks], flags


def filled(records: Sequence[Row], together: Together, recent: int, whole: int) -> Track:
    """A track with these records, number i at time 10 i and step i."""
    track = Track(len(records[0]) if records else 1, together, recent=recent, whole=whole)
    for number, record in enumerate(records):
        track.append(10.0 * number, number, np.array(record, dtype=np.float32))
    return track


def test_records_that_come_together_are_those_that_come_one_by_one() -> None:
    """Also where bins are filled, halved and passed over by many at once."""
    rng = np.random.default_rng(0)
    values = np.where(rng.random((300, 3)) < 0.2, np.nan, rng.normal(size=(300, 3))).astype(np.float32)
    values[rng.random((300, 3)) < 0.1] = np.inf
    for together in Together:
        one_by_one, at_once = (Track(3, together, recent=20, whole=16) for _ in range(2))
        for number, record in enumerate(values):
            one_by_one.append(number, number, record)
        places = np.split(np.arange(300), [1, 1, 9, 16, 17, 60, 61, 200])
        for part in places:
            at_once.extend(part.tolist(), part.tolist(), values[part])
        for window in (Track.recent, Track.whole):
            found, wanted = window(at_once), window(one_by_one)
            assert (found.first, found.stride, at_once.count) == (wanted.first, wanted.stride, 300)
            for name in ("times", "steps", "values", "nonfinite"):
                np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))


def same(found: np.ndarray, expected: Sequence[Row]) -> None:
    """Equal, a mean up to the rounding of 32 bits; NaN is equal to NaN."""
    wanted = np.array(expected, dtype=np.float32).reshape(found.shape)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1.0)
    exact = ~np.isfinite(wanted)
    np.testing.assert_array_equal(found[exact], wanted[exact])


@given(records=RECORDS, since=st.integers(0, 90), **SIZES)
def test_the_recent_part_is_as_it_was(records: list[Row], since: int, recent: int, whole: int) -> None:
    """`recent` has the last records from the asked one on, either infinity as one, and the number of the first one."""
    part = filled(records, Together.LARGEST, recent, whole).recent(since)
    first = max(since, len(records) - recent, 0)
    expected = np.array(records[first:], dtype=np.float32).reshape(part.values.shape)
    np.testing.assert_array_equal(part.values, np.where(np.isinf(expected), INF, expected))
    np.testing.assert_array_equal(part.nonfinite, np.isinf(expected))
    numbers = list(range(first, len(records)))
    assert (part.steps.tolist(), part.times.tolist(), part.stride) == (numbers, [10.0 * number for number in numbers], 1)
    assert part.first == first or not numbers


@pytest.mark.parametrize("together", Together)
@given(records=RECORDS, **SIZES)
def test_a_bin_is_what_the_naive_way_makes_of_its_records(together: Together, records: list[Row], recent: int, whole: int) -> None:
    """Bins of the whole run: stride, values, what was not finite, and the time and step of each bin's last record."""
    part = filled(records, together, recent, whole).whole()
    stride, bins, flags = naive_bins(records, whole, together)
    assert (part.first, part.stride, len(part.values)) == (0, stride, len(bins))
    if together is Together.LARGEST:
        np.testing.assert_array_equal(part.values, np.array(bins, dtype=np.float32).reshape(part.values.shape))
    same(part.values, bins)
    np.testing.assert_array_equal(part.nonfinite, np.array(flags, dtype=bool).reshape(part.values.shape))
    ends = [min(start + stride, len(records)) - 1 for start in range(0, len(records), stride)]
    assert (part.steps.tolist(), part.times.tolist()) == (ends, [10.0 * end for end in ends])


@given(records=RECORDS, since=st.integers(0, 20), asked=st.integers(0, 8), **SIZES)
def test_bins_from_a_number_on_only_with_the_stride_of_now(
    records: list[Row], since: int, asked: int, recent: int, whole: int
) -> None:
    """`since` counts where the stride is still that of now; else everything comes, from bin 0 on."""
    track = filled(records, Together.LARGEST, recent, whole)
    everything, part = track.whole(), track.whole(since, asked)
    first = min(since, len(everything.values)) if asked == everything.stride else 0
    assert (part.first, part.stride) == (first, everything.stride)
    np.testing.assert_array_equal(part.values, everything.values[first:])
    assert part.steps.tolist() == everything.steps.tolist()[first:]


class Client:
    """Puts incremental answers together, as docs/live.md says how."""

    def __init__(self) -> None:
        self.steps: dict[str, list[float]] = {"recent": [], "whole": []}
        self.values: dict[str, list[Row]] = {"recent": [], "whole": []}
        self.next = 0
        self.first = 0
        self.stride = 0

    def ask(self, track: Track) -> None:
        """One round of both views."""
        recent = track.recent(self.next)
        if recent.first > self.next:
            self._take("recent", recent, 0)
            self.first = recent.first
        else:
            self._take("recent", recent, len(self.steps["recent"]))
        self.next = recent.first + len(recent.values)
        whole = track.whole(max(len(self.steps["whole"]) - 1, 0), self.stride)
        self._take("whole", whole, whole.first)
        self.stride = whole.stride

    def _take(self, view: str, part: Part, at: int) -> None:
        self.steps[view][at:] = part.steps.tolist()
        self.values[view][at:] = part.values.tolist()


@given(records=RECORDS, pauses=st.lists(st.integers(0, 12), max_size=30), together=st.sampled_from(Together), **SIZES)
def test_answers_one_after_the_other_make_the_whole(
    records: list[Row], pauses: list[int], together: Together, recent: int, whole: int
) -> None:
    """Reading again and again what is new gives the same as one reading at the end."""
    track = Track(len(records[0]) if records else 1, together, recent=recent, whole=whole)
    client, asks = Client(), set(np.cumsum(pauses).tolist())
    for number, record in enumerate(records):
        track.append(number, number, np.array(record, dtype=np.float32))
        if number in asks:
            client.ask(track)
    client.ask(track)
    for view, part in (("recent", track.recent(client.first)), ("whole", track.whole())):
        kept = len(part.steps)
        assert client.steps[view][-kept:] == part.steps.tolist() if kept else not client.steps[view]
        np.testing.assert_array_equal(np.array(client.values[view][-kept:] if kept else []).ravel(), part.values.ravel())
    assert client.steps["whole"] == track.whole().steps.tolist()


@pytest.mark.parametrize("together", Together)
@given(records=RECORDS, at=st.integers(0, 70), **SIZES)
def test_a_value_that_comes_later_has_nothing_before(
    together: Together, records: list[Row], at: int, recent: int, whole: int
) -> None:
    """A track that is widened says of its new value what the naive way says where it is NaN in all records before."""
    track = Track(len(records[0]) if records else 1, together, recent=recent, whole=whole)
    wide = [[*record, NAN if number < at else 7.0 + number] for number, record in enumerate(records)]
    for number, (record, widened) in enumerate(zip(records, wide, strict=True)):
        if number == at:
            track.arrange(np.append(np.arange(track.width), -1))
        track.append(number, number, np.array(record if number < at else widened, dtype=np.float32))
    if len(records) <= at:
        track.arrange(np.append(np.arange(track.width), -1))
    stride, bins, flags = naive_bins(wide, whole, together)
    assert track.whole().stride == stride
    same(track.whole().values, bins)
    assert track.whole().nonfinite.ravel().tolist() == [flag for row in flags for flag in row]
    same(track.recent().values, [[INF if math.isinf(value) else value for value in row] for row in wide[-recent:]])


@pytest.mark.parametrize("whole", [2, 8, 30])
def test_the_whole_run_is_always_there_in_half_of_the_bins_at_least(whole: int) -> None:
    """At any length the first bin begins at record 0, the last ends with the last record, and no record is lost between."""
    track = Track(1, Together.MEAN, recent=4, whole=whole)
    for number in range(5 * whole):
        track.append(number, number, np.array([float(number)], dtype=np.float32))
        part = track.whole()
        count = number + 1
        assert whole // 2 <= len(part.steps) <= whole or count <= whole // 2 + 1
        assert part.steps[-1] == number
        weights = np.diff(part.steps, prepend=-1)
        assert weights.sum() == count
        assert set(weights[:-1].tolist()) <= {part.stride}
        assert float(part.values[:, 0].astype(np.float64) @ weights) == pytest.approx(number * count / 2, rel=1e-5, abs=1e-3)


def test_a_run_of_100_000_records_takes_the_memory_of_the_first_one() -> None:
    """`nbytes` and what is really allocated stay where they are, and the run is covered between `WHOLE` / 2 and `WHOLE` bins."""
    track = Track(2, Together.LARGEST)
    row = np.ones(2, dtype=np.float32)
    before = track.nbytes
    for number in range(98_000):
        track.append(number, number, row)
    tracemalloc.start()
    for number in range(98_000, 100_000):
        track.append(number, number, row)
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    part = track.whole()
    assert (track.count, track.nbytes) == (100_000, before)
    assert grown < 20_000
    assert (part.stride, len(part.steps), part.steps[-1]) == (256, -(-100_000 // 256), 99_999)
    assert WHOLE / 2 <= len(part.steps) <= WHOLE
    assert track.recent().steps.tolist() == list(range(100_000 - RECENT, 100_000))


# The history of a run


@dataclass
class Made:
    """A training by hand."""

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
    """The steps of the layers' records."""
    return history.grid("norm", Window(whole=False))[1].steps.tolist()


def run_records(history: History) -> list[float]:
    """The steps of the run's records."""
    return history.run(Window(whole=False)).steps.tolist()


def test_a_record_a_second_however_often_it_looks() -> None:
    """100 looks in 10 seconds make 10 records, and ask what there is no more often than that."""
    made = Made()
    history = made.history()
    for _ in range(100):
        made.step(seconds=0.1)
        history.record_if_due()
    assert made.asked == len(run_records(history)) == len(layer_records(history))
    assert 10 <= made.asked <= 11
    times = history.run(Window(whole=False)).times
    assert np.diff(times).min() >= 1.0


def test_nothing_is_recorded_without_a_new_step_or_sample() -> None:
    """Before the first step, and while nothing happens, there is no record; a step without a sample is one of the run only."""
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


def test_layers_that_are_gone_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers that come one after another a bounded number stays, each with its own values; who followed gets all anew."""
    monkeypatch.setattr(history_module, "MOST_GONE", 10)
    made = Made()
    history = made.history()
    seen = 0
    for number in range(40):
        made.names = ["base", f"task_{number}"]
        made.step()
        history.record_if_due()
        names, part = history.grid("norm", Window(whole=False))
        assert len(names) <= 12
        assert names[0] == "base"
        assert names[-1] == f"task_{number}"
        first = int(names[1].removeprefix("task_"))
        assert names[1:] == [f"task_{one}" for one in range(first, number + 1)]
        steps = np.arange(1, number + 2)
        own = np.where(steps[:, None] == np.arange(first, number + 1) + 1, 1000.0 * steps[:, None] + len(QUANTITIES), np.nan)
        assert np.array_equal(part.values, np.column_stack([1000.0 * steps, own]), equal_nan=True)
        assert np.array_equal(history.grid("norm", Window(whole=True))[1].values, part.values, equal_nan=True)
        forgotten = number > 0 and first > seen
        assert history.grid("norm", Window(whole=False, since=number))[1].first == (0 if forgotten and number else number)
        seen = first
    assert seen > 25


def test_a_clock_that_is_set_back_stops_no_records() -> None:
    """After the machine's clock was set back by an hour there is a record each second as before."""
    made = Made(now=10_000.0)
    history = made.history()
    made.step()
    history.record_if_due()
    made.now -= 3600
    for _ in range(5):
        made.step()
        history.record_if_due()
    assert run_records(history) == layer_records(history) == [1, 2, 3, 4, 5, 6]
    for whole in (True, False):
        for part in (history.run(Window(whole=whole)), history.grid("norm", Window(whole=whole))[1]):
            assert part.times.tolist() == [made.now - age for age in (5, 4, 3, 2, 1, 0)]


def test_who_asks_for_what_is_new_learns_that_the_clock_was_set_back() -> None:
    """The next answer has all records with the times that they have now, though they are known; then comes only what is new."""
    made = Made(now=10_000.0)
    history = made.history()
    for _ in range(3):
        made.step()
        history.record_if_due()
    made.now -= 3600
    made.step()
    history.record_if_due()
    for whole in (True, False):
        answer = history.run(Window(whole=whole, since=2 if whole else 3, stride=1))
        assert (answer.first, answer.times.tolist()) == (0, [made.now - age for age in (3, 2, 1, 0)])
    for _ in range(2):
        made.step()
        history.record_if_due()
    assert [history.run(Window(whole=whole, since=4, stride=1)).steps.tolist() for whole in (True, False)] == [[5, 6]] * 2


def test_a_column_of_the_layers_is_at_the_step_of_its_sample() -> None:
    """Not at that of the look; where no step followed the sample it is, as the steps of the columns never fall."""
    made = Made()
    sampled: list[int | None] = []
    history = History(lambda: replace(made.moment(), sample_step=sampled[-1]), now=lambda: made.now)
    for step in (1, 7, 7, None, 12, 40):
        sampled.append(step)
        for _ in range(5):
            made.step(sampled=False, seconds=0.2)
        made.samples += 1
        history.record_if_due()
    assert layer_records(history) == [1, 7, 15, 20, 25, 40]
    assert run_records(history) == [5, 10, 15, 20, 25, 30]


NONE = np.full(len(SCALARS), NAN, dtype=np.float32)


def scalars(**values: float) -> np.ndarray:
    """Those that are named, NaN for the others."""
    return np.array([values.get(name, NAN) for name in SCALARS], dtype=np.float32)


def test_a_norm_that_comes_after_its_step_is_of_the_next_record() -> None:
    """It makes none of its own but at the end, and goes with the next step's; what is not finite makes one at once."""
    made, shown = Made(names=["a"]), [NONE, NONE]
    history = History(
        lambda: Moment(made.samples, made.steps, ["a"], np.zeros((1, 4), np.float32), shown[0], None, shown[1] == 1),
        now=lambda: made.now,
    )

    def look(values: np.ndarray, *, step: bool = False, sample: bool = False, flags: np.ndarray = NONE) -> list[float | None]:
        made.steps, made.samples, made.now = made.steps + step, made.samples + sample, made.now + 1
        shown[:] = values, flags
        history.record_if_due()
        return [None if math.isnan(norm) else norm for norm in history.run(Window(whole=False)).values[:, 1].tolist()]

    assert look(scalars(loss=1), step=True) == [None]
    assert look(scalars(norm=8), sample=True) == [None]
    assert look(NONE) == [None]
    assert look(scalars(norm=5), step=True, sample=True) == [None, 8]
    assert look(scalars(), step=True) == [None, 8, None]
    assert look(scalars(), sample=True, flags=scalars(norm=1)) == [None, 8, None, INF]
    assert look(scalars(norm=3), sample=True) == [None, 8, None, INF]
    for _ in range(2):
        made.now += 0.1
        shown[:] = NONE, NONE
        history.finish()
        assert history.run(Window(whole=False)).values[3:, 1].tolist() == [INF, 3]
    assert history.run(Window(whole=False)).steps.tolist() == [1, 2, 3, 3, 3]
    assert history.samples == 4


def test_each_layer_and_quantity_is_in_its_place() -> None:
    """By layer and by quantity the same values come back that were recorded."""
    made = Made(names=["x", "y", "z"])
    history = made.history()
    for _ in range(3):
        made.step()
        history.record_if_due()
    for whole in (True, False):
        for place, quantity in enumerate(QUANTITIES):
            found = history.grid(quantity, Window(whole=whole))[1].values
            np.testing.assert_array_equal(found, [[1000 * step + 4 * layer + place for layer in range(3)] for step in (1, 2, 3)])
        for layer, name in enumerate("xyz"):
            found = history.layer(name, Window(whole=whole)).values
            np.testing.assert_array_equal(found, [[1000 * step + 4 * layer + place for place in range(4)] for step in (1, 2, 3)])
        np.testing.assert_array_equal(history.run(Window(whole=whole)).values, [[step] * len(SCALARS) for step in (1, 2, 3)])
    with pytest.raises(KeyError):
        history.layer("w", Window(whole=True))
    with pytest.raises(ValueError, match="not in tuple"):
        history.grid("loss", Window(whole=True))[1]


def test_layers_that_come_and_go() -> None:
    """A new layer stands at the end with nothing before, one that is gone has nothing from then on, one that is back goes on."""
    made = Made(names=["a", "b"])
    history = made.history()
    for names in (["a", "b"], ["new", "a"], ["b", "new"]):
        made.names = names
        made.step()
        history.record_if_due()
    assert history.layers == ["a", "b", "new"]
    expected = [[1000, 1004, NAN], [2004, NAN, 2000], [NAN, 3000, 3004]]
    for whole in (True, False):
        np.testing.assert_array_equal(history.grid("norm", Window(whole=whole))[1].values, expected)
    np.testing.assert_array_equal(history.layer("new", Window(whole=True)).values[:, 3], [NAN, 2003, 3007])


def allocated(layers: int, records: int) -> tuple[int, History]:
    """The memory that a history of so many layers takes at most, once it has begun."""
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


def test_the_history_of_300_layers_takes_6_megabytes() -> None:
    """All that is allocated for 300 layers stays below 9 MiB over 1,000 records, also while bins are put together; allowed: 32."""
    peak, history = allocated(300, 1000)
    assert history.nbytes <= peak <= 9 * 2**20
    assert 5e6 < history.nbytes < 6e6
    assert len(layer_records(history)) == RECENT
    assert len(history.grid("norm", Window(whole=True))[1].steps) == 1000 // 4


@pytest.mark.parametrize(("layers", "limit"), [(2_000, LAYER_BYTES + 200_000), (100_000, LEAST * 16.5 * 100_000 + 200_000)])
def test_very_many_layers_have_fewer_records(layers: int, limit: int) -> None:
    """2,000 layers take 17 MB and 100,000 take 53 MB, and even these have the whole run in bins and the last records."""
    _, history = allocated(layers, 3)
    assert history.nbytes <= limit
    part, recent = history.grid("norm", Window(whole=True))[1], history.grid("norm", Window(whole=False))[1]
    assert part.steps[-1] == recent.steps[-1] == 3
    assert len(part.steps) == len(recent.steps) == 3


def test_layers_that_come_later_stay_within_the_memory() -> None:
    """A run that begins with one layer and goes on with 20,000 takes no more than one that had them from the start."""
    made = Made(names=["first"])
    history = made.history()
    for names in (["first"], [f"layers.{number}" for number in range(20_000)]):
        made.names = names
        made.step()
        history.record_if_due()
    assert history.nbytes <= LAYER_BYTES + 200_000
    assert history.layers[:2] == ["first", "layers.0"]
    assert history.layer("first", Window(whole=True)).values[0].tolist() == [1000, 1001, 1002, 1003]


def uniform(made: Made) -> Moment:
    """A moment all of whose values are its step."""
    values = np.full((len(made.names), len(QUANTITIES)), made.steps, dtype=np.float32)
    return Moment(made.samples, made.steps, made.names, values, np.full(len(SCALARS), made.steps, dtype=np.float32))


def whole_records(part: Part) -> bool:
    """Whether there is a record for each step, and its first value is the step."""
    first = part.values[:, 0] if part.values.size else np.zeros(len(part.steps))
    return np.array_equal(first, part.steps)


def test_who_reads_while_it_is_written_sees_whole_records() -> None:
    """Readers in three threads never see half of a record, nor values that do not fit their steps, while layers are added."""
    made = Made(names=["a"])
    history = History(lambda: uniform(made), now=lambda: made.now)
    over, wrong, reads = threading.Event(), list[Part](), [0, 0, 0]

    def read(number: int) -> None:
        while not over.is_set():
            # A bin's largest is its last one, which is the one at its step.
            parts = [history.grid("norm", Window(whole=view))[1] for view in (True, False)] + [history.run(Window(whole=False))]
            wrong.extend(part for part in parts if not whole_records(part))
            reads[number] += 1

    readers = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for reader in readers:
        reader.start()
    while min(reads) < 20 or made.steps < 1500:
        if made.steps % 300 == 299:
            made.names = [*made.names, f"layer.{made.steps}"]
        made.step()
        history.record_if_due()
    over.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    assert len(history.layers) >= 5
