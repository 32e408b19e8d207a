"""Recorder: fills the history, in a thread of its own, whether the page is open or not."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress

import numpy as np

from torch_grad_exporter.errors import Guard
from torch_grad_exporter.inspection.activation_totals import ActivationSnapshot
from torch_grad_exporter.lifecycle import BackgroundLoop
from torch_grad_exporter.metrics.families import REMOVED, FloatArray
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.outputs.live.history import ACTIVATIONS, MOMENTS, QUANTITIES, RECORD_SECONDS, Moment
from torch_grad_exporter.outputs.live.rows import OF_SAMPLES, SCALARS, scalars
from torch_grad_exporter.outputs.live.track import RECENT, Flags, Values
from torch_grad_exporter.store.histograms import Records
from torch_grad_exporter.store.records import PLACED, Outcome
from torch_grad_exporter.store.run_table import TotalsSnapshot
from torch_grad_exporter.store.snapshots import GradientSnapshot, Reading
from torch_grad_exporter.store.worker import Worker

REMEMBER_SECONDS = 15.0
"""Between two readings of the counters by which problems are judged."""

# Between two looks of the recorder while nobody looks at the page, of a training that is fast or does nothing. Each look costs
# about half a millisecond, of which waking up is a part.
UNSEEN_SECONDS = 5.0

# Steps a second from which on a training is fast. Slower steps have a record each.
FAST = 4.0

# How long the page counts as open after a request. It makes one every other second.
OPEN_SECONDS = 10.0


class Recorder(BackgroundLoop):
    """A loop that calls `record` each second or less often, `remember` each fifteen, and at its end `last`.

    `on_error` takes what they raise. `steps`: how many there have been. `clock`: in seconds.
    """

    def __init__(
        self,
        record: Callable[[], None],
        remember: Callable[[], None],
        steps: Callable[[], int],
        *,
        on_error: Callable[[BaseException], None],
        last: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._remember, self._steps, self._clock = remember, steps, clock
        self._remember_at, self._open_until = -math.inf, -math.inf
        self._stepped, self._fast = (clock(), 0), False  # when there was last a new step, and how many there were
        super().__init__(
            "history", record, self._remember_now_and_then, guard=Guard(unless_late(on_error)), pause=self._pause, last=last
        )

    def looked_at(self) -> None:
        """Somebody looks at the page. From any thread."""
        now = self._clock()
        if now > self._open_until:
            self.wake()
        self._open_until = now + OPEN_SECONDS

    def _remember_now_and_then(self) -> None:
        now = self._clock()
        if now >= self._remember_at:
            self._remember_at = now + REMEMBER_SECONDS
            self._remember()

    def _pause(self) -> float:
        now, steps = self._clock(), self._steps()
        before, known = self._stepped
        if steps != known:
            self._fast, self._stepped = steps - known >= FAST * (now - before), (now, steps)
        idle = now - self._stepped[0] >= UNSEEN_SECONDS
        return UNSEEN_SECONDS if now > self._open_until and (self._fast or idle) else RECORD_SECONDS


def unless_late(on_error: Callable[[BaseException], None]) -> Callable[[Exception], None]:
    """For a guard: tells of an error, unless another thread was busy with the same values, which the next record then has."""

    def failed(error: Exception) -> None:
        if not isinstance(error, TimeoutError):
            on_error(error)

    return failed


class GradientMoments:
    """The moment of a reading for the history. `dead_from`: samples from which on a layer's dead ratio means anything.

    `quantities`: of the history.

    Values of samples are only there if there was one since the moment before: the largest norm and z-score, the last ratios.
    """

    def __init__(self, dead_from: int, quantities: Sequence[str] = QUANTITIES) -> None:
        self._dead_from = dead_from
        self._quantities = quantities
        self._moments = [name for name in quantities if name in MOMENTS]
        self._flagged = [place for place, name in enumerate(quantities) if name in ("norm", *MOMENTS)]
        # The table of the last sample, and its layers that are shown: a new table is rare.
        self._table: ParameterTable | None = None
        self._shown: slice | Flags = slice(None)
        self._names: list[str] = []
        self._sharded: frozenset[str] = frozenset()
        self._steps = (0.0, 0.0)
        self._losses_told = 0
        """How many losses that are not finite were told by themselves."""
        self._last: tuple[Records, Moment] | None = None
        """The layers' values when they were last gone through, and the moment: where they are the same, nothing has come."""
        self._without: Moment | None = None
        """What is left of that moment without what was new then."""
        self._captured, self._spoiled, self._norms, self._losses = _Growth(), _Growth(), _Growth(), _Growth()

    def of(self, reading: Reading, steps: int) -> Moment:
        """The moment of a reading after so many steps."""
        moment = self._without_sample(reading) or self.of_sample(reading, steps)
        values, nonfinite = self._of_steps(reading)
        flags = nonfinite if moment.scalars_nonfinite is None else moment.scalars_nonfinite | nonfinite
        return replace(
            moment,
            steps=steps,
            scalars=np.where(OF_SAMPLES, moment.scalars, values),
            scalars_nonfinite=flags,
            singles=reading.singles,
        )

    def of_sample(self, reading: Reading, steps: int) -> Moment:
        """That of a sample, without what is of each step. It is of the step of the sample, or of `steps` if that is not known."""
        gradients = reading.snapshot.gradients
        step = _sample_step(gradients)
        if self._table is not gradients.table:
            self._table, shown = gradients.table, gradients.table.shown
            self._shown = slice(None) if shown.all() else shown
            self._names = list(compress(gradients.table.layers, shown.tolist()))
            self._sharded = frozenset(compress(gradients.table.layers, (shown & gradients.table.sharded).tolist()))
        names, layer_values = self._names, gradients.layer_values[self._shown]
        new, spoiled = self._grown(gradients, names, layer_values)
        norm, zscore = reading.gradients.peaks[:, self._shown]
        values = {
            "norm": norm,
            "zero_ratio": np.where(new, layer_values["zero_ratio"], np.nan),
            "dead_ratio": np.where(new & (layer_values["captures"] >= self._dead_from), layer_values["dead_ratio"], np.nan),
            "zscore": zscore,
            # Where an element is not finite neither is: the norm's flag says so.
            **{
                name: np.where(new & layer_values["sized"] & np.isfinite(layer_values[name]), layer_values[name], np.nan)
                for name in self._moments
            },
        }
        nonfinite = np.zeros((len(names), len(self._quantities)), dtype=np.bool_)
        nonfinite[:, self._flagged] = (spoiled | (new & layer_values["sized"] & ~np.isfinite(layer_values["norm"])))[:, None]
        norms, spoiled_norms = self._of_samples(reading)
        moment = Moment(
            gradients.samples,
            steps if step is None else step,
            names,
            _narrowed([values[name] for name in self._quantities]).T,
            norms,
            nonfinite,
            spoiled_norms,
            step,
            self._sharded,
        )
        self._last, self._without = (gradients.layer_values, moment), None
        return moment

    def _without_sample(self, reading: Reading) -> Moment | None:
        """What `of_sample` makes of the gradients where they are still those of the moment before, else `None`."""
        if self._last is None or reading.snapshot.gradients.layer_values is not self._last[0]:
            return None
        if self._without is None:
            before, shape = self._last[1], self._last[1].values.shape
            nothing, none = np.full(shape, np.nan, dtype=np.float32), np.zeros(shape, dtype=np.bool_)
            none_of_run = np.zeros(len(SCALARS), dtype=np.bool_)
            self._without = replace(before, values=nothing, scalars=scalars(), nonfinite=none, scalars_nonfinite=none_of_run)
        return self._without

    def _grown(self, gradients: GradientSnapshot, names: list[str], layer_values: Records) -> tuple[Flags, Flags]:
        """Which of the layers had a sample since the moment before, and which an element that was not finite.

        A layer that is not tracked at present goes on counting when it is tracked again.
        """
        captures, bad = layer_values["captures"], layer_values["nans"] + layer_values["infs"]
        if labels := gradients.untracked.labels:
            names, more = [*names, *labels], gradients.untracked.values
            captures, bad = np.concatenate([captures, more["captures"]]), np.concatenate([bad, more["nans"] + more["infs"]])
        new, spoiled = self._captured.since(names, captures.copy()), self._spoiled.since(names, bad)
        return new[: len(layer_values)], spoiled[: len(layer_values)]

    def _of_samples(self, reading: Reading) -> tuple[Values, Flags]:
        """The norms of the run, and which of them were not finite since the moment before."""
        gradients = reading.snapshot.gradients
        # One rank alone cannot know the norm of a gradient that is sharded.
        whole = bool(len(gradients.totals)) and (gradients.norm_observed or not gradients.table.sharded.any())
        norm, after = reading.gradients.peaks_of_totals[:, 0].tolist() if whole else (np.nan, np.nan)
        skipped_or_not = sum(float(gradients.totals[f"nonfinite_{one.value}"][0]) for one in Outcome) if whole else 0.0
        return scalars(norm=norm, norm_after_clip=after), self._norms.of_scalar("norm", skipped_or_not)

    def _of_steps(self, reading: Reading) -> tuple[Values, Flags]:
        """The other values of the run, and which were not finite since the moment before; without those that are there alone."""
        totals, alone = reading.snapshot.totals, {one.name: one.value for one in reading.singles}
        self._losses_told += sum(one.name == "loss" and np.isinf(one.value) for one in reading.singles)
        values = scalars(
            loss=reading.losses.mean if reading.losses.count else np.nan,
            step_seconds=self._step_seconds(totals, [one.value for one in reading.singles if one.name == "step_seconds"]),
            learning_rate=np.nan if "learning_rate" in alone else next(iter(totals.learning_rates.values()), np.nan),
        )
        return values, self._losses.of_scalar("loss", float(totals.loss_nonfinite - self._losses_told))

    def _step_seconds(self, totals: TotalsSnapshot, alone: Sequence[float]) -> float:
        """The mean since the last moment, without those that are there alone."""
        count, seconds = float(totals.duration_buckets.sum()), totals.duration_sum
        before, self._steps = self._steps, (count, seconds)
        others = count - before[0] - len(alone)
        return (seconds - before[1] - sum(alone)) / others if others > 0 else np.nan


