"""Checks of a dashboard's JSON and PromQL that no server makes: each yields what is wrong."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml
from promql_parser import AggregateExpr, BinaryExpr, Call, MatrixSelector, SubqueryExpr, VectorSelector

from tests.support.catalogue import CATALOGUE
from tests.support.grafana import dashboards, each_panel
from tests.support.tools import REPOSITORY
from torch_grad_exporter.metrics.families import Kind

Json = dict[str, Any]
Node = Any  # promql_parser's classes have no common type
Found = Iterator[str]

RATE_INTERVAL, RANGE = "7919s", "7901s"
"""Durations for Grafana's own variables, which no query has."""
RATES = frozenset({"rate", "irate", "increase"})
SUMS = frozenset({"sum", "avg", "stddev", "stdvar", "quantile"})
CHOOSES = frozenset({"and", "unless", "==", ">", "<", ">=", "<="})
MAYBE_NAN = re.compile(
    r"torch_(?!grad_(?:units|missing_parameters|sample_step|exporter_))(?:(?:grad|weight|run_grad)_.*|train_(?:loss|value|learning_rate|loss_scale)|rl_.*)"
)
"""Gauges of what a model or a script computes, of which NaN is a value."""
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
UNITS = frozenset((Path(__file__).parent / "grafana_schema" / "units.txt").read_text(encoding="utf-8").split())
FREE_UNITS = re.compile(r"(prefix|suffix|si|count|time|currency|bool):.+")
ALERT_LABELS = {"alertname", "severity", "run", "rank", "layer", "device"}


def known() -> dict[str, set[str]]:
    """Return the labels of every possible series by name."""
    target = {"job", "instance"}
    found = dict.fromkeys(("up", "scrape_duration_seconds", "scrape_samples_scraped"), target)
    found |= {"ALERTS": {*ALERT_LABELS, "alertstate"}, "ALERTS_FOR_STATE": ALERT_LABELS}
    for spec in CATALOGUE.values():
        ends = ("_bucket", "_sum", "_count") if spec.kind is Kind.HISTOGRAM else ("",)
        own = {*spec.labels, *target, "run", "rank"}
        found |= {spec.name + end: {*own, "le"} if end == "_bucket" else own for end in ends}
    for path in (REPOSITORY / "dashboards" / "prometheus").glob("*.rules.yml"):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                kept = re.findall(r"by \(([\w, ]+)\)", rule["expr"])
                found[rule["record"]] = {label for by in kept for label in by.split(", ")} | {"run", "rank"}
    return found


