"""What is demanded of numbers, tables' order and texts for nothing. Each rule yields (panel, text) for what it finds."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

import promql_parser

from tests.dashboards.lint import grafana
from tests.dashboards.lint import labels as lint_labels
from tests.dashboards.lint.model import ALERTS, SERIES, Board, Json, Node, Query, selectors, walk
from tests.dashboards.lint.values import asked, drawn, names, number
from torch_grad_exporter.metrics.families import Kind

Found = Iterator[tuple[str, str]]
Fields = Iterator[tuple[str, Json, Query | None]]

BARE_RATES = frozenset({"cps", "cpm", "ops", "opm"})
"""Units that Grafana writes as c/s and ops/s: nobody can tell of what."""

COUNTED = frozenset({"short", "none", "locale"})
"""Units of what is counted; a custom unit counts as well if it begins with `count:` or `suffix:`."""

ROUNDED = frozenset({"round", "ceil", "floor"})
SEVERITIES = ("critical", "warning", "info")

FACTS = frozenset({"torch_train_info", "torch_train_world_size"})
"""Series that each run has, which give others their labels."""

LETTERS = 7
"""So many letters of a sentence fit on a stat's tile for each column of the grid, at a third of the height of a title."""

SENTENCE = 3
"""So many words are needed to say what is missing."""


def _fields(board: Board, panel: Json) -> Fields:
    """Name and merged config of what a panel draws: its queries, or the columns of a table."""
    if panel["type"] == "table":
        yield from ((column.title, column.config, column.query) for column in grafana.columns(board, panel))
    else:
        yield from ((str(query.target.get("refId")), grafana.settings(panel, query), query) for query in asked(board, panel))


def decimals(board: Board) -> Found:
    """Scientific notation has a number of decimals: without it Grafana writes all that there are."""
    for panel in board.panels_with_data():
        options = grafana.options(panel)
        configs = [(name, config) for name, config, _ in _fields(board, panel)] if panel["type"] != "heatmap" else []
        configs += [(key, options[key]) for key in ("yAxis", "cellValues") if panel["type"] == "heatmap" and key in options]
        for name, config in configs:
            if config.get("unit") == "sci" and config.get("decimals") is None:
                yield panel["title"], f"{name}: scientific notation without decimals"


def log_axis(board: Board) -> Found:
    """A logarithmic axis has a unit that tells its small ticks apart, or begins at 1."""
    for panel in board.panels():
        for name, config, _ in _fields(board, panel) if panel["type"] in {"timeseries", "trend", "barchart"} else ():
            unit = str(config.get("unit", "short"))
            logarithmic = config["custom"].get("scaleDistribution", {}).get("type") == "log"
            if logarithmic and unit.partition(":")[0] in grafana.FIXED_POINT and (config.get("min") or 0) < 1:
                yield panel["title"], f"{name}: ticks below 1 of a logarithmic axis all read 0 as {unit}"


def bare_rates(board: Board) -> Found:
    """What happens in a second is said by the unit."""
    for panel in board.panels_with_data():
        units = {str(config.get("unit")) for _, config, _ in _fields(board, panel)}
        for unit in sorted(units & BARE_RATES):
            yield panel["title"], f"unit {unit} does not say what is counted"


def whole_counts(board: Board) -> Found:
    """How often something happened is a whole number and is written as one."""
    for panel in board.panels_with_data():
        for name, config, query in _fields(board, panel):
            unit = str(config.get("unit", "short"))
            if query is None or not _counts(query) or (unit not in COUNTED and not unit.startswith(("count:", "suffix:"))):
                continue
            heat = panel["type"] == "heatmap"
            if not heat and not _is_rounded(query):
                yield panel["title"], f"{name}: an increase is extrapolated, and not rounded to a count"
            digits = grafana.options(panel)["cellValues"].get("decimals") if heat else config.get("decimals")
            if digits != 0:
                yield panel["title"], f"{name}: a count with {digits} decimals"


def _counts(query: Query) -> bool:
    """Whether an increase is drawn that nothing divides."""
    return bool(_increases(query))


def _increases(query: Query) -> list[Sequence[Node]]:
    paths = [above for _, _, above in drawn(query) if "increase" in _calls(above)]
    return [above for above in paths if not any(_divides(node) for node in above)]


def _divides(node: Node) -> bool:
    return isinstance(node, promql_parser.BinaryExpr) and str(node.op) in {"/", "%", "^"}


def _is_rounded(query: Query) -> bool:
    return all(_calls(above) & ROUNDED for above in _increases(query))


def _calls(above: Sequence[Node]) -> set[str]:
    return {node.func.name for node in above if isinstance(node, promql_parser.Call)}


def errors_that_are(board: Board) -> Found:
    """Of errors by their source or reason only those are drawn that there are."""
    for query in board.queries():
        if not query.target or query.panel["type"] in {"state-timeline", "status-history"}:
            continue
        left = lint_labels.of(query.tree(), board.recorded)
        for _, name, above in drawn(query):
            kind, labels = SERIES.get(name, (None, frozenset()))
            kept = labels & left & {"source", "reason"}
            if kind is Kind.COUNTER and kept and not any(_above_zero(node) for node in above):
                yield query.panel["title"], f"a line of zeros for each {', '.join(sorted(kept))} of {name}"


