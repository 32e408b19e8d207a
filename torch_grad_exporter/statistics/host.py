"""Measuring on the CPU, where branching on the data costs nothing.

Every sample reads the memory once, for the squares of rows: their sums are the norms, a sum that
is 0 belongs to a silent unit, and one that is not finite tells of a NaN or Inf. Zeros and extremes
cost three more passes. They are taken on request, and whenever something is not finite.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from torch_grad_exporter.metrics.families import BoolArray, FloatArray, IntArray
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.batches import Batch, arranged, slices
from torch_grad_exporter.statistics.layout import Layout, expected

# Elements of a block: larger ones leave the cache, smaller ones cost more in calls than they save.
BLOCK_ELEMENTS = 1 << 17

# Mean square from which on underflow of float32 squares, 1.2e-38 each at most, is of no matter.
FAITHFUL = 1e-30

_PIECE = 1024  # elements of one sum in the gradient's own precision: no rounding piles up
_NARROW = 32  # width from which on a product of BLAS pays off; numpy 1 has none of rows


def measure(batches: Sequence[Batch], layout: Layout, *, counts: bool) -> tuple[FloatArray, BoolArray, BoolArray]:
    """Measure all gradients of the batches.

    Args:
        batches: What to measure.
        layout: The columns.
        counts: Whether zeros and extremes are wanted. They are measured in any case where
            something is not finite; otherwise they are NaN.

    Returns:
        The rows, shape (gradients, columns), and of all units which are zero and which are not.
        A unit with a NaN is neither.
    """
    with np.errstate(all="ignore"):  # NaN, infinities and sums beyond the type are seen below
        if counts or layout.apart:
            looked = [_look(batch, layout, counts=counts) for batch in batches]
            squares, lengths = _joined([some for some, _ in looked])
            columns = np.concatenate([columns for _, columns in looked])
        else:
            squares, lengths = _squares(batches, wide=False)
            columns = np.zeros((sum(len(batch.tensors) for batch in batches), layout.width))
        if not counts:
            columns[:, [Column.ZEROS, Column.MIN, Column.MAX]] = np.nan
        columns[:, Column.NORM] = _norms(batches, squares, lengths)
        if not counts and not np.isfinite(columns[:, Column.NORM]).all():
            return measure(batches, layout, counts=True)
        return columns, *_units(batches, squares, lengths)


def norms(batches: Sequence[Batch], *, wide: bool = False) -> FloatArray:
    """Return only the norm of each gradient, shape (gradients,), bit-equal to that of `measure`."""
    with np.errstate(all="ignore"):
        return _norms(batches, *_squares(batches, wide=wide))


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
    in_order = len(batch.tensors) == 1 and (layout is None or layout.dims == (0,))
    if whole and not wide and in_order and first.dtype is torch.float32 and first.is_contiguous():
        # Almost all are like this. The general way below has the same result at twice the price.
        yield first.detach().resolve_neg().numpy().reshape(1 if layout is None else layout.shape[0], -1)
        return
    dtype = torch.float64 if wide or first.dtype is torch.float64 else torch.float32
    small = batch.elements <= BLOCK_ELEMENTS
    memory = batch.stacked() if small else arranged(first, batch.layout)
    memory = memory.detach().resolve_neg()
    direct = memory.dtype is dtype and memory.is_contiguous()
    width = batch.elements // batch.rows
    for part in (memory,) if small or (direct and whole) else slices(memory, BLOCK_ELEMENTS):
        array = (part if direct else _copied(part, dtype)).numpy()
        yield array.reshape(-1, min(width, array.size))


def _copied(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous copy, by way of one in the order of memory: jumps within the cache cost less."""
    order = sorted(range(part.dim()), key=part.stride, reverse=True)
    inverse = sorted(range(part.dim()), key=order.__getitem__)
    return part.permute(order).contiguous().permute(inverse).to(dtype).contiguous()


def row_squares(rows: FloatArray) -> FloatArray:
    """Return sums of squares in the rows' own precision, one or more of each, end to end."""
    width = rows.shape[1]
    if width <= _PIECE:
        return _dots(rows)
    rest = width % _PIECE
    found = _dots(rows[:, : width - rest].reshape(len(rows), -1, _PIECE))
    if rest:
        found = np.concatenate([found, _dots(rows[:, width - rest :])[:, None]], axis=1)
    return found.reshape(-1)


def _dots(vectors: FloatArray) -> FloatArray:
    if vectors.shape[-1] < _NARROW or not hasattr(np, "vecdot"):
        return np.einsum("...i,...i->...", vectors, vectors)  # type: ignore[no-any-return]
    return np.vecdot(vectors, vectors)  # type: ignore[no-any-return]


def _squares(batches: Sequence[Batch], *, wide: bool) -> tuple[FloatArray, list[int]]:
    return _joined([[row_squares(rows) for rows in blocks(batch, wide=wide, whole=True)] for batch in batches])


def _joined(squares: Sequence[Sequence[FloatArray]]) -> tuple[FloatArray, list[int]]:
    """The `row_squares` of all batches end to end, float64, and their number for each batch."""
    flat = list(itertools.chain.from_iterable(squares))
    return np.concatenate(flat, dtype=np.float64), [sum(map(len, some)) for some in squares]