KNOWN = known()
KINDS = {
    name: spec.kind
    for spec in CATALOGUE.values()
    for name in (spec.name, *(f"{spec.name}_{e}" for e in ("bucket", "sum", "count")))
}


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression: its panel, annotation or variable, and its tree."""

    panel: Json
    tree: Node

    def nodes(self) -> Iterator[tuple[Node, Sequence[Node]]]:
        """Yield each node with the nodes above it, the nearest first."""
        yield from _walk(self.tree, ())

    def selectors(self) -> Iterator[tuple[Node, Sequence[Node]]]:
        """Yield each selector of series with the nodes above it."""
        return ((node, above) for node, above in self.nodes() if isinstance(node, VectorSelector))


def _walk(node: Node, above: Sequence[Node]) -> Iterator[tuple[Node, Sequence[Node]]]:
    yield node, above
    names = ("lhs", "rhs", "expr", "param", "vector_selector")
    below = list(node.args) if isinstance(node, Call) else [getattr(node, name, None) for name in names]
    for child in below:
        if child is not None:
            yield from _walk(child, (node, *above))


def queries(board: Json) -> Iterator[Query]:
    """Yield the queries of panels, annotations and variables."""
    found = [(panel, target["expr"]) for panel in each_panel(board) for target in panel.get("targets", [])]  # type: ignore[attr-defined]
    found += [(note, note["expr"]) for note in board["annotations"]["list"] if not note.get("builtIn")]
    found += [(variable, variable["query"]) for variable in board["templating"]["list"] if variable["type"] == "query"]
    for panel, text in found:
        expression = re.sub(r"^label_values\((.+),\s*\w+\)$", r"\1", text)
        expression = expression.replace("$__rate_interval", RATE_INTERVAL).replace("$__range", RANGE)
        yield Query(panel, promql_parser.parse(expression))


def objects(json: object) -> Iterator[Json]:
    """Yield all objects within."""
    if isinstance(json, dict):
        yield json
    for value in json.values() if isinstance(json, dict) else json if isinstance(json, list) else ():
        yield from objects(value)


def _title(query: Query) -> str:
    return str(query.panel.get("title", query.panel.get("name")))


def _calls(above: Sequence[Node]) -> set[str]:
    return {node.func.name for node in above if isinstance(node, Call)}


def _chooses(selector: Node, above: Sequence[Node]) -> bool:
    """Return whether a selector stands on the right of an operation that only selects series of its left."""
    pairs = itertools.pairwise((selector, *above))
    return any(isinstance(node, BinaryExpr) and str(node.op) in CHOOSES and node.rhs is below for below, node in pairs)


def metrics(board: Json) -> Found:
    """Each metric exists."""
    for query in queries(board):
        yield from (f"{_title(query)}: no metric {node.name}" for node, _ in query.selectors() if node.name not in KNOWN)


def choices(board: Json) -> Found:
    """Each selector takes the chosen jobs and runs, if its series have such a label."""
    for query in queries(board):
        for node, _ in query.selectors():
            matchers = {(matcher.name, str(matcher.op), matcher.value) for matcher in node.matchers.matchers}
            for label in ("job", "run"):
                known_above = query.panel.get("name") not in ({"job"} if label == "job" else {"job", "run"})
                wanted = {(label, "MatchOp.Re", f"${label}"), (label, "MatchOp.Re", f"${{{label}}}")}
                if label in KNOWN.get(node.name, ()) and known_above and not wanted & matchers:
                    yield f'{_title(query)}: {node.name} has no {label}=~"${label}"'


def rate_interval(board: Json) -> Found:
    """A rate covers `$__rate_interval`; an increase covers that or `$__range`, or a time of its own at the points of a subquery."""
    rate, whole = (promql_parser.parse(f"x[{text}]").range for text in (RATE_INTERVAL, RANGE))
    for query in queries(board):
        for node, above in query.nodes():
            if isinstance(node, MatrixSelector | SubqueryExpr) and above and isinstance(above[0], Call):
                name = above[0].func.name
                if name == "increase" and any(isinstance(over, SubqueryExpr) for over in above):
                    continue
                if name in RATES and node.range != rate and (name, node.range) != ("increase", whole):
                    yield f"{_title(query)}: {name} over {node.range}"


def kinds(board: Json) -> Found:
    """A counter is read by a rate or an increase, a gauge by neither."""
    for query in queries(board):
        for node, above in query.selectors():
            kind = KINDS.get(node.name, Kind.GAUGE)
            counted = any(isinstance(over, AggregateExpr) and str(over.op) in {"count", "group"} for over in above)
            if kind is Kind.GAUGE and _calls(above) & (RATES | {"sum_over_time", "resets"}) and node.name in KINDS:
                yield f"{_title(query)}: a rate of the gauge {node.name}"
            counted = counted or bool(_calls(above) & (RATES | {"resets"})) or _subtracted(above)
            if kind is not Kind.GAUGE and not (counted or _chooses(node, above) or "query" in query.panel):
                yield f"{_title(query)}: {node.name} without a rate"


def _subtracted(above: Sequence[Node]) -> bool:
    """Return whether above is the largest of a window minus the smallest."""
    sides = next(((node.lhs, node.rhs) for node in above if isinstance(node, BinaryExpr)), ())
    return [side.func.name for side in sides if isinstance(side, Call)] == ["max_over_time", "min_over_time"]


def counts(board: Json) -> Found:
    """No increase is shown as a count of events, but of a counter that began again: an increase is extrapolated.

    A ratio of two, seconds, and the colour of a bucket may be extrapolated.
    """
    for query in queries(board):
        for node, above in query.selectors():
            if "increase" not in _calls(above) or _chooses(node, above) or re.search("_seconds_total|_bucket$", node.name):
                continue
            operations = {str(over.op) for over in above if isinstance(over, BinaryExpr)}
            if not ("/" in operations or ("round" in _calls(above) and "or" in operations)):
                yield f"{_title(query)}: {node.name} as an extrapolated count"


def totals(board: Json) -> Found:
    """A legend adds up increases only: the sum of other values depends on the zoom."""
    for panel in each_panel(board):
        calcs = {calc for found in objects(panel.get("options", {})) for calc in found.get("calcs", ())}
        own = [query for query in queries(board) if query.panel is panel]
        if calcs & {"sum", "total"} and not all("increase" in _calls(above) for query in own for _, above in query.selectors()):
            yield f"{panel['title']}: adds up what is not an increase"


def nan(board: Json) -> Found:
    """A value that may be NaN is compared before it is summed: one NaN would be the whole sum."""
    for query in queries(board):
        for selector, above in query.selectors():
            if MAYBE_NAN.fullmatch(selector.name or "") is None or KINDS.get(selector.name) is not Kind.GAUGE:
                continue
            for below, node in itertools.pairwise((selector, *above)):
                compared = isinstance(node, BinaryExpr) and (str(node.op) in CHOOSES - {"and", "unless"} or node.rhs is below)
                if compared and str(node.op) in CHOOSES:
                    break
                adds = isinstance(node, Call) and node.func.name in {f"{name}_over_time" for name in SUMS}
                if adds or (isinstance(node, AggregateExpr) and str(node.op) in SUMS):
                    yield f"{_title(query)}: {selector.name} may be NaN and is summed without `x == x`"
                    break


def datasource(board: Json) -> Found:
    """Every panel, query and variable uses the selected data source."""
    for found in objects(board):
        if found.get("datasource", DATASOURCE) != DATASOURCE and found.get("builtIn") != 1:
            yield f"{found.get('title', found.get('name'))}: data source {found['datasource']}"
    asking = [*each_panel(board), *board["annotations"]["list"], *board["templating"]["list"]]
    yield from (
        f"{one.get('title', one.get('name'))}: no data source"
        for one in asking
        if "datasource" not in one and one["type"] != "datasource"
    )


def variables(board: Json) -> Found:
    """Jobs, runs, ranks and layers can be chosen, several or all, and each used variable exists."""
    wanted = {"type": "query", "multi": True, "includeAll": True, "allValue": ".+", "refresh": 2}
    found = {variable["name"]: variable for variable in board["templating"]["list"]}
    for name in ("datasource", "job", "run", "rank"):
        if name not in found:
            yield f"no variable {name}"
    for name, variable in found.items():
        different = {key: variable.get(key) for key, value in wanted.items() if variable.get(key) != value}
        if different and name != "datasource":
            yield f"variable {name}: {different}"
    if found.get("datasource", {}).get("current", {}).get("value") != "default":
        yield "the data source is not the default one: Grafana takes the first by name"
    used = {match for text in _strings(board) for match in re.findall(r"\$\{?([A-Za-z]\w*)", text)}
    yield from (f"no variable {name}" for name in used - found.keys())
    yield from (f"variable {name} is not used" for name in found.keys() - used)


def _strings(json: object) -> Iterator[str]:
    if isinstance(json, str):
        yield json
    for value in json.values() if isinstance(json, dict) else json if isinstance(json, list) else ():
        yield from _strings(value)


def units(board: Json) -> Found:
    """Each panel has a unit that Grafana knows."""
    for panel in each_panel(board):
        found = [one["unit"] for one in objects([panel["options"], panel["fieldConfig"]]) if "unit" in one]
        found += [one["value"] for one in objects(panel["fieldConfig"]) if one.get("id") == "unit"]
        wrong = [unit for unit in found if unit not in UNITS and not FREE_UNITS.fullmatch(unit)]
        if wrong or not found:
            yield f"{panel['title']}: unit {wrong}"


def places(board: Json) -> Found:
    """Ids, titles and query letters are unique, and no panel lies over another one, beyond the grid or below a gap."""
    end = 0
    for panel in board["panels"]:
        if panel["gridPos"]["y"] > end:
            yield f"{panel['title']}: a gap above"
        end = max(end, panel["gridPos"]["y"] + panel["gridPos"]["h"])
    for rows in (board["panels"], *(panel.get("panels", []) for panel in board["panels"])):
        for panel in rows:
            if panel["gridPos"]["x"] + panel["gridPos"]["w"] > 24:
                yield f"{panel['title']}: leaves the grid"
        for one, other in itertools.combinations(rows, 2):
            a, b = one["gridPos"], other["gridPos"]
            if all(a[at] < b[at] + b[size] and b[at] < a[at] + a[size] for at, size in (("x", "w"), ("y", "h"))):
                yield f"{one['title']}: lies over {other['title']}"
    for key in ("id", "title"):
        counts = Counter(panel[key] for panel in each_panel(board))
        yield from (f"{key} {value} of {number} panels" for value, number in counts.items() if number > 1)
    for panel in each_panel(board):
        letters = Counter(target["refId"] for target in panel["targets"])  # type: ignore[attr-defined]
        yield from (f"{panel['title']}: two queries {letter}" for letter, number in letters.items() if number > 1)


def repeats(board: Json) -> Found:
    """A repeated panel is as wide as the grid: Grafana makes it so."""
    for panel in each_panel(board):
        if panel.get("repeat") and panel["gridPos"]["w"] < 24:  # type: ignore[index]
            yield f"{panel['title']}: is repeated over the whole width"


def tables(board: Json) -> Found:
    """A table queries current values as a table; a range would give each series a row per point."""
    for panel in each_panel(board):
        for target in panel["targets"] if panel["type"] == "table" else ():  # type: ignore[attr-defined]
            if not target.get("instant") or target.get("range") or target.get("format") != "table":
                yield f"{panel['title']}: query {target['refId']} is not instant and of format table"


def thresholds(board: Json) -> Found:
    """Thresholds begin with null and rise, and none is Grafana's default, red at 80."""
    for panel in each_panel(board):
        defaults = panel["fieldConfig"]["defaults"]  # type: ignore[index]
        if panel["type"] in {"stat", "gauge", "bargauge"} and "thresholds" not in defaults:
            yield f"{panel['title']}: Grafana's own thresholds"
        for steps in (found["steps"] for found in objects(panel["fieldConfig"]) if "steps" in found):
            values = [step["value"] for step in steps[1:]]
            if steps[0]["value"] is not None or values != sorted(values):
                yield f"{panel['title']}: thresholds {values}"