def _above_zero(node: Node) -> bool:
    if not isinstance(node, promql_parser.BinaryExpr):
        return False
    if str(node.op) == "and":
        return any(_above_zero(inner) for inner, _ in walk(node.rhs))
    return str(node.op) == ">" and (number(node.rhs) or 0) >= 0 and not (node.modifier is not None and node.modifier.return_bool)


def table_order(board: Board) -> Found:
    """A table of several runs keeps each together, unless it ranks by a value; alerts begin with the most serious."""
    for panel in board.panels():
        if panel["type"] != "table":
            continue
        columns = {column.title: column for column in grafana.columns(board, panel)}
        by = grafana.options(panel)["sortBy"]
        first = columns.get(by[0].get("displayName", "")) if by else None
        queries = asked(board, panel)
        if any(name in ALERTS for query in queries for _, name, _ in selectors(query)):
            if first is None or not _most_serious_first(first, desc=bool(by[0].get("desc"))):
                yield panel["title"], "alerts are not sorted by severity: critical, warning, info"
        elif any(column.field == "run" for column in columns.values()):
            ranks = first is not None and first.query is not None and any(_is_top(query) for query in queries)
            if first is None or (first.field != "run" and not ranks):
                yield panel["title"], f"runs are mixed: sorted by {first.title if first else 'nothing'}"


def _most_serious_first(column: grafana.Column, *, desc: bool) -> bool:
    """Whether its values sort as the severities do: Grafana sorts numbers as numbers, and words by their letters."""
    words = grafana.words(column.config)
    if column.field != "severity" and not words:
        return False
    values = {name: name for name in SEVERITIES}
    for value, result in words.items():
        values |= {name: value for name in SEVERITIES if name in str(result.get("text", "")).lower()}
    numeric = all(re.fullmatch(r"-?\d+(\.\d+)?", value) for value in values.values())
    keys: list[float | str] = [float(values[name]) if numeric else values[name] for name in SEVERITIES]
    return keys == sorted(keys, reverse=desc)  # type: ignore[type-var]


def _is_top(query: Query) -> bool:
    """Whether the query yields the largest or smallest of its values only."""
    tree = query.tree()
    return any(isinstance(node, promql_parser.AggregateExpr) and str(node.op) in {"topk", "bottomk"} for node, _ in walk(tree))


def needs_gpu_first(board: Board) -> Found:
    """The first section of a dashboard has something to show on a machine without a GPU."""
    for panel in _first_section(board):
        metrics = {name for query in asked(board, panel) for _, name, _ in selectors(query)} - FACTS
        if metrics and all(name.startswith(("torch_gpu_", "torch_cuda_")) for name in metrics):
            yield panel["title"], "stands first and is empty without a GPU"


def _first_section(board: Board) -> list[Json]:
    """The panels up to the heading of the next section; those of the row where it is closed."""
    top = sorted(board.json.get("panels", []), key=lambda panel: (panel["gridPos"]["y"], panel["gridPos"]["x"]))
    shown = list(itertools.takewhile(lambda panel: panel["type"] != "row", top[1:] if top and top[0]["type"] == "row" else top))
    return shown or list(top[0].get("panels", [])) if top else []


def says_what_is_missing(board: Board) -> Found:
    """Where there is nothing to show a sentence says what is missing; where only rules give it, it names them."""
    for panel in board.panels_with_data():
        text = str(panel.get("fieldConfig", {}).get("defaults", {}).get("noValue", ""))
        if len(re.findall(r"\w+", text)) < SENTENCE:
            yield panel["title"], f"{text!r} does not say what is missing"
        found = {name for query in asked(board, panel) for name in names(query)}
        if found and found <= set(board.recorded) | set(ALERTS) and not re.search(r"\brules?\b", text):
            yield panel["title"], f"{text!r} does not name the rules that {', '.join(sorted(found))} needs"


def short_in_tiles(board: Board) -> Found:
    """A stat writes its sentence as large as a number, on one line: a long one is too small to be read."""
    for panel in board.panels():
        text = str(panel.get("fieldConfig", {}).get("defaults", {}).get("noValue", ""))
        room = LETTERS * panel.get("gridPos", {}).get("w", 0)
        if panel["type"] == "stat" and len(text) > room:
            yield panel["title"], f"{text!r} has {len(text)} letters on a tile for {room}"


def limits(board: Board) -> Found:
    """An axis, bar or scale of colours begins below its end; the thresholds of a share are shares."""
    for panel in board.panels_with_data():
        color = grafana.options(panel).get("color", {}) if panel["type"] == "heatmap" else {}
        for name, config in [("colours", color), *((name, config) for name, config, _ in _fields(board, panel))]:
            low, high = config.get("min"), config.get("max")
            if low is not None and high is not None and low >= high:
                yield panel["title"], f"{name} from {low} to {high}"
        own = panel.get("fieldConfig", {}).get("defaults", {})  # Grafana's own threshold is 80, which most graphs do not draw
        for step in own.get("thresholds", {}).get("steps", ()) if own.get("unit") == "percentunit" else ():
            if (step.get("value") or 0) > max(1, own.get("max") or 1):
                yield panel["title"], f"a threshold of {step['value']} on a share"
