"""What a module's outputs have come to over a round: measured at once, since they may be modified in place right after.

Nothing here reads the data of a device other than the CPU: a few small tensors stay there until the round is over, and are then
packed into one vector.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from torch_grad_exporter.metrics.families import BoolArray, FloatArray, IntArray
from torch_grad_exporter.statistics import Column, device, host, single
from torch_grad_exporter.statistics.batches import Batch, resolved
from torch_grad_exporter.statistics.layout import ORDINARY

HELD = 16
"""Small tensors of one module that are kept before they are put together, as where a module is called for each time step."""


class OfOutput(enum.IntEnum):
    """The columns of what was measured of a module's outputs."""

    NORM = 0
    ZEROS = 1
    NANS = 2
    INFS = 3
    PEAK = 4
    """The largest magnitude; NaN where there is a NaN."""
    DEAD = 5
    """Output units that were zero in every element."""
    GRADIENT = 6
    """The norm of the gradient; NaN as well where there is none, see `ActivationSample.graded`."""


@dataclass(frozen=True, slots=True, eq=False)
class ActivationSample:
    """The outputs of modules over a sampled round; several of a layer are put together. Each array has an entry for each.

    `elements`, `units`: how many there were; `units` is 0 where they are not known. `graded`: whether a gradient came.
    `values`: shape (n, columns of `OfOutput`). `scale`: of the loss, NaN where it is not known.
    """

    layers: tuple[str, ...]
    elements: IntArray
    units: IntArray
    graded: BoolArray
    values: FloatArray
    scale: float = 1.0


_ROW = (OfOutput.NORM, OfOutput.ZEROS, OfOutput.NANS, OfOutput.INFS)
_COLUMNS = [Column.NORM, Column.ZEROS, Column.NANS, Column.INFS]


@dataclass(slots=True, eq=False)
class Tally:
    """Of the outputs of one module on one device, or of their gradients, or of both.

    `elements`: of all outputs; `units`: output units, 0 where they are not known. `rows`: norm, zeros, NaN and infinite elements,
    each of shape (4,). `peaks`: the largest magnitude of each unit, or of all elements; shape (units,) or (1,), a NaN where there
    is one. `gradients`: norms of parts of the gradient, each of shape (1,).
    """

    elements: int = 0
    units: int = 0
    rows: list[torch.Tensor] = field(default_factory=list)
    peaks: torch.Tensor | None = None
    gradients: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of_output(cls, values: torch.Tensor, unit_dim: int | None) -> Tally:
        """Measures an output: a plain real tensor that is not empty. `unit_dim`: along which its units lie, if it has any."""
        row, peaks = (_on_host if values.device.type == "cpu" else _on_device)(values, unit_dim)
        return cls(values.numel(), 0 if unit_dim is None else values.shape[unit_dim], [row], peaks)

    @classmethod
    def of_gradient(cls, gradient: torch.Tensor) -> Tally:
        """Measures the gradient of an output: a plain real tensor."""
        found = single.norms(gradient)
        return cls(gradients=[one if isinstance(one, torch.Tensor) else _numbers([one]) for one in found])

    def include(self, other: Tally) -> None:
        """Adds another one, of the same module and device. Keeps at most `HELD` small tensors of each kind."""
        if self.peaks is None or other.peaks is None:
            self.units, self.peaks = (other.units, other.peaks) if self.peaks is None else (self.units, self.peaks)
        elif self.units == other.units:
            self.peaks = torch.maximum(self.peaks, other.peaks)
        else:  # outputs of several widths have no units in common
            self.units, self.peaks = 0, torch.maximum(self.peaks.amax(0, keepdim=True), other.peaks.amax(0, keepdim=True))
        self.elements += other.elements
        self.rows += other.rows
        self.gradients += other.gradients
        if len(self.rows) >= HELD:
            self.rows = [self.row()]
        if len(self.gradients) >= HELD:
            self.gradients = [self.gradient()]

    def row(self) -> torch.Tensor:
        """All rows as one, shape (4,)."""
        if len(self.rows) == 1:
            return self.rows[0]
        rows = torch.stack(self.rows)
        return torch.cat((torch.linalg.vector_norm(rows[:, :1], dim=0), rows[:, 1:].sum(dim=0)))

    def gradient(self) -> torch.Tensor:
        """The norm of the whole gradient, shape (1,)."""
        return self.gradients[0] if len(self.gradients) == 1 else torch.linalg.vector_norm(torch.cat(self.gradients)).reshape(1)


_AS_IT_IS = contextlib.nullcontext()


def measuring(kind: str) -> contextlib.AbstractContextManager[object]:
    """Without autocast, which would take copies in float32 on other devices than the CPU. What is measured has no graph."""
    return torch.autocast(kind, enabled=False) if kind != "cpu" and torch.is_autocast_enabled(kind) else _AS_IT_IS


def _numbers(values: Sequence[float] | FloatArray) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float64))