def links(board: Json) -> Found:
    """Links keep time and variables, and lead to dashboards that have these variables."""
    for link in board["links"]:
        if not (link["includeVars"] and link["keepTime"] and set(link["tags"]) <= set(board["tags"])):
            yield f"{link['title']}: does not keep time, variables and tags"
    there = {other["uid"]: {one["name"] for one in other["templating"]["list"]} for other in dashboards().values()}  # type: ignore[index]
    for uid, rest in (found for text in _strings(board) for found in re.findall(r"/d/([\w-]+)(\S*)", text)):
        used = {"".join(pair) for pair in re.findall(r"\bvar-(\w+)=|\$\{(\w+):queryparam\}", rest)}
        if uid not in there or not used <= there[uid]:
            yield f"/d/{uid}{rest}"


def empty(board: Json) -> Found:
    """A table, timeline or heatmap has a row where it has no data: Grafana 12 draws an error or bare headers there."""
    for panel in each_panel(board):
        if panel["type"] in {"table", "state-timeline", "heatmap"} and "or on () label_replace(" not in panel["targets"][0]["expr"]:  # type: ignore[index]
            yield f"{panel['title']}: nothing to draw without series"
        if panel["type"] == "state-timeline" and any(one.get("match") == "null+nan" for one in objects(panel)):
            yield f"{panel['title']}: the legend names what is null, though nothing is"
        if panel["type"] == "state-timeline" and "noValue" in panel["fieldConfig"]["defaults"]:  # type: ignore[index]
            yield f"{panel['title']}: the legend has a text for gaps, or they are zeros"
        if panel["type"] == "table" and '"note", ' not in panel["targets"][0]["expr"]:  # type: ignore[index]
            yield f"{panel['title']}: its sentence stands in a column that leads somewhere"


