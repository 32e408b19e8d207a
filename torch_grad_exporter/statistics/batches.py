"""Gradients made ready for measuring: dense, real, local, and the small ones of one shape together.

A model of many small tensors is bound by the number of calls, not by bytes, so gradients of the same
shape and type share their calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.model.units import UnitLayout

STACKED_ELEMENTS = 1 << 17
"""Elements of a batch of several gradients at most: 512 KiB of float32 stay in a core's cache between the passes."""

_ORDINARY = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Gradients of one shape, type and layout, which none of them need share in memory.

    Real ones of a type that torch computes with; a large one on a device other than the CPU is still to be `resolved`.
    `layout`: how each splits into output units, if it has any. `implied_zeros`: elements of a sparse gradient that
    are not stored, and so are zero.
    """

    positions: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    layout: UnitLayout | None
    implied_zeros: int = 0

    def of(self, tensors: Iterable[torch.Tensor]) -> Batch:
        """Such a batch of other gradients."""
        return Batch(self.positions, tuple(tensors), self.layout)

    @property
    def units(self) -> bool:
        """Whether the gradients have output units."""
        return self.layout is not None

    @property
    def rows(self) -> int:
        """Output units of each gradient, 1 where there are none."""
        return 1 if self.layout is None else self.layout.count

    @property
    def elements(self) -> int:
        """Stored elements of each gradient; a complex one counts as two."""
        first = self.tensors[0]
        return first.numel() * (2 if first.is_complex() else 1)

    @property
    def values(self) -> torch.Tensor:
        """All of it as one tensor, shape (tensors, rows, columns), a row for each output unit; a copy if there are several."""
        tensors = self.in_order_of_units()
        together = resolved(tensors[0]) if len(tensors) == 1 else torch.stack(tensors)
        return together.reshape(len(tensors), self.rows, -1)

    def in_order_of_units(self) -> tuple[torch.Tensor, ...]:
        """The gradients, each with the elements of one unit after those of another if they are read row by row."""
        layout = self.layout
        return self.tensors if layout is None or layout.dims == (0,) else tuple(map(layout.rows, self.tensors))


def dense_local(gradient: torch.Tensor, *, keep_sparse: bool) -> torch.Tensor:
    """The gradient without graph, as this rank's own plain, real tensor; the stored values if sparse.

    A sparse gradient is coalesced first: entries that stand twice must be added before they are squared.
    """
    return resolved(plain_local(gradient, keep_sparse=keep_sparse))


def plain_local(gradient: torch.Tensor, *, keep_sparse: bool) -> torch.Tensor:
    """The same, still to be `resolved`: it may be complex, of a type of one byte, or lazily conjugated or negated."""
    gradient = gradient.detach()
    to_local = getattr(gradient, "to_local", None)
    if to_local is not None:
        gradient = to_local()
    if gradient.is_sparse:
        return gradient.coalesce().values() if keep_sparse else gradient.to_dense()
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def resolved(part: torch.Tensor) -> torch.Tensor:
    """A plain gradient, or a part of one, as a real tensor of a type that torch computes with; a view wherever it can be one."""
    if part.is_complex():
        part = torch.view_as_real(part.resolve_conj())
    # For types of one byte torch supports little more than conversion; float32 holds each of their values.
    return part.float() if part.element_size() == 1 else part.resolve_neg()


def batches(table: ParameterTable, gradients: Iterable[tuple[int, torch.Tensor]]) -> Iterator[Batch]:
    """Groups `(position in the table, gradient)` of one device into batches; empty gradients are left out."""
    stacks: dict[tuple[object, ...], tuple[list[int], list[torch.Tensor]]] = {}
    for position, gradient in gradients:
        tracked = table.tracked[position]
        layout = tracked.units
        ordinary = is_ordinary(gradient)
        values = gradient if ordinary else plain_local(gradient, keep_sparse=layout is None)
        if values is not gradient and (values.device.type == "cpu" or values.numel() <= STACKED_ELEMENTS // 2):
            values = resolved(values)
        elements = values.numel() if ordinary else values.numel() * (2 if values.is_complex() else 1)
        implied = 0 if ordinary or not gradient.is_sparse else tracked.elements - elements
        if elements == 0:
            if implied:
                yield Batch((position,), (values.new_zeros(1),), None, implied - 1)
        elif implied or elements > STACKED_ELEMENTS // 2:
            yield Batch((position,), (values,), layout, implied)
        else:
            key = (values.shape, values.dtype, None if layout is None else (layout.shape, layout.dims))
            stack = stacks.get(key)
            if stack is None:
                stack = stacks[key] = [], []
            stack[0].append(position)
            stack[1].append(values)
    for positions, tensors in stacks.values():
        most = STACKED_ELEMENTS // tensors[0].numel()
        for start in range(0, len(tensors), most):
            part = slice(start, start + most)
            yield Batch(tuple(positions[part]), tuple(tensors[part]), table.tracked[positions[start]].units)


def is_ordinary(gradient: torch.Tensor) -> bool:
    """Whether a gradient needs no preparation: where there are hundreds, calling `dense_local` costs too much."""
    return type(gradient) is torch.Tensor and gradient.layout is torch.strided and gradient.dtype in _ORDINARY
