"""Gradients made ready for measuring: dense, real, local, and small ones of equal shape batched.

A model of many small tensors is bound by the number of calls and not by bytes. In training nothing
but the numbers changes from sample to sample, so that the grouping is kept.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from torch_grad_exporter.metrics.families import FloatArray, IntArray
from torch_grad_exporter.model.sharding import is_partial

if TYPE_CHECKING:
    from torch_grad_exporter.model.parameters import ParameterTable, TrackedParameter
    from torch_grad_exporter.model.units import UnitLayout

# Elements of a batch of several gradients, at most: 512 KiB of float32 stay in a core's cache.
STACKED_ELEMENTS = 1 << 17

_ORDINARY = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
_KNOWN = 8  # sets of gradients whose grouping is kept: each optimizer may have its own
_kind: Callable[[torch.Tensor], tuple[object, ...]] = operator.attrgetter("__class__", "layout", "dtype", "device", "shape")

_Values = TypeVar("_Values", torch.Tensor, FloatArray)
Gradients = Mapping[int, torch.Tensor] | Iterable[tuple[int, torch.Tensor]]


@dataclass(slots=True, eq=False)
class Batch:
    """Gradients of one shape and type, each with memory of its own, and how they split into output units."""

    positions: tuple[int, ...]  # of the parameters in their table
    tensors: tuple[torch.Tensor, ...]
    layout: UnitLayout | None  # None: they have no units
    rows: int  # output units of each gradient, 1 where there are none
    elements: int  # stored in each gradient; a complex one counts as two
    implied_zeros: int = 0  # elements of a sparse gradient that are not stored, and so are zero

    @classmethod
    def of(
        cls, positions: tuple[int, ...], tensors: tuple[torch.Tensor, ...], layout: UnitLayout | None = None, implied_zeros: int = 0
    ) -> Batch:
        """Return the batch of these gradients."""
        elements = tensors[0].numel() * (2 if tensors[0].is_complex() else 1)
        return cls(positions, tensors, layout, 1 if layout is None else layout.count, elements, implied_zeros)

    def cut(self, most: int) -> Iterator[torch.Tensor]:
        """Return real tensors of shape (gradients, rows, columns); only small ones are copies.

        A row is an output unit or a part of one: a larger unit comes in parts, as many for each.
        A gradient of more than `most` elements comes in several tensors, and alone.
        """
        tensors, layout = self.tensors, self.layout
        if layout is not None and layout.dims == (0,):
            layout = None  # the units are as they stand in memory
        if self.elements <= most:
            if layout is not None:
                tensors = tuple(map(layout.rows, tensors))
            whole = resolved(tensors[0] if len(tensors) == 1 else torch.stack(tensors))
            yield whole.reshape(len(tensors), self.rows, -1)
            return
        gradient, width = tensors[0], self.elements // self.rows
        if layout is not None:
            # A view of `layout.shape` would be a copy where the last dimensions are apart in memory.
            split = gradient.view((*layout.shape[:2], *gradient.shape[1:]))
            gradient = split.movedim(layout.dims, tuple(range(len(layout.dims))))
        elif gradient.is_contiguous():
            gradient = gradient.view(self.rows, -1)
        for part in map(resolved, slices(gradient, most // 2 if gradient.is_complex() else most)):
            yield part.reshape(1, max(1, part.numel() // width), -1)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Which gradients of one device are measured together, without the gradients themselves."""

    device: torch.device
    members: tuple[tuple[TrackedParameter, int], ...]  # with output units, which come first, and how many
    positions: IntArray  # in the table, in the order of the batches
    elements: IntArray  # of each gradient
    units: IntArray  # output units of each
    implied: IntArray  # zeros of each that a sparse gradient does not store
    readable: bool  # all are plain tensors on the host, of types that NumPy has


def slices(values: _Values, most: int) -> Iterator[_Values]:
    """Cut a tensor or array along its first dimensions into consecutive parts of at most `most` elements."""
    width = math.prod(values.shape[1:])
    if width > most:
        for part in values:
            yield from slices(part, most)
    else:
        step = most // width
        for start in range(0, values.shape[0], step):
            yield values[start : start + step]


def is_ordinary(gradient: torch.Tensor) -> bool:
    """Return whether a gradient needs no preparation, which is too slow for hundreds of them."""
    return type(gradient) is torch.Tensor and gradient.layout is torch.strided and gradient.dtype in _ORDINARY


