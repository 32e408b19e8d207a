"""Recorder: fills the history, in a thread of its own, whether the page is open or not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import compress

import numpy as np

from torch_grad_exporter.aggregation.activations import ActivationSnapshot
from torch_grad_exporter.aggregation.gradients import GradientSnapshot
from torch_grad_exporter.aggregation.tables import Records
from torch_grad_exporter.aggregation.totals import TotalsSnapshot
from torch_grad_exporter.aggregation.worker import Reading
from torch_grad_exporter.errors import Guard
from torch_grad_exporter.lifecycle import BackgroundLoop
from torch_grad_exporter.metrics.families import REMOVED, FloatArray
from torch_grad_exporter.outputs.live.history import (
    ACTIVATIONS,
    MOMENTS,
    QUANTITIES,
    RECORD_SECONDS,
    SCALARS,
    Flags,
    Moment,
    Values,
)
from torch_grad_exporter.transfer.events import Outcome

REMEMBER_SECONDS = 15.0
"""Between two readings of the counters by which problems are judged."""

_ROUNDS = round(REMEMBER_SECONDS / RECORD_SECONDS)


def recorder(
    record: Callable[[], None],
    remember: Callable[[], None],
    *,
    on_error: Callable[[BaseException], None],
    last: Callable[[], None] | None = None,
    interval: float = RECORD_SECONDS,
) -> BackgroundLoop:
    """A loop that calls `record` each second, `remember` each fifteen, and at its end `last`. `on_error` takes what they raise."""
    rounds = itertools.count()

    def remember_now_and_then() -> None:
        if next(rounds) % _ROUNDS == 0:
            remember()

    def failed(error: Exception) -> None:
        # Another thread is busy with the same values, as on a machine under load: the next record has them.
        if not isinstance(error, TimeoutError):
            on_error(error)

    return BackgroundLoop("history", record, remember_now_and_then, guard=Guard(failed), pause=interval, last=last or record)


class Moments:
    """The moment of a reading for the history. `dead_from`: samples from which on a layer's dead ratio means anything.

    `quantities`: of the history.

    Values of samples are only there if there was one since the moment before: the largest norm and z-score, the last ratios.
    """

    def __init__(self, dead_from: int, quantities: Sequence[str] = QUANTITIES) -> None:
        self._dead_from = dead_from
        self._quantities = quantities
        self._steps = (0.0, 0.0)
        self._captured, self._spoiled, self._of_the_run = _Growth(), _Growth(), _Growth()

    def of(self, reading: Reading, steps: int) -> Moment:
        """The moment of a reading after so many steps."""
        gradients = reading.snapshot.gradients
        shown = gradients.table.shown
        layer_values = gradients.layer_values[shown]
        names = list(compress(gradients.table.layers, shown.tolist()))
        new, spoiled = self._grown(gradients, names, layer_values)
        norm, zscore = reading.gradients.peaks[:, shown]
        values = {
            "norm": norm,
            "zero_ratio": np.where(new, layer_values["zero_ratio"], np.nan),
            "dead_ratio": np.where(new & (layer_values["captures"] >= self._dead_from), layer_values["dead_ratio"], np.nan),
            "zscore": zscore,
            # Where an element is not finite neither is: the norm's flag says so.
            **{
                name: np.where(new & layer_values["sized"] & np.isfinite(layer_values[name]), layer_values[name], np.nan)
                for name in MOMENTS
            },
        }
        nonfinite = np.zeros((len(names), len(self._quantities)), dtype=np.bool_)
        flagged = [place for place, name in enumerate(self._quantities) if name in ("norm", *MOMENTS)]
        nonfinite[:, flagged] = (spoiled | (new & layer_values["sized"] & ~np.isfinite(layer_values["norm"])))[:, None]
        scalars, of_the_run = self._scalars(reading)
        return Moment(
            gradients.samples,
            steps,
            names,
            _narrowed([values[name] for name in self._quantities]).T,
            _narrowed([scalars[name] for name in SCALARS]),
            nonfinite,
            of_the_run,
            _sample_step(gradients),
            frozenset(compress(names, gradients.table.sharded[shown].tolist())),
        )

    def _grown(self, gradients: GradientSnapshot, names: list[str], layer_values: Records) -> tuple[Flags, Flags]:
        """Which of the layers had a sample since the moment before, and which an element that was not finite.

        A layer that is not tracked at present goes on counting when it is tracked again.
        """
        every = [*names, *gradients.untracked.labels]
        values = np.concatenate([layer_values, gradients.untracked.values])
        new = self._captured.since(every, values["captures"])
        spoiled = self._spoiled.since(every, values["nans"] + values["infs"])
        return new[: len(names)], spoiled[: len(names)]

    def _scalars(self, reading: Reading) -> tuple[dict[str, float], Flags]:
        """The values of the run by name, and which of them were not finite since the moment before."""
        gradients, totals = reading.snapshot.gradients, reading.snapshot.totals
        # One rank alone cannot know the norm of a gradient that is sharded.
        whole = bool(len(gradients.totals)) and (gradients.norm_observed or not gradients.table.sharded.any())
        norm, after = reading.gradients.peaks_of_totals[:, 0].tolist() if whole else (np.nan, np.nan)
        skipped_or_not = sum(float(gradients.totals[f"nonfinite_{one.value}"][0]) for one in Outcome) if whole else 0.0
        counts = {"loss": float(totals.loss_nonfinite), "norm": skipped_or_not}
        values = {
            "loss": reading.losses.mean if reading.losses.count else np.nan,
            "norm": norm,
            "norm_after_clip": after,
            "step_seconds": self._step_seconds(totals),
            "learning_rate": next(iter(totals.learning_rates.values()), np.nan),
        }
        grown = self._of_the_run.since(list(SCALARS), np.array([counts.get(name, 0.0) for name in SCALARS]))
        return values, grown

    def _step_seconds(self, totals: TotalsSnapshot) -> float:
        """The mean since the last moment."""
        count, seconds = float(totals.duration_buckets.sum()), totals.duration_sum
        before, self._steps = self._steps, (count, seconds)
        return (seconds - before[1]) / (count - before[0]) if count > before[0] else np.nan


class ActivationMoments:
    """The moment of the activations for a history of theirs."""

    def __init__(self, activations: Callable[[], ActivationSnapshot]) -> None:
        self._activations = activations
        self._nonfinite = _Growth()

    def of(self, steps: int) -> Moment:
        """The moment after so many steps; a layer without a value of the last sample has none."""
        found = self._activations()
        layers = {name: one for name, one in found.layers.items() if name != REMOVED}
        last = [one if one.sample == found.samples else one.only_counts() for one in layers.values()]
        columns = [[one.rms for one in last], [one.zero_ratio for one in last], [one.dead_ratio for one in last]]
        values = [np.array([np.nan if one is None else one for one in column]) for column in columns]
        names = list(layers)
        nonfinite = np.zeros((len(names), len(ACTIVATIONS)), dtype=np.bool_)
        nonfinite[:, 0] = self._nonfinite.since(names, np.array([one.nans + one.infs for one in layers.values()]))
        nothing = np.full(len(SCALARS), np.nan, dtype=np.float32)
        return Moment(found.samples, steps, names, _narrowed(values).T, nothing, nonfinite)


class _Growth:
    """Says which counters have grown since they were last read, at first since they were 0.

    One that has fallen began anew, as that of a layer that was removed and added again. It forgets those that are gone.
    """

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def since(self, names: Sequence[str], counts: FloatArray) -> Flags:
        before = np.array([self._before.get(name, 0.0) for name in names])
        self._before = dict(zip(names, counts.tolist(), strict=True))
        grown: Flags = (counts != before) & (counts > 0)
        return grown


def _narrowed(values: Sequence[FloatArray] | Sequence[float]) -> Values:
    """In 32 bits, of which the largest number stands for what they cannot hold."""
    most = float(np.finfo(np.float32).max)
    return np.clip(np.array(values, dtype=np.float64), -most, most).astype(np.float32)


def _sample_step(gradients: GradientSnapshot) -> int | None:
    """The step of the last sample, if one is known."""
    seen = gradients.totals["sample_step"][gradients.totals["seen"]]
    return int(seen.max()) if len(seen) else None
