"""The table as HTML, and a page with the table and the graph as SVG: no script, nothing from elsewhere, every text escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from torch_grad_exporter.inspection.explain.drawing import Box, Drawing
from torch_grad_exporter.inspection.explain.rows import Row, Verdict

_GOOD = (Verdict.OK, Verdict.FROZEN)
WIDTH, HEIGHT, GAP_X, GAP_Y = 190, 34, 14, 26
"""Of a box, and between boxes, in pixels."""

LETTERS = 26
"""Of a label that fit in a box."""

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


def page(rows: Sequence[Row], summary: str, notes: Sequence[str], drawing: Drawing) -> str:
    """The whole page."""
    apart = ""
    if drawing.apart:
        apart = f"<h2>Not in the graph</h2><div class='graph'>{_svg(drawing.apart, (), columns=5)}</div>"
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Why a parameter has no gradient</title><style>{_STYLE}</style></head><body>"
        f"<h1>Why a parameter has no gradient</h1>{table_of(rows, summary, notes, len(rows))}"
        f"<h2>The graph, from the loss down to the parameters</h2>"
        f"<p>Red: the gradient there is missing, zero everywhere, or not finite. A box says more under the mouse.</p>"
        f"<div class='graph'>{_svg(drawing.boxes, drawing.arrows)}</div>{apart}</body></html>\n"
    )


def table_of(rows: Sequence[Row], summary: str, notes: Sequence[str], total: int) -> str:
    """The table with what is said of the whole."""
    head = "<tr><th>parameter<th>verdict<th>where<th>note</tr>"
    more = f"<p>{total - len(rows)} rows more are ok.</p>" if total > len(rows) else ""
    said = "".join(f"<p>{escape(note)}</p>" for note in (summary, *notes))
    return f"{said}<table>{head}{''.join(map(_row, rows))}</table>{more}"


def _row(row: Row) -> str:
    where = escape(str(row.where or ""))
    if row.where is not None and row.where.code:
        where += f"<br><code>{escape(row.where.code)}</code>"
    kind = "" if row.verdict in _GOOD else " class='bad'"
    return f"<tr><td>{escape(row.parameter)}<td{kind}>{row.verdict}<td>{where}<td>{escape(row.note)}</tr>"


def _svg(boxes: Sequence[Box], arrows: Sequence[tuple[int, int]], columns: int | None = None) -> str:
    """Boxes in ranks, each below all that lead to it; `columns`: side by side in a grid instead."""
    if not boxes:
        return "<p>There is no graph.</p>"
    ranks = [number // columns for number in range(len(boxes))] if columns else _ranks(len(boxes), arrows)
    places, filled = [], dict.fromkeys(ranks, 0)
    for rank in ranks:
        places.append((10 + filled[rank] * (WIDTH + GAP_X), 10 + rank * (HEIGHT + GAP_Y)))
        filled[rank] += 1
    width = 10 + max(filled.values()) * (WIDTH + GAP_X)
    height = 10 + (max(ranks) + 1) * (HEIGHT + GAP_Y)
    lines = "".join(_line(places[start], places[end]) for start, end in arrows)
    drawn = "".join(_drawn(box, *place) for box, place in zip(boxes, places, strict=True))
    return f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' role='img'>{lines}{drawn}</svg>"


def _ranks(count: int, arrows: Sequence[tuple[int, int]]) -> list[int]:
    """How far below the loss each box is. Boxes come in an order of the graph; a module that is used twice may point back."""
    ranks = [0] * count
    for start, end in sorted(arrows):
        if start < end:
            ranks[end] = max(ranks[end], ranks[start] + 1)
    return ranks


def _line(start: tuple[int, int], end: tuple[int, int]) -> str:
    x, y = start[0] + WIDTH // 2, start[1] + HEIGHT
    to_x, to_y = end[0] + WIDTH // 2, end[1]
    return f"<path d='M{x} {y} C{x} {y + GAP_Y} {to_x} {to_y - GAP_Y} {to_x} {to_y}'/>"


def _drawn(box: Box, x: int, y: int) -> str:
    label = box.label if len(box.label) <= LETTERS else f"…{box.label[1 - LETTERS :]}"
    kind = "bad" if box.bad else box.state or "plain"
    text = f"{escape(label)}" + (f" · {box.state}" if box.bad else "")
    return (
        f"<g><title>{escape(box.label)}: {escape(box.title)}</title>"
        f"<rect class='{kind}' x='{x}' y='{y}' width='{WIDTH}' height='{HEIGHT}' rx='5'/>"
        f"<text class='{kind}' x='{x + 8}' y='{y + 21}'>{text}</text></g>"
    )
