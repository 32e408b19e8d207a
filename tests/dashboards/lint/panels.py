"""Rules about panels beside their queries: each yields (panel, text) for every fault."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.dashboards.lint.model import Board, Json

Found = Iterator[tuple[str, str]]

UNITS = frozenset((Path(__file__).parent.parent / "grafana_schema" / "units.txt").read_text(encoding="utf-8").split())
"""The ids of Grafana's units; test_grafana_schema.py compares the list with Grafana's own."""
FREE_UNITS = re.compile(r"(prefix|suffix|si|count|time|currency|bool):.+")
"""Units that Grafana makes from what is written after the colon."""

PANELS = frozenset({
    "barchart", "bargauge", "gauge", "heatmap", "histogram", "piechart", "stat", "state-timeline", "status-history", "table",
    "timeseries", "trend", "xychart",
    "row", "text", "dashlist", "alertlist", "annolist",
})  # fmt: skip
"""Panels that come with Grafana and are none of the removed Angular ones."""


def titles(board: Board) -> Found:
    """Each panel has a title and a description; a row has a title."""
    for panel in board.panels():
        if not panel.get("title"):
            yield str(panel.get("id")), "no title"
        if panel["type"] != "row" and not panel.get("description"):
            yield panel.get("title", ""), "no description"


def unique(board: Board) -> Found:
    """No id, title or query letter is used twice."""
    for key in ("id", "title"):
        for value, times in Counter(panel.get(key) for panel in board.panels()).items():
            if times > 1 or value is None:
                yield str(value), f"{key} of {times} panels"
    for panel in board.panels():
        letters = [target.get("refId") for target in panel.get("targets", [])]
        if len(set(letters)) < len(letters):
            yield panel["title"], f"refId {letters}"


def panel_types(board: Board) -> Found:
    """Only panels that every Grafana has."""
    for panel in board.panels():
        if panel["type"] not in PANELS:
            yield panel.get("title", ""), f"panel of type {panel['type']}"


def panel_targets(board: Board) -> Found:
    """A panel with data has a query."""
    for panel in board.panels_with_data():
        if not panel.get("targets") or not all(target.get("expr") for target in panel["targets"]):
            yield panel["title"], "no query"


def _is_unit(value: object) -> bool:
    return value in UNITS or FREE_UNITS.fullmatch(str(value)) is not None


def units(board: Board) -> Found:
    """Each panel with data has a unit that Grafana knows."""
    for panel in board.panels_with_data():
        config, options = panel.get("fieldConfig", {}), panel.get("options", {})
        main = options.get("yAxis", {}).get("unit") if panel["type"] == "heatmap" else config.get("defaults", {}).get("unit")
        overrides = [p.get("value") for o in config.get("overrides", []) for p in o["properties"] if p["id"] == "unit"]
        cells = [options["cellValues"]["unit"]] if "unit" in options.get("cellValues", {}) else []
        for unit in (main, *overrides, *cells):
            if not _is_unit(unit):
                yield panel["title"], f"unit {unit!r}"


def _threshold_steps(panel: Json) -> Iterator[list[Json]]:
    config = panel.get("fieldConfig", {})
    defaults = config.get("defaults", {})
    by_threshold = {"stat", "gauge", "bargauge", "state-timeline", "status-history"}
    mode = defaults.get("color", {}).get("mode", "thresholds" if panel["type"] in by_threshold else "")
    if "thresholds" in defaults:
        yield defaults["thresholds"]["steps"]
    elif mode == "thresholds" or defaults.get("custom", {}).get("thresholdsStyle", {}).get("mode", "off") != "off":
        yield GRAFANAS
    yield from (p["value"]["steps"] for o in config.get("overrides", []) for p in o["properties"] if p["id"] == "thresholds")


GRAFANAS: list[Json] = [{"color": "green", "value": None}, {"color": "red", "value": 80}]
"""The steps that Grafana takes where a panel has none."""


def thresholds(board: Board) -> Found:
    """Thresholds rise, and none is Grafana's default, which turns red at 80."""
    for panel in board.panels_with_data():
        for steps in _threshold_steps(panel):
            if [(step["color"], step["value"] or None) for step in steps] == [("green", None), ("red", 80)]:
                yield panel["title"], "Grafana's own thresholds: red at 80"
            values = [step["value"] for step in steps[1:]]
            if steps[0]["value"] is not None or values != sorted(values):
                yield panel["title"], "thresholds do not begin with null and rise"


def no_value(board: Board) -> Found:
    """An empty panel shows its own text, not Grafana's "No data"."""
    for panel in board.panels_with_data():
        if panel.get("fieldConfig", {}).get("defaults", {}).get("noValue", "No data") in {"", "No data"}:
            yield panel["title"], "says No data where a 0 or a sentence belongs (fieldConfig.defaults.noValue)"


def table_queries(board: Board) -> Found:
    """A table queries the current values as a table; a range would give each series a row per point."""
    for panel in board.panels():
        for target in panel.get("targets", []) if panel["type"] == "table" else ():
            if not target.get("instant") or target.get("range") or target.get("format") != "table":
                yield panel["title"], f"query {target.get('refId')} is not instant and of format table"


def _on_grid(panels: list[Json]) -> Found:
    for panel in panels:
        place = panel.get("gridPos", {"x": 0, "y": 0, "w": 0, "h": 0})
        if place["w"] < 1 or place["h"] < 1 or place["x"] < 0 or place["y"] < 0 or place["x"] + place["w"] > 24:
            yield panel.get("title", ""), f"leaves the grid of 24 columns: {place}"
    for one, other in itertools.combinations([panel for panel in panels if "gridPos" in panel], 2):
        a, b = one["gridPos"], other["gridPos"]
        if all(a[at] < b[at] + b[size] and b[at] < a[at] + a[size] for at, size in (("x", "w"), ("y", "h"))):
            yield one.get("title", ""), f"lies over {other.get('title')}"


def grid(board: Board) -> Found:
    """Panels lie side by side on the grid. A collapsed row's panels have a grid of their own."""
    yield from _on_grid(board.json.get("panels", []))
    for panel in board.json.get("panels", []):
        yield from _on_grid(panel.get("panels", []))
