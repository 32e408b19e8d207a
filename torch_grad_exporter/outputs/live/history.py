"""History: the values of the samples over the whole run, in memory of a fixed size, for the live page and for pictures.

A thread of its own writes it, once a second and only if there is something new, whether or not there are scrapes. At first each
sample has a record of its own, and so has each step with a known value of the run; see `Moment`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from torch_grad_exporter.outputs.live.step_rows import LASTING, OF_SAMPLES, SCALARS, StepRows, scalars
from torch_grad_exporter.outputs.live.track import RECENT, WHOLE, Flags, Part, Track, Values, farther
from torch_grad_exporter.store.cursors import Single

# For the records of layers: if there are very many layers, fewer records are kept, but this many records and bins.
LAYER_BYTES, LEAST = 16 * 2**20, 32

# Layers that are kept although no moment has them any more, at most; beyond that, the first half of them is forgotten.
MOST_GONE = 1000

# Kept of each layer. A norm that is not finite is kept as infinity; NaN stands for no value. With `moments=True` also those over
# the elements of its gradient. Outputs of inner modules, and logged values by name, have histories of their own.
QUANTITIES = ("norm", "zero_ratio", "dead_ratio", "zscore")
MEAN_AND_STDDEV = ("mean", "stddev")
ACTIVATIONS = ("activation_rms", "activation_zero_ratio", "activation_dead_ratio")
LOGGED = ("value",)

# Seconds between two records, at least; samples that are recorded at a time, a compromise between memory and time.
RECORD_SECONDS, TOGETHER = 1.0, 32


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """The values to be recorded at a point in time, after this many samples and steps.

    Attributes:
        values: Of each layer, shape (layers, quantities).
        scalars: Of the run, shape (scalars,).
        nonfinite: Shape of `values`: what was not finite since the moment before, whatever it is now.
        scalars_nonfinite: The same for `scalars`.
        sample_step: Step of the last sample, None if unknown.
        sharded: Layers whose values are of this rank's part.
        earlier: Unix time and moment of each sample since the moment before that has a record of its own. The last may be this.
        singles: Values of the run at a certain step.
        by_step: Whether to put values of the run together by step, as more `earlier` moments may come.
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
    """A selection: the run in bins or its recent records, from number `since` on; all bins if they are not of `stride`."""

    whole: bool
    since: int = 0
    stride: int = 0

    def of(self, track: Track) -> Part:
        """Return the selected part of a track; see `Track.recent` and `Track.whole`."""
        return track.whole(self.since, self.stride) if self.whole else track.recent(self.since)


VIEWS = {"whole": Window(whole=True), "recent": Window(whole=False)}


class UnknownLayerError(Exception):
    """A layer that does not exist."""


