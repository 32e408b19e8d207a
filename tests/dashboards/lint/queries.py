"""Rules about queries: each yields (panel, text) for every fault."""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import promql_parser
import yaml

from tests.dashboards.lint import labels as lint_labels
from tests.dashboards.lint.model import (
    ALERTS,
    RANGE,
    RATE_INTERVAL,
    SERIES,
    SYNTHETIC,
    Board,
    Node,
    Query,
    label_values,
    selectors,
    walk,
)
from tests.dashboards.lint.values import only_chooses
from tests.support.tools import PATIENCE, find
from torch_grad_exporter.metrics.families import Kind

Found = Iterator[tuple[str, str]]

RATES = frozenset({"rate", "irate", "increase"})
AVERAGES = frozenset({"sum", "avg", "stddev", "stdvar", "quantile"})
AVERAGES_OVER_TIME = frozenset({f"{name}_over_time" for name in AVERAGES})
COMPARISONS = frozenset({"==", ">", "<", ">=", "<="})

NEVER_NAN = re.compile(r"torch_grad_(units|missing_parameters|sample_step|exporter_.*)")
MAYBE_NAN = re.compile(r"torch_(grad|weight|run_grad)_.*|torch_train_loss|torch_train_learning_rate|torch_train_loss_scale")
"""Gauges of what a model computes: NaN is a value of theirs. Counts, times, bytes and shares of time never are."""


