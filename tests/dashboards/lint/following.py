"""What is demanded of data links and annotations. Each rule yields (panel, text) for what it finds."""

from __future__ import annotations

import re
from collections.abc import Iterator

import promql_parser

from tests.dashboards.lint import grafana
from tests.dashboards.lint import labels as lint_labels
from tests.dashboards.lint.model import ALERTS, INTERVAL, Board, Json, Node, Query, objects, walk
from tests.dashboards.lint.values import asked, chooses, drawn, number

Found = Iterator[tuple[str, str]]

# Grafana's Prometheus data source asks for an annotation as for a range of values, one in each step (60 s unless it is given). A
# series makes an event wherever its value is above 0, and one region of all that follow each other within a step. With
# `useValueForTime` the value is the moment, in milliseconds: one that stays the same makes one event without a length.

ONCE = frozenset({"changes", "increase", "delta", "idelta", "resets"})
"""Functions that over one step are above 0 in that step only in which something happens."""

AT_WORK = ("training", "evaluating")


def _links(board: Board, panel: Json) -> Iterator[tuple[str, str, list[Query]]]:
    """Each address behind a value, the label of a table's cell it is on, and the queries whose series it is on."""
    queries = asked(board, panel)
    config = panel.get("fieldConfig", {})
    if panel["type"] == "table":
        for column in grafana.columns(board, panel):
            yield from ((link["url"], column.field, queries) for link in column.config.get("links", []))
    else:
        for query in queries:
            yield from ((link["url"], "", [query]) for link in grafana.settings(panel, query).get("links", []))
    for override in config.get("overrides", []) if not queries else ():
        yield from ((link["url"], "", queries) for link in objects(override) if "url" in link)


def _sure(board: Board, queries: list[Query]) -> list[frozenset[str]]:
    """The labels that each series has, by query; of alerts those that all our rules give them."""
    return [lint_labels.sure(tree, board.recorded) for query in queries if (tree := query.tree()) is not None]


def follows_the_run(board: Board) -> Found:
    """A click on what belongs to one run leads to that run, not to all that are chosen."""
    for panel in board.panels_with_data():
        for url, _, queries in sorted(_links(board, panel), key=str):
            has_run = bool(queries) and all("run" in labels for labels in _sure(board, queries))
            if has_run and "/d/" in url and not re.search(r"var-run=\$\{__(data\.fields|field\.labels)\.run\b", url):
                yield panel["title"], f"leads to all chosen runs, not to ${{__field.labels.run}}: {url}"


def no_empty_links(board: Board) -> Found:
    """A link is filled in by labels that each series has; a cell of a table that leads somewhere is not empty."""
    for panel in board.panels_with_data():
        for url, cell, queries in _links(board, panel):
            sure = _sure(board, queries)
            for name in re.findall(r"\$\{__(?:data\.fields|field\.labels)\.(\w+)", url):
                if not name.startswith("Value") and not all(name in labels for labels in sure):
                    yield panel["title"], f"the label {name} is empty on some series: {url}"
            other = "field.labels" if panel["type"] == "table" else "data.fields"
            if f"${{__{other}." in url:
                yield panel["title"], f"nothing has {other} here, a table's rows have fields and a series labels: {url}"
            if cell and not cell.startswith(("Value", "Time")) and not any(cell in labels for labels in sure):
                yield panel["title"], f"a cell of {cell} may be empty and leads somewhere: {url}"


def _notes(board: Board) -> list[tuple[Json, Query]]:
    found = [(note, query) for note in board.annotations() for query in board.queries() if _is_of(query, note)]
    return [(note, query) for note, query in found if not note.get("builtIn") and query.tree() is not None]


def _is_of(query: Query, note: Json) -> bool:
    return query.panel["type"] == "annotation" and query.panel["title"] == f"annotation {note.get('name')}"


def annotations_off(board: Board) -> Found:
    """No annotation is on at first."""
    for note in board.annotations():
        if not note.get("builtIn") and note.get("enable", True):
            yield f"annotation {note['name']}", "is on at first"


def onsets_only(board: Board) -> Found:
    """An annotation marks a moment: Grafana tints the graph for as long as a series stays above 0."""
    for note, query in _notes(board):
        title = query.panel["title"]
        if note.get("useValueForTime"):
            yield from ((title, text) for text in _not_one_moment(query))
        elif not _lasts_one_step(query.tree()):
            yield title, "is a region, not a moment: its series last over several steps, and the value is not the time"


def _not_one_moment(query: Query) -> Iterator[str]:
    for _, name, above in drawn(query):
        in_time = {node.func.name for node in above if isinstance(node, promql_parser.Call)}
        if "timestamp" not in name and name != "ALERTS_FOR_STATE" and "timestamp" not in in_time:
            yield f"the value of {name} is no time"
        elif "timestamp" in in_time and not any(called.endswith("_over_time") for called in in_time):
            yield f"the timestamp of {name} moves from scrape to scrape"
    nodes = list(walk(query.tree()))
    if not any(number(node) == 1000 and not chooses(node, above) for node, above in nodes):
        yield "the time is in seconds, where Grafana reads milliseconds"
    for node, above in nodes:
        if isinstance(node, promql_parser.Call) and node.func.name == "time" and not chooses(node, above):
            yield "time() moves on with each step"


def _lasts_one_step(tree: Node) -> bool:
    """Whether it is above 0 in one step only: a change within a step, or something that was not there a step ago."""
    step = promql_parser.parse(f"x[{INTERVAL}]").range
    for node, above in walk(tree):
        called = isinstance(node, promql_parser.Call) and node.func.name in ONCE and not chooses(node, above, "unless")
        if called and getattr(node.args[0], "range", None) == step:
            return True
        if isinstance(node, promql_parser.BinaryExpr) and str(node.op) == "unless" and INTERVAL_BEFORE.search(_offsets(node.rhs)):
            return True
    return False


INTERVAL_BEFORE = re.compile(re.escape(str(promql_parser.parse(f"x[{INTERVAL}]").range)))


def _offsets(node: Node) -> str:
    found = [
        inner.offset for inner, _ in walk(node) if isinstance(inner, promql_parser.VectorSelector | promql_parser.SubqueryExpr)
    ]
    return " ".join(str(offset) for offset in found if offset is not None)


def no_state_changes(board: Board) -> Found:
    """No annotation comes of the change between training and evaluating, which is no event."""
    for note, query in _notes(board):
        for node, above in walk(query.tree()):
            if not isinstance(node, promql_parser.VectorSelector) or "torch_train_state" not in str(node.name):
                continue
            if not chooses(node, above, "unless") and any(_takes(node, state) for state in AT_WORK):
                yield f"annotation {note['name']}", "marks each change between training and evaluating"


def _takes(selector: Node, state: str) -> bool:
    for matcher in selector.matchers.matchers:
        if matcher.name == "state":
            hit = re.fullmatch(matcher.value, state) is not None if "Re" in str(matcher.op) else matcher.value == state
            if hit == ("Not" in str(matcher.op)):
                return False
    return True


def both_are_there(board: Board) -> Found:
    """Ends of runs and beginnings of alerts can be marked on every graph."""
    for metric in ("torch_train_state", next(iter(ALERTS))):
        if not any(metric in note.get("expr", "") for note in board.annotations()):
            yield "", f"no annotation from {metric}"