def plain_local(gradient: torch.Tensor, *, keep_sparse: bool) -> torch.Tensor:
    """Return this rank's own part as a plain tensor without graph; stored values if sparse."""
    gradient = gradient.detach()
    to_local = getattr(gradient, "to_local", None)
    if to_local is not None:
        gradient = to_local()
    if gradient.is_sparse and keep_sparse:
        # Entries that are stored twice must be added before they are squared.
        return gradient.coalesce().values()
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def resolved(part: torch.Tensor) -> torch.Tensor:
    """Return a plain gradient as a real tensor that torch computes with; a view wherever possible."""
    if part.is_complex():
        part = torch.view_as_real(part.resolve_conj())
    # Torch can do little more with types of one byte than convert them.
    return part.float() if part.element_size() == 1 else part.resolve_neg()


def batches(table: ParameterTable, gradients: Iterable[tuple[int, torch.Tensor]]) -> Iterator[Batch]:
    """Batch `(position in the table, gradient)`; empty gradients are left out."""
    # In columns: a container for each gradient would make the garbage collector come in the middle of the first sample.
    stacks: dict[tuple[object, ...], tuple[list[int], list[torch.Tensor]]] = {}
    for position, gradient in gradients:
        tracked = table.tracked[position]
        layout, values, implied = tracked.units, gradient, 0
        if not is_ordinary(gradient):
            values = plain_local(gradient, keep_sparse=layout is None)
        elements = values.numel() * (2 if values.is_complex() else 1)
        if gradient.is_sparse:
            implied = tracked.elements - elements
        # To copy a gradient into a stack costs less than a call only if it is small.
        small = elements <= STACKED_ELEMENTS // (8 if gradient.device.type == "cpu" else 2)
        if elements == 0 and implied:
            values, elements, implied = values.new_zeros(1), 1, implied - 1
        if elements == 0:
            continue
        if implied or not small:
            yield Batch.of((position,), (values,), layout, implied)
        else:
            key = (values.device, values.shape, values.dtype, None if layout is None else (layout.shape, layout.dims))
            positions, tensors = stacks.setdefault(key, ([], []))
            positions.append(position)
            tensors.append(values)
    for positions, tensors in stacks.values():
        most = STACKED_ELEMENTS // tensors[0].numel()
        for start in range(0, len(positions), most):
            part = slice(start, start + most)
            yield Batch.of(tuple(positions[part]), tuple(tensors[part]), table.tracked[positions[start]].units)


Grouped = list[tuple[Group, list[Batch]]]


class Grouping:
    """Groups gradients by device and batches them; keeps how, but no gradient."""

    def __init__(self) -> None:
        # Which gradients, their kinds, and their groups without them. Replaced, never changed: threads may share it.
        self._known: tuple[tuple[tuple[ParameterTable, list[int]], list[tuple[object, ...]], Grouped], ...] = ()

    def groups(self, table: ParameterTable, gradients: Gradients) -> Grouped:
        """Return the gradients, without empty ones and those of which this rank has a summand."""
        wanted = dict(gradients)
        for position in table.tracked.flat & wanted.keys():
            wanted[position] = table.tracked[position].own(wanted[position])
        which, values, at = (table, [*wanted]), wanted.values(), wanted.__getitem__
        for known, kinds, groups in self._known:
            if known == which and all(map(operator.eq, map(_kind, values), kinds)):
                return [
                    (group, [Batch(p.positions, (*map(at, p.positions),), p.layout, p.rows, p.elements) for p in parts])
                    for group, parts in groups
                ]
        by_device: dict[torch.device, list[Batch]] = {}
        # The norm of a sum does not follow from one summand.
        for batch in batches(table, ((i, gradient) for i, gradient in wanted.items() if not is_partial(gradient))):
            by_device.setdefault(batch.tensors[0].device, []).append(batch)
        ordinary, grouped = all(map(is_ordinary, values)), []
        for device, parts in by_device.items():
            parts.sort(key=lambda batch: batch.layout is None)
            positions = np.array([position for batch in parts for position in batch.positions], dtype=np.int64)
            implied = np.repeat([batch.implied_zeros for batch in parts], [len(batch.positions) for batch in parts])
            units = table.units[positions]
            members = tuple((table.tracked[p], n) for p, n in zip(positions.tolist(), units.tolist(), strict=True) if n)
            readable = ordinary and device.type == "cpu" and all(b.tensors[0].dtype is not torch.bfloat16 for b in parts)
            group = Group(device, members, positions, table.elements[positions], units, implied, readable)
            grouped.append((group, parts))
        # How other gradients are grouped does not follow from their kind alone.
        if ordinary:
            shared: dict[tuple[object, ...], tuple[object, ...]] = {}
            kinds = [shared.setdefault(kind, kind) for kind in map(_kind, values)]
            kept = [(group, [replace(batch, tensors=()) for batch in parts]) for group, parts in grouped]
            of_this_table = (known for known in self._known if known[0][0] is table)
            self._known = ((which, kinds, kept), *of_this_table)[:_KNOWN]
        return grouped
