"""Grafana dashboards as their checks see them: panels, variables and queries of the classic JSON, and PromQL as a tree."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import promql_parser

from tests.support.catalogue import CATALOGUE
from torch_grad_exporter.metrics.families import Kind

Json = dict[str, Any]
Node = Any  # The classes of promql_parser's tree have no common type beside `object`.

RATE_INTERVAL, INTERVAL, RANGE = "7919s", "7907s", "7901s"
"""What stands for Grafana's own variables in a query: durations that are never written, so that they are recognised in the tree."""

TARGET_LABELS = frozenset({"job", "instance", "run", "rank"})
SYNTHETIC = (
    "up",
    "scrape_duration_seconds",
    "scrape_samples_scraped",
    "scrape_samples_post_metric_relabeling",
    "scrape_series_added",
)
ALERTS = {"ALERTS": {"alertname", "alertstate", "severity", "run"}, "ALERTS_FOR_STATE": {"alertname", "severity", "run"}}
"""Series that Prometheus makes itself; of the labels of alerts those that all our rules give them."""

WITHOUT_DATA = frozenset({"row", "text", "dashlist", "alertlist", "annolist"})


@functools.cache
def _parsed(text: str) -> Node | None:
    try:
        return promql_parser.parse(text)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression of a dashboard: where it stands, its own JSON, and the text with Grafana's variables replaced."""

    panel: Json
    target: Json
    text: str

    def tree(self) -> Node | None:
        """The expression parsed; `None` where it is no PromQL, which is a finding of a rule of its own."""
        return _parsed(self.text)


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard, and what it may refer to: all dashboards by their uid, and what is recorded, with its labels."""

    json: Json
    others: Mapping[str, Json]
    recorded: Mapping[str, frozenset[str]]

    def panels(self) -> list[Json]:
        """All panels, also rows and those in rows."""
        return [inner for panel in self.json.get("panels", []) for inner in (panel, *panel.get("panels", []))]

    def panels_with_data(self) -> list[Json]:
        return [panel for panel in self.panels() if panel["type"] not in WITHOUT_DATA]

    def variables(self) -> list[Json]:
        return list(self.json.get("templating", {}).get("list", []))

    def annotations(self) -> list[Json]:
        return list(self.json.get("annotations", {}).get("list", []))

    def queries(self) -> list[Query]:
        """Those of the panels, and of annotations and variables, which stand as panels of their name."""
        panels = [(panel, target, target.get("expr", "")) for panel in self.panels() for target in panel.get("targets", [])]
        notes = [
            (_as_panel("annotation", note), {}, note.get("expr", "")) for note in self.annotations() if not note.get("builtIn")
        ]
        asking = [
            (_as_panel("variable", variable), {}, asked[0]) for variable in self.variables() if (asked := label_values(variable))
        ]
        return [Query(panel, target, self.interpolate(text)) for panel, target, text in panels + notes + asking if text or target]

    def interpolate(self, expression: str) -> str:
        """The expression with durations for Grafana's own variables, and the current value for others outside of strings."""
        now = {"__rate_interval": RATE_INTERVAL, "__interval": INTERVAL, "__range": RANGE}
        now |= {v["name"]: str(v.get("current", {}).get("value", "5")) for v in self.variables()}
        parts = re.split(r'("(?:[^"\\]|\\.)*")', expression)
        parts[::2] = [re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda m: now.get(m[1] or m[2], m[0]), part) for part in parts[::2]]
        return "".join(parts)


def _as_panel(kind: str, json: Json) -> Json:
    return {"type": kind, "title": f"{kind} {json['name']}"}


def label_values(variable: Json) -> tuple[str, str] | None:
    """Selector (may be empty) and label of a variable that asks for a label's values; `None` for any other."""
    query = variable.get("query", "")
    text = query.get("query", "") if isinstance(query, dict) else query
    found = re.fullmatch(r"label_values\((?:(?P<of>.+),\s*)?(?P<label>\w+)\)", text)
    return (found["of"] or "", found["label"]) if found and variable.get("type") == "query" else None


def strings(json: object) -> Iterator[str]:
    """All strings within, keys left out."""
    if isinstance(json, str):
        yield json
    elif isinstance(json, dict):
        for value in json.values():
            yield from strings(value)
    elif isinstance(json, list):
        for value in json:
            yield from strings(value)


def objects(json: object) -> Iterator[Json]:
    """All objects within."""
    if isinstance(json, dict):
        yield json
        for value in json.values():
            yield from objects(value)
    elif isinstance(json, list):
        for value in json:
            yield from objects(value)


def children(node: Node) -> list[Node]:
    """The nodes directly below."""
    match node:
        case promql_parser.BinaryExpr():
            return [node.lhs, node.rhs]
        case promql_parser.Call():
            return list(node.args)
        case promql_parser.MatrixSelector():
            return [node.vector_selector]
        case promql_parser.AggregateExpr():
            return [node.expr] if node.param is None else [node.expr, node.param]
        case promql_parser.ParenExpr() | promql_parser.UnaryExpr() | promql_parser.SubqueryExpr():
            return [node.expr]
    return []


def walk(node: Node, above: Sequence[Node] = ()) -> Iterator[tuple[Node, Sequence[Node]]]:
    """Each node of the tree with those above it, the nearest last."""
    yield node, above
    for child in children(node):
        yield from walk(child, (*above, node))


def selectors(query: Query) -> Iterator[tuple[Node, str, Sequence[Node]]]:
    """Each selector of series in the query, its metric, and the nodes above it."""
    tree = query.tree()
    for node, above in walk(tree) if tree is not None else ():
        if isinstance(node, promql_parser.VectorSelector):
            named = [matcher.value for matcher in node.matchers.matchers if matcher.name == "__name__"]
            yield node, node.name or (named[0] if named else ""), above


def series() -> dict[str, tuple[Kind, frozenset[str]]]:
    """Kind and labels of every series that the exporter yields, by its name in Prometheus."""
    found = {}
    for spec in CATALOGUE.values():
        labels = frozenset(spec.labels) | TARGET_LABELS
        ends = ("_sum", "_count", "_bucket") if spec.kind is Kind.HISTOGRAM else ("",)
        found |= {spec.name + end: (spec.kind, labels | {"le"} if end == "_bucket" else labels) for end in ends}
    return found


SERIES = series()
