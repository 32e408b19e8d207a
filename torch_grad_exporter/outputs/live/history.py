"""History: the values of the samples over the whole run, in memory of a fixed size, for the live page and for pictures.

It is written by a thread of its own, once a second and only when there is something new, and does not depend on scrapes. At first
each sample has a record of its own, and so has each step of which a value of the run is known; see `Moment`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from torch_grad_exporter.outputs.live.rows import LASTING, OF_SAMPLES, SCALARS, StepRows, scalars
from torch_grad_exporter.outputs.live.track import RECENT, WHOLE, Flags, Part, Together, Track, Values, farther
from torch_grad_exporter.store.cursors import Single

LAYER_BYTES = 16 * 2**20
"""For the records of layers: where there are very many, fewer of them are kept."""

MOST_GONE = 1000
"""Layers that are kept though no record has them any more, at most; beyond that, the first half of them is forgotten."""

LEAST = 32
"""Records and bins that are kept, however many layers there are."""

QUANTITIES = ("norm", "zero_ratio", "dead_ratio", "zscore")
"""What is kept of each layer. A norm that is not finite is kept as infinity; NaN means that there is no value."""

MOMENTS = ("mean", "stddev")
"""What is kept of each layer as well where `moments` is on: over the elements of its gradient."""
ACTIVATIONS = ("activation_rms", "activation_zero_ratio", "activation_dead_ratio")
"""What is kept of the outputs of each inner module, in a history of their own."""

RECORD_SECONDS = 1.0
"""Between two records, at least."""

# Samples that are recorded at a time: of large models each takes much memory, of small ones each alone much time.
TOGETHER = 32


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """What there is to be recorded. `samples`, `steps`: how many there have been; `layers`: names, one for each row of `values`.

    `values`: shape (layers, quantities). `scalars`: shape (scalars,). `nonfinite`, `scalars_nonfinite`: of the same shapes, what
    was not finite since the moment before, whatever it is now. `sample_step`: of the last sample, if that is known. `sharded`:
    layers of which there is this rank's part. `earlier`: of each sample since the moment before that has a record of its own, its
    moment with its Unix time; the last of them may be this one. `singles`: values of the run that are of a certain step.
    `by_step`: the values of the run are put together by their steps, as more `earlier` ones may come.
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
    earlier: Sequence[tuple[float, Moment]] = ()
    singles: Sequence[Single] = ()
    by_step: bool = False


@dataclass(frozen=True, slots=True)
class Window:
    """What is selected: the run in bins or its recent records, from number `since` on, and all bins if they are not of `stride`."""

    whole: bool
    since: int = 0
    stride: int = 0

    def of(self, track: Track) -> Part:
        """That of a track; see `Track.recent` and `Track.whole`."""
        return track.whole(self.since, self.stride) if self.whole else track.recent(self.since)


VIEWS = {"whole": Window(whole=True), "recent": Window(whole=False)}


class UnknownLayerError(Exception):
    """There is no layer of this name."""