def narrow(board: Json) -> Found:
    """A narrow panel has its legend below."""
    for panel in each_panel(board):
        legend = panel["options"].get("legend", {})  # type: ignore[union-attr]
        if legend.get("placement") == "right" and panel["gridPos"]["w"] < 12:  # type: ignore[index]
            yield f"{panel['title']}: a legend at the right of a narrow panel"


def schemes(board: Json) -> Found:
    """A heatmap's colours are the same in both themes, or a paler and a stronger one: Grafana inverts others in the light one."""
    for panel in each_panel(board):
        scheme = panel["options"].get("color", {}).get("scheme", "Spectral")  # type: ignore[union-attr]
        if scheme not in {"Spectral", "RdYlBu", "Oranges"}:
            yield f"{panel['title']}: colours {scheme}"


def labels(board: Json) -> Found:
    """A stat panel names its numbers in 12 px: Grafana shrinks names to 1 px where they are many."""
    for panel in each_panel(board):
        if panel["type"] == "stat" and panel["options"].get("text", {}).get("titleSize", 0) < 12:  # type: ignore[index]
            yield f"{panel['title']}: names of any size"


def legends(board: Json) -> Found:
    """A legend has the last value beside a name, or none: a second column leaves names no room."""
    for panel in each_panel(board):
        if panel["options"].get("legend", {}).get("calcs", []) not in ([], ["lastNotNull"]):  # type: ignore[union-attr]
            yield f"{panel['title']}: a legend with more than the last value"


