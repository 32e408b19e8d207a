"""How values of parts combine to the value of the whole: chunks to a gradient, gradients to a layer."""

from __future__ import annotations

import enum
import math

import numpy as np

from torch_grad_exporter.metrics.families import FloatArray, IntArray


class Combine(enum.Enum):
    """Ways to combine. The order of the parts changes nothing but rounding; a NaN stays one."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"
    ROOT_OF_SQUARES = "root of the sum of squares"

    def runs(self, rows: FloatArray, group: IntArray, starts: IntArray) -> FloatArray:
        """Return the combined row of each group, shape (groups, columns).

        Args:
            rows: Shape (n, columns); the rows of a group are next to each other.
            group: The group of each row, ascending from 0; no group is empty.
            starts: Where each group begins.
        """
        match self:
            case Combine.SUM:
                return np.add.reduceat(rows, starts, axis=0)
            case Combine.MIN:
                return np.minimum.reduceat(rows, starts, axis=0)
            case Combine.MAX:
                return np.maximum.reduceat(rows, starts, axis=0)
            case Combine.ROOT_OF_SQUARES:
                largest = np.maximum.reduceat(rows, starts, axis=0)
                scale = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
                return np.sqrt(np.add.reduceat(np.square(rows / scale[group]), starts, axis=0)) * scale

    def groups(self, values: FloatArray, group: IntArray, groups: int) -> FloatArray:
        """Like `runs` for one column, shape (n,), whose groups come in any order."""
        order = np.argsort(group, kind="stable")
        ascending = group[order]
        starts = np.searchsorted(ascending, np.arange(groups))
        return self.runs(values[order, None].astype(np.float64), ascending, starts)[:, 0]

    def repeated(self, value: float, times: int) -> float:
        """Return the combined value of this many parts that all have `value`."""
        match self:
            case Combine.SUM:
                return value * times
            case Combine.MIN | Combine.MAX:
                return value
            case Combine.ROOT_OF_SQUARES:
                return value * math.sqrt(times)


def root_of_squares(norms: FloatArray, group: IntArray, groups: int) -> FloatArray:
    """Return the L2 norm of each group of vectors from the norms of the vectors, without overflow."""
    largest = np.zeros(groups)
    np.maximum.at(largest, group, norms)
    scale = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    return np.sqrt(np.bincount(group, np.square(norms / scale[group]), groups)) * scale


def length(norms: FloatArray) -> float:
    """Return the L2 norm of one vector from the norms of its parts, shape (n,)."""
    largest = float(norms.max(initial=0.0))
    if not 0 < largest < math.inf:  # a NaN stays one
        return largest
    return math.sqrt(float(np.square(norms / largest).sum())) * largest
