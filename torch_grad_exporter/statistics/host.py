"""Measuring on the CPU, where branching on the data costs nothing.

Every sample reads the memory once, for the squares of rows: their sums are the norms, a sum that
is 0 belongs to a silent unit, and one that is not finite shows a NaN or Inf. Zeros and extremes
cost three more passes. They are taken on request, and whenever something is not finite.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from torch_grad_exporter.metrics.families import BoolArray, FloatArray, IntArray
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.batches import Batch, slices
from torch_grad_exporter.statistics.layout import Layout

# Elements of a block: larger ones leave the cache, smaller ones cost more in calls than they save.
BLOCK_ELEMENTS = 1 << 17

# Mean square from which on underflow of float32 squares, 1.2e-38 each at most, does not matter.
FAITHFUL = 1e-30

_PIECE = 1024  # elements of one sum in the gradient's own precision: no rounding piles up
_NARROW = 32  # width from which on a product of BLAS pays off

_Dots = Callable[[FloatArray, FloatArray], FloatArray]
_einsum: _Dots = functools.partial(np.einsum, "...i,...i->...")
_vecdot: _Dots = getattr(np, "vecdot", _einsum)  # numpy 1 has none


def measure(batches: Sequence[Batch], layout: Layout, *, counts: bool) -> tuple[FloatArray, BoolArray, BoolArray]:
    """Measure all gradients of the batches.

    Args:
        batches: What to measure; those with output units come first.
        layout: The columns.
        counts: Whether zeros and extremes are wanted. They are measured in any case where
            something is not finite; otherwise they are NaN. A layout of norms has none.

    Returns:
        The rows, shape (gradients, columns), and of all units which are zero and which are not.
        A unit with a NaN is neither.
    """
    looks = counts or bool(layout.apart)
    squares: list[FloatArray] = []
    parts, sizes, rows = [], [], []
    with np.errstate(all="ignore"):  # NaN, infinities and sums beyond the type are seen below
        for batch in batches:
            number, length, n = 0, 0, len(batch.tensors)
            for block in blocks(batch, wide=layout.float64, whole=not looks):
                squares.append(row_squares(block))
                number, length = number + 1, length + len(squares[-1])
                if looks:
                    rows.append(_looked_at(block.reshape(n, -1), layout, counts=counts))
            parts.append(number)
            sizes.append((n, length, 0 if batch.layout is None else batch.rows * n, batch.elements))
        sums = np.concatenate(squares, dtype=np.float64)
        squares.clear()  # as large as the gradients where units are narrow
        norms, zero, alive = _norms(batches, sums, sizes)
        if layout.norms_only:
            return norms[:, None], zero, alive
        columns = np.concatenate(rows) if looks else np.zeros((len(norms), layout.width))
        if len(columns) > len(norms):  # a gradient of several blocks has a batch for itself
            each = np.repeat(parts, [n for n, _, _, _ in sizes])
            columns = layout.runs(columns, np.repeat(np.arange(len(each)), each), np.cumsum(each) - each)
        columns[:, Column.NORM] = norms
        # Without negative zeros, whose order depends on the company that they are measured in.
        columns[:, Column.MIN : Column.MAX + 1] += 0.0
        if not counts:
            columns[:, [Column.ZEROS, Column.MIN, Column.MAX]] = np.nan
            if not np.isfinite(norms).all():
                return measure(batches, layout, counts=True)
        return columns, zero, alive


def blocks(batch: Batch, *, wide: bool = False, whole: bool = False) -> Iterator[FloatArray]:
    """Return the batch as contiguous arrays of shape (rows, elements), float32 or float64.

    A row is an output unit, a part of one that is larger than a block, or as much of a gradient
    without units. An array may be the gradient itself.

    Args:
        batch: Its gradients.
        wide: Whether the arrays have to be float64.
        whole: Whether one array may have all that needs no copy, however large.
    """
    first, layout = batch.tensors[0], batch.layout
    dtype = torch.float64 if wide or first.dtype in (torch.float64, torch.complex128) else torch.float32
    parts: Iterable[FloatArray]
    if first.dtype is dtype and first.is_contiguous() and len(batch.tensors) == 1 and (layout is None or layout.dims == (0,)):
        # Almost all are like this. The general way below has the same result at twice the price.
        array = first.numpy(force=True).reshape((1, -1) if layout is None else layout.shape)
        if whole or array.size <= BLOCK_ELEMENTS:
            yield array
            return
        parts = slices(array, BLOCK_ELEMENTS)
    else:
        parts = (part.to(dtype).contiguous().numpy(force=True).reshape(-1, part.shape[2]) for part in batch.cut(BLOCK_ELEMENTS))
    for part in parts:
        yield part if part.ndim > 1 else part[None]


def row_squares(rows: FloatArray) -> FloatArray:
    """Return sums of squares in the rows' own precision, one or more of each, end to end."""
    width = rows.shape[1]
    dots = _einsum if width < _NARROW else _vecdot
    if width <= _PIECE:
        return dots(rows, rows)
    rest = width % _PIECE
    pieces, tail = rows[:, : width - rest].reshape(len(rows), -1, _PIECE), rows[:, width - rest :]
    squares = dots(pieces, pieces)
    if rest:
        squares = np.concatenate([squares, dots(tail, tail)[:, None]], axis=1)
    return squares.reshape(-1)


