"""Measuring on the CPU, where looking at the data costs nothing: one pass in cache-sized blocks.

A row-wise norm in the gradient's own precision gives the norm, and its extremes point at the few rows that
need more: a row of 1e-24 has a float32 norm of 0 and is not zero, one of 2e19 has an infinite norm and is
finite. Only such rows are measured again in float64 and searched for NaN and Inf.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from torch_grad_exporter.families import BoolArray, FloatArray, IntArray
from torch_grad_exporter.statistics import COLUMNS, Column
from torch_grad_exporter.statistics.batches import STACKED_ELEMENTS, Batch

_SAFE_NORM = {torch.float64: (1e-140, 1e140)}
_SAFE_NORM_FLOAT32 = (1e-14, 1e14)
"""Norms of a row between which its squares neither underflowed nor overflowed noticeably."""


_PIECE = 1024
"""Elements that one float32 sum of squares runs over at most."""


@dataclass(slots=True)
class RowFlags:
    """What is known of each row: exactly zero, or certainly not zero. A row with a NaN is neither."""

    zero: BoolArray
    alive: BoolArray


@dataclass(slots=True)
class _Block:
    """Measured values of a block: per tensor (tensors, columns), per row (rows,)."""

    columns: FloatArray
    norms: FloatArray
    flags: RowFlags


def measure(batch: Batch, *, moments: bool) -> tuple[FloatArray, RowFlags]:
    """Statistics of each tensor of the batch, shape (tensors, columns), and the flags of all its rows."""
    tensors = batch.values.shape[0]
    blocks = [_measure_block(block, moments=moments) for block in _split(batch)]
    columns = blocks[0].columns if len(blocks) == 1 else _combined([block.columns for block in blocks])
    columns[:, Column.NORM] = combined_norm(np.concatenate([b.norms for b in blocks]).reshape(tensors, -1))
    if batch.implied_zeros:
        columns[:, Column.ZEROS] += batch.implied_zeros
        columns[:, Column.MIN] = np.minimum(columns[:, Column.MIN], 0.0)
        columns[:, Column.MAX] = np.maximum(columns[:, Column.MAX], 0.0)
    flags = RowFlags(np.concatenate([b.flags.zero for b in blocks]), np.concatenate([b.flags.alive for b in blocks]))
    return columns, flags


def norms(batch: Batch, *, moments: bool) -> FloatArray:
    """Only the norm of each tensor, shape (tensors,), bit-equal to that of `measure` on equal gradients."""
    parts = []
    for block in _split(batch):
        rows = block.reshape(block.shape[0] * block.shape[1], -1)
        values = _row_norms(rows, exact=moments)
        suspicious = _suspicious(values, rows.dtype)
        if suspicious.size:
            values[suspicious] = _exact_norms(rows[torch.from_numpy(suspicious)].double())[0]
        parts.append(values)
    return combined_norm(np.concatenate(parts).reshape(batch.values.shape[0], -1))


def combined_norm(parts: FloatArray) -> FloatArray:
    """The L2 norm of vectors whose parts have the given norms; shape (n, parts) to (n,), without overflow."""
    with np.errstate(all="ignore"):  # NaN and Infinity are what is looked for here
        largest = parts.max(axis=1, initial=0.0)
        scale = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
        return np.asarray(np.sqrt(np.square(parts / scale[:, None]).sum(axis=1)) * scale)


def _split(batch: Batch) -> Iterator[torch.Tensor]:
    """Views of the batch as (tensors, rows, columns) blocks that stay in cache; a stack is one block."""
    values = batch.values
    tensors, rows, columns = values.shape
    if tensors > 1 or values.numel() <= STACKED_ELEMENTS:
        yield values
    elif batch.units:
        step = max(1, STACKED_ELEMENTS // columns)
        for start in range(0, rows, step):
            yield values[:, start : start + step]
    else:
        flat = values.reshape(1, 1, -1)
        for start in range(0, flat.shape[2], STACKED_ELEMENTS):
            yield flat[:, :, start : start + STACKED_ELEMENTS]


def _measure_block(block: torch.Tensor, *, moments: bool) -> _Block:
    tensors, rows, _ = block.shape
    flat = block.reshape(tensors * rows, -1)
    columns = np.zeros((tensors, COLUMNS))
    # Not `aminmax(dim=1)`: that one is not vectorised and ten times slower than the two passes.
    per_tensor = block.reshape(tensors, -1)
    columns[:, Column.MIN] = per_tensor.amin(dim=1).double().numpy()
    columns[:, Column.MAX] = per_tensor.amax(dim=1).double().numpy()
    columns[:, Column.ZEROS] = _zeros(block)
    if moments:
        columns[:, Column.SUM] = per_tensor.sum(dim=1, dtype=torch.float64).numpy()
    row_norms = _row_norms(flat, exact=moments)
    flags = RowFlags(np.zeros(tensors * rows, dtype=np.bool_), np.ones(tensors * rows, dtype=np.bool_))
    suspicious = _suspicious(row_norms, flat.dtype)
    if suspicious.size:
        values = flat[torch.from_numpy(suspicious)].double()
        row_norms[suspicious], magnitude = _exact_norms(values)
        flags.zero[suspicious] = magnitude == 0
        flags.alive[suspicious] = magnitude > 0
        owner = suspicious // rows
        columns[:, Column.NANS] = np.bincount(owner, values.isnan().sum(dim=1).numpy(), tensors)
        columns[:, Column.INFS] = np.bincount(owner, values.isinf().sum(dim=1).numpy(), tensors)
    return _Block(columns, row_norms, flags)


def _row_norms(rows: torch.Tensor, *, exact: bool) -> FloatArray:
    """The norm of each row; long rows in pieces, which are added up in float64 so that no rounding piles up.

    `exact`: all in float64, as a standard deviation needs it, which is what little is left when the mean is taken from the norm.
    """
    if exact:
        rows = rows.double()
    accumulate = rows.dtype if rows.dtype in _SAFE_NORM else torch.float32
    if rows.stride(1) != 1:
        rows = rows.contiguous()  # along any other dimension torch sums up in one accumulator, and rounding piles up
    width = rows.shape[1]
    if width <= _PIECE:
        return torch.linalg.vector_norm(rows, dim=1, dtype=accumulate).double().numpy()  # type: ignore[no-any-return]
    if width % _PIECE == 0:
        pieces = torch.linalg.vector_norm(rows.reshape(rows.shape[0], -1, _PIECE), dim=2, dtype=accumulate)
    else:
        pieces = torch.stack([torch.linalg.vector_norm(part, dim=1, dtype=accumulate) for part in torch.split(rows, _PIECE, 1)], 1)
    return combined_norm(pieces.double().numpy())


def _suspicious(row_norms: FloatArray, dtype: torch.dtype) -> IntArray:
    low, high = _SAFE_NORM.get(dtype, _SAFE_NORM_FLOAT32)
    return np.flatnonzero(~((row_norms > low) & (row_norms < high)))


def _exact_norms(rows: torch.Tensor) -> tuple[FloatArray, FloatArray]:
    """Norm and largest magnitude of float64 rows, exact wherever both are finite."""
    magnitude = rows.abs().amax(dim=1)
    scale = torch.where((magnitude > 0) & magnitude.isfinite(), magnitude, 1.0)
    return (torch.linalg.vector_norm(rows / scale[:, None], dim=1) * scale).numpy(), magnitude.numpy()


def _zeros(block: torch.Tensor) -> list[int]:
    """Zero elements of each tensor: numpy counts booleans three times as fast as torch does."""
    if block.dtype in (torch.float32, torch.float64):
        zero = block.numpy() == 0
    else:  # numpy has no bfloat16, and its float16 is slow; without its sign bit a zero of either is 0
        zero = (block.view(torch.int16).numpy() & np.int16(0x7FFF)) == 0
    return [int(np.count_nonzero(one)) for one in zero]


def _combined(parts: list[FloatArray]) -> FloatArray:
    """The columns of one tensor from those of its blocks; NaN stays NaN in the extremes."""
    stacked = np.stack(parts)
    with np.errstate(all="ignore"):  # infinities of both signs, or a sum beyond float64
        total: FloatArray = stacked.sum(axis=0)
    total[:, Column.MIN] = stacked[:, :, Column.MIN].min(axis=0)
    total[:, Column.MAX] = stacked[:, :, Column.MAX].max(axis=0)
    return total
