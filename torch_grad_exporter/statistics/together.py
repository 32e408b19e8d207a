"""The statistics that are measured together, in one read of the gradient: declared here, measured in `host.py` and `device.py`.

Their definitions are in plain float64, one element at a time: what every other path must agree with.
"""

from __future__ import annotations

import math

from torch_grad_exporter.statistics.combine import Combine
from torch_grad_exporter.statistics.declared import ColumnSpec, Elements, Statistic


def _norm(elements: Elements) -> tuple[float, ...]:
    return (math.nan if any(map(math.isnan, elements.flat)) else math.hypot(*elements.flat),)


def _zeros(elements: Elements) -> tuple[float, ...]:
    return (float(sum(value == 0 for value in elements.flat)),)


def _nonfinite(elements: Elements) -> tuple[float, ...]:
    return float(sum(map(math.isnan, elements.flat))), float(sum(map(math.isinf, elements.flat)))


def _extremes(elements: Elements) -> tuple[float, ...]:
    if any(map(math.isnan, elements.flat)):
        return math.nan, math.nan
    return min(elements.flat, default=0.0), max(elements.flat, default=0.0)


def _units(elements: Elements) -> tuple[float, ...]:
    zero = float(sum(not any(unit) for unit in elements.units))
    return zero, zero


NORM = Statistic("norm", (ColumnSpec("norm", Combine.ROOT_OF_SQUARES, power=1, whole_only=True),), _norm)
"""The L2 norm."""

ZEROS = Statistic("zeros", (ColumnSpec("zeros", Combine.SUM),), _zeros)
"""Elements that are exactly zero, of either sign."""

NONFINITE = Statistic("nonfinite", (ColumnSpec("nans", Combine.SUM), ColumnSpec("infs", Combine.SUM)), _nonfinite)
"""Elements that are NaN, and that are infinite."""

EXTREMES = Statistic("extremes", (ColumnSpec("min", Combine.MIN, power=1), ColumnSpec("max", Combine.MAX, power=1)), _extremes)
"""The smallest and the largest element; NaN if there is a NaN."""

UNITS = Statistic("units", (ColumnSpec("zero_units", Combine.SUM), ColumnSpec("dead_units", Combine.SUM)), _units)
"""Output units whose gradient is exactly zero, and those where it was so in each of the last `dead_window` samples.

`units.py` remembers; the reference knows one sample, as if `dead_window` were 1.
"""

TOGETHER = (NORM, ZEROS, NONFINITE, EXTREMES, UNITS)
"""In the order of their columns, which come first in each row."""
