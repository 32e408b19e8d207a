"""History: the values of the samples over the whole run, in memory of a fixed size, for the live page and for pictures.

It is written by a thread of its own, at most once a second and only when there is a new sample, and does not depend on scrapes.
The recent part is kept as it was; the whole run in bins of equal numbers of records, of which two become one when there is
no space left, so that a run of any length has between `WHOLE` / 2 and `WHOLE` of them.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from torch_grad_exporter.metrics.families import FloatArray

RECENT = 600
"""Records that are kept as they were, at most."""

WHOLE = 480
"""Bins of the whole run, at most."""

LAYER_BYTES = 16 * 2**20
"""For the records of layers: where there are very many, fewer of them are kept."""

MOST_GONE = 1000
"""Layers that are kept though no record has them any more, at most; beyond that, the first half of them is forgotten."""

LEAST = 32
"""Records and bins that are kept, however many layers there are."""

Values = NDArray[np.float32]
Flags = NDArray[np.bool_]
Packed = NDArray[np.uint8]


class Together(enum.Enum):
    """How the finite values of records become one of a bin. NaN means that there is no value, and goes into none."""

    LARGEST = "largest"
    """The one that is farthest from zero."""
    MEAN = "mean"


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Records or bins in the order of time.

    `times`: Unix time of each end, shape (n,). `steps`: the optimizer step then. `values`: shape (n, width), what is finite, or
    else infinity where something was not, or else NaN. `nonfinite`: shape (n, width), whether any of the records was not finite.
    `first`: the number of the first one, counted from the start of the run; `stride`: how many records are in one.
    """

    times: FloatArray
    steps: FloatArray
    values: Values
    nonfinite: Flags
    first: int
    stride: int

    def columns(self, chosen: slice) -> Part:
        """The same of some of the values."""
        return replace(self, values=self.values[:, chosen], nonfinite=self.nonfinite[:, chosen])


