"""The labels that a PromQL expression leaves on its series."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import promql_parser
import yaml
from promql_parser import AggModifierType, LabelModifierType, VectorMatchCardinality

from tests.dashboards.lint.model import ALERTS, SERIES, SYNTHETIC, Node, children

Labels = frozenset[str]
Recorded = Mapping[str, Labels]

NONE: Labels = frozenset()


def of(node: Node, recorded: Recorded) -> Labels:
    """Return the labels of the series that the node yields; none for a scalar or an unknown metric."""
    match node:
        case promql_parser.VectorSelector():
            return _of_selector(node, recorded)
        case promql_parser.Call():
            return _of_call(node, recorded)
        case promql_parser.AggregateExpr():
            return _of_aggregation(node, of(node.expr, recorded))
        case promql_parser.BinaryExpr():
            return _of_binary(node, recorded)
    return NONE.union(*(of(child, recorded) for child in children(node)))


def _of_selector(node: Node, recorded: Recorded) -> Labels:
    if node.name in SERIES:
        return SERIES[node.name][1]
    if node.name in SYNTHETIC:
        return frozenset({"job", "instance"})
    if node.name in ALERTS:
        return frozenset(ALERTS[node.name])
    return recorded.get(node.name, NONE)


def _of_call(node: Node, recorded: Recorded) -> Labels:
    labels = frozenset().union(*(of(argument, recorded) for argument in node.args))
    match node.func.name:
        case "vector" | "time" | "scalar" | "absent" | "absent_over_time":
            return NONE
        case "histogram_quantile":
            return labels - {"le"}
        case "label_replace" | "label_join":
            return labels | {node.args[1].val}
    return labels


def _of_aggregation(node: Node, labels: Labels) -> Labels:
    if str(node.op) in {"topk", "bottomk"}:
        return labels
    if node.modifier is None:
        return NONE
    named = frozenset(node.modifier.labels)
    return named & labels if node.modifier.type == AggModifierType.By else labels - named


def _of_binary(node: Node, recorded: Recorded) -> Labels:
    left, right = of(node.lhs, recorded), of(node.rhs, recorded)
    operation = str(node.op)
    if operation == "or":
        return left | right
    if operation in {"and", "unless"} or node.modifier is None or is_scalar(node.lhs) or is_scalar(node.rhs):
        return right if is_scalar(node.lhs) else left
    extra = frozenset(node.modifier.group_labels or ())
    if node.modifier.card == VectorMatchCardinality.ManyToOne:
        return left | extra
    if node.modifier.card == VectorMatchCardinality.OneToMany:
        return right | extra
    matching = node.modifier.matching
    if matching is None:
        return left
    named = frozenset(matching.labels)
    return left & named if matching.type == LabelModifierType.Include else left - named


def is_scalar(node: Node) -> bool:
    """Return whether the node is a number, not a vector."""
    match node:
        case promql_parser.NumberLiteral():
            return True
        case promql_parser.Call():
            return node.func.name in {"scalar", "time", "pi"}
        case promql_parser.ParenExpr() | promql_parser.UnaryExpr():
            return is_scalar(node.expr)
        case promql_parser.BinaryExpr():
            return is_scalar(node.lhs) and is_scalar(node.rhs)
    return False


def of_rules(directory: Path) -> dict[str, Labels]:
    """Return the labels of each recorded series; a rule may use a rule above it or in an earlier file."""
    found: dict[str, Labels] = {}
    for path in sorted(directory.glob("*.rules.yml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                if "record" in rule:
                    found[rule["record"]] = of(promql_parser.parse(rule["expr"]), found) | frozenset(rule.get("labels", ()))
    return found