def pages(board: Json) -> Found:
    """A row of a timeline has 14 px, after title, axis, legend and pages: labels of thinner ones lie over each other."""
    for panel in each_panel(board):
        if panel["type"] == "state-timeline":
            room = 38 * panel["gridPos"]["h"] - 8 - 150  # type: ignore[index]
            if room < 14 * panel["options"].get("perPage", 20):  # type: ignore[union-attr]
                yield f"{panel['title']}: {panel['options'].get('perPage')} rows to a page"  # type: ignore[union-attr]


def zeros(board: Json) -> Found:
    """Whole numbers and shares that may all be 0 have an axis of their own size: Grafana's ends at 100, which is 10,000 %."""
    for panel in each_panel(board):
        defaults = panel["fieldConfig"]["defaults"]  # type: ignore[index]
        open_ended = panel["type"] == "timeseries" and defaults.get("min") == 0 and "max" not in defaults
        small = defaults.get("decimals") == 0 or defaults["unit"] == "percentunit"
        if open_ended and small and "axisSoftMax" not in defaults.get("custom", {}):
            yield f"{panel['title']}: an axis to 100 where all is 0"


def marks(board: Json) -> Found:
    """Ends and critical alerts are marked from the start: some versions of Grafana cannot enable a mark later."""
    found = {note["name"]: note for note in board["annotations"]["list"]}
    for name in ("Alerts begin", "Runs end"):
        if not found.get(name, {}).get("enable"):
            yield f"{name}: off at first"
    if 'severity="critical"' not in found["Alerts begin"]["expr"]:
        yield "Alerts begin: a mark for each warning"


def gone(board: Json) -> Found:
    """The last value of a layer within the hour is that of a run that is gone, not of a layer that pauses."""
    hour = promql_parser.parse("x[1h]").range
    for query in queries(board):
        for node, above in query.selectors():
            if "layer" not in KNOWN.get(node.name, ()) or not _within(above, "last_over_time", hour) or _chooses(node, above):
                continue
            excluded = [_names(over.rhs) for over in above if isinstance(over, BinaryExpr) and str(over.op) == "unless"]
            if ["torch_train_world_size"] not in excluded:
                yield f"{_title(query)}: {node.name} of the last hour, though its run goes on"


def _within(above: Sequence[Node], name: str, window: Any) -> bool:  # noqa: ANN401 - promql_parser's
    matrix = next((node for node in above if isinstance(node, MatrixSelector)), None)
    return matrix is not None and matrix.range == window and name in _calls(above)


def _names(tree: Node) -> list[str]:
    return [node.name for node, _ in _walk(tree, ()) if isinstance(node, VectorSelector)]


def steady(board: Json) -> Found:
    """A graph of the largest few series has the same few over all of its range, not others at each moment."""
    for query in queries(board):
        for node, _ in query.nodes():
            over_time = query.panel.get("type") in {"timeseries", "heatmap", "state-timeline"}
            chooses = isinstance(node, AggregateExpr) and str(node.op) in {"topk", "bottomk"}
            if over_time and chooses and node.modifier is None and "@ end()" not in node.expr.prettify():
                yield f"{_title(query)}: {node.op} of each moment"


def quantiles(board: Json) -> Found:
    """A line of a quantile of times is held against the longest: a quantile lies anywhere in its bucket, above all values too."""
    for query in queries(board):
        for node, above in query.nodes():
            drawn = isinstance(node, Call) and node.func.name == "histogram_quantile" and query.panel.get("type") == "timeseries"
            operations = [over for over in above if isinstance(over, BinaryExpr) and str(over.op) in CHOOSES]
            if drawn and not any("torch_train_slowest_step_seconds" in _names(over) for over in operations):
                yield f"{_title(query)}: a quantile that may lie above the longest"


RULES: tuple[Callable[[Json], Found], ...] = (
    metrics, choices, rate_interval, kinds, counts, totals, nan, datasource, variables, units, places, tables, thresholds, links,
    empty, narrow, schemes, repeats, labels, legends, pages, zeros, marks, gone, quantiles, steady,
)  # fmt: skip


def findings(board: Json) -> list[str]:
    """Return everything that is wrong."""
    return [f"{rule.__name__}: {text}" for rule in RULES for text in rule(board)]
