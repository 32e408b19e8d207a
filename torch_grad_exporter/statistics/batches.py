"""Gradients made ready for measuring: dense, real, local, and small ones of equal shape batched.

A model of many small tensors is bound by the number of calls and not by bytes. In training nothing
but the numbers changes from sample to sample, so that the grouping is kept.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torch_grad_exporter.metrics.families import IntArray
from torch_grad_exporter.model.parameters import ParameterTable, TrackedParameter
from torch_grad_exporter.model.sharding import is_partial
from torch_grad_exporter.model.units import UnitLayout

# Elements of a batch of several gradients, at most: 512 KiB of float32 stay in a core's cache.
STACKED_ELEMENTS = 1 << 17

_ORDINARY = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
_KNOWN = 8  # sets of gradients whose grouping is kept: each optimizer may have its own

Gradients = Mapping[int, torch.Tensor] | Iterable[tuple[int, torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Gradients of one shape and type, each with memory of its own.

    They are real and of a type that torch computes with. A large one on a device other than the
    CPU is still to be `resolved`.

    Attributes:
        positions: Of the parameters in their table.
        tensors: The gradients.
        layout: How each splits into output units, if it has any.
        implied_zeros: Elements of a sparse gradient that are not stored, and so are zero.
    """

    positions: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    layout: UnitLayout | None
    implied_zeros: int = 0

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

    def stacked(self) -> torch.Tensor:
        """Return all as one tensor in the order of units; a copy if there are several."""
        tensors, layout = self.tensors, self.layout
        if layout is not None and layout.dims != (0,):
            tensors = tuple(map(layout.rows, tensors))
        return tensors[0] if len(tensors) == 1 else torch.stack(tensors)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Which gradients of one device are measured together, without the gradients themselves.

    Attributes:
        device: Where they are.
        members: The parameters with output units, which come first, and their numbers of units.
        positions: In the table, shape (n,), in the order of the batches.
        elements: Of each gradient, shape (n,).
        units: Output units of each gradient, shape (n,).
        implied: Zeros of each that a sparse gradient does not store, shape (n,).
    """

    device: torch.device
    members: tuple[tuple[TrackedParameter, int], ...]
    positions: IntArray
    elements: IntArray
    units: IntArray
    implied: IntArray


Grouped = list[tuple[Group, tuple[Batch, ...]]]


def dense_local(gradient: torch.Tensor, *, keep_sparse: bool) -> torch.Tensor:
    """Return this rank's own part as a plain, real tensor without graph; stored values if sparse."""
    return resolved(plain_local(gradient, keep_sparse=keep_sparse))


def plain_local(gradient: torch.Tensor, *, keep_sparse: bool) -> torch.Tensor:
    """Like `dense_local`, still to be `resolved`."""
    gradient = gradient.detach()
    to_local = getattr(gradient, "to_local", None)
    if to_local is not None:
        gradient = to_local()
    if gradient.is_sparse:
        # Entries that are stored twice must be added before they are squared.
        return gradient.coalesce().values() if keep_sparse else gradient.to_dense()
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def resolved(part: torch.Tensor) -> torch.Tensor:
    """Return a plain gradient as a real tensor that torch computes with; a view wherever possible."""
    if part.is_complex():
        part = torch.view_as_real(part.resolve_conj())
    # Torch can do little more with types of one byte than convert them.
    return part.float() if part.element_size() == 1 else part.resolve_neg()


def is_ordinary(gradient: torch.Tensor) -> bool:
    """Return whether a gradient needs no preparation, which is too slow for hundreds of them."""
    return type(gradient) is torch.Tensor and gradient.layout is torch.strided and gradient.dtype in _ORDINARY


def batches(table: ParameterTable, gradients: Iterable[tuple[int, torch.Tensor]]) -> Iterator[Batch]:
    """Batch `(position in the table, gradient)` of one device; empty gradients are left out."""
    stacks: dict[tuple[object, ...], tuple[list[int], list[torch.Tensor]]] = {}
    for position, gradient in gradients:
        tracked = table.tracked[position]
        layout, values, implied = tracked.units, gradient, 0
        on_host = gradient.device.type == "cpu"
        # To copy a gradient into a stack costs less than a call only if it is small.
        small = STACKED_ELEMENTS // (8 if on_host else 2)
        if not is_ordinary(gradient):
            values = plain_local(gradient, keep_sparse=layout is None)
            if on_host or values.numel() <= small:
                values = resolved(values)
        elements = values.numel() * (2 if values.is_complex() else 1)
        if values is not gradient and gradient.is_sparse:
            implied = tracked.elements - elements
        if elements == 0:
            if implied:
                yield Batch((position,), (values.new_zeros(1),), None, implied - 1)
        elif implied or elements > small:
            yield Batch((position,), (values,), layout, implied)
        else:
            key = (values.shape, values.dtype, None if layout is None else (layout.shape, layout.dims))
            positions, tensors = stacks.setdefault(key, ([], []))
            positions.append(position)
            tensors.append(values)
    for positions, tensors in stacks.values():
        most = STACKED_ELEMENTS // tensors[0].numel()
        for start in range(0, len(tensors), most):
            part = slice(start, start + most)
            yield Batch(tuple(positions[part]), tuple(tensors[part]), table.tracked[positions[start]].units)


