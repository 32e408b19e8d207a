"""Measuring with torch on any device but the CPU, without ever branching on the data.

Nothing here reads a value or waits; it runs on `device="meta"`, where reading raises. A gradient is
measured in chunks, so that no temporary is larger than `TEMPORARY_BYTES`. Each chunk gives a row;
the host combines the rows of a gradient (`layout.Packing`).

Norms accumulate in float64, in which no square of a float32 over- or underflows. Where the device
has no float64, and for float64 gradients, a chunk is divided by its largest magnitude first.
Without float64 the product of both is left to the host, and sums run over `_PIECE` elements at a
time: four levels of 64 additions, each off by 2**-24 at most, give a norm that is right to 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torch_grad_exporter.metrics.families import IntArray
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.batches import Batch, Group
from torch_grad_exporter.statistics.layout import Layout

# Bytes of a temporary, at most. Not bounded: a sparse gradient made dense or coalesced, and a few
# bytes for each output unit.
TEMPORARY_BYTES = 1 << 26
# Torch converts to eight bytes an element inside a reduction. Float32 counts as many exactly.
CHUNK_ELEMENTS = TEMPORARY_BYTES // 8

_PIECE = 64

Wide = Callable[[torch.device], torch.dtype]


def wide(device: torch.device) -> torch.dtype:
    """Return the type to accumulate in: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def capturing_graph() -> bool:
    """Return whether a CUDA graph is being captured: nothing may be allocated or copied then."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, eq=False)
class GroupReading:
    """What was read of the gradients of a group, before the past of their units is considered."""

    group: Group
    pieces: IntArray | None  # rows of each gradient, shape (n,); None: one
    rows: torch.Tensor  # shape (all pieces, columns), followed by a scale where the device has no float64
    zero: torch.Tensor  # units whose gradient is exactly zero, shape (units of all members,)
    alive: torch.Tensor  # units that have a nonzero element and no NaN


@dataclass(frozen=True, slots=True)
class ByTorch:
    """Reads gradients with operations of torch, in several passes."""

    layout: Layout
    wide: Wide
    most: int  # elements that are read at once

    def read(self, group: Group, parts: Sequence[Batch]) -> GroupReading:
        """Return all that can be said of the gradients without their past."""
        accumulate = self.wide(group.device)
        rows, pieces, magnitudes = [], [], []
        for batch in parts:
            extremes = []
            for chunk in chunks(batch, self.most):
                low, high = _extremes(chunk)
                rows.append(self._row(chunk, low, high, accumulate))
                extremes.append(torch.maximum(-low, high))
            pieces.append(len(extremes))
            if batch.units:
                units = joined(extremes, dim=1)
                if units.numel() > batch.rows * len(batch.tensors):  # each came in as many parts
                    units = units.reshape(batch.rows, -1).amax(dim=1)
                magnitudes.append(units.reshape(-1))
        # The widest of their types rounds none of them to zero. A NaN is neither zero nor more.
        largest = torch.cat(magnitudes or [rows[0].new_zeros(0)])
        return GroupReading(group, pieces_of(parts, pieces), torch.cat(rows), largest == 0, largest > 0)

    def norms(self, group: Group, parts: Sequence[Batch]) -> tuple[torch.Tensor, IntArray | None]:
        """Return only the norms, with the same rounding, and how many each gradient has."""
        measured = [norms(batch, self.wide(group.device), self.most) for batch in parts]
        pieces = [len(rows) // len(batch.tensors) for batch, rows in zip(parts, measured, strict=True)]
        return torch.cat(measured).reshape(-1), pieces_of(parts, pieces)

    def _row(self, chunk: torch.Tensor, low: torch.Tensor, high: torch.Tensor, accumulate: torch.dtype) -> torch.Tensor:
        """The row of each tensor of a chunk, whose extremes by unit are known."""
        flat, layout = chunk.reshape(len(chunk), -1), self.layout
        norm, *scale = _norms(chunk, accumulate, (low, high))
        columns = [torch.zeros_like(norm)] * layout.width
        columns[Column.NORM] = norm
        for column, flags in ((Column.ZEROS, flat == 0), (Column.NANS, flat.isnan()), (Column.INFS, flat.isinf())):
            columns[column] = flags.sum(dim=1, dtype=accumulate)
        columns[Column.MIN], columns[Column.MAX] = low.amin(dim=1).to(accumulate), high.amax(dim=1).to(accumulate)
        for one in layout.apart:
            values = flat.to(accumulate) / scale[0][:, None] if scale and one.homogeneous else flat
            columns[layout.places(one)] = one.on_device(values, accumulate).unbind(dim=1)
        return torch.stack([*columns, *scale], dim=1)


def norms(batch: Batch, accumulate: torch.dtype, most: int = CHUNK_ELEMENTS) -> torch.Tensor:
    """Return a norm of each piece of each gradient, shape (pieces, 1), or (pieces, 2) with a scale."""
    return joined([torch.stack(_norms(chunk, accumulate), dim=1) for chunk in chunks(batch, most)])


def pieces_of(batches: Sequence[Batch], pieces: Sequence[int]) -> IntArray | None:
    """Return the rows of each gradient from those of each batch; None: one."""
    if max(pieces) == 1:
        return None
    return np.repeat(np.array(pieces, dtype=np.int64), [len(batch.positions) for batch in batches])


def joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Concatenate, without a launch where there is a single tensor, as there mostly is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim=dim)


def chunks(batch: Batch, most: int) -> Iterator[torch.Tensor]:
    """Cut a batch into parts of shape (tensors, rows, columns); only small ones are copies.

    A row is an output unit or a part of one: a larger unit comes in parts, as many for each. If a
    tensor is cut, it is the only one.
    """
    tensors, width = len(batch.tensors), batch.elements // batch.rows
    for part in batch.cut(most):
        yield part.reshape(tensors, max(1, part.numel() // (tensors * width)), -1)


def _extremes(chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest element of each row."""
    if chunk.device.type == "mps":  # older versions of torch have no `aminmax` there
        return chunk.amin(dim=2), chunk.amax(dim=2)
    low, high = chunk.aminmax(dim=2)
    return low, high


