"""Measuring on any device but the CPU, without ever branching on the data.

Nothing here branches on a value, copies to the host or waits; it runs on `device="meta"`, where any of those would raise.
A gradient is measured in chunks, so that no temporary is larger than `TEMPORARY_BYTES`; each gives a row, and the host combines
the rows of a gradient as the columns say (`layout.Packing`).

Norms accumulate in float64, in which the square of no float32 over- or underflows. Where the device has no float64, and for
float64 gradients, a chunk is divided by its largest magnitude first; without float64 the product of both, which float32 may not
hold, is left to the host. There sums of squares run over `PIECE` elements at a time, and over their norms in the same way, so that
a norm is right to 1e-5: four levels of 64 additions, each off by 2**-24 at most, and half of the sum's error is the root's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.batches import Batch, resolved
from torch_grad_exporter.statistics.blocks import arranged, slices
from torch_grad_exporter.statistics.declared import DeviceMeasure, Statistic
from torch_grad_exporter.statistics.layout import Layout, expected, homogeneous

TEMPORARY_BYTES = 1 << 26
"""Of a temporary, at most. Not bounded: a sparse gradient made dense or coalesced, and a few bytes for each output unit."""

CHUNK_ELEMENTS = TEMPORARY_BYTES // 8
"""Of a chunk, at most: torch converts to eight bytes an element inside a reduction. Float32 counts as many exactly."""

PIECE = 64
"""Elements of one sum of squares on devices without float64."""

Wide = Callable[[torch.device], torch.dtype]
"""The type to accumulate in on a device."""


def wide(device: torch.device) -> torch.dtype:
    """The type to accumulate in: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def capturing_graph() -> bool:
    """Whether a CUDA graph is being captured: then nothing may be allocated or copied. Never initialises CUDA."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What was measured of a batch: `rows`, shape (tensors * pieces, columns), with a scale at the end of each without float64.

    `pieces`: rows of each tensor. `magnitudes`: the largest magnitude of each unit, shape (all units,); NaN where there is a NaN.
    """

    rows: torch.Tensor
    pieces: int
    magnitudes: torch.Tensor


def measure(batch: Batch, layout: Layout, accumulate: torch.dtype, most: int = CHUNK_ELEMENTS) -> Measured:
    """Statistics of each tensor, all in this type, from chunks of at most so many elements."""
    rows, magnitudes = [], []
    for chunk in chunks(batch, most):
        low, high = _extremes(chunk, accumulate)
        rows.append(_row(chunk, low, high, layout, accumulate))
        magnitudes.append(torch.maximum(-low, high))
    units = joined(magnitudes, dim=1)
    if batch.units and units.numel() > batch.rows * len(batch.tensors):  # of one tensor, whose units come in parts
        units = units.reshape(batch.rows, -1).amax(dim=1)
    return Measured(joined(rows), len(rows), units.reshape(-1))


def norms(batch: Batch, accumulate: torch.dtype, most: int = CHUNK_ELEMENTS) -> tuple[torch.Tensor, int]:
    """Only the norms, bit-equal to those of `measure` on equal gradients: rows of one column, and how many for each tensor."""
    rows = []
    for chunk in chunks(batch, most):
        flat = chunk.reshape(len(chunk), -1)
        scale = _scale(*_extremes(chunk, accumulate)) if _is_scaled(flat, accumulate) else None
        rows.append(joined([column[:, None] for column in _norms(flat, scale, accumulate)], dim=1))
    return joined(rows), len(rows)


def joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """All in one, without a launch where it is one already, as it mostly is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim=dim)


def chunks(batch: Batch, most: int) -> Iterator[torch.Tensor]:
    """The batch in parts of shape (tensors, rows, columns), a row for each output unit or part of one; only small ones are copies.

    If a tensor is cut, it is the only one. A unit that is larger than a chunk comes in parts, as many for each.
    """
    if batch.elements <= most:
        yield batch.values
        return
    width = batch.elements // batch.rows if batch.units else batch.elements
    tensor = batch.tensors[0]
    for part in slices(arranged(tensor, batch.layout), most // (4 if tensor.is_complex() else 2)):
        values = resolved(part)
        yield values.reshape(1, max(1, values.numel() // width), -1)


def _row(chunk: torch.Tensor, low: torch.Tensor, high: torch.Tensor, layout: Layout, accumulate: torch.dtype) -> torch.Tensor:
    """The row of each tensor of a chunk, of whose units the extremes are known; without float64 a scale follows."""
    flat = chunk.reshape(len(chunk), -1)
    scale = _scale(low, high) if _is_scaled(flat, accumulate) else None
    norm, *factor = _norms(flat, scale, accumulate)
    nothing = torch.zeros_like(norm)
    known = {
        Column.NORM: norm,
        Column.ZEROS: (flat == 0).sum(dim=1, dtype=accumulate),
        Column.NANS: flat.isnan().sum(dim=1, dtype=accumulate),
        Column.INFS: flat.isinf().sum(dim=1, dtype=accumulate),
        Column.MIN: low.amin(dim=1).to(accumulate),
        Column.MAX: high.amax(dim=1).to(accumulate),
    }
    # All of one type, so that they become one table in one launch.
    columns = [known.get(column, nothing) for column in Column]
    columns += [nothing] * (layout.width - len(columns))
    for one in layout.apart:
        if one.device is not None:
            values = flat.to(accumulate) / factor[0][:, None] if factor and homogeneous(one) else flat
            columns[layout.places(one)] = apart(one, one.device, values, accumulate).unbind(dim=1)
    return torch.stack([*columns, *factor], dim=1)


def apart(one: Statistic, measured: DeviceMeasure, values: torch.Tensor, accumulate: torch.dtype) -> torch.Tensor:
    """The columns of a statistic that is measured apart, of gradients of shape (tensors, elements)."""
    return expected(one, measured(values, accumulate)).to(accumulate)


def _extremes(chunk: torch.Tensor, accumulate: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest element of each row."""
    if accumulate is torch.float32:  # older versions of torch have no `aminmax` on MPS
        return chunk.amin(dim=2), chunk.amax(dim=2)
    low, high = chunk.aminmax(dim=2)
    return low, high


def _scale(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """What to divide each tensor by before it is squared: the largest magnitude, 1 where that is no scale, shape (tensors,)."""
    largest = torch.maximum(-low, high).amax(dim=1)
    return torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))


def _is_scaled(flat: torch.Tensor, accumulate: torch.dtype) -> bool:
    """Whether squares may leave the range of the type that they are added up in."""
    return accumulate is torch.float32 or flat.dtype is torch.float64


def _norms(flat: torch.Tensor, scale: torch.Tensor | None, accumulate: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The norm of each tensor; without float64 that of the tensor divided by its scale, and the scale."""
    if scale is None:
        return (torch.linalg.vector_norm(flat, dim=1, dtype=accumulate),)
    scale = scale.to(accumulate)
    found = flat.to(accumulate) / scale[:, None]
    if accumulate is torch.float64:
        return (torch.linalg.vector_norm(found, dim=1) * scale,)
    while found.shape[1] > 1:
        whole = found.shape[1] - found.shape[1] % PIECE
        pieces = torch.linalg.vector_norm(found[:, :whole].reshape(len(found), whole // PIECE, PIECE), dim=2)
        rest = torch.linalg.vector_norm(found[:, whole:], dim=1, keepdim=True)
        found = torch.cat((pieces, rest), dim=1)
    return found[:, 0].abs(), scale


class StreamOrder:
    """Keeps tensors right that stay on a device from one sample to the next, where samples come on different CUDA streams.

    The stream of a sample waits for that of the one before, on the device; the host waits for nothing. Elsewhere it does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None

    def begin(self, *kept: torch.Tensor) -> None:
        """What was `kept` by the sample before is going to be read, and perhaps dropped, on the current stream."""
        if self._done is None:
            return
        stream = torch.cuda.current_stream(self._device)
        if stream != self._last:
            stream.wait_event(self._done)
            for tensor in kept:
                # So that its memory is not used again on its own stream before this one has read it.
                tensor.record_stream(stream)

    def end(self) -> None:
        """All that reads or writes it was put onto the current stream."""
        if self._device.type == "cuda":
            self._last = torch.cuda.current_stream(self._device)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(self._last)