class ActivationMoments:
    """The moment of the activations for a history of theirs."""

    def __init__(self, activations: Callable[[], ActivationSnapshot]) -> None:
        self._activations = activations
        self._nonfinite = _Growth()

    def of(self, steps: int, sample_step: int | None = None) -> Moment:
        """The moment after so many steps, with the step of the last sample; a layer without a value of that one has none."""
        found = self._activations()
        layers = {name: one for name, one in found.layers.items() if name != REMOVED}
        last = [one if one.sample == found.samples else one.only_counts() for one in layers.values()]
        columns = [[one.rms for one in last], [one.zero_ratio for one in last], [one.dead_ratio for one in last]]
        values = [np.array([np.nan if one is None else one for one in column]) for column in columns]
        names = list(layers)
        nonfinite = np.zeros((len(names), len(ACTIVATIONS)), dtype=np.bool_)
        nonfinite[:, 0] = self._nonfinite.since(names, np.array([one.nans + one.infs for one in layers.values()]))
        return Moment(found.samples, steps, names, _narrowed(values).T, scalars(), nonfinite, sample_step=sample_step)


class Looks:
    """What the histories of gradients and of activations record at a look: the present moment, and those of the samples before.

    The first `RECENT` samples have a moment each, on the thread that drains; the others share that of the look. `steps`: of the
    optimizer that took the most. `now`: Unix time. `judge`: gets the reading of each of these samples, and its step.
    """

    def __init__(
        self,
        host: Worker,
        moments: GradientMoments,
        activations: ActivationMoments | None,
        steps: Callable[[], int],
        now: Callable[[], float],
        *,
        judge: Callable[[Reading, int], object] = lambda _reading, _step: None,
    ) -> None:
        self._judge = judge
        self._host, self._moments, self._activations = host, moments, activations
        self._steps, self._now = steps, now
        self._samples: deque[tuple[float, Moment]] = deque()
        self._inner: deque[tuple[float, Moment]] = deque()
        self._last = Moment(0, 0, (), np.zeros((0, len(ACTIVATIONS)), dtype=np.float32), scalars())
        """The last moment of the activations."""
        self._seen: tuple[int, int | None] | None = None
        """The steps, and the changes of the host's side, at the last look."""
        self._shown = self._last
        """The last moment of the activations that was asked for."""
        self._cursor = host.cursor(singles=PLACED)
        self._each = host.each_sample(self._cursor, self._sampled, RECENT)

    def gradients(self) -> Moment:
        """The moment of the gradients and of the run. Raises as `Worker.read`."""
        steps = self._steps()  # those that come from now on may not be in the reading
        moment, changes = self._host.read_as(self._cursor, lambda reading: (self._present(reading), self._host.changes))
        self._seen = steps, changes
        return moment

    def activations(self) -> Moment:
        """That of the activations, as of the last call of `gradients`."""
        earlier, self._shown = _taken(self._inner), self._last
        return replace(earlier[-1][1] if earlier else self._last, earlier=earlier)

    def is_quiet(self) -> bool:
        """Whether nothing has come since the last call of `gradients`."""
        changes = self._host.changes
        return changes is not None and (self._steps(), changes) == self._seen

    def is_quiet_inside(self) -> bool:
        """The same of the activations."""
        return self._shown is self._last and not self._inner

    def _sampled(self, at: float, reading: Reading) -> None:
        """There is one more sample."""
        moment = self._moments.of_sample(reading, self._steps())
        self._judge(reading, moment.steps)
        self._samples.append((at, moment))
        self._look_inside(at, moment)

    def _present(self, reading: Reading) -> Moment:
        by_step = self._each.left > 0
        moment = self._moments.of(reading, self._steps())
        self._look_inside(self._now(), moment)
        return replace(moment, earlier=_taken(self._samples), by_step=by_step)

    def _look_inside(self, at: float, moment: Moment) -> None:
        """The activations of a sample are there before its gradients."""
        if self._activations is not None:
            inner = self._activations.of(moment.steps, moment.sample_step)
            if inner.samples != self._last.samples:
                self._inner.append((at, inner))
                self._last = inner


