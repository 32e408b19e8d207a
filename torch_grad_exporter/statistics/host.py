"""Measuring on the CPU, where branching on the data costs nothing: one read of the memory, all else from the cache.

Every block is squared and summed up, searched for its extremes and compared with zero. The extremes tell whether there
is a NaN or Inf to count, the first zero whether zeros are to be counted, their number whether a whole unit can be zero, and the sum
of squares whether it is to be made again in float64: what is rare costs nothing where it is absent. The squares come first: while
the memory is read, to multiply costs nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from torch_grad_exporter.metrics.families import BoolArray, FloatArray
from torch_grad_exporter.statistics import Column, squares
from torch_grad_exporter.statistics.batches import Batch
from torch_grad_exporter.statistics.blocks import Scratch, blocks
from torch_grad_exporter.statistics.extremes import Extremes
from torch_grad_exporter.statistics.layout import Layout, expected

_ZERO = {np.dtype(kind): np.zeros((), dtype=kind) for kind in ("f4", "f8")}
"""As arrays: converting a Python number in each call would cost as much as comparing a tenth of a block with it."""


@dataclass(slots=True)
class _Found:
    """What each block has: a value for each of its tensors, and, with units, flags for each row or part of one.

    `counts`: of how many blocks each tensor is. `squares`: one value for each tensor, from all of its blocks.
    """

    counts: list[int] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    extremes: Extremes = field(default_factory=Extremes)
    zeros: list[int] = field(default_factory=list)
    zero_rows: list[BoolArray] = field(default_factory=list)
    apart: list[list[FloatArray]] = field(default_factory=list)
    """By statistic that is measured apart, what it gave for each block."""

    def norms(self, batches: Sequence[Batch], scratch: Scratch, magnitudes: FloatArray | None = None) -> FloatArray:
        """The norm of each tensor, shape (all tensors,)."""
        total = np.array(self.squares, dtype=np.float64)
        return squares.norms(batches, scratch, total, magnitudes)

    def columns(self, layout: Layout) -> FloatArray:
        """The rows of all tensors but for their norms and what is not finite, shape (all tensors, columns)."""
        columns = np.zeros((len(self.zeros), layout.width))
        columns[:, Column.ZEROS] = self.zeros
        columns[:, Column.MIN], columns[:, Column.MAX] = self.extremes.low_and_high()
        for one, values in zip(layout.apart, self.apart, strict=True):
            columns[:, layout.places(one)] = np.concatenate(values)
        tensors = len(self.counts)
        return columns if len(columns) == tensors else layout.combined(columns, np.repeat(np.arange(tensors), self.counts), tensors)


def measure(batches: Sequence[Batch], scratch: Scratch, layout: Layout) -> tuple[FloatArray, BoolArray, BoolArray]:
    """The rows of all tensors of the batches, shape (tensors, columns), and of all units which are zero and which are not.

    A unit with a NaN is neither.
    """
    with np.errstate(all="ignore"):  # NaN, infinities and sums beyond the type are detected here
        found = _looked_at(batches, scratch, layout)
        columns = found.columns(layout)
        magnitudes = np.abs(columns[:, Column.MIN : Column.MAX + 1]).max(axis=1)
        columns[:, Column.NORM] = found.norms(batches, scratch, magnitudes)
        zero = np.concatenate([*found.zero_rows, np.zeros(0, dtype=np.bool_)])
        alive = ~zero
        if not np.isfinite(magnitudes).all():
            alive &= ~_count_nonfinite(batches, scratch, columns)
    return columns, zero, alive


def norms(batches: Sequence[Batch], scratch: Scratch, *, float64: bool) -> FloatArray:
    """Only the norm of each tensor, shape (tensors,), bit-equal to that of `measure` on equal gradients."""
    found = _Found()
    with np.errstate(all="ignore"):
        for batch in batches:
            sums = squares.Sums()
            for flat in blocks(batch, scratch, wide=float64):
                sums.add(flat)
            found.squares += sums.total().tolist()
        return found.norms(batches, scratch)


def _looked_at(batches: Sequence[Batch], scratch: Scratch, layout: Layout) -> _Found:
    found = _Found(apart=[[] for _ in layout.apart])
    mask: BoolArray = np.zeros((0, 0), dtype=np.bool_)
    for batch in batches:
        sums, zero_rows, count = squares.Sums(), [], 0
        units, width = batch.units, batch.elements // batch.rows
        for flat in blocks(batch, scratch, wide=layout.float64):
            sums.add(flat)
            found.extremes.look(flat)
            if layout.apart:
                _measure_apart(flat, layout, found)
            if mask.shape != flat.shape:
                mask = scratch.mask(flat.shape)
            np.equal(flat, _ZERO[flat.dtype], mask)
            zeros = int(np.count_nonzero(mask)) if mask.item(mask.argmax()) else 0  # `argmax` ends at the first zero
            found.zeros += _by_tensor(mask, zeros)
            if units:
                zero_rows.append(_zero_rows(mask, width, zeros))
            count += 1
        found.counts += [count] * len(batch.tensors)
        found.squares += sums.total().tolist()
        found.zero_rows += _whole(batch, zero_rows, np.logical_and)
    return found


def _measure_apart(flat: FloatArray, layout: Layout, found: _Found) -> None:
    """Has the other statistics measure a block while it is in the cache. It may be the gradient itself: they only read it."""
    guarded = flat.view()
    guarded.flags.writeable = False
    for one, values in zip(layout.apart, found.apart, strict=True):
        if one.host is not None:
            values.append(expected(one, one.host(guarded)))


def _zero_rows(mask: BoolArray, width: int, zeros: int) -> BoolArray:
    """Which rows of a block are all zero, or the part of one that it is; `width`: elements of a whole row."""
    width = min(width, mask.shape[1])
    if zeros < width:  # fewer than a row has elements
        return _none(mask.size // width)
    return np.asarray(mask.reshape(-1, width).all(axis=1))


@functools.lru_cache(maxsize=256)
def _none(rows: int) -> BoolArray:
    """That none of so many rows is meant; not to be written to."""
    return np.zeros(rows, dtype=np.bool_)


def _count_nonfinite(batches: Sequence[Batch], scratch: Scratch, columns: FloatArray) -> BoolArray:
    """Fills the columns of NaN and Inf; returns which of all units have a NaN."""
    nan_rows = [np.zeros(0, dtype=np.bool_)]
    for batch, here in squares.placed(batches):
        if np.isfinite(columns[here, Column.MIN : Column.MAX + 1]).all():
            nan_rows.append(np.zeros(batch.rows * len(batch.tensors) if batch.units else 0, dtype=np.bool_))
            continue
        parts, width = [], batch.elements // batch.rows
        for flat in blocks(batch, scratch, wide=False):
            mask = scratch.mask(flat.shape)
            for column, test in ((Column.INFS, np.isinf), (Column.NANS, np.isnan)):
                columns[here, column] += _by_tensor(mask, int(np.count_nonzero(test(flat, out=mask))))
            parts.append(np.asarray(mask.reshape(-1, min(width, mask.shape[1])).any(axis=1)))
        nan_rows += _whole(batch, parts, np.logical_or)
    return np.concatenate(nan_rows)


def _by_tensor(mask: BoolArray, found: int) -> list[int]:
    """How many are true in each row of a mask in which `found` are: counting all of it is many times as fast."""
    if len(mask) == 1 or found == 0:
        return [found] * len(mask)
    return np.add.reduce(mask, axis=1, dtype=np.int64).tolist()  # type: ignore[no-any-return]


def _whole(batch: Batch, parts: list[BoolArray], reduction: np.ufunc) -> list[BoolArray]:
    """The flags of the rows of a batch, none without units; those of a row that came in parts are reduced to one."""
    if not batch.units or sum(map(len, parts)) == batch.rows * len(batch.tensors):
        return parts if batch.units else []
    return [reduction.reduce(np.concatenate(parts).reshape(batch.rows, -1), axis=1)]
