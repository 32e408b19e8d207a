"""Collector `gradients`: what the samples say per layer and over each optimizer's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np

from torch_grad_exporter.aggregation.exponential import Counts
from torch_grad_exporter.aggregation.gradients import GradientSnapshot
from torch_grad_exporter.aggregation.tables import Records
from torch_grad_exporter.metrics import catalogue as c
from torch_grad_exporter.metrics.families import BoolArray, Family, FloatArray, LabelRows, RowCache, Spec
from torch_grad_exporter.transfer.events import Outcome

DEAD_FROM = 20
"""Samples before which a dead ratio says nothing, or the whole window if that is shorter."""


def dead_from(dead_window: int) -> int:
    """Samples from which on a layer's dead ratio is shown."""
    return min(DEAD_FROM, dead_window)


_LAST_VALUES = {
    c.GRAD_NORM: "norm",
    c.GRAD_NORM_ZSCORE: "zscore",
    c.GRAD_MAX_MAGNITUDE: "max_magnitude",
    c.GRAD_ZERO_RATIO: "zero_ratio",
    c.GRAD_ZERO_UNITS_RATIO: "zero_units_ratio",
    c.GRAD_MISSING_PARAMETERS: "missing",
}
_OF_THE_WHOLE = {c.GRAD_NORM, c.GRAD_MAX_MAGNITUDE, c.WEIGHT_NORM}
_TOTALS = {
    c.GRAD_NORM_SQUARED_TOTAL: "squared_total",
    c.GRAD_CAPTURES: "captures",
    c.GRAD_NORM_SPIKES: "spikes",
}
_MOMENTS = {c.GRAD_MEAN: "mean", c.GRAD_STDDEV: "stddev", c.GRAD_MIN: "minimum", c.GRAD_MAX: "maximum"}
_WEIGHTS = {c.WEIGHT_NORM: "weight_norm", c.WEIGHT_UPDATE_RATIO: "update_ratio"}


@dataclass(frozen=True, slots=True, eq=False)
class _Counted:
    """What only grows, by layer. `whole`: those of which this rank has all."""

    layers: LabelRows
    values: Records
    whole: BoolArray
    exponential: tuple[Counts, ...] | None = None


