"""Autograd's graph as far as it was met, and the gradients that a backward passes."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import Node

from torch_grad_exporter.errors import Guard
from torch_grad_exporter.inspection.explain.places import Places, Where
from torch_grad_exporter.torch_compat.autograd import node_of
from torch_grad_exporter.torch_compat.tensors import local

# The node of a reentrant checkpoint, which makes the graph of what is in it in the backward only.
REENTRANT = "CheckpointFunctionBackward"


class GradientState(enum.IntEnum):
    """What a gradient is worth; the larger, the worse."""

    OK = 0
    ZERO = 1  # everywhere
    MISSING = 2
    NONFINITE = 3

    def __str__(self) -> str:
        return "not finite" if self is GradientState.NONFINITE else self.name.lower()


@dataclass(frozen=True, slots=True)
class Turn:
    """A node that got a better gradient than it passed on to `following`. `state`: of what it passed on."""

    node: Node
    following: Node
    state: GradientState


class Graph:
    """Which parameters are behind a tensor, where each node was made, and what its backwards have shown.

    A set of parameters is an integer, in which bit `i` stands for parameter number `i`, so a union costs nothing. Keeps the nodes
    that it met, and with them what they saved, until it is dropped, but no gradient. It reads values of gradients, and so waits for
    the device.

    Attributes:
        places: Where nodes of a watched forward were made.
        roots: Where backwards began, in order.
        trained: The parameters that required a gradient when one began.
        arrived: The state of what arrived at each parameter, by number; of several gradients the best, unless one is not finite.
        states: The worst of what arrived at each node; only of nodes that ran.
        failures: Of watching, none of which reaches the user's function.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self.bits = {id(parameter): 1 << number for number, parameter in enumerate(parameters)}
        self._behind: dict[Node, int] = {}  # each node after all that get a gradient from it
        self._hooks, self._hooked = contextlib.ExitStack(), set[Node]()
        self.places: dict[Node, Where] = {}
        self.roots: list[torch.Tensor] = []
        self.trained = 0
        self.arrived: dict[int, GradientState] = {}
        self.turns: list[Turn] = []
        self.states: dict[Node, GradientState] = {}
        self.failures: list[Exception] = []
        self.guard = Guard(self.failures.append)

    # The forward

    def behind(self, tensor: torch.Tensor, places: Places | None = None) -> int:
        """Return the parameters that a gradient of the tensor reaches. New nodes are noted as made by what runs now in `places`."""
        if not tensor.requires_grad:
            return 0
        if tensor.grad_fn is None:
            return self.bits.get(id(tensor), 0)
        return self.behind_node(tensor.grad_fn, places)

    def behind_node(self, root: Node, places: Places | None = None) -> int:
        """Return the same for a node."""
        known = self._behind.get(root)
        if known is not None:
            return known
        where = places.here() if places is not None else None
        stack = [root]
        while stack:
            node = stack[-1]
            following = followers(node)
            unknown = [other for other in following if other not in self._behind]
            if unknown:
                stack += unknown
                continue
            stack.pop()
            if node not in self._behind:
                own = self.bits.get(id(getattr(node, "variable", None)), 0)
                self._behind[node] = own | union(self._behind[other] for other in following)
                if where is not None:
                    self.places[node] = where
        return self._behind[root]

    def below(self, roots: Iterable[torch.Tensor]) -> list[Node]:
        """Return all nodes that gradients of these tensors may pass, each before those that it passes them on to."""
        reached: set[Node] = set()
        stack = [root.grad_fn for root in roots if root.grad_fn is not None]
        for node in stack:
            self.behind_node(node)
        while stack:
            node = stack.pop()
            if node not in reached:
                reached.add(node)
                stack += followers(node)
        return [node for node in reversed(self._behind) if node in reached]

    # The backward

    def hook_parameters(self) -> None:
        """Note which parameters require a gradient now, and hook them."""
        for number, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                self.trained |= 1 << number
                node = node_of(parameter)
                if node not in self._hooked:
                    self._hooked.add(node)
                    self._hooks.callback(node.register_prehook(self._guarded(self._arrived, number)).remove)

    def begin(self, roots: list[torch.Tensor]) -> None:
        """Hook what a backward from these tensors, which is about to begin, may pass."""
        self.roots += roots
        self.hook_parameters()
        for node in self.below(roots):
            if node not in self._hooked and getattr(node, "variable", None) is None:
                self._hooked.add(node)
                self._hooks.callback(node.register_hook(self._guarded(self._passed_on, node)).remove)

    def run(self, loss: torch.Tensor, *, keep_graph: bool) -> None:
        """Run a backward from the loss that leaves `.grad` alone, unless a reentrant checkpoint needs a usual one."""
        self.begin([loss])
        if any(node.name() == REENTRANT for node in self.below([loss])):
            loss.backward(retain_graph=keep_graph)  # type: ignore[no-untyped-call]
            return
        behind = self.behind(loss)
        numbers = [n for n, p in enumerate(self._parameters) if p.requires_grad and behind >> n & 1]
        if not numbers or loss.grad_fn is None:
            return
        inputs = [self._parameters[number] for number in numbers]
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=keep_graph)
        for number, gradient in zip(numbers, gradients, strict=True):
            self.guard(self._arrived, number, (gradient,))

    def drop(self) -> None:
        """Remove all hooks and release the graph; idempotent."""
        self._hooks.close()
        for nodes in (self._hooked, self.roots, self.turns, self.states):
            nodes.clear()

    def _guarded(self, action: Callable[..., object], of: object) -> Callable[..., None]:
        def hook(*gradients: object) -> None:
            self.guard(action, of, *gradients)

        return hook

    def _arrived(self, number: int, gradients: Sequence[torch.Tensor | None]) -> None:
        if gradients[0] is not None:
            state = _state_of(gradients[0])
            states = (state, self.arrived.get(number, state))
            self.arrived[number] = GradientState.NONFINITE if GradientState.NONFINITE in states else min(states)

    def _passed_on(self, node: Node, passed: Sequence[torch.Tensor | None], got: Sequence[torch.Tensor | None]) -> None:
        """Compare what a node passes on with what it got."""
        received = [_state_of(gradient) for gradient in got if gradient is not None] or [GradientState.MISSING]
        # Of a node with several results some may go unused; the best that it got counts.
        best, worst = min(received), max(received)
        self.states[node] = max(worst, self.states.get(node, GradientState.OK))
        for (following, _), gradient in zip(node.next_functions, passed, strict=False):
            if following is None:
                continue
            state = GradientState.MISSING if gradient is None else _state_of(gradient)
            spoiled = state is GradientState.NONFINITE and worst is not GradientState.NONFINITE
            if spoiled or (state is not GradientState.OK and best is GradientState.OK):
                self.turns.append(Turn(node, following, state))


def followers(node: Node) -> list[Node]:
    """Return the nodes that get a gradient from this one."""
    return [following for following, _ in node.next_functions if following is not None]


def union(sets: Iterable[int]) -> int:
    """Return all that is in one of the sets."""
    total = 0
    for parameters in sets:
        total |= parameters
    return total


def _state_of(gradient: torch.Tensor) -> GradientState:
    """Return what a gradient is worth. One without elements is zero."""
    with torch.no_grad():
        values = local(gradient.detach())
        if values.layout is not torch.strided:
            values = values.coalesce().values() if values.layout is torch.sparse_coo else values.to_dense()
        if not bool(torch.isfinite(values).all()):
            return GradientState.NONFINITE
        return GradientState.OK if bool(values.any()) else GradientState.ZERO
