"""The smallest and the largest element of blocks on the CPU, by the bits of the elements as integers.

But for its sign bit a float is ordered as the integer of the same bits is. So the largest signed integer is the largest element,
and the largest unsigned one the smallest element, if there are any of that sign; a NaN lies beyond the infinity of its sign. Where
all are of one sign, the smallest unsigned integer is the element nearest to zero. Integers are compared in half the time of floats,
where each step asks for NaN.
"""

from __future__ import annotations

import numpy as np

from torch_grad_exporter.metrics.families import FloatArray


class Extremes:
    """What was found of each tensor of each block that was looked at, in turn."""

    def __init__(self) -> None:
        self._top: list[float] = []
        """The largest element; where all have the sign bit, the smallest one."""
        self._bottom: list[float] = []
        """The smallest element; where none has the sign bit, the largest one."""
        self._nearest: list[float] = []
        """The element nearest to zero, where all are of one sign; else any number."""
        self._last = _Ends(np.zeros((1, 1), dtype=np.float32))

    def look(self, flat: FloatArray) -> None:
        """Looks at a contiguous block, float32 or float64, shape (tensors, elements)."""
        ends = self._last
        if ends.floats.shape[1] != len(flat) or ends.floats.dtype != flat.dtype:
            ends = self._last = _Ends(flat)
        unsigned = flat.view(ends.unsigned)
        np.maximum.reduce(flat.view(ends.signed), 1, None, ends.top)
        np.maximum.reduce(unsigned, 1, None, ends.bottom)
        top, bottom = ends.floats.tolist()
        self._top += top
        self._bottom += bottom
        if (top[0] < 0 or bottom[0] > 0) if len(top) == 1 else ends.some_of_one_sign():
            np.minimum.reduce(unsigned, 1, None, ends.bottom)
            self._nearest += ends.floats[1].tolist()
        else:
            self._nearest += top

    def low_and_high(self) -> tuple[FloatArray, FloatArray]:
        """The smallest and the largest element, shape (tensors of all blocks,) each; both NaN where there is one.

        A negative zero is smaller than a positive one.
        """
        top, bottom, nearest = np.array((self._top, self._bottom, self._nearest), dtype=np.float64)
        low, high = np.where(bottom > 0, nearest, bottom), np.where(top < 0, nearest, top)
        low[np.isnan(top)] = high[np.isnan(bottom)] = np.nan
        return low, high


class _Ends:
    """Memory for what is found in blocks of one kind: to make it anew for each block would take a fifth of the time of a look."""

    def __init__(self, flat: FloatArray) -> None:
        self.signed, self.unsigned = np.dtype(f"i{flat.itemsize}"), np.dtype(f"u{flat.itemsize}")
        self.floats: FloatArray = np.zeros((2, len(flat)), dtype=flat.dtype)
        self._bits = self.floats.view(self.signed)
        self.top, self.bottom = self._bits[0], self._bits[1].view(self.unsigned)

    def some_of_one_sign(self) -> bool:
        """Whether there is a tensor whose elements are all of one sign."""
        return bool(np.maximum.reduce(np.bitwise_xor(*self._bits)) >= 0)