class History:
    """Records moments. `record_if_due` belongs to one thread, everything else to any.

    `moment` gives the present values, `now` the time, in seconds since 1970. `quantities`: what is kept of each layer,
    in the order of the columns of a moment's values. `quiet`: whether nothing has come since `moment` was last asked.
    """

    def __init__(
        self,
        moment: Callable[[], Moment],
        *,
        now: Callable[[], float],
        quantities: Sequence[str] = QUANTITIES,
        quiet: Callable[[], bool] = lambda: False,
    ) -> None:
        self.quantities = tuple(quantities)
        self._moment = moment
        self._quiet = quiet
        self._now = now
        self._lock = threading.Lock()
        self._checked = self._next = self._recorded = float("-inf")
        self._seen = (0, 0)
        self._sample_step = 0
        self._late = scalars()
        self._rows = StepRows()
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
        # A row that was there at one look alone is not complete yet.
        if now >= self._next and (self._rows or not self._quiet()):
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
                for track in (self._scalars, self._layers, self._rows):
                    track.shift(-back)
        self._checked = now
        return now

    def _record(self, now: float, *, last: bool = False) -> None:
        self._next = now + RECORD_SECONDS
        moment = self._moment()
        with self._lock:
            samples, steps = self._seen
            for layers, earlier in itertools.groupby(moment.earlier, key=lambda pair: pair[1].layers):
                while some := list(itertools.islice(earlier, TOGETHER)):
                    times = list(itertools.accumulate((at for at, _ in some), max, initial=self._recorded))[1:]
                    times, those = [min(at, now) for at in times], [sample for _, sample in some]
                    for step, at, sample in zip(self._record_layers(times, layers, those), times, those, strict=True):
                        self._rows.add(step, at, sample.scalars, sample.scalars_nonfinite)
                    self._recorded, samples = times[-1], those[-1].samples
            new = moment.samples != samples
            if moment.by_step or self._rows or moment.singles:
                self._record_steps(now, moment, due=moment.steps != steps, every=last or not moment.by_step)
            else:
                self._record_run(now, moment, new=new, due=moment.steps != steps, last=last)
            if new:
                self._record_layers([now], moment.layers, [moment])
            self._seen, self._recorded = (moment.samples, moment.steps), now

    def _record_steps(self, now: float, moment: Moment, *, due: bool, every: bool) -> None:
        """Puts what is known of steps together, and records those that are complete. `due`: there was a step."""
        for one in moment.singles:
            self._rows.add_one(one.step, min(one.at, now), one.name, one.value)
        values = np.where(LASTING & (not due), np.float32(np.nan), farther(self._late, moment.scalars))
        self._rows.add(moment.steps, now, values, moment.scalars_nonfinite)
        self._late = scalars()
        if rows := self._rows.take(every=every):
            values = np.array([row.values for row in rows], dtype=np.float32)
            flags = np.array([row.nonfinite for row in rows])
            self._scalars.extend([row.at for row in rows], [row.step for row in rows], values, flags)

    def _record_run(self, now: float, moment: Moment, *, new: bool, due: bool, last: bool) -> None:
        """A sample may come after its step: it is then part of the next record, unless it has values that are not finite."""
        values, flags = farther(self._late, moment.scalars), moment.scalars_nonfinite
        if new:
            self._late = np.where(OF_SAMPLES, values, np.float32(np.nan))
        late = last and not np.isnan(self._late).all()
        if due or late or (flags is not None and flags.any()):
            self._scalars.append(now, moment.steps, values, flags)
            self._late = scalars()

    def _record_layers(self, times: Sequence[float], layers: Sequence[str], moments: Sequence[Moment]) -> list[int]:
        """Records moments of the same layers; returns the step of each."""
        self._forget(layers)
        for name in layers:
            self._column.setdefault(name, len(self._column))
        self._sharded = moments[-1].sharded
        self._make_room()
        shape, columns = (len(moments), len(self._column), len(self.quantities)), [self._column[name] for name in layers]
        values, flags = np.full(shape, np.nan, dtype=np.float32), np.zeros(shape, dtype=np.bool_)
        for place, moment in enumerate(moments):
            values[place, columns] = moment.values
            if moment.nonfinite is not None:
                flags[place, columns] = moment.nonfinite
        steps = [self._step_of(moment) for moment in moments]
        self._layers.extend(times, steps, values.reshape(len(moments), -1), flags.reshape(len(moments), -1))
        return steps

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
        """All quantities of one layer: values of shape (n, quantities). Raises `UnknownLayerError` where there is none."""
        with self._lock:
            if name not in self._column:
                raise UnknownLayerError
            column = self._column[name]
            part = window.of(self._layers)
        return part.columns(slice(column * len(self.quantities), (column + 1) * len(self.quantities)))
