"""The statistics in plain float64, one element at a time: what every other path must agree with.

Slow on purpose and written from the definitions; used by tests and by readers, never by the exporter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_grad_exporter.model.units import UnitLayout


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
    values, rows = elements(gradient, units)
    return Reference(
        norm=norm(values),
        elements=len(values),
        zeros=zeros(values),
        nans=nans(values),
        infs=infs(values),
        minimum=minimum(values),
        maximum=maximum(values),
        zero_units=zero_units(rows),
        total=total(values),
    )


def elements(gradient: torch.Tensor, units: UnitLayout | None = None) -> tuple[list[float], list[list[float]]]:
    """The elements of a gradient, and those of each of its output units."""
    dense = gradient.detach().to_dense() if gradient.layout is not torch.strided else gradient.detach()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    rows: list[list[float]] = [] if units is None else units.rows(dense).double().tolist()
    values: list[float] = dense.double().reshape(-1).tolist()
    return values, rows


def norm(values: Sequence[float]) -> float:
    """The L2 norm; Infinity or NaN where an element is."""
    if any(math.isnan(v) for v in values):
        return math.nan
    return math.hypot(*values)


def zeros(values: Sequence[float]) -> int:
    """Elements that are exactly zero, of either sign."""
    return sum(v == 0 for v in values)


def nans(values: Sequence[float]) -> int:
    """Elements that are NaN."""
    return sum(math.isnan(v) for v in values)


def infs(values: Sequence[float]) -> int:
    """Elements that are infinite."""
    return sum(math.isinf(v) for v in values)


def minimum(values: Sequence[float]) -> float:
    """The smallest element; NaN if there is a NaN."""
    return math.nan if nans(values) else min(values, default=0.0)


def maximum(values: Sequence[float]) -> float:
    """The largest element; NaN if there is a NaN."""
    return math.nan if nans(values) else max(values, default=0.0)


def zero_units(units: Sequence[Sequence[float]]) -> int:
    """Output units of which each element is exactly zero."""
    return sum(all(v == 0 for v in unit) for unit in units)


def total(values: Sequence[float]) -> float:
    """The sum of the elements; Infinity or NaN where that is it."""
    if nans(values):
        return math.nan
    infinite = [v for v in values if math.isinf(v)]
    try:
        return sum(infinite) if infinite else math.fsum(values)
    except OverflowError:
        return math.copysign(math.inf, max(values, key=abs))
