"""The metrics of weights that the collector `gradients` shows, and their families."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torch_grad_exporter.aggregation.tables import Records
from torch_grad_exporter.metrics.buckets import WEIGHT_MAGNITUDES
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import BoolArray, Family, LabelRows

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


def weight_families(
    last: Records, layers: LabelRows, whole: BoolArray, counted: Records, counted_layers: LabelRows
) -> Iterator[Family]:
    """Of the layers' last values, and of what only grows. `whole`: the layers of which this rank has all."""
    norm, ratio = last["weight_norm"], last["update_ratio"]
    yield Family(WEIGHT_NORM, norm, layers, ~np.isnan(norm) & whole)
    yield Family(WEIGHT_UPDATE_RATIO, ratio, layers, ~np.isnan(ratio))
    yield Family(WEIGHT_DISTRIBUTION, counted["weight_buckets"], counted_layers, sums=counted["weight_sum"])
    yield Family(WEIGHT_CAPTURES, counted["weight_captures"], counted_layers)
