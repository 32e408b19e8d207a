"""AccumulateGradNodes: tells which parameters just received their gradients, whatever the backward runs through.

Unlike post-accumulate-grad hooks, hooks on the nodes leave next to nothing behind when they are removed. A node lives as long
as something references it, and it references its parameter. Armed nodes keep parameters alive, so they are armed for single
rounds only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from torch_grad_exporter.capture.torch_hooks import Handle
from torch_grad_exporter.model.parameters import ParameterTable, TrackedParameter
from torch_grad_exporter.torch_compat import node_of

NodeHook = Callable[..., None]
"""Is called with the `TrackedParameter` whose node fired first."""


class AccumulateGradNodes:
    """Hooks on the AccumulateGrad nodes of a table's parameters, while `armed`. `fired`: those for which `saw` was called."""

    def __init__(self) -> None:
        self._nodes: dict[TrackedParameter, torch.autograd.graph.Node] = {}
        self._handles: list[Handle] = []
        self.armed = False
        self.fired: set[TrackedParameter] = set()

    def arm(self, table: ParameterTable, hook: NodeHook) -> None:
        """Hooks the nodes of all parameters of the table, where none is hooked."""
        self.armed = True
        for tracked in table.tracked:
            parameter = tracked.parameter()
            if parameter is not None and parameter.requires_grad:
                node = node_of(parameter)
                self._nodes[tracked] = node
                self._handles.append(node.register_hook(functools.partial(hook, tracked)))

    def begin(self) -> None:
        """A backward begins."""
        self.fired.clear()

    def saw(self, tracked: TrackedParameter) -> None:
        """A parameter has received its gradient."""
        self.fired.add(tracked)

    def sees_all_of(self, table: ParameterTable) -> bool:
        """Whether the node of every parameter of the table is hooked, and is still the one that a backward runs through."""
        for tracked in table.tracked:
            parameter, node = tracked.parameter(), self._nodes.get(tracked)
            if parameter is None or node is None or not parameter.requires_grad:
                return False
            if node_of(parameter) is not node:
                return False
        return True

    def positions(self, table: ParameterTable) -> set[int]:
        """The positions in the table of the parameters that fired."""
        return {position for position, tracked in enumerate(table.tracked) if tracked in self.fired}

    def disarm(self) -> None:
        """Removes the hooks and releases the nodes; idempotent, from any thread."""
        self.armed = False
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._nodes = {}
        self.fired = set()
