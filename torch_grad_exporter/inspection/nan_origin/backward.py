"""The graph of a recording: its nodes, walked from the outputs of modules, and hooks on those that can make a value non-finite.

A hook on a node sees what it gives for each of the values that it was computed from, so which operation made a gradient
non-finite is not guessed. The hooks go with the graph; where that is kept, they do nothing once the recording is over.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch

from torch_grad_exporter.capture.torch_hooks import GuardedHook
from torch_grad_exporter.inspection.nan_origin.forward import Recording, value_of
from torch_grad_exporter.inspection.nan_origin.tape import LEAF, MOVES, GradientEvent, Node, Value, operation
from torch_grad_exporter.torch_compat.autograd import graph_task, number_of, started_from

NODES = 1 << 15
"""Nodes of one recording, at most."""


class RecordedGraph:
    """Walks and hooks the graphs of recordings. `arrives`, `passes`: the boundaries of the hooks before and after a node.

    Belongs to the thread that trains, and to that of the backward.
    """

    def __init__(self, arrives: GuardedHook, passes: GuardedHook) -> None:
        self._arrives, self._passes = arrives, passes

    def hook(self, recording: Recording) -> None:
        """A forward is over: walks what it has made, and hooks it."""
        outputs = [*recording.given()]
        found = walk(recording, [node for one in outputs if (node := one.grad_fn) is not None])
        fans: dict[int, int] = {}
        for number, _ in found:
            for value in recording.nodes[number].edges:
                if value is not None and value[0] != LEAF:
                    fans[value[0]] = fans.get(value[0], 0) + 1
        ends = {value[0] for one in outputs if (value := value_of(one)) is not None}
        for number, node in found:
            if number in ends or fans.get(number, 0) > 1:
                node.register_prehook(functools.partial(self._arrives, recording, number))
        self._hook_all(recording, found)

    def _hook_all(self, recording: Recording, found: list[tuple[int, Any]]) -> None:
        for number, node in found:
            if operation(recording.nodes[number].name) not in MOVES:
                node.register_hook(functools.partial(self._passes, recording, number))

    def arrived(self, recording: Recording, number: int, gradients: Iterable[object]) -> None:
        """Gradients arrive at a node."""
        self._note(recording, number, gradients, arrives=True)

    def passed(self, recording: Recording, number: int, given: Iterable[object], _got: object) -> None:
        """A node has given gradients."""
        self._note(recording, number, given, arrives=False)

    def _note(self, recording: Recording, number: int, gradients: Iterable[object], *, arrives: bool) -> None:
        if recording.over:
            return
        if recording.task != (task := graph_task()):
            recording.task = task
            self._find_losses(recording)
        slots = [
            (at, slot) for at, one in enumerate(gradients)
            if isinstance(one, torch.Tensor) and (slot := recording.flags.add(one)) is not None
        ]  # fmt: skip
        recording.events.append(GradientEvent(number, arrives, tuple(slots)))

    def _find_losses(self, recording: Recording) -> None:
        """A backward begins: flags what it started from, walks the graph from there to what is known, and hooks what is to come."""
        for loss in started_from(sys._current_frames().get(recording.thread)):
            slot = recording.flags.add(loss)
            if slot is not None:
                recording.losses.append((slot, value_of(loss)))
                self._hook_all(recording, walk(recording, [] if loss.grad_fn is None else [loss.grad_fn]))


def walk(recording: Recording, starts: list[Any]) -> list[tuple[int, Any]]:
    """Notes all nodes behind these that are not known yet; returns them with their numbers."""
    found, known = [], recording.nodes
    while starts:
        node = starts.pop()
        number = number_of(node)
        if number in known or number == LEAF:
            continue
        if len(known) >= NODES:
            recording.full = True
            break
        edges: list[Value | None] = []
        leaves: list[bool] = []
        for behind, output in node.next_functions:
            if behind is None:
                edges.append(None)
                leaves.append(False)
                continue
            edges.append(_value(recording, behind, output))
            leaves.append(_leads_to_leaf(behind))
            starts.append(behind)
        known[number] = Node(node.name(), tuple(edges), tuple(leaves))
        found.append((number, node))
    return found


def _value(recording: Recording, node: Any, output: int) -> Value:  # noqa: ANN401 - a node
    number = number_of(node)
    return (number, output) if number != LEAF else (LEAF, recording.leaves.get(id(node.variable), -1))


def _leads_to_leaf(node: Any) -> bool:  # noqa: ANN401 - a node
    """Whether nothing but moves is between here and a leaf."""
    while number_of(node) != LEAF:
        behind = node.next_functions
        if operation(node.name()) not in MOVES or len(behind) != 1 or behind[0][0] is None:
            return False
        node = behind[0][0]
    return True
