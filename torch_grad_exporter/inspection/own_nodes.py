"""The nodes of the graph that a call of a module has made: those numbered while it ran, found behind what it has returned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch_grad_exporter.torch_compat.autograd import number_of

VISITED = 1 << 12
"""Nodes that are visited for one call, at most."""

FEW = 128
"""So many nodes of a call are all to be hooked, at most."""


@dataclass(frozen=True, slots=True)
class OwnNodes:
    """Before which nodes of a call something of it begins, and after which it is over."""

    before: tuple[Any, ...]
    after: tuple[Any, ...]


def own_nodes(outputs: Iterable[Any], first: int, last: int, taken: set[int]) -> OwnNodes | None:
    """Those numbered from `first` up to `last`, that excluded, without those that are `taken`, to which it adds them.

    `outputs`: the nodes that made what the call has returned. Where there are more than `FEW`, the backward goes through them one
    after the other, from the outputs to the lowest number; then only these are given. `None` where there are too many to find out.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    ends = {number_of(node): node for node in outputs if first <= number_of(node) < last}
    nodes = list(ends.values())
    while nodes:
        node = nodes.pop()
        number = number_of(node)
        if number in seen:
            continue
        if len(seen) == VISITED:
            return None
        seen.add(number)
        if number not in taken:
            found[number] = node
        nodes += (behind for behind, _ in node.next_functions if behind is not None and first <= number_of(behind) < last)
    taken.update(found)
    if len(found) <= FEW:
        return OwnNodes((*found.values(),), (*found.values(),))
    return OwnNodes((*ends.values(),), (found[min(found)],))