def arranged(gradient: torch.Tensor, layout: UnitLayout | None) -> torch.Tensor:
    """Return a view with the dimensions of the units first, the rest in the order of memory."""
    if layout is not None and layout.dims != (0,):
        # A view of `layout.shape` would be a copy where the last dimensions are apart in memory.
        split = gradient.view((*layout.shape[:2], *gradient.shape[1:]))
        return split.movedim(layout.dims, tuple(range(len(layout.dims))))
    order = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
    in_memory = gradient if gradient.is_contiguous() else gradient.permute(order)
    if not in_memory.is_contiguous() or (layout is not None and in_memory is not gradient and order[0] != 0):
        return gradient
    return in_memory.view(-1 if layout is None else (layout.count, -1))


def slices(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Cut a tensor along its first dimensions into consecutive parts of at most `most` elements."""
    width = math.prod(tensor.shape[1:])
    if width > most:
        for part in tensor:
            yield from slices(part, most)
    else:
        step = most // width
        for start in range(0, tensor.shape[0], step):
            yield tensor[start : start + step]


_kind: Callable[[torch.Tensor], tuple[object, ...]] = operator.attrgetter("layout", "dtype", "device", "shape")


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """How gradients at these positions, of these types and kinds, are grouped."""

    table: ParameterTable
    positions: list[int]
    types: list[type[torch.Tensor]]
    kinds: list[tuple[object, ...]]
    groups: list[tuple[Group, list[tuple[tuple[int, ...], UnitLayout | None]]]]

    def fits(self, table: ParameterTable, gradients: Mapping[int, torch.Tensor]) -> bool:
        # In columns, since each sample asks twice.
        return (
            self.table is table
            and self.positions == [*gradients]
            and self.types == [*map(type, gradients.values())]
            and all(map(operator.eq, map(_kind, gradients.values()), self.kinds))
        )

    def grouped(self, gradients: Mapping[int, torch.Tensor]) -> Grouped:
        at = gradients.__getitem__
        return [(group, tuple(Batch(some, tuple(map(at, some)), layout) for some, layout in parts)) for group, parts in self.groups]


class Grouping:
    """Groups gradients by device and batches them; keeps how, but no gradient."""

    def __init__(self) -> None:
        self._known: deque[_Known] = deque(maxlen=_KNOWN)

    def groups(self, table: ParameterTable, gradients: Gradients) -> Grouped:
        """Return the gradients, without empty ones and those of which this rank has a summand."""
        wanted = dict(gradients)
        for known in self._known:
            if known.fits(table, wanted):
                return known.grouped(wanted)
        by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for position, gradient in wanted.items():
            if not is_partial(gradient):  # the norm of a sum does not follow from one summand
                by_device.setdefault(gradient.device, []).append((position, gradient))
        groups: Grouped = []
        for device, some in by_device.items():
            if parts := tuple(sorted(batches(table, some), key=lambda batch: not batch.units)):
                groups.append((_group(device, table, parts), parts))
        if self._known and self._known[0].table is not table:
            self._known.clear()
        # How other gradients are grouped does not follow from their kind alone.
        if all(map(is_ordinary, wanted.values())):
            shared: dict[tuple[object, ...], tuple[object, ...]] = {}
            kinds = [shared.setdefault(kind, kind) for kind in map(_kind, wanted.values())]
            kept = [(group, [(batch.positions, batch.layout) for batch in parts]) for group, parts in groups]
            self._known.appendleft(_Known(table, [*wanted], [*map(type, wanted.values())], kinds, kept))
        return groups


def _group(device: torch.device, table: ParameterTable, ordered: Sequence[Batch]) -> Group:
    positions = [position for batch in ordered for position in batch.positions]
    sizes = [(b.elements + b.implied_zeros, b.rows * b.units, b.implied_zeros) for b in ordered]
    repeats = [len(batch.positions) for batch in ordered]
    elements, units, implied = np.repeat(np.array(sizes, dtype=np.int64), repeats, axis=0).T
    members = tuple((table.tracked[p], int(n)) for p, n in zip(positions, units, strict=True) if n)
    return Group(device, members, np.array(positions, dtype=np.int64), elements, units, implied)
