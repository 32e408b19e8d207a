"""Tallies of a module's outputs over a round: measured at once, since they may be modified in place right after.

Nothing here waits for a device: a few small tensors stay there until the round is over, and are then packed into one vector.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from torch_grad_exporter.metrics.families import BoolArray, FloatArray, IntArray
from torch_grad_exporter.statistics import Column, device, host, single
from torch_grad_exporter.statistics.batches import Batch, resolved
from torch_grad_exporter.statistics.combine import root_of_squares
from torch_grad_exporter.statistics.layout import ORDINARY

# Small tensors of one module that are kept before they are put together, as where a module is called for each time step.
HELD = 16

_ROW = [Column.NORM, Column.ZEROS, Column.NANS, Column.INFS]


@dataclass(slots=True, eq=False)
class Tally:
    """What was measured of the outputs of one module on one device, or of their gradients, or of both.

    Attributes:
        elements: Of all outputs.
        units: Output units, 0 where they are unknown.
        rows: Norm, zeros, NaN and infinite elements, each of shape (4,).
        peaks: The largest magnitude of each unit, or of all elements; shape (units,) or (1,), a NaN where there is one.
        squares: The sum of squares of each unit, shape (units,), or None.
        gradients: Norms of parts of the gradient, each of shape (1,).
    """

    elements: int = 0
    units: int = 0
    rows: list[torch.Tensor] = field(default_factory=list)
    peaks: torch.Tensor | None = None
    squares: torch.Tensor | None = None
    gradients: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of_values(cls, values: torch.Tensor, unit_dim: int | None) -> Tally:
        """Measure an output: a plain real tensor that is not empty. `unit_dim`: along which its units lie, if it has any."""
        row, peaks = (_on_host if values.device.type == "cpu" else _on_device)(values, unit_dim)
        if unit_dim is None:
            return cls(values.numel(), 0, [row], peaks)
        return cls(values.numel(), values.shape[unit_dim], [row], peaks, _squares(resolved(values), unit_dim))

    @classmethod
    def of_gradient(cls, gradient: torch.Tensor) -> Tally:
        """Measure the gradient of an output: a plain real tensor."""
        norms = (torch.as_tensor(norm, dtype=torch.float64 if isinstance(norm, float) else None) for norm in single.norms(gradient))
        return cls(gradients=[norm.reshape(1) for norm in norms])

    def include(self, other: Tally) -> None:
        """Add another tally, of the same module and device. Keep at most `HELD` small tensors of each kind."""
        if self.peaks is None:
            self.units, self.peaks, self.squares = other.units, other.peaks, other.squares
        elif other.peaks is not None and self.units == other.units:
            self.peaks = torch.maximum(self.peaks, other.peaks)
            if self.squares is not None and other.squares is not None:
                self.squares = self.squares + other.squares
        elif other.peaks is not None:  # outputs of several widths have no units in common
            self.units, self.squares = 0, None
            self.peaks = torch.maximum(self.peaks.amax(0, keepdim=True), other.peaks.amax(0, keepdim=True))
        self.elements += other.elements
        self.rows += other.rows
        self.gradients += other.gradients
        if len(self.rows) >= HELD:
            self.rows = [self.row()]
        if len(self.gradients) >= HELD:
            self.gradients = [self.gradient()]

    def row(self) -> torch.Tensor:
        """Return all rows as one, shape (4,)."""
        if len(self.rows) == 1:
            return self.rows[0]
        rows = torch.stack(self.rows)
        return torch.cat((torch.linalg.vector_norm(rows[:, :1], dim=0), rows[:, 1:].sum(dim=0)))

    def gradient(self) -> torch.Tensor:
        """Return the norm of the whole gradient, shape (1,)."""
        return self.gradients[0] if len(self.gradients) == 1 else torch.linalg.vector_norm(torch.cat(self.gradients)).reshape(1)


def _on_host(values: torch.Tensor, unit_dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row and peaks. For the peak of a unit that is not zero stands that of all units, which is no smaller."""
    values = resolved(values)
    measured = _fast(values)
    if measured is None:
        columns, _, _ = host.measure((Batch.of((0,), (values,)),), ORDINARY, counts=True)
        measured = columns[0][_ROW], float(np.maximum(abs(columns[0][Column.MIN]), abs(columns[0][Column.MAX])))
    row, peak = measured
    units = 1 if unit_dim is None else values.shape[unit_dim]
    peaks = torch.full((units,), peak, dtype=torch.float64)
    if unit_dim is not None and row[1] >= values.numel() // units:  # else no unit can be zero
        others = [dim for dim in range(values.dim()) if dim != unit_dim]
        peaks.masked_fill_(~(values != 0).any(dim=others), 0.0)
    return torch.from_numpy(np.array(row, dtype=np.float64)), peaks


def _fast(values: torch.Tensor) -> tuple[Sequence[float] | FloatArray, float] | None:
    """Return the same for a small finite output at a third of the cost; None where that is not possible or not exact."""
    if values.numel() > host.BLOCK_ELEMENTS or not values.is_contiguous() or values.dtype is torch.float64:
        return None
    flat = values.float().numpy().reshape(-1)
    with np.errstate(all="ignore"):
        total = float(host.row_squares(flat.reshape(1, -1)).sum(dtype=np.float64))
    if not flat.size * host.FAITHFUL < total < np.inf:  # as well where there is a NaN
        return None
    return [math.sqrt(total), float(flat.size - np.count_nonzero(flat)), 0.0, 0.0], max(-float(flat.min()), float(flat.max()))


