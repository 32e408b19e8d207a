"""Tape: what the host needs to know of an armed forward and backward to find where a value became non-finite. Without tensors.

A value of the autograd graph is known by the node that gives it and the number of that output; a node by its sequence number,
which autograd counts up on each thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

Value = tuple[int, int]
"""The sequence number of a node and the number of its output; `LEAF` and the number of a parameter, -1 if it is not known."""

LEAF = -1
"""In the place of a node: a leaf of the graph, such as a parameter."""


MOVES = frozenset((
    "T", "View", "Transpose", "Permute", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Clone", "Alias",
))  # fmt: skip
"""Operations that move values only: what their gradient gives is what it gets, and they are not looked at."""


def operation(name: str) -> str:
    """The name of a node without what PyTorch adds: `Sqrt` of `SqrtBackward0`."""
    return re.sub(r"Backward\d*$", "", name)


@dataclass(frozen=True, slots=True)
class TapedCall:
    """One call of a module. `layer`: its name; `kind`: its class; `parent`: the number of the call around it, -1 for none.

    `number`: which call of this module it is, from 1. `module`: a key of the module. `hidden`: compiled modules in it that show
    nothing of their inside.
    """

    layer: str
    kind: str
    parent: int
    number: int
    module: int
    training: bool
    hidden: tuple[str, ...] = ()
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor that a call got (an input) or gave. `value`: where it is in the graph, `None` outside of any."""

    call: int
    output: bool
    name: str
    slot: int
    value: Value | None


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A parameter or buffer. `name`: its full name; `layer`: of the module that owns it; `module`: a key of that module."""

    name: str
    attribute: str
    layer: str
    module: int
    buffer: bool
    slot: int


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the graph. `edges`: the values that it was computed from, of which the backward gives the gradients.

    `leaves`: for each whether its gradient goes into a leaf without another operation between.
    """

    name: str
    edges: tuple[Value | None, ...]
    leaves: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class GradientEvent:
    """Gradients in a backward, in the order in which it ran. `arrives`: at the node, before it runs; else what it gave.

    `slots`: by number of the output or edge.
    """

    node: int
    arrives: bool
    slots: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Tape:
    """Everything of one or more forwards and the backward through them.

    `began`: for each change of the running call, the sequence number from which nodes belong to it, and the call, -1 for none.
    `losses`: slot and value of each tensor that the backward started from, empty if that is not known; `backward`: whether there
    was one. `roots`: calls of whole models. `before`, `after`: slots of all gradients before the forward and after the backward, by
    number of the parameter. `ranks`: whether gradients are reduced over several. `scaled`: whether a gradient scaler is in use.
    `full`: whether there was more than is flagged.
    """

    step: int
    calls: tuple[TapedCall, ...]
    places: tuple[TensorPlace, ...]
    held: tuple[HeldTensor, ...]
    nodes: Mapping[int, Node]
    events: tuple[GradientEvent, ...]
    began: tuple[tuple[int, int], ...]
    roots: tuple[int, ...]
    losses: tuple[tuple[int, Value | None], ...]
    backward: bool
    before: Mapping[str, int]
    after: Mapping[str, int]
    ranks: bool = False
    scaled: bool = False
    full: bool = False