def _looked_at(flat: FloatArray, layout: Layout, *, counts: bool) -> FloatArray:
    """Return the rows of a block of gradients, shape (gradients, elements), without norms and units."""
    row = np.zeros((len(flat), layout.width))
    if counts:
        row[:, Column.MIN] = low = np.minimum.reduce(flat, 1)
        row[:, Column.MAX] = high = np.maximum.reduce(flat, 1)
        row[:, Column.ZEROS] = count(flat == 0)
        if not (high - low < np.inf).all():
            row[:, Column.NANS], row[:, Column.INFS] = count(np.isnan(flat)), count(np.isinf(flat))
    for statistic, here in layout.apart.items():
        row[:, here] = statistic.on_host(flat)
    return row


def count(mask: BoolArray) -> IntArray | int:
    """Return how many are true in each row, one number if the same; numpy counts a whole array ten times as fast as by rows."""
    total = int(np.count_nonzero(mask))
    return total if len(mask) == 1 or total == 0 else np.count_nonzero(mask, axis=1)


def _norms(
    batches: Sequence[Batch], squares: FloatArray, sizes: Sequence[tuple[int, int, int, int]]
) -> tuple[FloatArray, BoolArray, BoolArray]:
    """Return the norm of each gradient, without under- or overflow, and of all output units which are zero and which are not.

    Args:
        batches: The gradients.
        squares: The `row_squares` of all batches, end to end.
        sizes: Of each batch its gradients, squares, output units, and elements of each gradient.
    """
    tensors, lengths, units, elements = np.array(sizes).T
    each = np.repeat(lengths // tensors, tensors)
    # The sum of a gradient depends on its own squares alone: measured alone it has the same bits.
    total = np.add.reduceat(squares, np.cumsum(each) - each)
    norms: FloatArray = np.sqrt(total)
    least = np.repeat(elements * FAITHFUL, tensors)
    doubtful = ~((total > least) & np.isfinite(total))
    zero = np.zeros(units.sum(), dtype=np.bool_)
    alive = ~zero
    if squares.min() > 0 and not doubtful.any():  # as mostly
        return norms, zero, alive
    ends = (itertools.accumulate(column.tolist()) for column in (tensors, lengths, units))
    for batch, (n, length, size, _), *end in zip(batches, sizes, *ends, strict=True):
        mine, here = slice(end[0] - n, end[0]), slice(end[2] - size, end[2])
        doubts = doubtful[mine]
        if not doubts.any() and (size == 0 or squares[end[1] - length : end[1]].min() > 0):
            continue
        # Squares may underflow: only the largest magnitude of a row tells whether it is zero.
        peaks = np.concatenate([np.abs(block).max(axis=1) for block in blocks(batch)])
        if size:
            largest = peaks.reshape(size, -1).max(axis=1)
            zero[here], alive[here] = largest == 0, largest > 0
        if doubts.any():  # again in float64, scaled by a power of two so that no square over- or underflows
            largest = peaks.reshape(n, -1).max(axis=1)
            scale = np.where((largest > 0) & np.isfinite(largest), np.ldexp(1.0, np.frexp(largest)[1] - 1), 1.0)
            parts = [np.square(block.reshape(n, -1) / scale[:, None]).sum(axis=1) for block in blocks(batch, wide=True)]
            norms[mine] = np.where(doubts, np.sqrt(np.sum(parts, axis=0)) * scale, norms[mine])
    return norms, zero, alive