class GradientCollector:
    """Families of the aggregated gradients. `names`: the optimizers' names by number, read at each scrape."""

    name = "gradients"

    def __init__(
        self,
        snapshot: Callable[[], GradientSnapshot],
        names: Sequence[str],
        *,
        dead_window: int,
        moments: bool = False,
        weights: bool = False,
    ) -> None:
        self._snapshot = snapshot
        self._names = names
        self._dead_from = dead_from(dead_window)
        self._moments = moments
        self._weights = weights
        self._layers, self._counted, self._kinds = RowCache(), RowCache(), RowCache()
        self._optimizers, self._outcomes = RowCache(), RowCache()

    def collect(self) -> Iterator[Family]:
        """The families, all of one and the same sample."""
        snapshot = self._snapshot()
        yield from self._per_layer(snapshot)
        yield from self._per_optimizer(snapshot)

    def _per_layer(self, snapshot: GradientSnapshot) -> Iterator[Family]:
        table, shown = snapshot.table, snapshot.table.shown
        names = [layer for layer, here in zip(table.layers, shown.tolist(), strict=True) if here]
        layers = self._layers.get(tuple((layer,) for layer in names))
        layer_values, recent_max = snapshot.layer_values[shown], snapshot.recent_max[shown]
        read = layer_values["captures"] > 0
        sized = read & layer_values["sized"]
        # One rank alone cannot know the norm of a gradient that is sharded: it shows that of its part, named so.
        whole = ~table.sharded[shown]
        judged = {c.GRAD_NORM_ZSCORE, c.GRAD_ZERO_UNITS_RATIO, c.GRAD_MISSING_PARAMETERS}
        for spec, column in _LAST_VALUES.items():
            # The norm itself may be NaN; where NaN means that there is no value, it is left out.
            present = ~np.isnan(layer_values[column]) if spec in judged else read
            yield Family(spec, layer_values[column], layers, sized & whole if spec in _OF_THE_WHOLE else present)
        yield Family(c.GRAD_SHARD_NORM, layer_values["norm"], layers, sized & ~whole)
        with np.errstate(over="ignore"):
            yield Family(c.GRAD_NORM_SQUARED, np.square(layer_values["part"]), layers, sized)
        counted = self._counted_layers(snapshot, _Counted(layers, layer_values, whole))
        for spec, column in _TOTALS.items():
            yield Family(spec, counted.values[column], counted.layers)
        yield Family(
            c.GRAD_NORM_DISTRIBUTION, counted.values["buckets"], counted.layers, counted.whole,
            sums=counted.values["bucket_sum"], exponential=counted.exponential,
        )  # fmt: skip
        yield Family(c.GRAD_NORM_RECENT_MAX, recent_max, layers, whole & ~np.isnan(recent_max))
        yield Family(c.GRAD_UNITS, layer_values["units"], layers, read & (layer_values["units"] > 0))
        dead = layer_values["dead_ratio"]
        yield Family(c.GRAD_DEAD_RATIO, dead, layers, ~np.isnan(dead) & (layer_values["captures"] >= self._dead_from))
        nonfinite = np.concatenate([counted.values["nans"], counted.values["infs"]])
        kinds = self._kinds.get(tuple((layer, kind) for kind in ("nan", "inf") for (layer,) in counted.layers.rows))
        yield Family(c.GRAD_NONFINITE_ELEMENTS, nonfinite, kinds)
        if self._moments:
            yield from (Family(spec, layer_values[column], layers, sized) for spec, column in _MOMENTS.items())
        if self._weights:
            for spec, column in _WEIGHTS.items():
                known = ~np.isnan(layer_values[column])
                yield Family(spec, layer_values[column], layers, known & whole if spec in _OF_THE_WHOLE else known)

    def _counted_layers(self, snapshot: GradientSnapshot, shown: _Counted) -> _Counted:
        """The shown layers of the table, those that are not tracked at present, and all removed ones together."""
        more, counts = snapshot.untracked, None
        if snapshot.exponential is not None:
            counts = (*compress(snapshot.exponential, snapshot.table.shown.tolist()), *more.exponential)
        if not more.labels:
            return replace(shown, exponential=counts)
        layers = self._counted.get((*shown.layers.rows, *((layer,) for layer in more.labels)))
        values = np.concatenate([shown.values, more.values])
        return _Counted(layers, values, np.concatenate([shown.whole, ~more.values["sharded"]]), counts)

    def _per_optimizer(self, snapshot: GradientSnapshot) -> Iterator[Family]:
        totals, names = self._labelled(snapshot)
        rows = self._optimizers.get(tuple((name,) for name in names))
        whole = np.full(len(names), snapshot.norm_observed or not snapshot.table.sharded.any())
        clip = totals["clip_known"] & whole
        yield Family(c.GRAD_GLOBAL_NORM, totals["norm"], rows, totals["sized"] & whole)
        more: tuple[Counts, ...] = ({},) * (len(names) - len(snapshot.totals))
        counts = None if snapshot.exponential_totals is None else snapshot.exponential_totals + more
        yield Family(c.GRAD_GLOBAL_NORM_DISTRIBUTION, totals["buckets"], rows, whole, sums=totals["bucket_sum"], exponential=counts)
        yield Family(c.GRAD_GLOBAL_NORM_SPIKES, totals["spikes"], rows)
        yield Family(c.GRAD_GLOBAL_NORM_AFTER_CLIP, totals["after_clip"], rows, clip)
        yield Family(c.GRAD_CLIP_COEFFICIENT, totals["coefficient"], rows, clip)
        yield Family(c.GRAD_CLIPPED_STEPS, totals["clipped"], rows)
        yield from self._local(snapshot, rows)
        yield Family(c.GRAD_SAMPLE_STEP, totals["sample_step"], rows, totals["seen"])
        yield self._nonfinite(totals, names)

    def _local(self, snapshot: GradientSnapshot, rows: LabelRows) -> Iterator[Family]:
        """What is of this rank alone, if it is measured."""
        if not snapshot.local:
            return
        found = [snapshot.local.get(number) for number in self._numbers(snapshot)] or [None]
        for spec, values in (
            (c.GRAD_LOCAL_NORM, [None if one is None else one.norm for one in found]),
            (c.GRAD_NOISE_SCALE, [None if one is None else one.noise_scale for one in found]),
        ):
            present = np.array([value is not None for value in values])
            yield Family(spec, np.array([value or 0.0 for value in values]), rows, present)

    def _nonfinite(self, totals: np.ndarray[tuple[int], np.dtype[np.void]], names: list[str]) -> Family:
        rows: LabelRows = self._outcomes.get(tuple((name, outcome.value) for outcome in Outcome for name in names))
        values: FloatArray = np.concatenate([totals[f"nonfinite_{outcome.value}"] for outcome in Outcome])
        spec: Spec = c.GRAD_NONFINITE_STEPS
        return Family(spec, values, rows)

    def _numbers(self, snapshot: GradientSnapshot) -> tuple[int, ...]:
        """The optimizers in the order of their rows; those without a sample come last, unless there is only one."""
        optimizers, known = snapshot.optimizers, len(self._names)
        return optimizers + tuple(number for number in range(known if known > 1 else 0) if number not in optimizers)

    def _labelled(self, snapshot: GradientSnapshot) -> tuple[np.ndarray[tuple[int], np.dtype[np.void]], list[str]]:
        """The values over each optimizer's parameters and its label: none, which is the empty one, while only one is known.

        Of an optimizer that is known and has no sample yet there are the totals, which are 0.
        """
        names, optimizers = list(self._names), self._numbers(snapshot)
        more = np.zeros(max(1, len(optimizers)) - len(snapshot.totals), dtype=snapshot.totals.dtype)
        totals = np.concatenate([snapshot.totals, more])
        if len(optimizers) <= 1:
            return totals, [""]
        return totals, [names[number] if 0 <= number < len(names) else "" for number in optimizers]
