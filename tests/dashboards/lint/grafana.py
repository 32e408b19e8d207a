"""Panels as Grafana draws them: options and field config merged with the defaults of Grafana and its plugins."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import promql_parser

from tests.dashboards.lint import labels as lint_labels
from tests.dashboards.lint.model import ALERTS, Board, Json, Query, walk

PLUGINS: Mapping[str, Json] = json.loads(
    (Path(__file__).parent.parent / "grafana_schema" / "defaults.json").read_text(encoding="utf-8")
)
"""Of each type of panel `options` and `custom` as @grafana/schema has them; test_grafana_schema.py compares."""

# The package lacks what follows; it was read in Grafana's repository (module.tsx, heatmap/palettes.ts, valueFormats.ts).

LEGEND: Json = {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []}
"""The legend that the option builder of panels with one begins with."""

OPTIONS: Mapping[str, Json] = {
    # The package leaves out the two enums, whose values its generator cannot write.
    "heatmap": {"color": {"mode": "scheme", "scale": "exponential"}},
    "state-timeline": {"legend": LEGEND},
    "status-history": {"legend": LEGEND},
    "timeseries": {"legend": LEGEND},
}

COLOR_MODES: Mapping[str, str] = {
    # A continuous mode has no legend of states (getFieldLegendItem returns none).
    "state-timeline": "continuous-GrYlRd",
    "status-history": "thresholds",
    "timeseries": "palette-classic",
    "barchart": "palette-classic",
    "piechart": "palette-classic",
}
"""The colour mode of a panel that names none; `thresholds` is Grafana's own for the others."""

THRESHOLDS: Json = {"mode": "absolute", "steps": [{"color": "green", "value": None}, {"color": "red", "value": 80}]}
"""The thresholds of a panel that has none."""

FIXED_POINT = frozenset({"short", "none", "locale", "percentunit", "percent", "count", "suffix", "prefix"})
"""Units, and kinds of custom unit, of a fixed number of digits: small ticks of an axis all read 0."""


def merge(under: object, over: object) -> object:
    """Merge objects key by key, as Grafana does; anything else comes from `over`."""
    if not isinstance(under, dict) or not isinstance(over, dict):
        return over
    return under | {key: merge(under[key], value) if key in under else value for key, value in over.items()}


def options(panel: Json) -> Json:
    """Return the merged options of the panel."""
    merged = merge(PLUGINS.get(panel["type"], {}).get("options", {}), OPTIONS.get(panel["type"], {}))
    merged = merge(merged, panel.get("options", {}))
    assert isinstance(merged, dict)
    return merged


@dataclass(frozen=True, slots=True)
class Drawn:
    """One field of a panel: by which query, its names (one's own and the one shown), and for a column of a table its label."""

    query: str = ""
    names: tuple[str, ...] = ()
    number: bool = True


def config(panel: Json, drawn: Drawn | None = None) -> Json:
    """Return the merged field config of the panel, or of one of its fields with the overrides that match."""
    found: Json = {
        "color": {"mode": COLOR_MODES.get(panel["type"], "thresholds")},
        "thresholds": THRESHOLDS,
        "custom": PLUGINS.get(panel["type"], {}).get("custom", {}),
    }
    own = panel.get("fieldConfig", {})
    merged = merge(found, own.get("defaults", {}))
    assert isinstance(merged, dict)
    for override in own.get("overrides", []) if drawn is not None else ():
        if drawn is not None and _matches(override["matcher"], drawn):
            for setting in override["properties"]:
                merged = _with(merged, setting["id"].split("."), setting.get("value"))
    return merged


def _with(json_: Json, path: Sequence[str], value: object) -> Json:
    inner = _with(json_.get(path[0], {}), path[1:], value) if len(path) > 1 else value
    return json_ | {path[0]: inner}


def _matches(matcher: Json, drawn: Drawn) -> bool:
    wanted = matcher.get("options")
    match matcher["id"]:
        case "byName":
            return wanted in drawn.names
        case "byNames":
            return bool(set(wanted.get("names", ())) & set(drawn.names))
        case "byRegexp":
            return any(_regexp(wanted).search(name) for name in drawn.names)
        case "byFrameRefID":
            return bool(wanted == drawn.query)
        case "byType":
            return bool(wanted == ("number" if drawn.number else "string"))
    return False