def _taken(line: deque[tuple[float, Moment]]) -> list[tuple[float, Moment]]:
    """All that are there, the first one first."""
    return [line.popleft() for _ in range(len(line))]


class _Growth:
    """Says which counters have grown since they were last read, at first since they were 0.

    One that has fallen began anew, as that of a layer that was removed and added again. It forgets those that are gone.
    """

    def __init__(self) -> None:
        self._names: Sequence[str] = ()
        self._counts: FloatArray = np.zeros(0)
        self._count = 0.0

    def since(self, names: Sequence[str], counts: FloatArray) -> Flags:
        before = self._counts
        if names is not self._names and names != self._names:
            known = dict(zip(self._names, before.tolist(), strict=True))
            before = np.array([known.get(name, 0.0) for name in names])
        self._names, self._counts = names, counts
        grown: Flags = (counts != before) & (counts > 0)
        return grown

    def of_scalar(self, name: str, count: float) -> Flags:
        """The same of one of the run, shape (scalars,)."""
        before, self._count = self._count, count
        return np.array([scalar == name and 0 < count != before for scalar in SCALARS])


def _narrowed(values: Sequence[FloatArray] | Sequence[float]) -> Values:
    """In 32 bits, of which the largest number stands for what they cannot hold."""
    most = float(np.finfo(np.float32).max)
    # For a few layers this takes half as long as `np.clip`.
    return np.minimum(np.maximum(np.array(values, dtype=np.float64), -most), most).astype(np.float32)


def _sample_step(gradients: GradientSnapshot) -> int | None:
    """The step of the last sample, if one is known."""
    seen = gradients.totals["sample_step"][gradients.totals["seen"]]
    return int(seen.max()) if len(seen) else None
