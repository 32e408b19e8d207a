"""Collector `gradients`: the samples, by layer and over each optimizer's parameters.

`clipping.py` and `weights.py` have its metrics of clipping and of weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torch_grad_exporter.collectors.clipping import CLIPPING, ClipFamilies, clip_families
from torch_grad_exporter.collectors.frozen_layers import FrozenLabels
from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.collectors.weights import WEIGHTS, WeightFamilies
from torch_grad_exporter.metrics.buckets import DECADES, HALF_DECADES
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.exponential import Exponential
from torch_grad_exporter.metrics.families import BoolArray, Family, LabelledRows, LabelRows, RowCache, Spec
from torch_grad_exporter.store.records import Outcome

if TYPE_CHECKING:
    from torch_grad_exporter.collectors.clipping import ClipReports
    from torch_grad_exporter.collectors.context import Snapshots
    from torch_grad_exporter.inspection.local_norms import LocalNormTotals
    from torch_grad_exporter.inspection.weights import WeightTotals
    from torch_grad_exporter.store.histograms import Records
    from torch_grad_exporter.store.snapshots import GradientSnapshot

GRADIENTS = Section("Gradients")

# Of a layer
GRAD_NORM = GRADIENTS.gauge(
    "torch_grad_norm",
    "L2 norm of the layer's gradient at the last sampled step: reduced over data-parallel ranks, unscaled, before clipping.",
    "layer",
)
GRAD_NORM_DISTRIBUTION = GRADIENTS.histogram(
    "torch_grad_norm_distribution",
    "L2 norm of the layer's gradient before clipping, one observation per sampled step; non-finite norms are left out.",
    DECADES,
    "layer",
)
GRAD_NORM_SQUARED = GRADIENTS.gauge(
    "torch_grad_norm_squared",
    "Square of the L2 norm of the layer's gradient at the last sampled step; this rank's part of it where the gradient is sharded.",
    "layer",
)
# Not `torch_grad_norm_squared_total`: in OpenMetrics that counter's family is called like the gauge above.
GRAD_NORM_SQUARED_TOTAL = GRADIENTS.counter(
    "torch_grad_norm_squared_accumulated_total",
    "Sum of torch_grad_norm_squared over sampled steps; non-finite values are left out.",
    "layer",
)
GRAD_CAPTURES = GRADIENTS.counter(
    "torch_grad_captures_total",
    "Sampled steps in which the layer's gradient was read, which every per-layer total and histogram covers.",
    "layer",
)
GRAD_SHARD_NORM = GRADIENTS.gauge(
    "torch_grad_shard_norm",
    "Sharded gradients only: L2 norm of this rank's part of the layer's gradient at the last sampled step, unscaled, before clipping.",
    "layer",
)
GRAD_NORM_RECENT_MAX = GRADIENTS.gauge(
    "torch_grad_norm_recent_max",
    "Largest finite L2 norm of the layer's gradient among the samples of the last 60 seconds.",
    "layer",
)
GRAD_NORM_ZSCORE = GRADIENTS.gauge(
    "torch_grad_norm_zscore",
    "Distance of the last logarithm of the norm from the layer's own median over its last 128 samples, in robust sigmas; absent before 20 samples.",
    "layer",
)
GRAD_NORM_SPIKES = GRADIENTS.counter(
    "torch_grad_norm_spikes_total",
    "Samples whose norm lay beyond 6 robust sigmas, 5 times the median and twice the largest of the layer's own last 128, or beyond ten times that largest, over sampled steps; of a sharded layer, the norm of this rank's part.",
    "layer",
)
GRAD_MAX_MAGNITUDE = GRADIENTS.gauge(
    "torch_grad_max_magnitude",
    "Largest absolute element of the layer's gradient at the last sampled step, unscaled, before clipping.",
    "layer",
)
GRAD_NONFINITE_ELEMENTS = GRADIENTS.counter(
    "torch_grad_nonfinite_elements_total",
    "Gradient elements that were NaN or Inf before clipping, over sampled steps; of what several ranks have a copy of, one counts.",
    "layer",
    "kind",
)
GRAD_ZERO_RATIO = GRADIENTS.gauge(
    "torch_grad_zero_ratio",
    "Share of the layer's gradient elements that were exactly zero at the last sampled step; of this rank's part where the gradient is sharded.",
    "layer",
)
GRAD_ZERO_UNITS_RATIO = GRADIENTS.gauge(
    "torch_grad_zero_units_ratio",
    "Share of the layer's output units whose weights' gradient was exactly zero at the last sampled step; of this rank's part where the gradient is sharded.",
    "layer",
)
GRAD_DEAD_RATIO = GRADIENTS.gauge(
    "torch_grad_dead_ratio",
    "Share of the layer's output units whose weights' gradient was exactly zero in each of the last dead_window samples; absent before min(20, dead_window) samples; of this rank's part where the gradient is sharded.",
    "layer",
)
GRAD_UNITS = GRADIENTS.gauge(
    "torch_grad_units",
    "Output units of the layer's weights that have a gradient, the whole of the shares of units; of this rank's part where the gradient is sharded.",
    "layer",
)
GRAD_MISSING_PARAMETERS = GRADIENTS.gauge(
    "torch_grad_missing_parameters",
    "Parameters of the layer that require a gradient and got none at the last sampled step.",
    "layer",
)
GRAD_LAYER_INDEX = GRADIENTS.gauge(
    "torch_grad_layer_index",
    "Place of the layer in the order of the model, from 0, by which dashboards order rows.",
    "layer",
)
LAYER_FROZEN = GRADIENTS.gauge(
    "torch_layer_frozen",
    "1 where an action has frozen the layer, which is not trained at present, else 0. Layers that the script has frozen itself are absent.",
    "layer",
    opt_in="freeze",
)
GRAD_MEAN = GRADIENTS.gauge(
    "torch_grad_mean",
    "Mean of the gradient's finite or non-finite elements at the last sampled step; of this rank's part where the gradient is sharded.",
    "layer",
    opt_in="moments",
)
GRAD_STDDEV = GRADIENTS.gauge(
    "torch_grad_stddev",
    "Population standard deviation of the gradient's elements at the last sampled step; of this rank's part where the gradient is sharded.",
    "layer",
    opt_in="moments",
)
GRAD_MIN = GRADIENTS.gauge(
    "torch_grad_min",
    "Smallest element of the gradient at the last sampled step; of this rank's part where the gradient is sharded.",
    "layer",
    opt_in="moments",
)
GRAD_MAX = GRADIENTS.gauge(
    "torch_grad_max",
    "Largest element of the gradient at the last sampled step; of this rank's part where the gradient is sharded.",
    "layer",
    opt_in="moments",
)

# Of the whole model, one series per optimizer where several own different parameters
GRAD_GLOBAL_NORM = GRADIENTS.gauge(
    "torch_grad_global_norm",
    "L2 norm over the gradients of all tracked parameters at the last sampled step, or at the last step for which observe(grad_norm=) gave it; unscaled, before clipping.",
    "optimizer",
)
GRAD_GLOBAL_NORM_DISTRIBUTION = GRADIENTS.histogram(
    "torch_grad_global_norm_distribution",
    "L2 norm over all tracked parameters before clipping, one observation per sampled or observed step; non-finite norms are left out.",
    HALF_DECADES,
    "optimizer",
)
GRAD_GLOBAL_NORM_SPIKES = GRADIENTS.counter(
    "torch_grad_global_norm_spikes_total",
    "Samples whose global norm lay beyond 6 robust sigmas, 5 times the median and twice the largest of its own last 128, or beyond ten times that largest, over sampled steps; of sharded gradients, the norm over this rank's parts, unless observe(grad_norm=) gives that of the whole.",
    "optimizer",
)
GRAD_NONFINITE_STEPS = GRADIENTS.counter(
    "torch_grad_nonfinite_steps_total",
    "Steps with any NaN or Inf gradient element, over sampled steps and those whose norm was observed, by what became of the step: stepped, skipped or unknown.",
    "optimizer",
    "outcome",
)
GRAD_LOCAL_NORM = GRADIENTS.gauge(
    "torch_grad_local_norm",
    "L2 norm over the gradients of all tracked parameters that DistributedDataParallel reduces, of this rank alone, before the mean over ranks is taken, at the last sampled step; unscaled, before clipping. Absent where several backwards of a step reduce, as with accumulation without no_sync().",
    "optimizer",
    opt_in="local_norm",
)
GRAD_NOISE_SCALE = GRADIENTS.gauge(
    "torch_grad_noise_scale",
    "Simple gradient noise scale in training examples, tr(Sigma) / |G|^2 (McCandlish et al. 2018, An Empirical Model of Large-Batch Training, appendix A.1), from the norms of this rank's gradient and of the mean over ranks under DistributedDataParallel, which are taken to have batches of one size, or from those of the first and of all micro-batches of one size that a rank accumulates; both terms averaged over about 100 samples; absent before 20, and while the noise hides the gradient, so that the estimate of |G|^2 is not above 0.",
    "optimizer",
    opt_in="local_norm",
)
GRAD_SAMPLE_STEP = GRADIENTS.gauge("torch_grad_sample_step", "Optimizer step of the last sample.", "optimizer")

# Samples before which a dead ratio has no meaning, unless the whole window is shorter.
DEAD_FROM = 20


def dead_from(dead_window: int) -> int:
    """Return the number of samples from which on a layer's dead ratio is shown."""
    return min(DEAD_FROM, dead_window)


