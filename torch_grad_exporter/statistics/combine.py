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
        if self is not Combine.ROOT_OF_SQUARES:
            return _UFUNCS[self].reduceat(rows, starts, axis=0)
        scale = _divisor(np.maximum.reduceat(rows, starts, axis=0))
        return np.sqrt(np.add.reduceat(np.square(rows / scale[group]), starts, axis=0)) * scale


_UFUNCS = {Combine.SUM: np.add, Combine.MIN: np.minimum, Combine.MAX: np.maximum}


def root_of_squares(norms: FloatArray, group: IntArray, groups: int) -> FloatArray:
    """Return the L2 norm of each group of vectors, 0 of an empty one, from the norms of the vectors, without overflow."""
    largest = np.zeros(groups)
    np.maximum.at(largest, group, norms)
    scale = _divisor(largest)
    return np.sqrt(np.bincount(group, np.square(norms / scale[group]), groups)) * scale


def length(norms: FloatArray) -> float:
    """Return the L2 norm of one vector from the norms of its parts, shape (n,)."""
    largest = float(norms.max(initial=0.0))
    if not 0 < largest < math.inf:  # a NaN stays one
        return largest
    return math.sqrt(float(np.square(norms / largest).sum())) * largest


def _divisor(largest: FloatArray) -> FloatArray:
    return np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
