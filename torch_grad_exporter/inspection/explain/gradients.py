"""The gradients of one backward: which parameters one arrived at, what it is worth, and at which node a gradient went bad."""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import Node

from torch_grad_exporter.errors import Guard
from torch_grad_exporter.inspection.explain.graph import REENTRANT, Graph, is_accumulator
from torch_grad_exporter.torch_compat.autograd import node_of
from torch_grad_exporter.torch_compat.tensors import local


class State(enum.IntEnum):
    """What a gradient is worth; the larger, the worse."""

    OK = 0
    ZERO = 1
    """It is zero everywhere."""
    MISSING = 2
    NONFINITE = 3


@dataclass(frozen=True, slots=True)
class Turn:
    """A node that got a better gradient than it passed on to `following`. `state`: of what it passed on."""

    node: Node
    following: Node
    state: State


class GradientHooks:
    """Hooks the nodes of a graph for the time of its backwards, and collects what passes. Holds no gradient.

    It reads values of gradients and so waits for the device. Its own failures are in `failures`, and reach no backward.
    """

    def __init__(self, graph: Graph, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._graph = graph
        self._parameters = parameters
        self._hooks = contextlib.ExitStack()
        self._hooked: set[Node] = set()
        self.roots: list[torch.Tensor] = []
        """Where backwards began, in order."""
        self.trained = 0
        """The parameters that required a gradient when one began."""
        self.arrived: dict[int, State] = {}
        """What arrived at each parameter, by number, of several gradients the best; one that is not finite is always told."""
        self.turns: list[Turn] = []
        """In the order of the backward."""
        self.states: dict[Node, State] = {}
        """What arrived at each node, the worst; only of nodes that ran."""
        self.failures: list[Exception] = []
        self._guard = Guard(self.failures.append)

    def look(self) -> None:
        """Notes which parameters require a gradient now, and waits for what arrives at them."""
        for number, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                self.trained |= 1 << number
                node = node_of(parameter)
                if node not in self._hooked:
                    self._hooked.add(node)
                    self._hooks.callback(node.register_prehook(functools.partial(self._at_leaf, number)).remove)

    def begin(self, roots: list[torch.Tensor]) -> None:
        """A backward is about to begin from these."""
        self.roots += roots
        self.look()
        for node in self._graph.below(roots):
            if node not in self._hooked and not is_accumulator(node):
                self._hooked.add(node)
                self._hooks.callback(node.register_hook(functools.partial(self._at_node, node)).remove)

    def run(self, loss: torch.Tensor, *, keep_graph: bool) -> None:
        """A backward from the loss that leaves `.grad` alone, unless a reentrant checkpoint needs a usual one."""
        self.begin([loss])
        nodes = self._graph.below([loss])
        if any(node.name() == REENTRANT for node in nodes):
            loss.backward(retain_graph=keep_graph)  # type: ignore[no-untyped-call]
            return
        behind = self._graph.behind(loss)
        numbers = [n for n, p in enumerate(self._parameters) if p.requires_grad and behind >> n & 1]
        if not numbers or loss.grad_fn is None:
            return
        inputs = [self._parameters[number] for number in numbers]
        found = torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=keep_graph)
        for number, gradient in zip(numbers, found, strict=True):
            self._guard(self._arrived, number, gradient)

    def close(self) -> None:
        """Removes all hooks; idempotent."""
        self._hooks.close()

    def drop(self) -> None:
        """Lets go of the graph."""
        self.close()
        for one in (self._hooked, self.roots, self.turns, self.states):
            one.clear()

    def _at_leaf(self, number: int, gradients: tuple[torch.Tensor | None, ...]) -> None:
        self._guard(lambda: self._arrived(number, gradients[0]))

    def _arrived(self, number: int, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        state = state_of(gradient)
        known = self.arrived.get(number, state)
        self.arrived[number] = State.NONFINITE if State.NONFINITE in (known, state) else min(known, state)

    def _at_node(self, node: Node, passed: tuple[torch.Tensor | None, ...], got: tuple[torch.Tensor | None, ...]) -> None:
        self._guard(self._look_at, node, passed, got)

    def _look_at(self, node: Node, passed: tuple[torch.Tensor | None, ...], got: tuple[torch.Tensor | None, ...]) -> None:
        before = _worst(got)
        self.states[node] = max(before, self.states.get(node, State.OK))
        # Of a node with several results some may go unused; what counts is the best that it got.
        best = min((state_of(one) for one in got if one is not None), default=State.MISSING)
        for (following, _), gradient in zip(node.next_functions, passed, strict=False):
            if following is None:
                continue
            state = State.MISSING if gradient is None else state_of(gradient)
            if state is not State.OK and (best is State.OK or (state is State.NONFINITE and before is not State.NONFINITE)):
                self.turns.append(Turn(node, following, state))


def state_of(gradient: torch.Tensor) -> State:
    """What a gradient is worth. One without elements is zero."""
    with torch.no_grad():
        values = local(gradient.detach())
        if values.layout is not torch.strided:
            values = values.coalesce().values() if values.layout is torch.sparse_coo else values.to_dense()
        if not bool(torch.isfinite(values).all()):
            return State.NONFINITE
        return State.OK if bool(values.any()) else State.ZERO


def _worst(gradients: Iterable[torch.Tensor | None]) -> State:
    """The worst of those that are there."""
    return max((state_of(one) for one in gradients if one is not None), default=State.MISSING)