def what_is_wrong(expressions: Iterable[str]) -> dict[int, str]:
    """Return the errors of Prometheus' own parser by the position of the expression."""
    # A sign does not change what parses, but it is refused before a range vector and a string, as a panel would refuse them.
    rules = [{"record": f"lint:query:{number}", "expr": f"-(\n{text}\n)"} for number, text in enumerate(expressions)]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "queries.yml")
        path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}), encoding="utf-8")
        command = [find("promtool"), "check", "rules", "--lint=none", path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    wrong = {int(n): text for n, text in re.findall(r'"lint:query:(\d+)": (.*)', done.stdout + done.stderr)}
    assert bool(wrong) == bool(done.returncode), done.stdout + done.stderr
    return wrong


def promql(board: Board) -> Found:
    """A query is valid PromQL for Prometheus and yields something that a panel can draw."""
    queries = board.queries()
    wrong = what_is_wrong(query.text for query in queries)
    for number, query in enumerate(queries):
        if number in wrong or query.tree() is None:
            yield query.panel["title"], f"no PromQL: {query.text!r}: {wrong.get(number, 'promql_parser refuses it')}"


def metric_exists(board: Board) -> Found:
    """Each metric is in the catalogue, recorded by a rule, or made by Prometheus."""
    for query in board.queries():
        for _, name, _ in selectors(query):
            if name not in SERIES and name not in board.recorded and name not in ALERTS and name not in SYNTHETIC:
                yield query.panel["title"], f"no such metric: {name or 'a selector without one'}"


def _matchers(board: Board, label: str) -> Found:
    defined = [variable["name"] for variable in board.variables()]
    for query in board.queries():
        own = query.panel["title"].removeprefix("variable ") if query.panel["type"] == "variable" else None
        if own in defined and (label not in defined or defined.index(own) <= defined.index(label)):
            continue  # A variable cannot ask for itself, nor for those that follow from it.
        for node, name, _ in selectors(query):
            if label not in lint_labels.of(node, board.recorded):
                continue
            wanted = {(label, "MatchOp.Re", value) for value in (f"${label}", f"${{{label}}}", f"${{{label}:regex}}")}
            if not wanted & {(matcher.name, str(matcher.op), matcher.value) for matcher in node.matchers.matchers}:
                yield query.panel["title"], f'{name} has no {label}=~"${label}"'


def job_matcher(board: Board) -> Found:
    """Each selector takes the chosen jobs if its series have a job."""
    return _matchers(board, "job")


def run_matcher(board: Board) -> Found:
    """Each selector takes the chosen runs if its series have a run."""
    return _matchers(board, "run")


def _ranges(query: Query) -> Iterator[tuple[str, Node]]:
    tree = query.tree()
    for node, above in walk(tree) if tree is not None else ():
        if isinstance(node, promql_parser.MatrixSelector | promql_parser.SubqueryExpr) and above:
            yield getattr(getattr(above[-1], "func", None), "name", ""), node


def rate_interval(board: Board) -> Found:
    """A rate covers `$__rate_interval`, and an increase that or `$__range`."""
    wanted, whole = (promql_parser.parse(f"x[{text}]").range for text in (RATE_INTERVAL, RANGE))
    for query in board.queries():
        for function, node in _ranges(query):
            if function in RATES and node.range != wanted and (function != "increase" or node.range != whole):
                yield query.panel["title"], f"{function} over {node.range}, not over $__rate_interval"


def counter(board: Board) -> Found:
    """A counter or histogram is read by a rate or an increase only."""
    for query in board.queries():
        for selector, name, above in selectors(query):
            kind = SERIES.get(name, (Kind.GAUGE,))[0]
            counted = any(isinstance(node, promql_parser.AggregateExpr) and str(node.op) in {"count", "group"} for node in above)
            asked = any(only_chooses(node, below) for below, node in itertools.pairwise((selector, *reversed(above))))
            if (
                kind is not Kind.GAUGE
                and not _calls(above) & RATES
                and not counted
                and not asked
                and query.panel["type"] != "variable"
            ):
                yield query.panel["title"], f"{kind.value} {name} without a rate"


def gauge(board: Board) -> Found:
    """A gauge has no rate and no sum over time."""
    for query in board.queries():
        for _, name, above in selectors(query):
            for call in sorted(_calls(above) & (RATES | {"sum_over_time", "resets"})):
                if name in SERIES and SERIES[name][0] is Kind.GAUGE:
                    yield query.panel["title"], f"{call} of the gauge {name}"


def summed_over_time(board: Board) -> Found:
    """Only increases are added up over time: for other values the sum depends on the zoom."""
    queries = board.queries()
    for panel in board.panels_with_data():
        options = panel.get("options", {})
        calcs = {calc for key in ("legend", "reduceOptions") for calc in options.get(key, {}).get("calcs", ())}
        if calcs & {"sum", "total"} and not all(_is_increase(query) for query in queries if query.panel is panel):
            yield panel["title"], "adds up over time what is no increase"


def _is_increase(query: Query) -> bool:
    """Return whether all series of the query go through increase()."""
    return all("increase" in _calls(above) for _, _, above in selectors(query))


def _calls(above: Iterable[Node]) -> set[str]:
    return {node.func.name for node in above if isinstance(node, promql_parser.Call)}


def histogram(board: Board) -> Found:
    """Buckets go into histogram_quantile or a heatmap and keep `le` until then."""
    for query in board.queries():
        tree = query.tree()
        for node, _ in walk(tree) if tree is not None else ():
            called = isinstance(node, promql_parser.Call) and node.func.name == "histogram_quantile"
            if called and "le" not in lint_labels.of(node.args[1], board.recorded):
                yield query.panel["title"], "histogram_quantile of series without le"
        for _, name, above in selectors(query):
            if (
                SERIES.get(name, (None,))[0] is Kind.HISTOGRAM
                and name.endswith("_bucket")
                and "histogram_quantile" not in _calls(above)
            ):
                yield from _bucket_in_panel(query, tree, board)


def _bucket_in_panel(query: Query, tree: Node, board: Board) -> Found:
    if query.panel["type"] != "heatmap" or query.target.get("format") != "heatmap":
        yield query.panel["title"], "buckets neither in histogram_quantile nor in a heatmap of format heatmap"
    elif "le" not in lint_labels.of(tree, board.recorded):
        yield query.panel["title"], "a heatmap of series without le"


def nan(board: Board) -> Found:
    """A value that may be NaN is compared before it is summed: one NaN would be the whole sum."""
    for query in board.queries():
        for selector, name, above in selectors(query):
            if not MAYBE_NAN.fullmatch(name) or NEVER_NAN.fullmatch(name) or SERIES.get(name, (None,))[0] is not Kind.GAUGE:
                continue
            for below, node in itertools.pairwise((selector, *reversed(above))):
                if only_chooses(node, below) or _never_nan(node):
                    break
                if _adds(node):
                    yield query.panel["title"], f"{name} may be NaN and is added up without `x == x`"
                    break


def _never_nan(node: Node) -> bool:
    """Whether this is a comparison that leaves NaN out, as all but `!=` do, or that yields 0 or 1."""
    if not isinstance(node, promql_parser.BinaryExpr):
        return False
    return str(node.op) in COMPARISONS or (str(node.op) == "!=" and _is_bool(node))


def _is_bool(node: Node) -> bool:
    return node.modifier is not None and node.modifier.return_bool


def _adds(node: Node) -> bool:
    if isinstance(node, promql_parser.AggregateExpr):
        return str(node.op) in AVERAGES
    return isinstance(node, promql_parser.Call) and node.func.name in AVERAGES_OVER_TIME


def legend(board: Board) -> Found:
    """A legend names labels that the query leaves on its series."""
    for query in board.queries():
        tree = query.tree()
        labels = lint_labels.of(tree, board.recorded) if tree is not None else frozenset()
        for name in re.findall(r"\{\{\s*(\w+)\s*\}\}", query.target.get("legendFormat", "")):
            if name not in labels:
                yield query.panel["title"], f"legend names {name}, of which the query leaves {sorted(labels)}"


def variable_query(board: Board) -> Found:
    """A query variable lists the values of a label that the metric has."""
    for variable in board.variables():
        asked, title = label_values(variable), f"variable {variable['name']}"
        if variable["type"] != "query":
            continue
        if asked is None or not asked[0]:
            yield title, f"asks for no label of a metric: {variable.get('query')!r}"
        elif asked[1] not in _labels(board, asked[0]):
            yield title, f"no label {asked[1]} on {asked[0]}"


def _labels(board: Board, text: str) -> frozenset[str]:
    tree = Query({}, {}, text).tree()
    return lint_labels.of(tree, board.recorded) if tree is not None else frozenset()
