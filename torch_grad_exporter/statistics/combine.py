"""How the values of parts combine to that of the whole: of pieces to a gradient's, and of gradients to a layer's."""

from __future__ import annotations

import enum
import math

import numpy as np

from torch_grad_exporter.metrics.families import FloatArray, IntArray


class Combine(enum.Enum):
    """The ways to combine. Each gives the same for any order of the parts and any cut into parts, but for rounding."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"
    ROOT_OF_SQUARES = "root of the sum of squares"

    def groups(self, values: FloatArray, group: IntArray, groups: int) -> FloatArray:
        """The combined value of each group, shape (groups,), from `values`, shape (n,), and the group of each. A NaN stays one.

        No group is empty.
        """
        match self:
            case Combine.SUM:
                return np.bincount(group, values, groups).astype(np.float64)
            case Combine.MIN:
                found = np.full(groups, np.inf)
                np.minimum.at(found, group, values)
            case Combine.MAX:
                found = np.full(groups, -np.inf)
                np.maximum.at(found, group, values)
            case Combine.ROOT_OF_SQUARES:
                return root_of_squares(values, group, groups)
        return found

    def runs(self, rows: FloatArray, group: IntArray, starts: IntArray) -> FloatArray:
        """The same of rows, shape (n, columns), that stand by group; `starts`: where each group begins. Shape (groups, columns)."""
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

    def repeated(self, value: float, times: int) -> float:
        """The combined value of so many parts that each have this one."""
        match self:
            case Combine.SUM:
                return value * times
            case Combine.MIN | Combine.MAX:
                return value
            case Combine.ROOT_OF_SQUARES:
                return value * math.sqrt(times)


def root_of_squares(norms: FloatArray, group: IntArray, groups: int) -> FloatArray:
    """The L2 norm of each of `groups` groups of vectors from the norms of the vectors, shape (n,), without overflow."""
    largest = np.zeros(groups)
    np.maximum.at(largest, group, norms)
    scale = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    return np.sqrt(np.bincount(group, np.square(norms / scale[group]), groups)) * scale


def length(norms: FloatArray) -> float:
    """The L2 norm of one vector from those of its parts, shape (n,)."""
    largest = float(norms.max(initial=0.0))
    if not 0 < largest < math.inf:  # a NaN stays one
        return largest
    return math.sqrt(float(np.square(norms / largest).sum())) * largest