@dataclass(slots=True, eq=False)
class _Rows:
    """Time and step, finite values, and which were not finite, eight to a byte."""

    at: FloatArray
    values: Values
    nonfinite: Packed

    @classmethod
    def empty(cls, count: int, width: int) -> _Rows:
        none = np.full((count, width), np.nan, dtype=np.float32)
        return cls(np.zeros((count, 2)), none, np.zeros((count, -(-width // 8)), dtype=np.uint8))

    @property
    def nbytes(self) -> int:
        return self.at.nbytes + self.values.nbytes + self.nonfinite.nbytes

    def widen(self, width: int) -> None:
        old = self.values.shape[1]
        self.values = np.pad(self.values, ((0, 0), (0, width - old)), constant_values=np.nan)
        self.nonfinite = np.pad(self.nonfinite, ((0, 0), (0, -(-width // 8) - self.nonfinite.shape[1])))

    def taken(self, places: NDArray[np.int64]) -> _Rows:
        """Copies of these."""
        return _Rows(self.at[places], self.values[places], self.nonfinite[places])

    def select(self, columns: NDArray[np.int64]) -> None:
        """Keeps these values of each record, in this order."""
        flags = np.unpackbits(self.nonfinite, axis=1, count=self.values.shape[1])
        self.values, self.nonfinite = self.values[:, columns], np.packbits(flags[:, columns], axis=1)

    def put(self, places: NDArray[np.int64], rows: _Rows) -> None:
        self.at[places], self.values[places], self.nonfinite[places] = rows.at, rows.values, rows.nonfinite

    def part(self, places: NDArray[np.int64], first: int, stride: int) -> Part:
        at, values = self.at[places], self.values[places]
        flags = np.unpackbits(self.nonfinite[places], axis=1, count=values.shape[1]).view(np.bool_)
        values[flags & np.isnan(values)] = np.inf
        return Part(at[:, 0], at[:, 1], values, flags, first, stride)


class Track:
    """Records of `width` values each; `whole` is even, as of two bins one is made."""

    def __init__(self, width: int, together: Together, *, recent: int = RECENT, whole: int = WHOLE) -> None:
        self._together = together
        self.count = 0
        self._recent = _Rows.empty(recent, width)
        self._whole = _Rows.empty(whole, width)
        self._weights = np.zeros((whole, width) if together is Together.MEAN else (1, 1), dtype=np.float32)
        self._stride = 1
        self._moved = 0
        """Records whose times, or the order of whose values, have changed after they were there."""

    @property
    def nbytes(self) -> int:
        """The memory that it takes, from its first record to its last."""
        return self._recent.nbytes + self._whole.nbytes + self._weights.nbytes

    @property
    def width(self) -> int:
        """Values of a record."""
        return int(self._recent.values.shape[1])

    def append(self, time: float, step: float, values: Values, nonfinite: Flags | None = None) -> None:
        """Takes a record; `values` of shape (width,). `nonfinite`: which were, besides, not finite within it."""
        infinite = np.isinf(values)
        flags = infinite if nonfinite is None else infinite | nonfinite
        packed: Packed | int = np.packbits(flags) if flags.any() else 0
        values = np.where(infinite, np.float32(np.nan), values)
        place = self.count % len(self._recent.at)
        self._recent.at[place], self._recent.values[place], self._recent.nonfinite[place] = (time, step), values, packed
        bin_, within = divmod(self.count, self._stride)
        if bin_ == len(self._whole.at):
            self._halve()
            bin_, within = divmod(self.count, self._stride)
        if not within:
            self._whole.values[bin_], self._whole.nonfinite[bin_] = np.nan, 0
            if self._together is Together.MEAN:
                self._weights[bin_] = 0
        self._enter(bin_, values)
        self._whole.nonfinite[bin_] |= packed
        self._whole.at[bin_] = time, step
        self.count += 1

    def _enter(self, bin_: int, values: Values) -> None:
        before = self._whole.values[bin_]
        if self._together is Together.LARGEST:
            self._whole.values[bin_] = _farther(before, values)
            return
        known = ~np.isnan(values)
        weights = self._weights[bin_] + known
        mean = np.where(np.isnan(before), 0, before.astype(np.float64))  # a difference may not fit into 32 bits
        mean += (np.where(known, values, mean) - mean) / np.maximum(weights, 1)
        self._whole.values[bin_], self._weights[bin_] = np.where(weights > 0, mean, np.nan), weights

    def _halve(self) -> None:
        """Makes one bin of two."""
        rows, half = self._whole, len(self._whole.at) // 2
        even, odd = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        if self._together is Together.LARGEST:
            rows.values[:half] = _farther(rows.values[even], rows.values[odd])
        else:
            rows.values[:half], self._weights[:half] = _mean(
                rows.values[even], rows.values[odd], self._weights[even], self._weights[odd]
            )
        rows.nonfinite[:half] = rows.nonfinite[even] | rows.nonfinite[odd]
        rows.at[:half] = rows.at[odd]
        self._stride *= 2

    def widen(self, width: int) -> None:
        """Adds more values to each record; earlier records have none of them."""
        self._recent.widen(width)
        self._whole.widen(width)
        if self._together is Together.MEAN:
            self._weights = np.pad(self._weights, ((0, 0), (0, width - self._weights.shape[1])))

    def select(self, columns: NDArray[np.int64]) -> None:
        """Keeps these values of each record, in this order; until the next record, reading what is new gives all records."""
        self._recent.select(columns)
        self._whole.select(columns)
        if self._together is Together.MEAN:
            self._weights = self._weights[:, columns]
        self._moved = self.count

    def shrink(self, recent: int, whole: int) -> None:
        """Keeps fewer records and bins, where there were more; the whole run stays covered."""
        if recent < len(self._recent.at):
            numbers = np.arange(max(0, self.count - recent), self.count)
            kept = self._recent.taken(numbers % len(self._recent.at))
            self._recent = _Rows.empty(recent, self.width)
            self._recent.put(numbers % recent, kept)
        while (used := -(-self.count // self._stride)) > whole:
            self._whole.values[used:], self._whole.nonfinite[used:] = np.nan, 0  # what was there before two became one
            self._whole.at[used:] = self._whole.at[used - 1]
            if self._together is Together.MEAN:
                self._weights[used:] = 0
            self._halve()
        self._whole = self._whole.taken(np.arange(min(whole, len(self._whole.at))))
        if self._together is Together.MEAN:
            self._weights = self._weights[:whole].copy()

    def shift(self, seconds: float) -> None:
        """Moves the times of all records; until the next record, reading what is new gives all records."""
        self._recent.at[:, 0] += seconds
        self._whole.at[:, 0] += seconds
        self._moved = self.count

    def recent(self, since: int = 0) -> Part:
        """The records from number `since` on that are still there."""
        since = since if since > self._moved else 0
        first = min(max(since, self.count - len(self._recent.at), 0), self.count)
        return self._recent.part(np.arange(first, self.count) % len(self._recent.at), first, 1)

    def whole(self, since: int = 0, stride: int = 0) -> Part:
        """The bins of the whole run, from number `since` on if they are still of `stride` records; the last one may not be full."""
        used = -(-self.count // self._stride)
        first = min(since, used) if stride == self._stride and since * stride >= self._moved else 0
        return self._whole.part(np.arange(first, used), first, self._stride)


def _farther(one: Values, other: Values) -> Values:
    """Elementwise the one that is farther from zero; where one is NaN, the other."""
    found: Values = np.where(np.isnan(one) | (np.abs(other) > np.abs(one)), other, one)
    return found


def _mean(one: Values, other: Values, weight: Values, more: Values) -> tuple[Values, Values]:
    """Elementwise the mean of two means of so many values each, NaN where there are none, and of how many it is."""
    weights = weight + more
    share = np.divide(more, weights, out=np.zeros_like(weights), where=weights > 0)
    a, b = np.where(weight > 0, one, 0.0).astype(np.float64), np.where(more > 0, other, 0.0)
    return np.where(weights > 0, a + (b - a) * share, np.nan).astype(np.float32), weights


QUANTITIES = ("norm", "zero_ratio", "dead_ratio", "zscore")
"""What is kept of each layer. A norm that is not finite is kept as infinity; NaN means that there is no value."""

SCALARS = ("loss", "norm", "norm_after_clip", "step_seconds", "learning_rate")
"""What is kept of the run: the first optimizer's norms, and its first learning rate."""

OF_SAMPLES = np.array([name in ("norm", "norm_after_clip") for name in SCALARS])
"""Which of these are of samples, and not of each step."""

RECORD_SECONDS = 1.0
"""Between two records, at least."""


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """What there is to be recorded. `samples`, `steps`: how many there have been; `layers`: names, one for each row of `values`.

    `values`: shape (layers, quantities). `scalars`: shape (scalars,). `nonfinite`, `scalars_nonfinite`: of the same shapes, what
    was not finite since the moment before, whatever it is now. `sample_step`: of the last sample, if that is known. `sharded`:
    layers of which there is this rank's part.
    """

    samples: int
    steps: int
    layers: Sequence[str]
    values: Values
    scalars: Values
    nonfinite: Flags | None = None
    scalars_nonfinite: Flags | None = None
    sample_step: int | None = None
    sharded: frozenset[str] = frozenset()


class History:
    """Records moments. `record_if_due` belongs to one thread, everything else to any.

    `moment` gives the present values, `now` the time, in seconds since 1970.
    """

    def __init__(self, moment: Callable[[], Moment], *, now: Callable[[], float]) -> None:
        self._moment = moment
        self._now = now
        self._lock = threading.Lock()
        self._checked = self._next = float("-inf")
        self._seen = (0, 0)
        self._sample_step = 0
        self._late = np.full(len(SCALARS), np.nan, dtype=np.float32)
        self._column: dict[str, int] = {}
        self._sharded: frozenset[str] = frozenset()
        self._layers: Track | None = None
        self._scalars = Track(len(SCALARS), Together.MEAN, recent=2 * RECENT, whole=2 * WHOLE)

    @property
    def layers(self) -> list[str]:
        """The layers that are recorded, in the order in which they came: of those that are gone the last `MOST_GONE` at most."""
        with self._lock:
            return list(self._column)

    @property
    def sharded(self) -> frozenset[str]:
        """Those of them whose values are of this rank's part of a gradient."""
        return self._sharded

    @property
    def samples(self) -> int:
        """How many samples there had been at the last record."""
        return self._seen[0]

    @property
    def nbytes(self) -> int:
        """The memory of all records."""
        return self._scalars.nbytes + (0 if self._layers is None else self._layers.nbytes)

    def record_if_due(self) -> None:
        """Records the present values, if it is time and if there is anything new."""
        now = self._clock()
        if now >= self._next:
            self._record(now)

    def finish(self) -> None:
        """Records the values at the end, if there is anything new, however short the time since the last record."""
        self._record(self._clock(), last=True)

    def _clock(self) -> float:
        """The time. If the clock was set back, all records move with it, as if one usual interval had passed since the last."""
        now = self._now()
        if now < self._checked:
            back = self._checked + RECORD_SECONDS - now
            self._next -= back
            with self._lock:
                for track in (self._scalars, self._layers):
                    if track is not None:
                        track.shift(-back)
        self._checked = now
        return now

    def _record(self, now: float, *, last: bool = False) -> None:
        self._next = now + RECORD_SECONDS
        moment = self._moment()
        samples, steps = self._seen
        with self._lock:
            self._record_run(now, moment, new=moment.samples != samples, due=moment.steps != steps, last=last)
            if moment.samples != samples:
                self._record_layers(now, moment)
            self._seen = moment.samples, moment.steps

    def _record_run(self, now: float, moment: Moment, *, new: bool, due: bool, last: bool) -> None:
        """A sample may come after its step: it is then part of the next record, unless it has values that are not finite."""
        scalars, flags = _farther(self._late, moment.scalars), moment.scalars_nonfinite
        if new:
            self._late = np.where(OF_SAMPLES, scalars, np.float32(np.nan))
        late = last and not np.isnan(self._late).all()
        if due or late or (flags is not None and flags.any()):
            self._scalars.append(now, moment.steps, scalars, flags)
            self._late = np.full(len(SCALARS), np.nan, dtype=np.float32)

    def _record_layers(self, now: float, moment: Moment) -> None:
        self._forget(moment.layers)
        for name in moment.layers:
            self._column.setdefault(name, len(self._column))
        self._sharded = moment.sharded
        track = self._room()
        shape, rows = (len(self._column), len(QUANTITIES)), [self._column[name] for name in moment.layers]
        row, flags = np.full(shape, np.nan, dtype=np.float32), np.zeros(shape, dtype=np.bool_)
        row[rows] = moment.values
        if moment.nonfinite is not None:
            flags[rows] = moment.nonfinite
        track.append(now, self._step_of(moment), row.ravel(), flags.ravel())

    def _forget(self, present: Sequence[str]) -> None:
        """Forgets layers that are gone, where these are too many."""
        there = frozenset(present)
        gone = [name for name in self._column if name not in there] if len(self._column) > MOST_GONE else []
        if self._layers is None or len(gone) <= MOST_GONE:
            return
        forgotten = frozenset(gone[: len(gone) - MOST_GONE // 2])
        kept = {name: column for name, column in self._column.items() if name not in forgotten}
        columns = np.array(list(kept.values()), dtype=np.int64)[:, None] * len(QUANTITIES) + np.arange(len(QUANTITIES))
        self._layers.select(columns.ravel())
        self._column = {name: column for column, name in enumerate(kept)}

    def _room(self) -> Track:
        """The track of the layers, with a place for each of them."""
        width = len(QUANTITIES) * len(self._column)
        fit = max(LEAST, LAYER_BYTES // max(4 * width + -(-width // 8), 1))
        recent, whole = min(RECENT, fit // 2), min(WHOLE, fit // 2 // 2 * 2)
        if self._layers is None:
            self._layers = Track(width, Together.LARGEST, recent=recent, whole=whole)
        elif self._layers.width < width:
            self._layers.shrink(recent, whole)
            self._layers.widen(width)
        return self._layers

    def _step_of(self, moment: Moment) -> int:
        """The step of the last sample; the present one where no step followed it, or where it is not known."""
        sampled = moment.sample_step or 0
        self._sample_step = sampled if sampled > self._sample_step else max(self._sample_step, moment.steps)
        return self._sample_step

    def run(self, *, whole: bool, since: int = 0, stride: int = 0) -> Part:
        """The values of the run, `SCALARS`; see `Track.recent` and `Track.whole`."""
        with self._lock:
            return self._scalars.whole(since, stride) if whole else self._scalars.recent(since)

    def quantity(self, name: str, *, whole: bool, since: int = 0, stride: int = 0) -> Part:
        """One quantity of all layers: values of shape (n, layers). Raises `ValueError` where there is none of that name."""
        return self.grid(name, whole=whole, since=since, stride=stride)[1]

    def grid(self, name: str, *, whole: bool, since: int = 0, stride: int = 0) -> tuple[list[str], Part]:
        """The layers, and the same. Another record may forget layers: names and values that are read separately may not match."""
        place = QUANTITIES.index(name)
        with self._lock:
            names = list(self._column)
            track = Track(0, Together.LARGEST, recent=1, whole=2) if self._layers is None else self._layers
            part = track.whole(since, stride) if whole else track.recent(since)
        return names, part.columns(slice(place, None, len(QUANTITIES)))

    def layer(self, name: str, *, whole: bool) -> Part:
        """All quantities of one layer: values of shape (n, quantities). Raises `KeyError` where there is no such layer."""
        with self._lock:
            column = self._column[name]
            if self._layers is None:
                raise KeyError(name)
            part = self._layers.whole() if whole else self._layers.recent()
        return part.columns(slice(column * len(QUANTITIES), (column + 1) * len(QUANTITIES)))