def _regexp(text: str) -> re.Pattern[str]:
    return re.compile(text[1 : text.rindex("/")] if text.startswith("/") else text)


def settings(panel: Json, query: Query) -> Json:
    """Return the field config of a query's series."""
    return config(panel, Drawn(query.target.get("refId", "")))


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its field (a label, or `Value`), the title shown, its merged config, and its query if it has one."""

    field: str
    title: str
    config: Json = field(compare=False)
    query: Query | None = field(compare=False, default=None)


def columns(board: Board, panel: Json) -> list[Column]:
    """Return the columns of a table after its transformations, in order."""
    fields = dict(_fields(board, panel))
    titles = {name: name for name in fields}
    order: dict[str, int] = {}
    for step in panel.get("transformations", []):
        asked = step.get("options", {})
        if step["id"] == "filterFieldsByName":
            fields = {name: query for name, query in fields.items() if _kept(asked, name)}
        elif step["id"] == "organize":
            fields = {name: query for name, query in fields.items() if not asked.get("excludeByName", {}).get(name)}
            titles |= asked.get("renameByName", {})
            order = asked.get("indexByName", {})
    found = []
    for name in sorted(fields, key=lambda name: order.get(name, len(order))):
        query = fields[name]
        letter = query.target.get("refId", "") if query else ""
        settled = config(panel, Drawn(letter, (name, titles[name]), number=query is not None))
        custom = settled.get("custom", {})
        if not custom.get("hidden") and not custom.get("hideFrom", {}).get("viz"):
            found.append(Column(name, titles[name], settled, query))
    return found


def _fields(board: Board, panel: Json) -> Iterator[tuple[str, Query | None]]:
    queries = [query for query in board.queries() if query.panel is panel]
    trees = [tree for query in queries if (tree := query.tree()) is not None]
    for name in sorted(frozenset().union(*(lint_labels.of(tree, board.recorded) for tree in trees))):
        yield name, None
    if any(_asks_for_alerts(tree) for tree in trees):
        # An alert has labels that its rule gives it; those that the table names are there on some.
        yield from ((name, None) for name in sorted(_named(panel)) if not name.startswith("Value"))
    yield "Time", None
    for query in queries:
        yield "Value" if len(queries) == 1 else f"Value #{query.target.get('refId')}", query


def _named(panel: Json) -> set[str]:
    """Return the fields that transformations and overrides name, without their new titles."""
    steps = [step.get("options", {}) for step in panel.get("transformations", [])]
    matchers = [override["matcher"] for override in panel.get("fieldConfig", {}).get("overrides", [])]
    named = {matcher["options"] for matcher in matchers if matcher["id"] == "byName"}
    for asked in steps:
        named -= set(asked.get("renameByName", {}).values())
    return named.union(*(asked.get("include", {}).get("names", ()) for asked in steps))


def _asks_for_alerts(tree: object) -> bool:
    return any(isinstance(node, promql_parser.VectorSelector) and node.name in ALERTS for node, _ in walk(tree))


def _kept(asked: Json, name: str) -> bool:
    wanted, unwanted = asked.get("include", {}), asked.get("exclude", {})
    kept = not wanted or name in wanted.get("names", ()) or ("pattern" in wanted and bool(_regexp(wanted["pattern"]).search(name)))
    left_out = name in unwanted.get("names", ()) or ("pattern" in unwanted and bool(_regexp(unwanted["pattern"]).search(name)))
    return kept and not left_out


def words(config_: Json) -> dict[str, Json]:
    """Return text and colour of each mapped value, by the value in the JSON."""
    return {value: result for mapping in config_.get("mappings", []) if mapping["type"] == "value"
            for value, result in mapping["options"].items()}  # fmt: skip


def has_ranges(config_: Json) -> bool:
    """Return whether each mapped range of values has a text and a colour."""
    ranges = [mapping["options"]["result"] for mapping in config_.get("mappings", []) if mapping["type"] == "range"]
    return bool(ranges) and all(result.get("text") and result.get("color") for result in ranges)
