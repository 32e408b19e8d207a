"""The graph of a loss as boxes and arrows, of a bounded number: a large graph is folded by module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch.autograd.graph import Node

from torch_grad_exporter.inspection.explain.gradients import State
from torch_grad_exporter.inspection.explain.graph import followers, is_accumulator, operation
from torch_grad_exporter.inspection.explain.rows import Judge, NamedParameter, Row, Verdict

BOXES = 200
"""Boxes of the graph at most; there may be as many of parameters that are not in it, and one for the rest."""

REST = "(more)"
"""The box of what has no place of its own."""

STATES = {State.OK: "ok", State.ZERO: "zero", State.MISSING: "missing", State.NONFINITE: "not finite"}


@dataclass(frozen=True, slots=True)
class Box:
    """A node, or all of a module. `title`: more of it.

    `state`: "ok", "zero", "missing", "not finite", or empty where nothing is known.
    """

    label: str
    state: str
    title: str

    @property
    def bad(self) -> bool:
        """Whether a gradient is missing, zero or not finite."""
        return self.state not in ("", "ok")


@dataclass(frozen=True, slots=True)
class Drawing:
    """`arrows`: from one box to another by their numbers, the way that gradients go. `apart`: boxes that are not in the graph."""

    boxes: tuple[Box, ...]
    arrows: tuple[tuple[int, int], ...]
    apart: tuple[Box, ...] = ()


def draw(judge: Judge, parameters: Sequence[NamedParameter], rows: Sequence[Row]) -> Drawing:
    """The graph of what was seen; keeps nothing of it."""
    nodes = judge.graph.below(judge.gradients.roots)
    named = {id(one.parameter): number for number, one in enumerate(parameters)}
    items = {node: _item(node, judge, named, parameters) for node in nodes}
    group = _folding(nodes, items)
    order: dict[object, int] = {}
    members: list[list[_Item]] = []
    for node in nodes:
        number = order.setdefault(group(node), len(order))
        if number == len(members):
            members.append([])
        members[number].append(items[node])
    boxes = tuple(_box(key, found) for key, found in zip(order, members, strict=True))
    arrows = {(order[group(node)], order[group(one)]): None for node in nodes for one in followers(node) if one in items}
    return Drawing(boxes, tuple(arrow for arrow in arrows if arrow[0] != arrow[1]), _apart(rows, parameters, nodes))


@dataclass(frozen=True, slots=True)
class _Item:
    label: str
    module: str
    state: State | None
    title: str


def _item(node: Node, judge: Judge, named: Mapping[int, int], parameters: Sequence[NamedParameter]) -> _Item:
    """What is drawn of one node."""
    if is_accumulator(node):
        number = named.get(id(node.variable))  # type: ignore[attr-defined]
        if number is None:
            return _Item("a tensor", "", None, "a leaf that is no parameter of the model")
        one = parameters[number]
        state = judge.gradients.arrived.get(number, State.MISSING)
        return _Item(one.name, one.layer, state, f"gradient {STATES[state]}")
    place = judge.graph.place(node)
    module = place.module if place is not None else _layer_behind(node, named, parameters)
    known = judge.gradients.states.get(node)
    # A node that leads to no parameter of the model need not run.
    state_of_node = State.MISSING if known is None and judge.graph.behind_node(node) else known
    title = f"{node.name()} {place or ''}: gradient {STATES[state_of_node] if state_of_node is not None else 'not needed'}"
    label = f"{operation(node)} ({module})" if module else operation(node)
    return _Item(label, module, state_of_node, title)


def _layer_behind(node: Node, named: Mapping[int, int], parameters: Sequence[NamedParameter]) -> str:
    """The layer of a parameter that the node uses directly."""
    for one in followers(node):
        number = named.get(id(getattr(one, "variable", None)))
        if number is not None:
            return parameters[number].layer
    return ""


def _folding(nodes: Sequence[Node], items: Mapping[Node, _Item]) -> Callable[[Node], object]:
    """By what nodes are put together, so that there are no more than `BOXES` groups."""
    if len(nodes) <= BOXES:
        return lambda node: node
    paths = list(dict.fromkeys(items[node].module for node in nodes))
    deepest = max(path.count(".") + 1 for path in paths)
    depth = next(d for d in range(deepest, -1, -1) if d == 0 or len({_first(path, d) for path in paths}) <= BOXES)
    groups = {path: _first(path, depth) for path in paths}
    parents = len({*groups.values()})
    if depth < deepest and parents < BOXES // 4:
        # The level below has too many, such as hundreds of blocks in a row: these in ranges.
        groups = _ranges(paths, depth, BOXES - parents)
    return lambda node: groups[items[node].module]


def _ranges(paths: Sequence[str], depth: int, room: int) -> dict[str, str]:
    """The modules of the next level in ranges of neighbours with the same parent, about `room` of them; by path."""
    children = dict.fromkeys(_first(path, depth + 1) for path in paths)
    by_parent: dict[str, list[str]] = {}
    for child in children:
        by_parent.setdefault(_first(child, depth), []).append(child)
    size = -(-len(children) // room)
    label: dict[str, str] = {}
    for found in by_parent.values():
        for begin in range(0, len(found), size):
            several = found[begin : begin + size]
            name = several[0] if len(several) == 1 else f"{several[0]} … {several[-1].rpartition('.')[2]}"
            label.update(dict.fromkeys(several, name))
    return {path: label[_first(path, depth + 1)] for path in paths}


def _first(module: str, depth: int) -> str:
    return ".".join(module.split(".")[:depth])


def _box(key: object, found: Sequence[_Item]) -> Box:
    states = [one.state for one in found if one.state is not None]
    if not isinstance(key, str):
        return Box(found[0].label, STATES[max(states)] if states else "", found[0].title)
    count = f"{len(found)} operations and parameters"
    # Within a module branches that carry nothing are usual: only what no gradient reaches, or spoils, is bad.
    worst = State.NONFINITE if State.NONFINITE in states else min(states, default=None)
    parameters = [one for one in found if one.title.startswith("gradient ") and one.state not in (None, State.OK)]
    if parameters and worst is State.OK:
        worst = max(one.state for one in parameters if one.state is not None)
    return Box(key or "outside of modules", STATES[worst] if worst is not None else "", count)


def _apart(rows: Sequence[Row], parameters: Sequence[NamedParameter], nodes: Sequence[Node]) -> tuple[Box, ...]:
    """A box for each layer and reason of parameters that are not in the graph, though they are not frozen."""
    inside = {id(variable) for node in nodes if (variable := getattr(node, "variable", None)) is not None}
    found: dict[tuple[str, str], int] = {}
    for row, one in zip(rows, parameters, strict=True):
        if row.verdict not in (Verdict.FROZEN, Verdict.OK, Verdict.OPTIMIZER_MISSING) and id(one.parameter) not in inside:
            why = " ".join(part for part in (row.verdict, row.note.partition(";")[0], str(row.where or "")) if part)
            found[row.layer, why] = found.get((row.layer, why), 0) + 1
    boxes = [Box(layer, "missing", f"{count} parameters: {why}") for (layer, why), count in found.items()]
    rest = [Box(REST, "missing", f"{len(boxes) - BOXES} layers more")] if len(boxes) > BOXES else []
    return (*boxes[:BOXES], *rest)
