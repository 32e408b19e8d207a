"""The tables of numbers that samples add up to: one row per layer, one row per optimizer."""

from __future__ import annotations

import numpy as np

from torch_grad_exporter.metrics.buckets import DECADES, HALF_DECADES, WEIGHT_MAGNITUDES
from torch_grad_exporter.metrics.families import FloatArray, IntArray
from torch_grad_exporter.transfer.events import Outcome

Records = np.ndarray[tuple[int], np.dtype[np.void]]
"""A structured array: one record per row."""

UNOWNED = -1
"""The owner of a parameter that no known optimizer has."""

RECENT_SECONDS = 60
"""Seconds over which a layer's recent maximum is taken."""

OF_A_SAMPLE = (
    "norm", "max_magnitude", "zero_ratio", "zero_units_ratio", "dead_ratio", "missing", "zscore", "part", "units",
    "mean", "stddev", "minimum", "maximum", "coefficient",
)  # fmt: skip
"""What of a layer is that of its optimizer's last sample."""

LAYER_TOTALS = (
    "squared_total", "captures", "spikes", "nans", "infs", "clipped", "bucket_sum", "buckets",
    "weight_captures", "weight_sum", "weight_buckets",
)  # fmt: skip
"""What of a layer only grows."""

LAYER = np.dtype(
    [(name, np.float64) for name in (
        *OF_A_SAMPLE, "weight_norm", "update_ratio",
        "squared_total", "captures", "spikes", "nans", "infs", "clipped", "bucket_sum", "weight_captures", "weight_sum",
    )]
    + [("buckets", np.float64, (len(DECADES) + 1,)), ("weight_buckets", np.float64, (len(WEIGHT_MAGNITUDES) + 1,))]
    + [("recent", np.float64, (RECENT_SECONDS,))]
    + [(name, np.bool_) for name in ("read", "sized", "shown", "sharded", "summed")],
    align=True,
)  # fmt: skip
"""One layer's values; NaN where a value was never had, but for the totals.

`read`: whether the last sample of its optimizer gave it a gradient; `sized`: and whether the loss scale of that is known.
`part`: the norm over those parameters of which this rank's part counts in sums over ranks, as `squared_total`, `nans` and
`infs` are; `units`: of what this rank has. `shown`, `sharded`: as of the last table that had the layer; `summed`: whether any
of it counts in sums over ranks.
"""

OPTIMIZER = np.dtype(
    [(name, np.float64) for name in (
        "norm", "after_clip", "coefficient", "sample_step", "spikes", "clipped", "bucket_sum",
        *(f"nonfinite_{outcome.value}" for outcome in Outcome),
    )]
    + [("buckets", np.float64, (len(HALF_DECADES) + 1,)), ("seen", np.bool_), ("sized", np.bool_)]
    + [("clip_known", np.bool_), ("after_known", np.bool_)]
)  # fmt: skip
"""The values over all parameters of one optimizer. `seen`: whether there was a sample; `sized`: as of a layer."""

DECADE_BOUNDS = np.array(DECADES)
HALF_DECADE_BOUNDS = np.array(HALF_DECADES)


def new_layers(count: int) -> Records:
    """Rows of layers that have had no sample."""
    rows = np.zeros(count, dtype=LAYER)
    for name in LAYER.names or ():
        if name not in LAYER_TOTALS and LAYER[name].base == np.float64:
            rows[name] = np.nan
    return rows


def of_a_sample(rows: Records) -> FloatArray:
    """A view of what of each layer is that of its optimizer's last sample, shape (rows, OF_A_SAMPLE): a record begins with it."""
    return np.ndarray((len(rows), len(OF_A_SAMPLE)), np.float64, rows, 0, (rows.itemsize, 8)) if len(rows) else np.zeros((0, 0))


def moved(rows: Records, index: IntArray, empty: Records) -> Records:
    """The rows with these numbers, in this order; -1 is a new one, as `empty`, a single record, is."""
    return np.concatenate([rows, empty])[index]


def enter_norms(table: Records, rows: IntArray, norms: FloatArray, bounds: FloatArray) -> tuple[IntArray, FloatArray]:
    """Enters one observation for each row into its histogram; a bucket's upper bound belongs to it. Returns what was entered.

    What would make the sum overflow is left out, like what is not finite.
    """
    sums = table["bucket_sum"][rows] + norms
    fits = np.isfinite(sums)
    if not fits.all():
        rows, norms, sums = rows[fits], norms[fits], sums[fits]
    table["buckets"][rows, np.searchsorted(bounds, norms, side="left")] += 1
    table["bucket_sum"][rows] = sums
    return rows, norms
