"""History: the values of the samples over the whole run, in memory of a fixed size, for the live page and for pictures.

It is written by a thread of its own, once a second and only when there is something new, and does not depend on scrapes. Of the
layers each sample has a record of its own at first, until the recent part is full.
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

from torch_grad_exporter.metrics.families import FloatArray, IntArray

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
_Rows = NDArray[np.void]


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


def _rows(count: int, width: int, *, weighted: bool) -> _Rows:
    """Empty ones: time and step, finite values, which were not finite, eight to a byte, and for means of how many each value is."""
    packed = -(-width // 8)
    fields = [
        ("at", "f8", (2,)),
        ("values", "f4", (width,)),
        ("nonfinite", "u1", (packed,)),
        ("weights", "f4", (weighted * width,)),
    ]
    found = np.zeros(count, dtype=np.dtype(fields, align=True))
    found["values"] = np.nan
    return found


class Track:
    """Records of `width` values each; `whole` is even, as of two bins one is made."""

    def __init__(self, width: int, together: Together, *, recent: int = RECENT, whole: int = WHOLE) -> None:
        self._weighted = together is Together.MEAN
        self.width = width
        self.count = 0
        self._recent, self._whole = (_rows(count, width, weighted=self._weighted) for count in (recent, whole))
        self._stride = 1
        self._moved = 0
        """Records whose times, or the order of whose values, have changed after they were there."""

    @property
    def nbytes(self) -> int:
        """The memory that it takes, from its first record to its last."""
        return self._recent.nbytes + self._whole.nbytes

    def append(self, time: float, step: float, values: Values, nonfinite: Flags | None = None) -> None:
        """Takes a record; `values` of shape (width,). `nonfinite`: which were, besides, not finite within it."""
        infinite = np.isinf(values)
        record = _rows(1, self.width, weighted=self._weighted)
        record["at"], record["values"] = (time, step), np.where(infinite, np.float32(np.nan), values)
        record["nonfinite"] = np.packbits(infinite if nonfinite is None else infinite | nonfinite)
        if self._weighted:
            record["weights"] = ~np.isnan(record["values"])
        place = self.count % len(self._recent)
        self._recent[place : place + 1] = record
        if self.count == len(self._whole) * self._stride:
            self._halve()
        place, within = divmod(self.count, self._stride)
        if within:
            self._merge(self._whole[place : place + 1], record)
        self._whole[place : place + 1] = record
        self.count += 1

    def _merge(self, one: _Rows, other: _Rows) -> None:
        """Makes of the other one, elementwise, what both are together; its time and step stay."""
        other["nonfinite"] |= one["nonfinite"]
        if self._weighted:
            other["values"], other["weights"] = _mean(one["values"], other["values"], one["weights"], other["weights"])
        else:
            other["values"] = _farther(one["values"], other["values"])

    def _halve(self) -> None:
        """Makes one bin of two."""
        half = len(self._whole) // 2
        even, odd = self._whole[0 : 2 * half : 2], self._whole[1 : 2 * half : 2]
        self._merge(even, odd)
        self._whole[:half] = odd
        self._stride *= 2

    def arrange(self, columns: IntArray) -> None:
        """Makes records of these of their values, in this order; -1 stands for a new one, which no earlier record has.

        Until the next record, reading what is new gives all records, unless the values before stay where they are.
        """
        if not np.array_equal(columns[: self.width], np.arange(self.width)):
            self._moved = self.count
        self._recent, self._whole = (self._arranged(rows, columns) for rows in (self._recent, self._whole))
        self.width = len(columns)

    def _arranged(self, rows: _Rows, columns: IntArray) -> _Rows:
        found = _rows(len(rows), len(columns), weighted=self._weighted)
        found["at"] = rows["at"]
        new, old = np.flatnonzero(columns >= 0), columns[columns >= 0]
        found["values"][:, new] = rows["values"][:, old]
        flags = np.zeros((len(rows), len(columns)), dtype=np.bool_)
        flags[:, new] = np.unpackbits(rows["nonfinite"], axis=1, count=self.width)[:, old]
        found["nonfinite"] = np.packbits(flags, axis=1)
        if self._weighted:
            found["weights"][:, new] = rows["weights"][:, old]
        return found

    def shrink(self, recent: int, whole: int) -> None:
        """Keeps fewer records and bins, where there were more; the whole run stays covered."""
        if recent < len(self._recent):
            numbers = np.arange(max(0, self.count - recent), self.count)
            kept = self._recent[numbers % len(self._recent)]
            self._recent = _rows(recent, self.width, weighted=self._weighted)
            self._recent[numbers % recent] = kept
        while (used := -(-self.count // self._stride)) > whole:
            # What was there before two became one.
            self._whole[used:] = _rows(1, self.width, weighted=self._weighted)
            self._whole["at"][used:] = self._whole["at"][used - 1]
            self._halve()
        self._whole = self._whole[:whole].copy()

    def shift(self, seconds: float) -> None:
        """Moves the times of all records; until the next record, reading what is new gives all records."""
        self._recent["at"][:, 0] += seconds
        self._whole["at"][:, 0] += seconds
        self._moved = self.count

    def recent(self, since: int = 0) -> Part:
        """The records from number `since` on that are still there."""
        since = since if since > self._moved else 0
        first = min(max(since, self.count - len(self._recent), 0), self.count)
        return self._part(self._recent[np.arange(first, self.count) % len(self._recent)], first, 1)

    def whole(self, since: int = 0, stride: int = 0) -> Part:
        """The bins of the whole run, from number `since` on if they are still of `stride` records; the last one may not be full."""
        used = -(-self.count // self._stride)
        first = min(since, used) if stride == self._stride and since * stride >= self._moved else 0
        return self._part(self._whole[first:used], first, self._stride)

    def _part(self, rows: _Rows, first: int, stride: int) -> Part:
        flags = np.unpackbits(rows["nonfinite"], axis=1, count=self.width).view(np.bool_)
        values = np.where(flags & np.isnan(rows["values"]), np.float32(np.inf), rows["values"])
        return Part(rows["at"][:, 0].copy(), rows["at"][:, 1].copy(), values, flags, first, stride)


def _farther(one: Values, other: Values) -> Values:
    """Elementwise the one that is farther from zero; where one is NaN, the other."""
    found: Values = np.where(np.isnan(one) | (np.abs(other) > np.abs(one)), other, one)
    return found


def _mean(one: Values, other: Values, weight: Values, more: Values) -> tuple[Values, Values]:
    """Elementwise the mean of two means of so many values each, NaN where there are none, and of how many it is."""
    weights = weight + more
    share = np.divide(more, weights, out=np.zeros_like(weights), where=weights > 0)
    # A difference may not fit into 32 bits.
    a, b = np.where(weight > 0, one, 0.0).astype(np.float64), np.where(more > 0, other, 0.0)
    return np.where(weights > 0, a + (b - a) * share, np.nan).astype(np.float32), weights


QUANTITIES = ("norm", "zero_ratio", "dead_ratio", "zscore")
"""What is kept of each layer. A norm that is not finite is kept as infinity; NaN means that there is no value."""

MOMENTS = ("mean", "stddev")
"""What is kept of each layer as well where `moments` is on: over the elements of its gradient."""
ACTIVATIONS = ("activation_rms", "activation_zero_ratio", "activation_dead_ratio")
"""What is kept of the outputs of each inner module, in a history of their own."""

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
    `of_samples`: of each sample since the moment before, its moment with its Unix time; `None` where these are not wanted any more.
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
    of_samples: Sequence[tuple[float, Moment]] | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """What is selected: the run in bins or its recent records, from number `since` on, and all bins if they are not of `stride`."""

    whole: bool
    since: int = 0
    stride: int = 0

    def of(self, track: Track) -> Part:
        """That of a track; see `Track.recent` and `Track.whole`."""
        return track.whole(self.since, self.stride) if self.whole else track.recent(self.since)


class History:
    """Records moments. `record_if_due` belongs to one thread, everything else to any.

    `moment` gives the present values, `now` the time, in seconds since 1970. `quantities`: what is kept of each layer,
    in the order of the columns of a moment's values.
    """

    def __init__(self, moment: Callable[[], Moment], *, now: Callable[[], float], quantities: Sequence[str] = QUANTITIES) -> None:
        self.quantities = tuple(quantities)
        self._moment = moment
        self._now = now
        self._lock = threading.Lock()
        self._checked = self._next = self._recorded = float("-inf")
        self._seen = (0, 0)
        self._sample_step = 0
        self._late = np.full(len(SCALARS), np.nan, dtype=np.float32)
        self._column: dict[str, int] = {}
        self._sharded: frozenset[str] = frozenset()
        self._layers = Track(0, Together.LARGEST)
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
        return self._scalars.nbytes + self._layers.nbytes

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
            self._recorded -= back
            with self._lock:
                for track in (self._scalars, self._layers):
                    track.shift(-back)
        self._checked = now
        return now

    def _record(self, now: float, *, last: bool = False) -> None:
        self._next = now + RECORD_SECONDS
        moment = self._moment()
        with self._lock:
            samples, steps = self._seen
            self._record_run(now, moment, new=moment.samples != samples, due=moment.steps != steps, last=last)
            for at, sample in moment.of_samples or ():
                self._recorded = min(max(at, self._recorded), now)
                self._record_layers(self._recorded, sample)
            if moment.of_samples is None and moment.samples != samples:
                self._record_layers(now, moment)
            self._seen, self._recorded = (moment.samples, moment.steps), now

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
        self._make_room()
        shape, rows = (len(self._column), len(self.quantities)), [self._column[name] for name in moment.layers]
        row, flags = np.full(shape, np.nan, dtype=np.float32), np.zeros(shape, dtype=np.bool_)
        row[rows] = moment.values
        if moment.nonfinite is not None:
            flags[rows] = moment.nonfinite
        self._layers.append(now, self._step_of(moment), row.ravel(), flags.ravel())

    def _forget(self, present: Sequence[str]) -> None:
        """Forgets layers that are gone, where these are too many."""
        there = frozenset(present)
        gone = [name for name in self._column if name not in there] if len(self._column) > MOST_GONE else []
        if len(gone) <= MOST_GONE:
            return
        forgotten = frozenset(gone[: len(gone) - MOST_GONE // 2])
        kept = {name: column for name, column in self._column.items() if name not in forgotten}
        columns = np.array(list(kept.values()), dtype=np.int64)[:, None] * len(self.quantities) + np.arange(len(self.quantities))
        self._layers.arrange(columns.ravel())
        self._column = {name: column for column, name in enumerate(kept)}

    def _make_room(self) -> None:
        """Gives each layer a place in the track."""
        width = len(self.quantities) * len(self._column)
        fit = max(LEAST, LAYER_BYTES // max(4 * width + -(-width // 8), 1))
        recent, whole = min(RECENT, fit // 2), min(WHOLE, fit // 2 // 2 * 2)
        if self._layers.width < width:
            self._layers.shrink(recent, whole)
            self._layers.arrange(np.where(np.arange(width) < self._layers.width, np.arange(width), -1))

    def _step_of(self, moment: Moment) -> int:
        """The step of the last sample; the present one where no step followed it, or where it is not known."""
        sampled = moment.sample_step or 0
        self._sample_step = sampled if sampled > self._sample_step else max(self._sample_step, moment.steps)
        return self._sample_step

    def run(self, window: Window) -> Part:
        """The values of the run, `SCALARS`."""
        with self._lock:
            return window.of(self._scalars)

    def grid(self, name: str, window: Window) -> tuple[list[str], Part]:
        """The layers, and one quantity of each: values of shape (n, layers). Raises `ValueError` where there is none of that name.

        Another record may forget layers: names and values that are read separately may not match.
        """
        place = self.quantities.index(name)
        with self._lock:
            part = window.of(self._layers)
            return list(self._column), part.columns(slice(place, None, len(self.quantities)))

    def layer(self, name: str, window: Window) -> Part:
        """All quantities of one layer: values of shape (n, quantities). Raises `KeyError` where there is no such layer."""
        with self._lock:
            column = self._column[name]
            part = window.of(self._layers)
        return part.columns(slice(column * len(self.quantities), (column + 1) * len(self.quantities)))
