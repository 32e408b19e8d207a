"""Gradients by device and in batches, grouped anew only when they are of other kinds than before.

In training nothing changes from sample to sample but the numbers, and with hundreds of gradients grouping them costs
as much as measuring them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torch_grad_exporter.metrics.families import IntArray
from torch_grad_exporter.model.parameters import ParameterTable, TrackedParameter
from torch_grad_exporter.model.sharding import is_partial
from torch_grad_exporter.statistics.batches import Batch, batches, is_ordinary

Gradients = Sequence[tuple[int, torch.Tensor]]
"""Gradients with their positions in the table."""


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


class Grouping:
    """Groups gradients; remembers how, but no gradient."""

    def __init__(self) -> None:
        self._known: tuple[ParameterTable, list[tuple[object, ...]], Grouped] | None = None

    def groups(self, table: ParameterTable, gradients: Gradients) -> Grouped:
        """The gradients by device and in batches, without empty ones and those of which this rank has only a summand."""
        kinds: list[tuple[object, ...]] = [(p, type(g), g.layout, g.dtype, g.device, g.shape) for p, g in gradients]
        known = self._known
        if known is not None and known[0] is table and known[1] == kinds:
            found = dict(gradients)
            return [(group, tuple(batch.of([found[p] for p in batch.positions]) for batch in parts)) for group, parts in known[2]]
        groups: Grouped = []
        for device, part in _by_device(gradients):
            if parts := tuple(sorted(batches(table, part), key=lambda batch: not batch.units)):
                groups.append((Group.of(device, table, parts), parts))
        # How gradients that are not ordinary are grouped does not follow from their kind.
        ordinary = all(is_ordinary(gradient) for _, gradient in gradients)
        empty = [(group, tuple(batch.of(()) for batch in parts)) for group, parts in groups]
        self._known = (table, kinds, empty) if ordinary else None
        return groups


def _by_device(gradients: Gradients) -> list[tuple[torch.device, Gradients]]:
    groups: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for position, gradient in gradients:
        if is_partial(gradient):
            continue  # the norm of a sum does not follow from one summand
        groups.setdefault(gradient.device, []).append((position, gradient))
    return list(groups.items())
