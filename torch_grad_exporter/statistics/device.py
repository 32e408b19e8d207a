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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

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


def to_device(values: torch.Tensor | np.ndarray[Any, Any] | Sequence[int], device: torch.device) -> torch.Tensor:
    """Return values of the host on a device, without waiting for it."""
    tensor = torch.as_tensor(values, device="cpu")  # whatever the default is
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class GroupReading:
    """What was read of the gradients of a group, before the past of their units is considered."""

    group: Group
    pieces: list[int]  # rows of each gradient
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
        """Return all that can be said of the gradients without their past; only norms if the layout has no more."""
        accumulate, layout = self.wide(group.device), self.layout
        rows: list[torch.Tensor] = []
        pieces: list[int] = []
        magnitudes = [torch.empty(0, dtype=torch.float32, device=group.device)]  # the largest of each unit
        for batch in parts:
            before, own = len(rows), []
            for chunk in batch.cut(self.most):
                flat = chunk.reshape(len(chunk), -1)
                norm, *scale = _norms(flat, accumulate)
                columns = [norm] + [torch.zeros_like(norm)] * (layout.width - 1)
                if not layout.norms_only:
                    for column, flags in ((Column.ZEROS, flat == 0), (Column.NANS, flat.isnan()), (Column.INFS, flat.isinf())):
                        columns[column] = flags.sum(dim=1, dtype=accumulate)
                    columns[Column.MIN], columns[Column.MAX] = flat.amin(dim=1).to(accumulate), flat.amax(dim=1).to(accumulate)
                    for statistic, here in layout.apart.items():
                        values = flat.to(accumulate) / scale[0][:, None] if scale and statistic.homogeneous else flat
                        columns[here] = statistic.on_device(values, accumulate).unbind(dim=1)
                    if batch.layout is not None:
                        own.append(_largest(chunk))
                rows.append(torch.stack([*columns, *scale], dim=1))
            pieces += [len(rows) - before] * len(batch.tensors)
            if own:  # a unit that is larger than a chunk came in several parts, all as many
                magnitudes.append(joined(own, dim=1).reshape(batch.rows * len(batch.tensors), -1).amax(dim=1))
        # The widest of their types rounds none of them to zero. A NaN is neither zero nor more.
        largest = torch.cat(magnitudes)
        return GroupReading(group, pieces, torch.cat(rows), largest == 0, largest > 0)


def norms(batch: Batch, accumulate: torch.dtype) -> torch.Tensor:
    """Return a norm of each piece of each gradient, shape (pieces, 1), or (pieces, 2) with a scale."""
    parts = (_norms(chunk.reshape(len(chunk), -1), accumulate) for chunk in batch.cut(CHUNK_ELEMENTS))
    return joined([torch.stack(columns, dim=1) for columns in parts])


def joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Concatenate, without a launch where there is a single tensor, as there mostly is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim=dim)


def _largest(values: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude along the last dimension; NaN where there is one. It needs no temporary."""
    largest: torch.Tensor = torch.linalg.vector_norm(values, torch.inf, dim=-1)
    return largest


def _norms(flat: torch.Tensor, accumulate: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return the norm of each row; without float64 that of the row divided by its scale, and the scale."""
    if accumulate is torch.float64 and flat.dtype is not torch.float64:
        return (torch.linalg.vector_norm(flat, dim=1, dtype=accumulate),)
    largest = _largest(flat)
    # 1 where the largest magnitude cannot be a divisor.
    scale = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest)).to(accumulate)
    values = flat.to(accumulate) / scale[:, None]
    if accumulate is torch.float64:
        return (torch.linalg.vector_norm(values, dim=1) * scale,)
    while values.shape[1] > 1:
        padded = torch.nn.functional.pad(values, (0, -values.shape[1] % _PIECE))
        values = torch.linalg.vector_norm(padded.view(len(padded), -1, _PIECE), dim=2)
    return values[:, 0].abs(), scale


class StreamOrder:
    """Keeps tensors right that stay on a device between samples that come on several CUDA streams.

    The stream of a sample waits for that of the one before, on the device. Elsewhere nothing is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None

    def begin(self, *kept: torch.Tensor) -> None:
        """The tensors are going to be read, and perhaps dropped, on the current stream."""
        if self._last is not None and (stream := torch.cuda.current_stream(self._device)) != self._last[0]:
            stream.wait_event(self._last[1])
            for tensor in kept:
                # Its memory is not used again on its own stream before this one has read it.
                tensor.record_stream(stream)

    def end(self) -> None:
        """All that reads or writes them was put onto the current stream."""
        if self._device.type == "cuda":
            self._last = torch.cuda.current_stream(self._device), torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._last[1].record(self._last[0])
