"""What is demanded of the dashboard that is looked at first. Each rule yields (panel, text) for what it finds."""

from __future__ import annotations

import re
from collections.abc import Iterator

import promql_parser

from tests.dashboards.lint import grafana
from tests.dashboards.lint.model import ALERTS, Board, Json, Query, selectors, walk
from tests.dashboards.lint.values import asked, drawn, names, number

Found = Iterator[tuple[str, str]]

OVERVIEW = "torch-grad-training"
"""The uid of that dashboard."""

ROWS = 20
"""Rows of the grid, of 30 pixels and 8 between them, that are on the screen of 1440 x 900 below the header without scrolling."""

WAITS = r"rank:torch_train_(own|gradient_wait)_seconds:.*|torch_train_gradient_wait(s|_seconds)_total"

FIRST: dict[str, tuple[str, frozenset[str]]] = {
    "state": (r"torch_train_state", frozenset({"stat", "state-timeline"})),
    "loss": (r"torch_train_loss", frozenset({"timeseries"})),
    "global norm": (r"torch_grad_global_norm|run:torch_grad_norm:.*", frozenset({"timeseries"})),
    "throughput": (r"torch_train_(samples|tokens|steps)_total|run:torch_train_throughput:.*", frozenset({"timeseries"})),
    "worst rank": (WAITS, frozenset({"stat", "bargauge", "gauge", "timeseries", "table"})),
    "firing alerts": ("|".join(ALERTS), frozenset({"table"})),
}
"""What belongs on the first screen: the metrics it is drawn from, and the kinds of panel that show it."""


def _shows(board: Board, panel: Json, metrics: str) -> bool:
    found = {name for query in asked(board, panel) for name in names(query)}
    return any(re.fullmatch(metrics, name) for name in found)


def one_screen(board: Board) -> Found:
    """State, loss, norm, throughput, worst rank and what is wrong are seen without scrolling and without opening a row."""
    if board.json.get("uid") != OVERVIEW:
        return
    for wanted, (metrics, kinds) in FIRST.items():
        panels = [panel for panel in board.json.get("panels", []) if panel["type"] in kinds and _shows(board, panel, metrics)]
        ends = min((panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels), default=None)
        if ends is None or ends > ROWS:
            yield (
                "",
                f"{wanted} ends in row {ends}, not in the first {ROWS}" if ends else f"{wanted} is not shown, or in a closed row",
            )


def straggler_first(board: Board) -> Found:
    """The first row of panels shows what a slow rank costs."""
    if board.json.get("uid") != OVERVIEW:
        return
    shown = [panel for panel in board.json.get("panels", []) if panel["type"] != "row"]
    top = min((panel["gridPos"]["y"] for panel in shown), default=0)
    if not any(panel["gridPos"]["y"] == top and _shows(board, panel, WAITS) for panel in shown):
        yield "", "no panel of the first row shows the ranks' own time or waits"


def outliers_between_samples(board: Board) -> Found:
    """The graph of the global norm has the largest of each interval, of which the value at a scrape shows nothing."""
    for panel in board.json.get("panels", []) if board.json.get("uid") == OVERVIEW else ():
        drawn_here = panel["type"] == "timeseries" and _shows(board, panel, "torch_grad_global_norm")
        if drawn_here and not any(_largest_of_buckets(query) for query in asked(board, panel)):
            yield panel["title"], "without the largest norm of each interval, from the histogram"


def _largest_of_buckets(query: Query) -> bool:
    for _, name, above in drawn(query):
        quantiles = [
            node.args[0] for node in above if isinstance(node, promql_parser.Call) and node.func.name == "histogram_quantile"
        ]
        if name == "torch_grad_global_norm_distribution_bucket" and any(number(share) == 1 for share in quantiles):
            return True
    return False


def ended_runs(board: Board) -> Found:
    """The table of runs has those that have ended within the hour."""
    for panel in board.json.get("panels", []) if board.json.get("uid") == OVERVIEW else ():
        queries = asked(board, panel) if panel["type"] == "table" else []
        if any(name in ALERTS for query in queries for _, name, _ in selectors(query)):
            continue
        labels = {column.field for column in grafana.columns(board, panel) if column.query is None} if queries else set()
        if "run" in labels and labels <= {"job", "run", "Time"} and not any(_reaches_back(query) for query in queries):
            yield panel["title"], "a run that has ended is missing: no query has a last value of the last hour"


def _reaches_back(query: Query) -> bool:
    tree = query.tree()
    return tree is not None and any(
        isinstance(node, promql_parser.Call) and node.func.name == "last_over_time" for node, _ in walk(tree)
    )
