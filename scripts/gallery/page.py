"""A dashboard as one picture: the panels where Grafana would put them, at 1440 pixels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from scripts.gallery import charts, grids, tiles
from scripts.gallery.asking import Json, Range, Series
from scripts.gallery.canvas import FAINT, INK, LINE, PAPER, Box, Canvas, fitted, wrapped
from scripts.gallery.fields import nothing

WIDE = 1440
HEADER = 76
UNIT, GAP, MARGIN = 38, 8, 16
"""Pixels from one row of the grid to the next, of which the gap between two panels is the last; and left and right of all."""

Ask = Callable[[Json, int], Sequence[Series]]
"""Gives what a panel gets, at no more than so many points in time."""

OVER_TIME = {"timeseries": charts.lines, "heatmap": grids.heatmap, "state-timeline": grids.timeline}
OF_NOW = {"stat": tiles.numbers, "bargauge": tiles.bars, "table": tiles.rows}


def place(grid: Mapping[str, int]) -> Box:
    """Where a panel stands, by its place in the grid of 24 columns."""
    column = (WIDE - 2 * MARGIN + GAP) / 24
    return Box(MARGIN + grid["x"] * column, HEADER + grid["y"] * UNIT, grid["w"] * column - GAP, grid["h"] * UNIT - GAP)


def repeated(dashboard: Json, values: Mapping[str, Sequence[str]]) -> Json:
    """The dashboard with a panel for each value of the variable that one is repeated for, as Grafana puts them."""
    panels, down = [], 0
    for panel in dashboard["panels"]:
        grid = panel["gridPos"] | {"y": panel["gridPos"]["y"] + down}
        names = values[panel["repeat"]] if panel.get("repeat") else []
        if not names:
            panels.append(panel | {"gridPos": grid})
            continue
        columns = min(panel["maxPerRow"], len(names))
        for place, name in enumerate(names):
            own = json.loads(json.dumps(panel).replace(f"${panel['repeat']}", json.dumps(name)[1:-1]))
            at = {"x": place % columns * 24 // columns, "y": grid["y"] + place // columns * grid["h"], "w": 24 // columns}
            panels.append(own | {"gridPos": grid | at})
        down += (len(names) - 1) // columns * grid["h"]
    return dashboard | {"panels": panels}


def upright(dashboard: Json) -> Iterator[Json]:
    """Rows and panels that are on the screen: those of a collapsed row are not."""
    yield from dashboard["panels"]


def draw(dashboard: Json, ask: Ask, span: Range, chosen: Mapping[str, str], high: int | None = None) -> Canvas:
    """The picture of a dashboard; `high` pixels of it, where only the first screen is wanted."""
    panels = [panel for panel in upright(dashboard) if high is None or place(panel["gridPos"]).y + UNIT <= high]
    ends = [box.y + box.h for box in (place(panel["gridPos"]) for panel in panels)]
    canvas = Canvas(WIDE, high or round(max(ends) + MARGIN))
    _header(canvas, dashboard, span, chosen)
    for panel in panels:
        at = place(panel["gridPos"])
        if panel["type"] == "row":
            sign, closed = ("▸", f"  ({len(panel['panels'])} panels)") if panel.get("collapsed") else ("▾", "")
            canvas.text(at.x, at.y + at.h / 2, f"{sign}  {_with(panel['title'], chosen)}{closed}", size=10, weight="bold")
        else:
            _panel(canvas, at, panel, ask, span)
    return canvas


def _with(title: str, chosen: Mapping[str, str]) -> str:
    return title.replace("$layer", chosen.get("layer", "All")).replace("$value", chosen.get("value", "All"))


def _header(canvas: Canvas, dashboard: Json, span: Range, chosen: Mapping[str, str]) -> None:
    canvas.text(MARGIN, 20, dashboard["title"], size=13, weight="bold")
    canvas.text(WIDE - MARGIN, 20, f"Last {round(span.end - span.begin)} seconds", size=8, ink=FAINT, ha="right")
    x = float(MARGIN)
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            value = " + ".join(chosen.get(variable["name"], "All").split("|"))
            text = f"{variable['label']}   {value}"
            wide = 7.2 * len(text) + 18
            canvas.box(Box(x, 40, wide, 26), PAPER, LINE)
            canvas.text(x + 8, 53, text, size=8)
            x += wide + 8


def _panel(canvas: Canvas, at: Box, panel: Json, ask: Ask, span: Range) -> None:
    canvas.box(at, PAPER, LINE)
    canvas.text(at.x + 9, at.y + 15, fitted(panel["title"], at.w - 16, 8.5, "bold"), size=8.5, ink=INK, weight="bold")
    inner = at.inset(9, 30, 9, 8)
    answers = [series for series in ask(panel, max(60, int(inner.w / 2))) if series.values]
    if not answers:
        tiles.empty(canvas, inner, panel, wrapped(nothing(panel), inner.w, 9))
    elif panel["type"] in OVER_TIME:
        OVER_TIME[panel["type"]](canvas, inner, panel, answers, span)
    else:
        OF_NOW[panel["type"]](canvas, inner, panel, answers)