def _norms(
    chunk: torch.Tensor, accumulate: torch.dtype, extremes: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, ...]:
    """The norm of each tensor; without float64 that of the tensor divided by its scale, and the scale."""
    flat = chunk.reshape(len(chunk), -1)
    if accumulate is torch.float64 and flat.dtype is not torch.float64:
        return (torch.linalg.vector_norm(flat, dim=1, dtype=accumulate),)
    low, high = extremes or _extremes(chunk)
    largest = torch.maximum(-low, high).amax(dim=1)
    # The largest magnitude of each tensor, 1 where that is no divisor.
    scale = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest)).to(accumulate)
    values = flat.to(accumulate) / scale[:, None]
    if accumulate is torch.float64:
        return (torch.linalg.vector_norm(values, dim=1) * scale,)
    while values.shape[1] > 1:
        whole = values.shape[1] - values.shape[1] % _PIECE
        pieces = torch.linalg.vector_norm(values[:, :whole].reshape(len(values), whole // _PIECE, _PIECE), dim=2)
        rest = torch.linalg.vector_norm(values[:, whole:], dim=1, keepdim=True)
        values = torch.cat((pieces, rest), dim=1)
    return values[:, 0].abs(), scale


class StreamOrder:
    """Keeps tensors right that stay on a device between samples that come on several CUDA streams.

    The stream of a sample waits for that of the one before, on the device. Elsewhere nothing is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None

    def begin(self, *kept: torch.Tensor) -> None:
        """The tensors are going to be read, and perhaps dropped, on the current stream."""
        if self._done is None:
            return
        stream = torch.cuda.current_stream(self._device)
        if stream != self._last:
            stream.wait_event(self._done)
            for tensor in kept:
                # Its memory is not used again on its own stream before this one has read it.
                tensor.record_stream(stream)

    def end(self) -> None:
        """All that reads or writes them was put onto the current stream."""
        if self._device.type == "cuda":
            self._last = torch.cuda.current_stream(self._device)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(self._last)