def _on_device(values: torch.Tensor, unit_dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row and peaks without waiting; temporaries are as bounded as for gradients."""
    values, accumulate = resolved(values), device.wide(values.device)
    batch = Batch.of((0,), (values,))
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


def _squares(values: torch.Tensor, unit_dim: int) -> torch.Tensor:
    """Return the sum of squares of each unit. On the host in float32, a tenth of the cost: sums are pairwise, so no less exact."""
    others, accumulate = [dim for dim in range(values.dim()) if dim != unit_dim], device.wide(values.device)
    if values.device.type == "cpu" and values.numel() <= device.CHUNK_ELEMENTS:
        values = values if values.dtype is torch.float64 else values.float()
        return (values * values).sum(dim=others).to(accumulate)
    norms: torch.Tensor = torch.linalg.vector_norm(values, dim=others, dtype=accumulate)
    return norms.square()


class LabelTally(NamedTuple):
    """The tallies of one label together."""

    elements: float
    units: float  # 0 where they are unknown
    norm: float
    zeros: float
    nans: float
    infs: float
    peak: float  # the largest magnitude; NaN where there is a NaN
    dead: float  # output units that were zero in every element
    kurtosis: float  # of the norms of units, and the largest of them over the median; NaN where they are unknown
    spread: float
    graded: float  # tallies with a gradient
    gradient: float  # its norm


_NORM, _GRADIENT = (LabelTally._fields.index(name) for name in ("norm", "gradient"))
_LARGEST = [LabelTally._fields.index(name) for name in ("peak", "kurtosis", "spread")]  # of several tallies the largest counts


@dataclass(frozen=True, slots=True, eq=False)
class PackedTallies:
    """The tallies of one device. The vector has their rows, peaks, zero units, kurtosis, spread and gradients, 0 without one.

    Arrays of shape (n,).
    """

    labels: tuple[str, ...]
    elements: IntArray
    units: IntArray
    graded: BoolArray

    def unpacked(self, vector: FloatArray) -> FloatArray:
        """Return what the vector says, once it has arrived: shape (n, fields of `LabelTally`)."""
        *measured, gradients = vector.reshape(9, -1)
        return np.column_stack((self.elements, self.units, *measured, self.graded, gradients))


@dataclass(frozen=True, slots=True, eq=False)
class SentTallies:
    """The data of a record of tallies, packed by device.

    `known`: whether it is known by what the loss was scaled; the scale comes behind the vectors where there is one.
    """

    devices: tuple[PackedTallies, ...]
    known: bool

    def scale(self, values: tuple[FloatArray, ...]) -> float | None:
        """Return by what the loss was scaled, None if unknown."""
        if not self.known:
            return None
        return float(values[-1][0]) if len(values) > len(self.devices) else 1.0

    def by_label(self, values: tuple[FloatArray, ...]) -> dict[str, LabelTally]:
        """Return what the vectors of the devices say, of all tallies of a label together."""
        labels = [label for packing in self.devices for label in packing.labels]
        number = {label: place for place, label in enumerate(dict.fromkeys(labels))}
        group, count = np.array([number[label] for label in labels], dtype=np.int64), len(number)
        rows = np.concatenate([packing.unpacked(vector) for packing, vector in zip(self.devices, values, strict=False)])
        together, largest = np.zeros((count, rows.shape[1])), np.full((count, len(_LARGEST)), -np.inf)
        with np.errstate(all="ignore"):  # a NaN stays one
            np.add.at(together, group, rows)
            np.maximum.at(largest, group, rows[:, _LARGEST])
            for column in (_NORM, _GRADIENT):
                together[:, column] = root_of_squares(rows[:, column], group, count)
        together[:, _LARGEST] = largest
        return {label: LabelTally(*together[place].tolist()) for label, place in number.items()}


def packed(labelled: Sequence[tuple[str, Tally]]) -> tuple[PackedTallies, torch.Tensor]:
    """Pack tallies with outputs of one device into a vector.

    Few operations are launched, as tallies with the same number of units share theirs.
    """
    known = [(tally.peaks, label, tally) for label, tally in labelled if tally.peaks is not None]
    known.sort(key=lambda each: len(each[0]))
    tallies = [tally for _, _, tally in known]
    rows, of_units = torch.stack([tally.row() for tally in tallies], dim=1), []
    for _, several in itertools.groupby(known, key=lambda each: len(each[0])):
        group = [*several]
        peaks = torch.stack([peaks for peaks, _, _ in group])
        # Kurtosis of outlier features: He et al., "Understanding and minimising outlier features in transformer training" (2024).
        unknown = torch.full_like(peaks[0], math.nan)
        squares = torch.stack([unknown if tally.squares is None else tally.squares for _, _, tally in group])
        kurtosis = squares.square().mean(dim=1) / squares.mean(dim=1).square()
        median = squares.sort(dim=1).values[:, (squares.shape[1] - 1) // 2]  # `torch.median` may not be deterministic
        spread = (squares.amax(dim=1) / median).sqrt()
        of_units.append(torch.stack((peaks.amax(dim=1), (peaks == 0).sum(dim=1, dtype=peaks.dtype), kurtosis, spread)))
    nothing = rows.new_zeros(1)
    gradients = torch.cat([tally.gradient() if tally.gradients else nothing for tally in tallies])
    packing = PackedTallies(
        tuple(label for _, label, _ in known),
        np.array([tally.elements for tally in tallies], dtype=np.int64),
        np.array([tally.units for tally in tallies], dtype=np.int64),
        np.array([bool(tally.gradients) for tally in tallies], dtype=np.bool_),
    )
    return packing, torch.cat([rows, torch.cat(of_units, dim=1), gradients[None]]).reshape(-1)