class History:
    """The records of a run. `record_if_due` belongs to one thread, everything else to any.

    `moment` returns the present values, with columns in the order of `quantities`, and `now` Unix time.
    """

    def __init__(
        self,
        moment: Callable[[], Moment],
        *,
        now: Callable[[], float],
        quantities: Sequence[str] = QUANTITIES,
        means: bool = False,
    ) -> None:
        self.quantities = tuple(quantities)
        self._moment, self._now = moment, now
        self._lock = threading.Lock()
        self._next = self._recorded = float("-inf")
        self._seen = (0, 0)
        self._sample_step = 0
        self._late = scalars()
        self._rows = StepRows()
        self._column: dict[str, int] = {}
        self._sharded: frozenset[str] = frozenset()
        self._layers = Track(0, means=means)
        self._scalars = Track(len(SCALARS), means=True, recent=2 * RECENT, whole=2 * WHOLE)

    @property
    def layers(self) -> list[str]:
        """The recorded layers, in the order in which they came; of absent ones the last `MOST_GONE` at most."""
        with self._lock:
            return list(self._column)

    @property
    def sharded(self) -> frozenset[str]:
        """The layers whose values are of this rank's part of a gradient."""
        return self._sharded

    @property
    def samples(self) -> int:
        """The number of samples at the last record."""
        return self._seen[0]

    @property
    def nbytes(self) -> int:
        """The memory of all records."""
        return self._scalars.nbytes + self._layers.nbytes

    def record_if_due(self) -> None:
        """Record the present values, if it is time and if there is anything new."""
        now = self._now()
        if not 0 < self._next - now <= RECORD_SECONDS:  # more if the clock was set back
            self._record(now)

    def finish(self) -> None:
        """Record the values at the end, if there is anything new, however recent the last record is."""
        self._record(self._now(), last=True)

    def _record(self, now: float, *, last: bool = False) -> None:
        self._next = now + RECORD_SECONDS
        now = max(now, self._recorded)  # if the clock was set back, times stand still until it has caught up
        moment = self._moment()
        with self._lock:
            samples, steps = self._seen
            for layers, earlier in itertools.groupby(moment.earlier, key=lambda pair: pair[1].layers):
                while batch := list(itertools.islice(earlier, TOGETHER)):
                    times = list(itertools.accumulate((at for at, _ in batch), max, initial=self._recorded))[1:]
                    times, moments = [min(at, now) for at in times], [sample for _, sample in batch]
                    for step, at, sample in zip(self._record_layers(times, layers, moments), times, moments, strict=True):
                        self._rows.add(step, at, sample.scalars, sample.scalars_nonfinite)
                    self._recorded, samples = times[-1], moments[-1].samples
            new = moment.samples != samples
            self._record_run(now, moment, new=new, due=moment.steps != steps, last=last)
            if new:
                self._record_layers([now], moment.layers, [moment])
            self._seen, self._recorded = (moment.samples, moment.steps), now

    def _record_run(self, now: float, moment: Moment, *, new: bool, due: bool, last: bool) -> None:
        """Put values of the run together by step, and record complete steps. `new`: there was a sample; `due`: there was a step."""
        for single in moment.singles:
            self._rows.add_one(single.step, min(single.at, now), single.name, single.value)
        values, flags = farther(self._late, moment.scalars), moment.scalars_nonfinite
        if moment.by_step or self._rows or due or last or (flags is not None and flags.any()):
            self._rows.add(moment.steps, now, np.where(LASTING & (not due), np.float32(np.nan), values), flags)
            self._late = scalars()
        elif new:  # the sample came after its step, which has a record already
            self._late = np.where(OF_SAMPLES, values, np.float32(np.nan))
        if rows := self._rows.take(every=last or not moment.by_step):
            table = np.array([row.values for row in rows], dtype=np.float32)
            nonfinite = np.array([row.nonfinite for row in rows])
            self._scalars.extend([row.at for row in rows], [row.step for row in rows], table, nonfinite)

    def _record_layers(self, times: Sequence[float], layers: Sequence[str], moments: Sequence[Moment]) -> list[int]:
        """Record moments of the same layers, and return the step of each."""
        self._forget(layers)
        for name in layers:
            self._column.setdefault(name, len(self._column))
        self._sharded = moments[-1].sharded
        width = len(self.quantities) * len(self._column)
        if self._layers.width < width:  # a place in the track for each layer
            fit = max(LEAST, LAYER_BYTES // max(4 * width + -(-width // 8), 1))
            self._layers.shrink(min(RECENT, fit // 2), min(WHOLE, fit // 2 // 2 * 2))
            self._layers.arrange(np.where(np.arange(width) < self._layers.width, np.arange(width), -1))
        shape, columns = (len(moments), len(self._column), len(self.quantities)), [self._column[name] for name in layers]
        values, flags = np.full(shape, np.nan, dtype=np.float32), np.zeros(shape, dtype=np.bool_)
        for place, moment in enumerate(moments):
            values[place, columns] = moment.values
            if moment.nonfinite is not None:
                flags[place, columns] = moment.nonfinite
        steps = []
        for moment in moments:  # the step of the last sample; the present one if none followed it, or if it is unknown
            sampled = moment.sample_step or 0
            self._sample_step = sampled if sampled > self._sample_step else max(self._sample_step, moment.steps)
            steps.append(self._sample_step)
        self._layers.extend(times, steps, values.reshape(len(moments), -1), flags.reshape(len(moments), -1))
        return steps

    def _forget(self, present: Sequence[str]) -> None:
        """Forget absent layers, if these are too many."""
        known = frozenset(present)
        gone = [name for name in self._column if name not in known] if len(self._column) > MOST_GONE else []
        if len(gone) <= MOST_GONE:
            return
        forgotten, width = frozenset(gone[: len(gone) - MOST_GONE // 2]), len(self.quantities)
        kept = {name: column for name, column in self._column.items() if name not in forgotten}
        columns = np.array(list(kept.values()), dtype=np.int64)[:, None] * width + np.arange(width)
        self._layers.arrange(columns.ravel())
        self._column = {name: column for column, name in enumerate(kept)}

    def run(self, window: Window) -> Part:
        """Return the values of the run, `SCALARS`."""
        with self._lock:
            return window.of(self._scalars)

    def grid(self, name: str, window: Window) -> tuple[list[str], Part]:
        """Return the layers, and one quantity of each: values of shape (n, layers). Raises `ValueError` if there is none.

        Both at once, as the next record may forget layers.
        """
        place = self.quantities.index(name)
        with self._lock:
            part = window.of(self._layers)
            return list(self._column), part.columns(slice(place, None, len(self.quantities)))

    def layer(self, name: str, window: Window) -> Part:
        """Return all quantities of one layer: values of shape (n, quantities). Raises `UnknownLayerError` if there is none."""
        with self._lock:
            if name not in self._column:
                raise UnknownLayerError
            column = self._column[name]
            part = window.of(self._layers)
        return part.columns(slice(column * len(self.quantities), (column + 1) * len(self.quantities)))
