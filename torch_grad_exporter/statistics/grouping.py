"""Gradients by device and in batches, grouped anew only when they are of other kinds than before.

In training nothing changes from sample to sample but the numbers, and with hundreds of gradients grouping them costs
as much as measuring them.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torch_grad_exporter.metrics.families import IntArray
from torch_grad_exporter.model.parameters import ParameterTable, TrackedParameter
from torch_grad_exporter.model.sharding import is_partial
from torch_grad_exporter.statistics.batches import Batch, batches, is_ordinary

Gradients = Mapping[int, torch.Tensor] | Iterable[tuple[int, torch.Tensor]]
"""Gradients by their positions in the table, as `dict` takes them."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Which gradients of one device are measured together, those with output units first; without the gradients themselves.

    `members`: the parameters with output units, and how many. `positions`, `elements`, `units`: shape (n,), in the order of
    the batches: the gradients' positions in the table, and how many elements and output units each has. `implied`: how many of the
    elements are zeros that a sparse gradient does not store.
    """

    device: torch.device
    members: tuple[tuple[TrackedParameter, int], ...]
    positions: IntArray
    elements: IntArray
    units: IntArray
    implied: IntArray

    @classmethod
    def of(cls, device: torch.device, table: ParameterTable, ordered: Sequence[Batch]) -> Group:
        """The group of these batches."""
        positions = [position for batch in ordered for position in batch.positions]
        sizes = [(one.elements + one.implied_zeros, one.rows if one.units else 0, one.implied_zeros) for one in ordered]
        elements, units, implied = np.repeat(np.array(sizes, dtype=np.int64), [len(one.positions) for one in ordered], axis=0).T
        members = tuple((table.tracked[p], int(n)) for p, n in zip(positions, units, strict=True) if n)
        return cls(device, members, np.array(positions, dtype=np.int64), elements, units, implied)


Grouped = list[tuple[Group, tuple[Batch, ...]]]

KNOWN = 8
"""Sets of gradients of which it is remembered how they are grouped, at most: those of each optimizer are measured by themselves."""

_kind: Callable[[torch.Tensor], tuple[object, ...]] = operator.attrgetter("layout", "dtype", "device", "shape")


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """How gradients at these positions, of these types and kinds, are grouped; without the gradients."""

    table: ParameterTable
    positions: list[int]
    types: list[type[torch.Tensor]]
    kinds: list[tuple[object, ...]]
    groups: Grouped

    @classmethod
    def of(cls, table: ParameterTable, gradients: Mapping[int, torch.Tensor], groups: Grouped) -> _Known:
        """What is to be remembered of these. Gradients of one kind share the object that says it."""
        kinds: dict[tuple[object, ...], tuple[object, ...]] = {}
        return cls(
            table,
            [*gradients],
            [*map(type, gradients.values())],
            [kinds.setdefault(kind, kind) for kind in map(_kind, gradients.values())],
            [(group, tuple(batch.of(()) for batch in parts)) for group, parts in groups],
        )

    def fits(self, table: ParameterTable, gradients: Mapping[int, torch.Tensor]) -> bool:
        """Whether these gradients are grouped like that. In columns, since each sample asks twice."""
        return (
            self.table is table
            and self.positions == [*gradients]
            and self.types == [*map(type, gradients.values())]
            and all(map(operator.eq, map(_kind, gradients.values()), self.kinds))
        )

    def grouped(self, gradients: Mapping[int, torch.Tensor]) -> Grouped:
        """The gradients in these groups."""
        found = gradients.__getitem__
        return [(group, tuple(batch.of(map(found, batch.positions)) for batch in parts)) for group, parts in self.groups]


class Grouping:
    """Groups gradients; remembers how, but no gradient."""

    def __init__(self) -> None:
        self._known: deque[_Known] = deque(maxlen=KNOWN)

    def groups(self, table: ParameterTable, gradients: Gradients) -> Grouped:
        """The gradients by device and in batches, without empty ones and those of which this rank has only a summand."""
        found = dict(gradients)
        for known in self._known:
            if known.fits(table, found):
                return known.grouped(found)
        groups: Grouped = []
        for device, part in _by_device(found).items():
            if parts := tuple(sorted(batches(table, part.items()), key=lambda batch: not batch.units)):
                groups.append((Group.of(device, table, parts), parts))
        if self._known and self._known[0].table is not table:
            self._known.clear()
        # How gradients that are not ordinary are grouped does not follow from their kind.
        if all(map(is_ordinary, found.values())):
            self._known.appendleft(_Known.of(table, found, groups))
        return groups


def _by_device(gradients: Mapping[int, torch.Tensor]) -> dict[torch.device, dict[int, torch.Tensor]]:
    groups: dict[torch.device, dict[int, torch.Tensor]] = {}
    for position, gradient in gradients.items():
        if is_partial(gradient):
            continue  # the norm of a sum does not follow from one summand
        group = groups.get(gradient.device)
        if group is None:
            group = groups[gradient.device] = {}
        group[position] = gradient
    return groups
