"""The values that a PromQL expression can have."""

from __future__ import annotations

import itertools

import promql_parser

from tests.dashboards.lint import labels as lint_labels
from tests.dashboards.lint.model import Board, Node, Query, walk

FACT = frozenset({1.0})
EITHER = frozenset({0.0, 1.0})
YES_OR_NO = {
    "ALERTS": FACT,
    "up": EITHER,
    "torch_train_state": EITHER,
    "torch_grad_exporter_capture_mode": EITHER,
    "torch_grad_exporter_collector_success": EITHER,
}
"""Series that are 0 or 1: of all states or modes one has 1, and an alert is there as long as it has one."""

KEEPS_VALUES = frozenset({"max", "min", "topk", "bottomk"})
KEEPS_VALUES_IN_TIME = frozenset({"last_over_time", "max_over_time", "min_over_time"})
ONLY_LABELS = frozenset({"label_replace", "label_join", "sort", "sort_desc", "vector"})
COMPARED = {
    "==": float.__eq__, "!=": float.__ne__, ">": float.__gt__, "<": float.__lt__, ">=": float.__ge__, "<=": float.__le__,
}  # fmt: skip

Values = frozenset[float] | None
"""All values that there may be; `None` where they cannot be listed."""


def only_chooses(node: Node, below: Node) -> bool:
    """Return whether this side of an operation only selects series of the other side."""
    if not isinstance(node, promql_parser.BinaryExpr) or below is not node.rhs or lint_labels.is_scalar(node.lhs):
        return False
    is_bool = node.modifier is not None and node.modifier.return_bool
    return str(node.op) in {"and", "unless"} or (str(node.op) in COMPARED and not is_bool)


def asked(board: Board, panel: object) -> list[Query]:
    """Return the queries of a panel."""
    return [query for query in board.queries() if query.panel is panel]


def number(node: Node) -> float | None:
    """Return the value of a literal, else None."""
    match node:
        case promql_parser.NumberLiteral():
            return float(node.val)
        case promql_parser.ParenExpr():
            return number(node.expr)
        case promql_parser.UnaryExpr():
            inner = number(node.expr)
            return None if inner is None else -inner
    return None


def possible(node: Node) -> Values:  # noqa: PLR0911 - one for each kind of node
    """Return every value that the expression can have, or None if they cannot be listed."""
    literal = number(node)
    if literal is not None:
        return frozenset({literal})
    match node:
        case promql_parser.VectorSelector():
            return FACT if str(node.name).endswith("_info") else YES_OR_NO.get(node.name)
        case promql_parser.ParenExpr():
            return possible(node.expr)
        case promql_parser.MatrixSelector():
            return possible(node.vector_selector)
        case promql_parser.SubqueryExpr():
            return possible(node.expr)
        case promql_parser.AggregateExpr():
            kept = possible(node.expr) if str(node.op) in KEEPS_VALUES else None
            return frozenset({1.0}) if str(node.op) == "group" else kept
        case promql_parser.Call() if node.func.name in KEEPS_VALUES_IN_TIME | ONLY_LABELS:
            return possible(node.args[0])
        case promql_parser.BinaryExpr():
            return _of_operation(node, possible(node.lhs), possible(node.rhs))
    return None


def _of_operation(node: Node, left: Values, right: Values) -> Values:
    operation = str(node.op)
    if operation == "or":
        return None if left is None or right is None else left | right
    if operation in {"and", "unless"}:
        return left
    if operation in COMPARED:
        return _of_comparison(node, left, right)
    if operation == "*" and frozenset({0.0}) in {left, right}:
        return frozenset({0.0})
    if left is None or right is None or operation not in {"+", "-", "*"}:
        return None
    made = {"+": float.__add__, "-": float.__sub__, "*": float.__mul__}[operation]
    return frozenset(made(a, b) for a in left for b in right)


def _of_comparison(node: Node, left: Values, right: Values) -> Values:
    if node.modifier is not None and node.modifier.return_bool:
        return frozenset({0.0, 1.0})
    if lint_labels.is_scalar(node.lhs):
        left, right = right, left
    if left is not None and right is not None and len(right) == 1:
        return frozenset(value for value in left if COMPARED[str(node.op)](value, next(iter(right))))
    return right if str(node.op) == "==" and left is None else left


def alternatives(node: Node) -> list[Node]:
    """Return the operands of `or`, the first of which wins."""
    match node:
        case promql_parser.ParenExpr():
            return alternatives(node.expr)
        case promql_parser.Call() if node.func.name in ONLY_LABELS:
            return alternatives(node.args[0])
        case promql_parser.BinaryExpr() if str(node.op) == "or":
            return [*alternatives(node.lhs), *alternatives(node.rhs)]
    return [node]


def decides(query: Query) -> set[str]:
    """Return what selects one of several values: max, min or the order of `or`."""
    tree = query.tree()
    if tree is None:
        return set()
    operations = {
        str(node.op)
        for node, above in walk(tree)
        if isinstance(node, promql_parser.AggregateExpr)
        and not any(only_chooses(over, below) for below, over in itertools.pairwise((node, *reversed(above))))
    }
    return (operations & {"max", "min"}) | ({"or"} if len(alternatives(tree)) > 1 else set())
