"""What tests of statistics share: layouts, rows of what was measured, and a spy on the tensors that operations make."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_grad_exporter.model.units import UnitLayout
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.declared import MOMENTS, Elements
from torch_grad_exporter.statistics.eager import Measurement
from torch_grad_exporter.statistics.layout import Layout

WITH_MOMENTS = Layout([MOMENTS])


def by_position(measured: Iterable[Measurement]) -> dict[int, np.ndarray]:
    """The row of each position, put together from its pieces as the host does it."""
    return {
        position: row
        for one in measured
        for position, row in zip(
            one.positions.tolist(), one.packing.rows(one.vector.double().numpy(), len(one.positions)), strict=True
        )
    }


def elements(gradient: torch.Tensor, units: UnitLayout | None = None) -> Elements:
    """The elements of a dense, sparse or complex gradient, and those of each of its output units."""
    dense = gradient.detach() if gradient.layout is torch.strided else gradient.detach().to_dense()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    return Elements(dense.double().reshape(-1).tolist(), [] if units is None else units.rows(dense).double().tolist())


def _sum(elements: Elements) -> float:
    infinite = [value for value in elements.flat if not math.isfinite(value)]
    try:
        return sum(infinite) if infinite else math.fsum(elements.flat)
    except OverflowError:
        return math.copysign(math.inf, max(elements.flat, key=abs))


def own_columns(elements: Elements) -> tuple[float, ...]:
    """Return the package's own columns in plain loops, in the order of `Column`."""
    flat = elements.flat
    norm = math.nan if any(map(math.isnan, flat)) else math.hypot(*flat)
    zeros, nans, infs = (float(sum(map(test, flat))) for test in ((0.0).__eq__, math.isnan, math.isinf))
    low, high = (math.nan, math.nan) if nans else (min(flat, default=0.0), max(flat, default=0.0))
    # Dead units depend on earlier samples. This is their number for a window of one.
    units = float(sum(not any(unit) for unit in elements.units))
    return norm, zeros, nans, infs, low, high, units, units, _sum(elements)


def by_definition(gradient: torch.Tensor, units: UnitLayout | None = None) -> SimpleNamespace:
    """The columns of one gradient by name, by their definitions, and how many `elements` it has; a complex one counts as two."""
    found = elements(gradient, units)
    values = {column.name.lower(): value for column, value in zip(Column, own_columns(found), strict=True)}
    return SimpleNamespace(elements=len(found.flat), **values)


def identity(tensor: torch.Tensor) -> int:
    """Return what two tensors have in common if one is a view of the other."""
    storage: int = tensor.untyped_storage()._cdata  # private: tensors on `meta` have no address
    return storage


class Made(TorchDispatchMode):
    """Shows `look` each tensor that an operation has made with memory of its own, not one of `known` or a view."""

    def __init__(self, look: Callable[[torch.Tensor], None], *known: torch.Tensor) -> None:
        super().__init__()
        self._look = look
        self._known = set(map(identity, known))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and identity(one) not in self._known:
                self._look(one)
        return result
