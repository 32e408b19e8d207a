"""Measuring on the CPU, where branching on the data costs nothing.

Every sample reads the memory once, for the squares of rows: their sums are the norms, a sum that
is 0 belongs to a silent unit, and one that is not finite shows a NaN or Inf. Zeros and extremes
cost three more passes. They are taken on request, and whenever something is not finite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from torch_grad_exporter.metrics.families import BoolArray, FloatArray
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.batches import Batch, slices
from torch_grad_exporter.statistics.layout import Layout

# Elements of a block: larger ones leave the cache, smaller ones cost more in calls than they save.
BLOCK_ELEMENTS = 1 << 17

# Mean square from which on underflow of float32 squares, 1.2e-38 each at most, does not matter.
FAITHFUL = 1e-30

_PIECE = 1024  # elements of one sum in the gradient's own precision: no rounding piles up
_NARROW = 32  # width from which on a product of BLAS pays off

_DOUBLE = (torch.float64, torch.complex128)

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
    lengths: list[int] = []  # of each batch, its squares
    parts: list[int] = []  # of each gradient, its blocks
    rows: list[FloatArray] = []  # what is measured of each block apart
    low: list[FloatArray] = []
    high: list[FloatArray] = []
    zeros: list[int] = []
    with np.errstate(all="ignore"):  # NaN, infinities and sums beyond the type are seen below
        for batch in batches:
            length, number, n = 0, 0, len(batch.tensors)
            for block in blocks(batch, wide=layout.float64, whole=not looks):
                sums = row_squares(block)
                squares.append(sums)
                length, number = length + len(sums), number + 1
                flat = block.reshape(n, -1) if looks else block
                if counts:
                    low.append(np.minimum.reduce(flat, 1))
                    high.append(np.maximum.reduce(flat, 1))
                    zeros += count(flat == 0)
                if layout.apart:
                    rows.append(_measured_apart(flat, layout))
            lengths.append(length)
            parts += [number] * n
        sums = np.concatenate(squares, dtype=np.float64)
        squares.clear()  # as large as the gradients where units are narrow
        norms, zero, alive = _norms(batches, sums, lengths)
        if layout.norms_only:
            return norms[:, None], zero, alive
        columns = np.concatenate(rows) if rows else np.zeros((sum(parts) if looks else len(norms), layout.width))
        if counts:
            columns[:, Column.MIN], columns[:, Column.MAX] = map(np.concatenate, (low, high))
            columns[:, Column.ZEROS] = zeros
            if not (columns[:, Column.MAX] - columns[:, Column.MIN] < np.inf).all():
                _count_nonfinite(columns, batches, layout)
        if len(columns) > len(norms):  # a gradient of several blocks has a batch for itself
            columns = layout.runs(columns, np.repeat(np.arange(len(parts)), parts), np.cumsum([0, *parts[:-1]]))
        columns[:, Column.NORM] = norms
        # Without negative zeros, whose order depends on the company that they are measured in.
        columns[:, Column.MIN : Column.MAX + 1] += 0.0
        if not counts:
            columns[:, [Column.ZEROS, Column.MIN, Column.MAX]] = np.nan
            if not np.isfinite(norms).all():
                return measure(batches, layout, counts=True)
        return columns, zero, alive


def blocks(batch: Batch, *, wide: bool = False, whole: bool = False) -> Iterable[FloatArray]:
    """Return the batch as contiguous arrays of shape (rows, elements), float32 or float64.

    A row is an output unit, a part of one that is larger than a block, or as much of a gradient
    without units. An array may be the gradient itself.

    Args:
        batch: Its gradients.
        wide: Whether the arrays have to be float64.
        whole: Whether one array may have all that needs no copy, however large.
    """
    first, layout, n = batch.tensors[0], batch.layout, len(batch.tensors)
    dtype = torch.float64 if wide or first.dtype in _DOUBLE else torch.float32
    if first.dtype is dtype and (layout is None or layout.dims == (0,)):
        # Almost all are like this. The general way below has the same result at twice the price.
        together = first if n == 1 else torch.stack(batch.tensors)
        if together.is_contiguous():
            array = together.numpy(force=True).reshape(n * batch.rows, -1)
            if whole or batch.elements <= BLOCK_ELEMENTS:
                return (array,)
            return (part if part.ndim > 1 else part[None] for part in slices(array, BLOCK_ELEMENTS))
    parts = (part.to(dtype).contiguous().numpy(force=True) for part in batch.cut(BLOCK_ELEMENTS))
    return (part.reshape(-1, part.shape[2]) for part in parts)


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


def _measured_apart(flat: FloatArray, layout: Layout) -> FloatArray:
    """Return rows with the statistics that a layout has besides the package's own, of gradients of shape (gradients, elements)."""
    row = np.zeros((len(flat), layout.width))
    for statistic, here in layout.apart.items():
        row[:, here] = statistic.on_host(flat)
    return row


def _count_nonfinite(columns: FloatArray, batches: Sequence[Batch], layout: Layout) -> None:
    """Enter how many elements of each block are NaN or infinite."""
    end = 0
    for batch in batches:
        for block in blocks(batch, wide=layout.float64):
            flat = block.reshape(len(batch.tensors), -1)
            start, end = end, end + len(flat)
            columns[start:end, Column.NANS], columns[start:end, Column.INFS] = count(np.isnan(flat)), count(np.isinf(flat))


def count(mask: BoolArray) -> list[int]:
    """Return how many are true in each row; numpy counts a whole array ten times as fast as by rows."""
    total = int(np.count_nonzero(mask))
    if len(mask) == 1 or total == 0:
        return [total] * len(mask)
    by_row: list[int] = np.count_nonzero(mask, axis=1).tolist()
    return by_row


def _norms(batches: Sequence[Batch], squares: FloatArray, lengths: Sequence[int]) -> tuple[FloatArray, BoolArray, BoolArray]:
    """Return the norm of each gradient, without under- or overflow, and of all output units which are zero and which are not.

    Args:
        batches: The gradients.
        squares: The `row_squares` of all batches, end to end.
        lengths: How many of these each batch has.
    """
    starts: list[int] = []  # of the squares of each gradient
    least: list[float] = []  # sums of squares that may be trusted
    units = square = 0
    for batch, length in zip(batches, lengths, strict=True):
        n = len(batch.tensors)
        starts += range(square, square + length, length // n)
        square += length
        least += [batch.elements * FAITHFUL] * n
        units += 0 if batch.layout is None else batch.rows * n
    # The sum of a gradient depends on its own squares alone: measured alone it has the same bits.
    total = np.add.reduceat(squares, starts)
    norms: FloatArray = np.sqrt(total)
    doubtful = ~((total > least) & np.isfinite(total))
    zero, alive = np.zeros(units, dtype=np.bool_), np.ones(units, dtype=np.bool_)
    if squares.min() > 0 and not doubtful.any():  # as mostly
        return norms, zero, alive
    gradient = square = unit = 0
    for batch, length in zip(batches, lengths, strict=True):
        n, size = len(batch.tensors), 0 if batch.layout is None else batch.rows * len(batch.tensors)
        mine, own, here = slice(gradient, gradient + n), slice(square, square + length), slice(unit, unit + size)
        gradient, square, unit = mine.stop, own.stop, here.stop
        doubts = doubtful[mine]
        if not doubts.any() and (size == 0 or squares[own].min() > 0):
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
