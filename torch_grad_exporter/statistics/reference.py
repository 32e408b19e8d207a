"""The statistics in plain float64, one element at a time: what every other path must agree with.

Slow on purpose and written from the definitions; used by tests and by readers, never by the exporter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from torch_grad_exporter.model.layers import UnitLayout


@dataclass(frozen=True, slots=True)
class Reference:
    """Statistics of one gradient by their definitions."""

    norm: float
    elements: int
    zeros: int
    nans: int
    infs: int
    minimum: float
    maximum: float
    zero_units: int
    total: float


def measure(gradient: torch.Tensor, units: UnitLayout | None = None) -> Reference:
    """The statistics of one dense, sparse or complex gradient; a complex element counts as two real ones."""
    dense = gradient.detach().to_dense() if gradient.layout is not torch.strided else gradient.detach()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    values: list[float] = dense.double().reshape(-1).tolist()
    zero_units = 0
    if units is not None:
        zero_units = sum(all(v == 0 for v in row) for row in units.rows(dense).double().tolist())
    has_nan = any(math.isnan(v) for v in values)
    return Reference(
        norm=norm(values),
        elements=len(values),
        zeros=sum(v == 0 for v in values),
        nans=sum(math.isnan(v) for v in values),
        infs=sum(math.isinf(v) for v in values),
        minimum=math.nan if has_nan else min(values, default=0.0),
        maximum=math.nan if has_nan else max(values, default=0.0),
        zero_units=zero_units,
        total=math.nan if has_nan else _sum(values),
    )


def norm(values: list[float]) -> float:
    """The L2 norm; Infinity or NaN where an element is."""
    if any(math.isnan(v) for v in values):
        return math.nan
    return math.hypot(*values)


def _sum(values: list[float]) -> float:
    infinite = [v for v in values if math.isinf(v)]
    try:
        return sum(infinite) if infinite else math.fsum(values)
    except OverflowError:
        return math.copysign(math.inf, max(values, key=abs))
