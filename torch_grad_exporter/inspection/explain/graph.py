"""Autograd's graph as far as it was met: which parameters are behind a tensor, and where each node was made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.autograd.graph import Node

from torch_grad_exporter.inspection.explain.places import Where

REENTRANT = "CheckpointFunctionBackward"
"""The node of a reentrant checkpoint, which makes the graph of what is in it in the backward only."""


class Graph:
    """Sets of parameters are integers, in which bit `i` stands for parameter number `i`; so a union costs nothing.

    Keeps the nodes that it met, and with them what they saved, until it is dropped.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.bits = {id(parameter): 1 << number for number, parameter in enumerate(parameters)}
        self._behind: dict[Node, int] = {}
        self._places: dict[Node, Where] = {}

    def behind(self, tensor: torch.Tensor, place: Callable[[], Where] | None = None) -> int:
        """The parameters that a gradient of the tensor reaches. Nodes that are new are said to be made at `place`."""
        if not tensor.requires_grad:
            return 0
        if tensor.grad_fn is None:
            return self.bits.get(id(tensor), 0)
        return self._visit(tensor.grad_fn, place)

    def behind_node(self, node: Node | None) -> int:
        """The same of a node."""
        return 0 if node is None else self._visit(node, None)

    def _visit(self, root: Node, place: Callable[[], Where] | None) -> int:
        known = self._behind.get(root)
        if known is not None:
            return known
        where = place() if place is not None else None
        stack = [root]
        while stack:
            node = stack[-1]
            following = followers(node)
            waiting = [one for one in following if one not in self._behind]
            if waiting:
                stack += waiting
                continue
            stack.pop()
            if node not in self._behind:
                self._behind[node] = self._own(node) | union(self._behind[one] for one in following)
                if where is not None:
                    self._places[node] = where
        return self._behind[root]

    def _own(self, node: Node) -> int:
        variable = getattr(node, "variable", None)  # of AccumulateGrad
        return 0 if variable is None else self.bits.get(id(variable), 0)

    def place(self, node: Node) -> Where | None:
        """Where the node was made, `None` if nobody watched."""
        return self._places.get(node)

    def below(self, roots: Iterable[torch.Tensor]) -> list[Node]:
        """All nodes that gradients of these tensors may pass, each before those that it passes them on to."""
        order: list[Node] = []
        done: set[Node] = set()
        for root in roots:
            # Depth first, each after all that follow it; reversed, that is the order wanted.
            stack = [(root.grad_fn, False)]
            while stack:
                node, left = stack.pop()
                if node is None or (node in done and not left):
                    continue
                if left:
                    order.append(node)
                    continue
                done.add(node)
                stack.append((node, True))
                stack += [(one, False) for one in followers(node)]
        return order[::-1]


def followers(node: Node) -> list[Node]:
    """The nodes that get a gradient from this one."""
    return [one for one, _ in node.next_functions if one is not None]


def operation(node: Node) -> str:
    """The name of the operation that made a node: `relu` for `ReluBackward0`."""
    name = node.name().rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")
    if "." in name:  # a compiled or custom function shows its path
        name = name.rpartition(".")[2]
    return name


def is_accumulator(node: Node) -> bool:
    """Whether the node accumulates a leaf's gradient."""
    return getattr(node, "variable", None) is not None


def union(sets: Iterable[int]) -> int:
    """All that is in one of the sets."""
    found = 0
    for one in sets:
        found |= one
    return found