_LAST_VALUES = {
    GRAD_NORM: "norm",
    GRAD_NORM_ZSCORE: "zscore",
    GRAD_MAX_MAGNITUDE: "max_magnitude",
    GRAD_ZERO_RATIO: "zero_ratio",
    GRAD_ZERO_UNITS_RATIO: "zero_units_ratio",
    GRAD_MISSING_PARAMETERS: "missing",
}
_OF_THE_WHOLE = {GRAD_NORM, GRAD_MAX_MAGNITUDE}
_TOTALS = {
    GRAD_NORM_SQUARED_TOTAL: "squared_total",
    GRAD_CAPTURES: "captures",
    GRAD_NORM_SPIKES: "spikes",
}
_MOMENTS = {GRAD_MEAN: "mean", GRAD_STDDEV: "stddev", GRAD_MIN: "minimum", GRAD_MAX: "maximum"}


@dataclass(frozen=True, slots=True, eq=False)
class _Counted:
    """The totals by layer. `whole`: the layers of whose gradients this rank has all."""

    layers: LabelRows
    values: Records
    whole: BoolArray
    exponential: Exponential


class GradientCollector:
    """Families of the aggregated gradients. `names`: the optimizers' names by number, read at each scrape."""

    def __init__(
        self,
        snapshots: Snapshots,
        names: Sequence[str],
        *,
        dead_window: int,
        moments: bool = False,
        local_norms: LocalNormTotals,
        weights: WeightTotals | None = None,
        clip: ClipReports | None = None,
        frozen: FrozenLabels | None = None,
    ) -> None:
        self._clip = None if clip is None else ClipFamilies(clip)
        self._frozen, self._frozen_rows = frozen or FrozenLabels(), LabelledRows()
        self._snapshots = snapshots
        self._names = names
        self._dead_from = dead_from(dead_window)
        self._moments = moments
        self._local_norms, self._weights = local_norms, None if weights is None else WeightFamilies(weights)
        self._layers, self._counted, self._kinds = RowCache(), RowCache(), RowCache()
        self._optimizers, self._outcomes = RowCache(), RowCache()

    def collect(self) -> Iterator[Family]:
        """Yield the families, all of one sample."""
        snapshot = self._snapshots.latest.gradients
        yield from self._per_layer(snapshot)
        yield from self._per_optimizer(snapshot)
        if self._clip is not None:
            yield from self._clip.of_policies(snapshot)

    def some(self, snapshot: GradientSnapshot, specs: Collection[Spec]) -> Iterator[Family]:
        """Yield the families of these metrics, and make as few of the others as possible: it may be called for each sample."""
        for part, of_layers in ((self._per_layer, True), (self._per_optimizer, False)):
            missing = {spec for spec in specs if ("layer" in spec.labels) is of_layers}
            families = part(snapshot)
            while missing and (family := next(families, None)) is not None:
                if family.spec in missing:
                    missing.discard(family.spec)
                    yield family

    def _per_layer(self, snapshot: GradientSnapshot) -> Iterator[Family]:
        table, shown = snapshot.table, snapshot.table.shown
        names = [layer for layer, here in zip(table.layers, shown.tolist(), strict=True) if here]
        layers = self._layers.get(tuple((layer,) for layer in names))
        layer_values, recent_max = snapshot.layer_values[shown], snapshot.recent_max[shown]
        read, sized, exponential = layer_values["read"], layer_values["sized"], snapshot.exponential
        # One rank alone cannot know the norm of a sharded gradient: it shows that of its part, under another name.
        whole = ~table.sharded[shown]
        judged = {GRAD_NORM_ZSCORE, GRAD_ZERO_UNITS_RATIO, GRAD_MISSING_PARAMETERS}
        for spec, column in _LAST_VALUES.items():
            # The norm itself may be NaN; where NaN means that there is no value, it is left out.
            present = ~np.isnan(layer_values[column]) if spec in judged else read
            yield Family(spec, layer_values[column], layers, sized & whole if spec in _OF_THE_WHOLE else present)
        yield Family(GRAD_SHARD_NORM, layer_values["norm"], layers, sized & ~whole)
        with np.errstate(over="ignore"):
            yield Family(GRAD_NORM_SQUARED, np.square(layer_values["part"]), layers, sized)
        counted = self._counted_layers(
            snapshot, _Counted(layers, layer_values, whole, Exponential(exponential.buckets, exponential.counts[shown]))
        )
        for spec, column in _TOTALS.items():
            yield Family(spec, counted.values[column], counted.layers)
        yield Family(
            GRAD_NORM_DISTRIBUTION, counted.values["buckets"], counted.layers, counted.whole,
            sums=counted.values["bucket_sum"], exponential=counted.exponential,
        )  # fmt: skip
        yield Family(GRAD_LAYER_INDEX, np.arange(len(names), dtype=np.float64), layers)
        yield Family(GRAD_NORM_RECENT_MAX, recent_max, layers, whole & ~np.isnan(recent_max))
        yield Family(GRAD_UNITS, layer_values["units"], layers, read & (layer_values["units"] > 0))
        dead = layer_values["dead_ratio"]
        yield Family(GRAD_DEAD_RATIO, dead, layers, ~np.isnan(dead) & (layer_values["captures"] >= self._dead_from))
        nonfinite = np.concatenate([counted.values["nans"], counted.values["infs"]])
        kinds = self._kinds.get(tuple((layer, kind) for kind in ("nan", "inf") for (layer,) in counted.layers.rows))
        yield Family(GRAD_NONFINITE_ELEMENTS, nonfinite, kinds)
        if self._clip is not None:
            yield from self._clip.of_layers(layer_values, layers, counted.values, counted.layers)
        if self._moments:
            yield from (Family(spec, layer_values[column], layers, sized) for spec, column in _MOMENTS.items())
        if self._weights is not None:
            yield from self._weights.collect(names, [layer for (layer,) in counted.layers.rows])
        if self._frozen.in_use:
            exist = {layer for (layer,) in counted.layers.rows}
            acted = {layer: frozen for layer, frozen in self._frozen.shown.items() if frozen or layer in exist}
            rows = {**dict.fromkeys(names, False), **acted}
            yield self._frozen_rows.by_label(LAYER_FROZEN, rows)

    def _counted_layers(self, snapshot: GradientSnapshot, shown: _Counted) -> _Counted:
        """Return the shown layers of the table, those that are not tracked at present, and all removed ones together."""
        more = snapshot.untracked
        if not more.labels:
            return shown
        layers = self._counted.get((*shown.layers.rows, *((layer,) for layer in more.labels)))
        values = np.concatenate([shown.values, more.values])
        # Of the same columns: both are rows of one table.
        exponential = Exponential(more.exponential.buckets, np.concatenate([shown.exponential.counts, more.exponential.counts]))
        return _Counted(layers, values, np.concatenate([shown.whole, ~more.values["sharded"]]), exponential)

    def _per_optimizer(self, snapshot: GradientSnapshot) -> Iterator[Family]:
        totals, names = self._labelled(snapshot)
        rows = self._optimizers.get(tuple((name,) for name in names))
        whole = np.full(len(names), snapshot.norm_observed or not snapshot.table.sharded.any())
        yield Family(GRAD_GLOBAL_NORM, totals["norm"], rows, totals["sized"] & whole)
        counts = snapshot.exponential_totals
        counts = Exponential(counts.buckets, np.pad(counts.counts, ((0, len(names) - len(snapshot.totals)), (0, 0))))
        yield Family(GRAD_GLOBAL_NORM_DISTRIBUTION, totals["buckets"], rows, whole, sums=totals["bucket_sum"], exponential=counts)
        yield Family(GRAD_GLOBAL_NORM_SPIKES, totals["spikes"], rows)
        yield from clip_families(totals, rows, whole)
        yield from self._local(snapshot, rows)
        yield Family(GRAD_SAMPLE_STEP, totals["sample_step"], rows, totals["seen"])
        outcomes = self._outcomes.get(tuple((name, outcome.value) for outcome in Outcome for name in names))
        nonfinite = np.concatenate([totals[f"nonfinite_{outcome.value}"] for outcome in Outcome])
        yield Family(GRAD_NONFINITE_STEPS, nonfinite, outcomes)

    def _local(self, snapshot: GradientSnapshot, rows: LabelRows) -> Iterator[Family]:
        """Yield the norms of this rank alone, if they are measured."""
        local = self._local_norms.values
        if not local:
            return
        norms = [local.get(number) for number in self._numbers(snapshot)] or [None]
        for spec, values in (
            (GRAD_LOCAL_NORM, [None if norm is None else norm.norm for norm in norms]),
            (GRAD_NOISE_SCALE, [None if norm is None else norm.noise_scale for norm in norms]),
        ):
            present = np.array([value is not None for value in values])
            yield Family(spec, np.array([value or 0.0 for value in values]), rows, present)

    def _numbers(self, snapshot: GradientSnapshot) -> tuple[int, ...]:
        """Return the optimizers in the order of their rows; those without a sample come last, unless there is only one."""
        optimizers, known = snapshot.optimizers, len(self._names)
        return optimizers + tuple(number for number in range(known if known > 1 else 0) if number not in optimizers)

    def _labelled(self, snapshot: GradientSnapshot) -> tuple[np.ndarray[tuple[int], np.dtype[np.void]], list[str]]:
        """Return the values of each optimizer and its label, which is empty while only one optimizer is known.

        An optimizer that is known and has no sample yet has totals of 0.
        """
        names, optimizers = list(self._names), self._numbers(snapshot)
        more = np.zeros(max(1, len(optimizers)) - len(snapshot.totals), dtype=snapshot.totals.dtype)
        totals = np.concatenate([snapshot.totals, more]) if len(more) else snapshot.totals
        if len(optimizers) <= 1:
            return totals, [""]
        return totals, [names[number] if 0 <= number < len(names) else "" for number in optimizers]


COLLECTOR = Declaration(
    "gradients",
    (GRADIENTS, CLIPPING, WEIGHTS),
    lambda context: GradientCollector(
        context.snapshots,
        context.optimizers,
        dead_window=context.dead_window,
        moments=context.moments,
        weights=context.weights,
        local_norms=context.local_norms,
        clip=context.clip,
        frozen=context.frozen,
    ),
    place=10,
)
