"""What `explain` returns: a row for each parameter, as a table for the terminal and a notebook, and as a page with the graph.

The page has no script, loads nothing from elsewhere, and every text in it is escaped.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from torch.autograd.graph import Node

from torch_grad_exporter.files import write_output
from torch_grad_exporter.inspection.explain.graph import GradientState, followers
from torch_grad_exporter.inspection.explain.verdicts import Judge, Row, Verdict
from torch_grad_exporter.model.folding import fold
from torch_grad_exporter.torch_compat.autograd import operation

# Boxes of the graph at most; there may be as many of parameters that are not in it, and one for the rest.
BOXES = 200

# Of a box, and between boxes, in pixels; and letters of a label that fit in a box.
WIDTH, HEIGHT, GAP_X, GAP_Y = 190, 34, 14, 26
LETTERS = 26


@dataclass(frozen=True, slots=True)
class Box:
    """A node, or all of a module. `title`: more of it; `state`: of its gradient, None where it is unknown or not needed."""

    label: str
    state: GradientState | None
    title: str


def draw(judge: Judge, rows: Sequence[Row]) -> str:
    """Return the graph of what was seen for a page, and what is not in it; gradients go along the arrows."""
    nodes = judge.graph.below(judge.graph.roots)
    named = {id(named.parameter): number for number, named in enumerate(judge.parameters)}
    boxes, modules = {}, {}
    for node in nodes:
        boxes[node], modules[node] = _box(node, judge, named)
    groups: dict[Node, object] = {node: node for node in nodes}
    if len(nodes) > BOXES:
        paths = [path for path in dict.fromkeys(modules.values()) if path]
        labels = dict(zip(paths, fold(paths, BOXES - 1), strict=True))
        groups = {node: labels.get(modules[node], "outside of modules") for node in nodes}
    members: dict[object, list[Box]] = {}
    for node in nodes:
        members.setdefault(groups[node], []).append(boxes[node])
    number = {group: place for place, group in enumerate(members)}
    arrows = {
        (number[groups[node]], number[groups[following]]): None
        for node in nodes for following in followers(node) if following in boxes
    }  # fmt: skip
    drawn = [_folded(group, inside) if isinstance(group, str) else inside[0] for group, inside in members.items()]
    graph = f"<div class='graph'>{_svg(drawn, [arrow for arrow in arrows if arrow[0] != arrow[1]])}</div>"
    apart = _apart(judge, rows, nodes)
    return graph + (f"<h2>Not in the graph</h2><div class='graph'>{_svg(apart, (), columns=5)}</div>" if apart else "")


def _box(node: Node, judge: Judge, named: dict[int, int]) -> tuple[Box, str]:
    """Return the box of a node, and its module."""
    if (leaf := getattr(node, "variable", None)) is not None:
        number = named.get(id(leaf))
        if number is None:
            return Box("a tensor", None, "a leaf that is not a parameter of the model"), ""
        parameter = judge.parameters[number]
        state = judge.graph.arrived.get(number, GradientState.MISSING)
        return Box(parameter.name, state, f"gradient {state}"), parameter.layer
    place = judge.graph.places.get(node)
    used = (named.get(id(getattr(following, "variable", None))) for following in followers(node))
    layer = next((judge.parameters[number].layer for number in used if number is not None), "")
    module = place.module if place is not None else layer
    known = judge.graph.states.get(node)
    if known is None and judge.graph.behind_node(node):  # a node that leads to no parameter of the model need not run
        known = GradientState.MISSING
    title = f"{node.name()} {place or ''}: gradient {'not needed' if known is None else known}"
    return Box(f"{operation(node)} ({module})" if module else operation(node), known, title), module


def _folded(label: str, inside: Sequence[Box]) -> Box:
    """Return a box for all of a module. Usual are branches that carry nothing: only parameters and what spoils gradients count."""
    states = [box.state for box in inside if box.state is not None]
    worst = GradientState.NONFINITE if GradientState.NONFINITE in states else min(states, default=None)
    of_parameters = [box.state for box in inside if box.state is not None and box.title.startswith("gradient ")]
    if worst is GradientState.OK and of_parameters:
        worst = max(of_parameters)
    return Box(label, worst, f"{len(inside)} operations and parameters")


def _apart(judge: Judge, rows: Sequence[Row], nodes: Sequence[Node]) -> list[Box]:
    """Return a box for each layer and reason of parameters that are not in the graph, though they are not frozen."""
    inside = {id(variable) for node in nodes if (variable := getattr(node, "variable", None)) is not None}
    counts: dict[tuple[str, str], int] = {}
    for row, named in zip(rows, judge.parameters, strict=True):
        if row.verdict not in (Verdict.FROZEN, Verdict.OK, Verdict.OPTIMIZER_MISSING) and id(named.parameter) not in inside:
            why = " ".join(part for part in (row.verdict, row.note.partition(";")[0], str(row.where or "")) if part)
            counts[row.layer, why] = counts.get((row.layer, why), 0) + 1
    boxes = [Box(layer, GradientState.MISSING, f"{count} parameters: {why}") for (layer, why), count in counts.items()]
    rest = [Box("(more)", GradientState.MISSING, f"{len(boxes) - BOXES} layers more")] if len(boxes) > BOXES else []
    return boxes[:BOXES] + rest


def _svg(boxes: Sequence[Box], arrows: Sequence[tuple[int, int]], columns: int | None = None) -> str:
    """Return the picture: boxes in ranks, each below all that lead to it. `columns`: side by side in a grid instead."""
    if not boxes:
        return "<p>There is no graph.</p>"
    ranks = [number // columns if columns else 0 for number in range(len(boxes))]
    for start, end in sorted(arrows):
        if start < end:  # boxes come in an order of the graph; a module that is used twice may point back
            ranks[end] = max(ranks[end], ranks[start] + 1)
    places, filled = [], dict.fromkeys(ranks, 0)
    for rank in ranks:
        places.append((10 + filled[rank] * (WIDTH + GAP_X), 10 + rank * (HEIGHT + GAP_Y)))
        filled[rank] += 1
    width = 10 + max(filled.values()) * (WIDTH + GAP_X)
    height = 10 + (max(ranks) + 1) * (HEIGHT + GAP_Y)
    drawn = []
    for start, end in arrows:
        (x, y), (to_x, to_y) = places[start], places[end]
        x, y, to_x = x + WIDTH // 2, y + HEIGHT, to_x + WIDTH // 2
        drawn.append(f"<path d='M{x} {y} C{x} {y + GAP_Y} {to_x} {to_y - GAP_Y} {to_x} {to_y}'/>")
    for box, (x, y) in zip(boxes, places, strict=True):
        label = box.label if len(box.label) <= LETTERS else f"…{box.label[1 - LETTERS :]}"
        kind = "plain" if box.state is None else "bad" if box.state else "ok"
        drawn.append(
            f"<g><title>{escape(box.label)}: {escape(box.title)}</title>"
            f"<rect class='{kind}' x='{x}' y='{y}' width='{WIDTH}' height='{HEIGHT}' rx='5'/>"
            f"<text class='{kind}' x='{x + 8}' y='{y + 21}'>{escape(label)}{f' · {box.state}' if box.state else ''}</text></g>"
        )
    return f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' role='img'>{''.join(drawn)}</svg>"


# Rows up to which all are printed; of more, those are left out that are `ok` without a note. And rows that are printed at most.
SHOWN, PRINTED = 40, 200

_STYLE = """
:root { color-scheme: light dark }
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.5em; background: Canvas; color: CanvasText }
table { border-collapse: collapse }
td, th { padding: .2em .8em; text-align: left; vertical-align: top; border-bottom: 1px solid #8884 }
code { font-size: .92em } .bad { color: #c62828; font-weight: 600 }
.graph { overflow: auto; border: 1px solid #8884; max-height: 85vh }
svg { font: 12px system-ui, sans-serif } path { stroke: #888; fill: none }
rect { fill: color-mix(in srgb, #888 8%, Canvas); stroke: #888 } text { fill: CanvasText }
rect.ok { fill: color-mix(in srgb, #2e7d32 13%, Canvas); stroke: #2e7d32 }
rect.bad { fill: #c62828; stroke: #7f0000 } text.bad { fill: #fff }
"""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why each parameter has a gradient or not. `print` shows it as a table; a notebook shows it by itself.

    Attributes:
        rows: One for each parameter, in the order of the model.
        notes: What concerns the loss, the optimizers or all.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    _graph: str = field(default="", repr=False)

    def __getitem__(self, parameter: str) -> Row:
        """Return the row of a parameter by its name; raises `KeyError`."""
        return {row.parameter: row for row in self.rows}[parameter]

    def __str__(self) -> str:
        shown = self._shown()
        lines = [("parameter", "verdict", "where", "note"), *((r.parameter, r.verdict, str(r.where or ""), r.note) for r in shown)]
        first, second, third = (max(len(line[column]) for line in lines) for column in range(3))
        text = [f"{name:{first}}  {verdict:{second}}  {where:{third}}  {note}".rstrip() for name, verdict, where, note in lines]
        text += [f"... {len(self.rows) - len(shown)} rows more"] if len(shown) < len(self.rows) else []
        return "\n".join([*text, "", self.summary, *self.notes])

    @property
    def summary(self) -> str:
        """How many parameters have which verdict, in a sentence."""
        counts = Counter(row.verdict for row in self.rows)
        parts = [f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict]]
        return f"{len(self.rows)} parameters: {', '.join(parts)}"

    def _shown(self) -> tuple[Row, ...]:
        if len(self.rows) <= SHOWN:
            return self.rows
        return tuple(row for row in self.rows if row.verdict is not Verdict.OK or row.note)[:PRINTED]

    def _repr_html_(self) -> str:
        """For notebooks: the table."""
        return self._table(self._shown())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a page with the table and the graph, in which nodes with a bad gradient are red. It loads nothing from elsewhere.

        A graph of many nodes is folded by module. A file is whole, or as it was before.

        Raises:
            OSError: The file cannot be written.
        """
        page = (
            "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
            "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'\">"
            f"<title>Why a parameter has no gradient</title><style>{_STYLE}</style></head><body>"
            f"<h1>Why a parameter has no gradient</h1>{self._table(self.rows)}"
            "<h2>The graph, from the loss down to the parameters</h2>"
            "<p>Red: the gradient there is missing, zero everywhere, or not finite. A box says more under the mouse.</p>"
            f"{self._graph}</body></html>\n"
        )
        write_output(Path(path), page.encode())

    def _table(self, shown: Sequence[Row]) -> str:
        lines = ["<tr><th>parameter<th>verdict<th>where<th>note</tr>"]
        for row in shown:
            code = f"<br><code>{escape(row.where.code)}</code>" if row.where is not None and row.where.code else ""
            kind = "" if row.verdict in (Verdict.OK, Verdict.FROZEN) else " class='bad'"
            where = escape(str(row.where or "")) + code
            lines.append(f"<tr><td>{escape(row.parameter)}<td{kind}>{row.verdict}<td>{where}<td>{escape(row.note)}</tr>")
        more = f"<p>{len(self.rows) - len(shown)} rows more are ok.</p>" if len(self.rows) > len(shown) else ""
        notes = "".join(f"<p>{escape(note)}</p>" for note in (self.summary, *self.notes))
        return f"{notes}<table>{''.join(lines)}</table>{more}"
