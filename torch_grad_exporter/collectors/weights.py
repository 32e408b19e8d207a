"""The metrics of weights that the collector `gradients` shows, and their families."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torch_grad_exporter.metrics.buckets import WEIGHT_MAGNITUDES
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, LabelledRows, RowCache

if TYPE_CHECKING:
    from torch_grad_exporter.inspection.weights import WeightTotals

WEIGHTS = Section("Weights")

WEIGHT_NORM = WEIGHTS.gauge(
    "torch_weight_norm",
    "L2 norm of the layer's parameters after the last sampled update of the layer; absent where they are sharded.",
    "layer",
    opt_in="weights",
)
WEIGHT_UPDATE_RATIO = WEIGHTS.gauge(
    "torch_weight_update_ratio",
    "L2 norm of the layer's last sampled update over the L2 norm of its parameters before it; of a sharded layer, over this rank's part.",
    "layer",
    opt_in="weights",
)
UPDATE_RMS = WEIGHTS.gauge(
    "torch_update_rms",
    "Root mean square of the elements of the layer's last sampled update; of a sharded layer, of this rank's part.",
    "layer",
    opt_in="weights",
)
WEIGHT_UNCHANGED_RATIO = WEIGHTS.gauge(
    "torch_weight_unchanged_ratio",
    "Share of the elements of the layer's parameters that its last sampled update left as they were; of a sharded layer, of this rank's part.",
    "layer",
    opt_in="weights",
)
WEIGHT_DISTRIBUTION = WEIGHTS.histogram(
    "torch_weight_distribution",
    "Magnitudes of the elements of the layer's parameters: each time that the layer is measured, each element is one observation; of this rank's part where they are sharded. Elements that are not finite are left out.",
    WEIGHT_MAGNITUDES,
    "layer",
    opt_in="weights",
)
WEIGHT_CAPTURES = WEIGHTS.counter(
    "torch_weight_captures_total",
    "Sampled updates of the layer around which its parameters were measured, a few layers at each sample; steps that were left out do not count.",
    "layer",
    opt_in="weights",
)


class WeightFamilies:
    """The families of the weights."""

    def __init__(self, totals: WeightTotals) -> None:
        self._totals = totals
        self._rows = LabelledRows()
        self._counted = RowCache()

    def collect(self, shown: Sequence[str], counted: Sequence[str]) -> Iterator[Family]:
        """Yield gauges of the layers that are shown, and the totals of all that count. A removed layer stays until it is in the remainder."""
        totals = self._totals.snapshot(counted)
        here = {layer: totals[layer] for layer in shown if layer in totals}
        norms = {layer: row.norm for layer, row in here.items() if row.whole and not math.isnan(row.norm)}
        yield self._rows.by_label(WEIGHT_NORM, norms)
        for spec, numbers in (
            (WEIGHT_UPDATE_RATIO, {layer: row.update_ratio for layer, row in here.items()}),
            (UPDATE_RMS, {layer: row.update_rms for layer, row in here.items()}),
            (WEIGHT_UNCHANGED_RATIO, {layer: row.unchanged_ratio for layer, row in here.items()}),
        ):
            yield self._rows.by_label(spec, {layer: number for layer, number in numbers.items() if not math.isnan(number)})
        layers, rows = self._counted.get(tuple((label,) for label in totals)), list(totals.values())
        buckets = np.array([row.buckets for row in rows]).reshape(len(rows), len(WEIGHT_MAGNITUDES) + 1)
        yield Family(WEIGHT_DISTRIBUTION, buckets, layers, sums=np.array([row.sum for row in rows]))
        yield Family(WEIGHT_CAPTURES, np.array([row.captures for row in rows], dtype=np.float64), layers)
