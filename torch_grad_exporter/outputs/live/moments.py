"""Moments: what the history records of a reading, of gradients and of activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

import numpy as np

from torch_grad_exporter.inspection.activations import ActivationTotals
from torch_grad_exporter.metrics.families import REMOVED, FloatArray
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.outputs.live.history import ACTIVATIONS, LOGGED, MEAN_AND_STDDEV, QUANTITIES, Moment
from torch_grad_exporter.outputs.live.step_rows import OF_SAMPLES, SCALARS, scalars
from torch_grad_exporter.outputs.live.track import Flags, Values
from torch_grad_exporter.store.cursors import Single
from torch_grad_exporter.store.histograms import Records
from torch_grad_exporter.store.logged_values import LoggedValues
from torch_grad_exporter.store.records import Outcome
from torch_grad_exporter.store.run_table import TotalsSnapshot
from torch_grad_exporter.store.snapshots import GradientSnapshot, Reading


class GradientMoments:
    """The moments of readings. Values of samples are only present if there was a sample since the moment before.

    These are the largest norm and z-score, and the last ratios, of which the dead one means nothing before `dead_from` samples.
    """

    def __init__(self, dead_from: int, quantities: Sequence[str] = QUANTITIES) -> None:
        self._dead_from, self._quantities = dead_from, quantities
        self._spread = [name for name in quantities if name in MEAN_AND_STDDEV]
        self._flagged = [place for place, name in enumerate(quantities) if name in ("norm", *MEAN_AND_STDDEV)]
        # The table of the last sample, and its layers that are shown. A new table is rare.
        self._table: ParameterTable | None = None
        self._shown: slice | Flags = slice(None)
        self._names: list[str] = []
        self._sharded: frozenset[str] = frozenset()
        self._steps = (0.0, 0.0)
        self._since: tuple[float, int] | None = None  # durations and steps from which on their ratio counts
        self._single_nonfinite_losses = 0
        self._captured, self._spoiled, self._norms, self._losses = _Growth(), _Growth(), _Growth(), _Growth()

    def of(self, reading: Reading, steps: int) -> Moment:
        """Return the moment of a reading after this many steps."""
        moment = self.of_sample(reading, steps)
        totals, singles = reading.snapshot.totals, reading.singles
        single_rate = any(single.name == "learning_rate" for single in singles)
        values = scalars(
            loss=reading.losses.mean if reading.losses.count else np.nan,
            step_seconds=self._step_seconds(totals, [single for single in singles if single.name == "step_seconds"], steps),
            learning_rate=np.nan if single_rate else next(iter(totals.learning_rates.values()), np.nan),
        )
        self._single_nonfinite_losses += sum(single.name == "loss" and np.isinf(single.value) for single in singles)
        nonfinite = self._losses.of_scalar("loss", float(totals.loss_nonfinite - self._single_nonfinite_losses))
        flags = nonfinite if moment.scalars_nonfinite is None else moment.scalars_nonfinite | nonfinite
        shown = np.where(OF_SAMPLES, moment.scalars, values)
        return replace(moment, steps=steps, scalars=shown, scalars_nonfinite=flags, singles=singles)

    def of_sample(self, reading: Reading, steps: int) -> Moment:
        """Return the moment of a sample, at its step, or at `steps` if that is unknown; without values of each step."""
        gradients = reading.snapshot.gradients
        seen = gradients.totals["sample_step"][gradients.totals["seen"]]
        step = int(seen.max()) if len(seen) else None
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
            # If an element is not finite, neither is its mean: the flag of the norm says so.
            **{
                name: np.where(new & layer_values["sized"] & np.isfinite(layer_values[name]), layer_values[name], np.nan)
                for name in self._spread
            },
        }
        nonfinite = np.zeros((len(names), len(self._quantities)), dtype=np.bool_)
        nonfinite[:, self._flagged] = (spoiled | (new & layer_values["sized"] & ~np.isfinite(layer_values["norm"])))[:, None]
        # One rank alone cannot know the norm of a gradient that is sharded.
        whole = bool(len(gradients.totals)) and (gradients.norm_observed or not gradients.table.sharded.any())
        global_norm, after = reading.gradients.peaks_of_totals[:, 0].tolist() if whole else (np.nan, np.nan)
        skipped_or_not = sum(float(gradients.totals[f"nonfinite_{outcome.value}"][0]) for outcome in Outcome) if whole else 0.0
        norms, spoiled_norms = scalars(norm=global_norm, norm_after_clip=after), self._norms.of_scalar("norm", skipped_or_not)
        columns = _narrowed([values[name] for name in self._quantities]).T
        at = steps if step is None else step
        return Moment(gradients.samples, at, names, columns, norms, nonfinite, spoiled_norms, step, self._sharded)

    def _grown(self, gradients: GradientSnapshot, names: list[str], layer_values: Records) -> tuple[Flags, Flags]:
        """Return which layers had a sample since the moment before, and which had an element that was not finite.

        A layer that is not tracked at present goes on counting when it is tracked again.
        """
        captures, bad = layer_values["captures"], layer_values["nans"] + layer_values["infs"]
        if labels := gradients.untracked.labels:
            names, more = [*names, *labels], gradients.untracked.values
            captures, bad = np.concatenate([captures, more["captures"]]), np.concatenate([bad, more["nans"] + more["infs"]])
        new, spoiled = self._captured.since(names, captures.copy()), self._spoiled.since(names, bad)
        return new[: len(layer_values)], spoiled[: len(layer_values)]

    def _step_seconds(self, totals: TotalsSnapshot, singles: Sequence[Single], steps: int) -> float:
        """Return the mean since the last moment, without single values.

        Durations are of the steps of any optimizer; of several, those of one step of the busiest one are put together.
        """
        count, seconds = float(totals.duration_buckets.sum()), totals.duration_sum
        before, self._steps = self._steps, (count, seconds)
        if self._since is None:
            self._since = (before[0], singles[0].step - 1) if singles else (count, steps)
        others = count - before[0] - len(singles)
        if others <= 0:
            return np.nan
        several = len({optimizer for optimizer, _ in totals.learning_rates}) > 1
        rounds = (count - self._since[0]) / max(steps - self._since[1], 1) if several else 1.0
        return (seconds - before[1] - sum(single.value for single in singles)) / others * max(rounds, 1.0)


class ActivationMoments:
    """The moments of activations, for a history of their own."""

    def __init__(self, activations: ActivationTotals) -> None:
        self._activations = activations
        self._nonfinite = _Growth()

    def of(self, steps: int, sample_step: int | None = None) -> Moment:
        """Return the moment after this many steps. Layers without a value in the last sample, at `sample_step`, have none."""
        snapshot = self._activations.snapshot()
        layers = {name: layer for name, layer in snapshot.layers.items() if name != REMOVED}
        last = [layer if layer.sample == snapshot.samples else layer.only_counts() for layer in layers.values()]
        known = [value for layer in last for value in (layer.rms, layer.zero_ratio, layer.dead_ratio)]
        values = np.array([np.nan if value is None else value for value in known]).reshape(len(last), len(ACTIVATIONS))
        names = list(layers)
        nonfinite = np.zeros((len(names), len(ACTIVATIONS)), dtype=np.bool_)
        nonfinite[:, 0] = self._nonfinite.since(names, np.array([layer.nans + layer.infs for layer in layers.values()]))
        return Moment(snapshot.samples, steps, names, _narrowed(values), scalars(), nonfinite, sample_step=sample_step)


class LoggedMoments:
    """The moments of logged values, for a history of their own in which names stand for layers."""

    def __init__(self, logged: LoggedValues) -> None:
        self._logged = logged
        self._last = Moment(0, 0, (), np.zeros((0, len(LOGGED)), dtype=np.float32), scalars())

    def take(self) -> Moment:
        """Return the last moment, with those of all rows since the last call."""
        earlier = []
        for row in self._logged.rows():
            names = (*dict.fromkeys((*row.values, *row.nonfinite)),)
            values = _narrowed([row.values.get(name, np.nan) for name in names])[:, None]
            flags = np.array([[name in row.nonfinite] for name in names], dtype=np.bool_).reshape(len(names), 1)
            samples = self._last.samples + 1
            self._last = Moment(samples, row.step, names, values, scalars(), flags, sample_step=row.step)
            earlier.append((row.at, self._last))
        return replace(self._last, earlier=earlier)


class _Growth:
    """The growth of counters since they were last read, at first since 0.

    A counter that has fallen began again, like that of a layer that was removed and added. Absent counters are forgotten.
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
        """Return the same for a counter of the run, shape (scalars,)."""
        before, self._count = self._count, count
        return np.array([scalar == name and 0 < count != before for scalar in SCALARS])


def _narrowed(values: FloatArray | Sequence[FloatArray] | Sequence[float]) -> Values:
    """Return values in 32 bits, whose largest number stands for larger ones."""
    most = float(np.finfo(np.float32).max)
    # For few layers this takes half as long as `np.clip`.
    return np.minimum(np.maximum(np.array(values, dtype=np.float64), -most), most).astype(np.float32)