def _norms(batches: Sequence[Batch], squares: FloatArray, lengths: Sequence[int]) -> FloatArray:
    """The norm of each gradient, without under- or overflow."""
    tensors = [len(batch.tensors) for batch in batches]
    each = np.repeat([length // n for length, n in zip(lengths, tensors, strict=True)], tensors)
    # The sum of a gradient depends on its own squares alone: measured alone it has the same bits.
    total = np.add.reduceat(squares, np.cumsum(each) - each)
    found: FloatArray = np.sqrt(total)
    least = np.repeat([batch.elements * FAITHFUL for batch in batches], tensors)
    doubtful = ~((total > least) & np.isfinite(total))
    if doubtful.any():
        ends = np.cumsum(tensors).tolist()
        for batch, end in zip(batches, ends, strict=True):
            here = slice(end - len(batch.tensors), end)
            if doubtful[here].any():
                found[here] = np.where(doubtful[here], _scaled_norms(batch), found[here])
    return found


def _scaled_norms(batch: Batch) -> FloatArray:
    """The norms in float64, scaled by a power of two so that no square over- or underflows."""
    tensors = len(batch.tensors)
    magnitudes = [np.abs(rows).reshape(tensors, -1).max(axis=1) for rows in blocks(batch)]
    largest: FloatArray = np.maximum.reduce(magnitudes).astype(np.float64)
    ordinary = (largest > 0) & np.isfinite(largest)
    if not ordinary.any():
        return largest
    scale = np.ldexp(1.0, np.frexp(largest)[1] - 1)[:, None]
    parts = [np.square(rows.reshape(tensors, -1) / scale).sum(axis=1) for rows in blocks(batch, wide=True)]
    return np.where(ordinary, np.sqrt(np.sum(parts, axis=0)) * scale[:, 0], largest)


def _look(batch: Batch, layout: Layout, *, counts: bool) -> tuple[list[FloatArray], FloatArray]:
    """The `row_squares` of a batch, and its rows without norms and units."""
    tensors = len(batch.tensors)
    columns = np.zeros((tensors, layout.width))
    squares, low, high, zeros, others = [], [], [], [], []
    for rows in blocks(batch, wide=layout.float64):
        squares.append(row_squares(rows))
        flat = rows.reshape(tensors, -1)
        if counts:
            low.append(np.minimum.reduce(flat, 1))
            high.append(np.maximum.reduce(flat, 1))
            zeros.append(count(flat == 0))
        if layout.apart:
            others.append(_apart(flat, layout))
    if others:
        group = np.tile(np.arange(tensors), len(others))
        columns = layout.combined(np.concatenate(others), group, tensors)
    if counts:
        # Without negative zeros, whose order depends on the company that they are measured in.
        columns[:, Column.MIN] = np.minimum.reduce(low) + 0.0
        columns[:, Column.MAX] = np.maximum.reduce(high) + 0.0
        columns[:, Column.ZEROS] = np.add.reduce(zeros)
        if not np.isfinite(columns[:, Column.MIN : Column.MAX + 1]).all():
            for rows in blocks(batch):
                flat = rows.reshape(tensors, -1)
                columns[:, Column.NANS] += count(np.isnan(flat))
                columns[:, Column.INFS] += count(np.isinf(flat))
    return squares, columns


def _apart(flat: FloatArray, layout: Layout) -> FloatArray:
    """The columns of the statistics with measures of their own, all others 0."""
    found = np.zeros((len(flat), layout.width))
    flat = flat.view()
    flat.flags.writeable = False  # it may be the gradient itself
    for one in layout.apart:
        if one.host is not None:
            found[:, layout.places(one)] = expected(one, one.host(flat))
    return found


def count(mask: BoolArray) -> IntArray:
    """How many are true in each row; numpy counts a whole array ten times as fast as by rows."""
    total = np.count_nonzero(mask)
    return np.full(len(mask), total) if len(mask) == 1 or total == 0 else np.count_nonzero(mask, axis=1)


def _units(batches: Sequence[Batch], squares: FloatArray, lengths: Sequence[int]) -> tuple[BoolArray, BoolArray]:
    """Of all output units, which are zero and which are not."""
    units = [batch.rows * len(batch.tensors) if batch.units else 0 for batch in batches]
    zero = np.zeros(sum(units), dtype=np.bool_)
    if not zero.size or squares.min() > 0:
        return zero, ~zero
    alive, start, end = ~zero, 0, 0
    for batch, own, length in zip(batches, units, lengths, strict=True):
        rows = squares[start : start + length].reshape(own or 1, -1)
        here = slice(end, end + own)
        start, end = start + length, end + own
        if not own or rows.min() > 0:
            continue
        silent, nan = (rows == 0).all(axis=1), np.isnan(rows).any(axis=1)
        if silent.any():  # squares of float32 may underflow: only the elements tell
            silent &= ~_any_nonzero(batch, own)
        zero[here], alive[here] = silent, ~(silent | nan)
    return zero, alive


def _any_nonzero(batch: Batch, units: int) -> BoolArray:
    """Which output units have an element that is not zero, by the bits but for the sign."""
    parts = [np.bitwise_or.reduce(rows.view(f"u{rows.itemsize}"), 1) << 1 != 0 for rows in blocks(batch)]
    return np.asarray(np.concatenate(parts).reshape(units, -1).any(axis=1))