def _on_host(values: torch.Tensor, unit_dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and peaks. Of a unit that is not zero the peak is only known to be at most that of all, which stands in its place."""
    values = resolved(values)
    found = _fast(values)
    if found is None:
        columns, _, _ = host.measure((Batch((0,), (values,), None),), ORDINARY, counts=True)
        row = columns[0]
        found = row[_COLUMNS], float(np.maximum(abs(row[Column.MIN]), abs(row[Column.MAX])))
    row, peak = found
    units = 1 if unit_dim is None else values.shape[unit_dim]
    peaks = _numbers([peak] * units)
    if unit_dim is not None and row[1] >= values.numel() // units:  # else no unit can be zero
        others = [dim for dim in range(values.dim()) if dim != unit_dim]
        peaks.masked_fill_(~(values != 0).any(dim=others), 0.0)
    return _numbers(row), peaks


def _fast(values: torch.Tensor) -> tuple[Sequence[float] | FloatArray, float] | None:
    """The same of a small finite output at a third of the price; `None` where it cannot be had or trusted that way."""
    if values.numel() > host.BLOCK_ELEMENTS or not values.is_contiguous() or values.dtype is torch.float64:
        return None
    flat = values.float().numpy().reshape(-1)
    with np.errstate(all="ignore"):
        total = float(host.row_squares(flat.reshape(1, -1)).sum(dtype=np.float64))
    if not flat.size * host.FAITHFUL < total < np.inf:  # as well where there is a NaN
        return None
    return [math.sqrt(total), float(flat.size - np.count_nonzero(flat)), 0.0, 0.0], max(-float(flat.min()), float(flat.max()))


def _on_device(values: torch.Tensor, unit_dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and peaks, without a read; temporaries are as bounded as for gradients."""
    values, accumulate = resolved(values), device.wide(values.device)
    batch = Batch((0,), (values,), None)
    norm = device.norms(batch, accumulate).prod(dim=1)  # without float64 it comes with a scale
    counts = [
        torch.stack([flags.sum(dtype=accumulate) for flags in (chunk == 0, chunk.isnan(), chunk.isinf())])
        for chunk in batch.cut(device.CHUNK_ELEMENTS)
    ]
    if len(counts) > 1:
        norm, counts = torch.linalg.vector_norm(norm).reshape(1), [torch.stack(counts).sum(dim=0)]
    others = None if unit_dim is None else [dim for dim in range(values.dim()) if dim != unit_dim]
    # The norm of order infinity needs no temporary, and of a NaN it is NaN.
    peaks = torch.linalg.vector_norm(values, torch.inf, dim=others).reshape(-1)
    return torch.cat((norm.to(accumulate), counts[0])), peaks.to(accumulate)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """How the tallies of one device are packed: rows, then the largest peaks, zero units and gradients, each in this `order`.

    `order`: places of the tallies that were given. `elements`, `units`: shape (n,); `graded`: which have a gradient; as given.
    """

    order: IntArray
    elements: IntArray
    units: IntArray
    graded: BoolArray

    def values(self, vector: FloatArray) -> FloatArray:
        """From the vector, once it has arrived: shape (n, columns of `OfOutput`), as given."""
        count = len(self.order)
        found = np.zeros((count, len(OfOutput)))
        rows, rest = vector[: 4 * count].reshape(count, 4), vector[4 * count :]
        found[self.order[:, None], _ROW] = rows
        found[self.order, OfOutput.PEAK], found[self.order, OfOutput.DEAD] = rest[:count], rest[count : 2 * count]
        found[self.order[self.graded[self.order]], OfOutput.GRADIENT] = rest[2 * count :]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class SentTallies:
    """The data of a record of tallies: for each device the labels and how they are packed.

    `known`: whether it is known by what the loss was scaled; the scale comes behind the vectors where there is one.
    """

    devices: tuple[tuple[tuple[str, ...], Packed], ...]
    known: bool

    def sample(self, values: tuple[FloatArray, ...]) -> ActivationSample:
        """Return what the vectors of the devices say."""
        scale = float(values[-1][0]) if len(values) > len(self.devices) else 1.0
        packings = [packing for _, packing in self.devices]
        return ActivationSample(
            tuple(label for labels, _ in self.devices for label in labels),
            np.concatenate([one.elements for one in packings]),
            np.concatenate([one.units for one in packings]),
            np.concatenate([one.graded for one in packings]),
            np.concatenate([one.values(vector) for one, vector in zip(packings, values, strict=False)]),
            scale if self.known else float("nan"),
        )


def packed(tallies: Sequence[Tally]) -> tuple[Packed, torch.Tensor]:
    """Packs tallies with outputs of one device into a vector; few launches, as those with equally many units share theirs."""
    order = sorted(range(len(tallies)), key=lambda place: len(_peaks(tallies[place])))
    chosen = [tallies[place] for place in order]
    parts, dead = [torch.stack([one.row() for one in chosen]).reshape(-1)], []
    for _, group in itertools.groupby(map(_peaks, chosen), key=len):
        peaks = torch.stack([*group])
        parts.append(peaks.amax(dim=1))
        dead.append((peaks == 0).sum(dim=1, dtype=peaks.dtype))
    gradients = [one.gradient() for one in chosen if one.gradients]
    packing = Packed(
        np.array(order, dtype=np.int64),
        np.array([one.elements for one in tallies], dtype=np.int64),
        np.array([one.units for one in tallies], dtype=np.int64),
        np.array([bool(one.gradients) for one in tallies], dtype=np.bool_),
    )
    return packing, torch.cat([*parts, *dead, *gradients])


def _peaks(tally: Tally) -> torch.Tensor:
    assert tally.peaks is not None  # noqa: S101 - only tallies with outputs are packed
    return tally.peaks
