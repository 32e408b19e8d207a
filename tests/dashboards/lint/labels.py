"""Which labels a PromQL expression leaves on its series: what a legend may name and a matcher can match."""

from __future__ import annotations

import re
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
    """Labels of the series that the node yields; none for a scalar, and for an unknown metric."""
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


def sure(node: Node, recorded: Recorded) -> Labels:  # noqa: PLR0911 - one for each kind of node
    """Labels that each series of the node has, where `of` are those that some have: a link by one of these is never empty."""
    match node:
        case promql_parser.BinaryExpr() if str(node.op) == "or":
            return sure(node.lhs, recorded) & sure(node.rhs, recorded)
        case promql_parser.BinaryExpr():
            left, right = sure(node.lhs, recorded), sure(node.rhs, recorded)
            return of(node, recorded) & (left | right)
        case promql_parser.AggregateExpr():
            return _of_aggregation(node, sure(node.expr, recorded))
        case promql_parser.Call() if node.func.name == "label_replace":
            inner = sure(node.args[0], recorded)
            into = node.args[1].val
            return inner | {into} if _always_sets(node, inner) else inner - ({into} - inner)
        case promql_parser.Call():
            return of(node, recorded) & NONE.union(*(sure(argument, recorded) for argument in node.args))
        case promql_parser.VectorSelector():
            return _of_selector(node, recorded)
    return NONE.union(*(sure(child, recorded) for child in children(node)))


def _always_sets(node: Node, inner: Labels) -> bool:
    """Whether after a label_replace the label is nowhere empty: it had a value or is given one where it had none."""
    into, replacement, source, pattern = (argument.val for argument in node.args[1:5])
    named = replacement.replace("${", "$").replace("}", "")
    if source in inner:
        return into in inner or pattern in {".*", ".+", "(.*)", "(.+)"}
    # An absent label is an empty one. What does not match keeps the value it had, so it has to be the label itself.
    of_nothing = re.fullmatch(pattern, "")
    return of_nothing is not None and bool(named) and "$" not in named and (source in {into, ""} or pattern == ".*")


def is_scalar(node: Node) -> bool:
    """Whether the node is a number, not a vector."""
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
    """The labels of what each recording rule records; a rule may build on one above it or in a file read before."""
    found: dict[str, Labels] = {}
    for path in sorted(directory.glob("*.rules.yml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                if "record" in rule:
                    found[rule["record"]] = of(promql_parser.parse(rule["expr"]), found) | frozenset(rule.get("labels", ()))
    return found
