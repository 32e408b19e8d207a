"""L2 norms on the CPU: sums of squares in the gradient's own precision, and in float64 where those cannot be trusted."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.statistics.batches import Batch
from torch_grad_exporter.statistics.blocks import Scratch, blocks

_PIECE = 1024
"""Elements that one sum of squares in the gradient's own precision runs over at most, so that no rounding piles up."""

_HELD = 64
"""Arrays of pieces that are added up in one call, at most: few calls are made, and they take little memory."""

FAITHFUL = 1e-30
"""Mean square from which on it is nothing what float32 squares lose to underflow, 1.2e-38 each at most."""


class Sums:
    """The sums of squares of some tensors, block by block: of pieces in their own precision, and of these in float64."""

    def __init__(self) -> None:
        self._pieces: list[FloatArray] = []

    def add(self, flat: FloatArray) -> None:
        """Adds the next elements of each tensor, contiguous, shape (tensors, elements)."""
        rows, size = flat.shape
        piece, rest = _cut(size)
        self._pieces.append(_dots((flat[:, :-rest] if rest else flat).reshape(rows, -1, piece)))
        if rest:
            self._pieces.append(_dots(flat[:, None, -rest:]))
        if len(self._pieces) >= _HELD:
            self._pieces = [self.total()[:, None]]

    def total(self) -> FloatArray:
        """The sum of all, shape (tensors,), float64."""
        # Not `sum(dtype=float64)`, which works in chunks across the rows: a row's sum would depend on the others'.
        found: FloatArray = np.add.reduce(np.concatenate(self._pieces, axis=1, dtype=np.float64), axis=1)
        return found


def squares(flat: FloatArray) -> FloatArray:
    """The sum of squares of each row, shape (n, k) to (n,), float64."""
    sums = Sums()
    sums.add(flat)
    return sums.total()


@functools.lru_cache(maxsize=256)
def _cut(size: int) -> tuple[int, int]:
    """The length of the pieces of so many elements, and how many are left over: none, if pieces in whole cache lines allow it."""
    longest = min(size, _PIECE)
    even = (length for length in range(_PIECE, _PIECE // 4, -16) if size % length == 0)
    piece = next(even, longest)
    return piece, size % piece


def norms(batches: Sequence[Batch], scratch: Scratch, total: FloatArray, magnitudes: FloatArray | None = None) -> FloatArray:
    """The norm of each tensor in the batches from its sum of squares, shape (all tensors,), without under- or overflow.

    `magnitudes`: the largest of each tensor, where they are known; NaN if there is a NaN.
    """
    found: FloatArray = np.sqrt(total)
    least = np.repeat([batch.elements * FAITHFUL for batch in batches], [len(batch.tensors) for batch in batches])
    doubtful = ~((total > least) & np.isfinite(total))
    for batch, here in placed(batches) if doubtful.any() else ():
        if doubtful[here].any():
            largest = _magnitudes(batch, scratch) if magnitudes is None else magnitudes[here]
            ordinary = (largest > 0) & np.isfinite(largest)
            exact = _scaled_norms(batch, scratch, largest) if (doubtful[here] & ordinary).any() else largest
            found[here] = np.where(doubtful[here], np.where(ordinary, exact, largest), found[here])
    return found


def placed(batches: Sequence[Batch]) -> Iterator[tuple[Batch, slice]]:
    """Each batch and where its tensors are among all."""
    end = 0
    for batch in batches:
        start, end = end, end + len(batch.tensors)
        yield batch, slice(start, end)


def _dots(vectors: FloatArray) -> FloatArray:
    """The product of each vector with itself, along the last dimension."""
    if hasattr(np, "vecdot"):  # from numpy 2 on
        return np.vecdot(vectors, vectors)  # type: ignore[no-any-return]
    return np.matmul(vectors[..., None, :], vectors[..., :, None])[..., 0, 0]  # type: ignore[no-any-return]


def _magnitudes(batch: Batch, scratch: Scratch) -> FloatArray:
    """The largest magnitude of each tensor; NaN if there is a NaN."""
    flat = blocks(batch, scratch, wide=True)
    found: FloatArray = np.maximum.reduce([np.maximum(np.abs(f.min(axis=1)), np.abs(f.max(axis=1))) for f in flat])
    return found


def _scaled_norms(batch: Batch, scratch: Scratch, magnitudes: FloatArray) -> FloatArray:
    """The norm of each tensor in float64, scaled by a power of two so that no square over- or underflows."""
    scale = np.ldexp(1.0, np.frexp(magnitudes)[1] - 1)
    sums = Sums()
    for flat in blocks(batch, scratch, wide=True):
        sums.add(flat / scale[:, None])
    found: FloatArray = np.sqrt(sums.total()) * scale
    return found
