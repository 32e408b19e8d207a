"""The Grafana dashboards against what is demanded of them, and each of these demands against a dashboard that does not meet it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.dashboards.lint import RULES, Finding, findings
from tests.dashboards.lint.labels import of_rules
from tests.dashboards.lint.model import Board, Json
from tests.support.tools import REPOSITORY

FILES = sorted((REPOSITORY / "dashboards" / "grafana").glob("*.json"))
BOARDS = {board["uid"]: board for board in (json.loads(path.read_text(encoding="utf-8")) for path in FILES)}
RECORDED = of_rules(REPOSITORY / "dashboards" / "prometheus")

EXCLUDED: dict[tuple[str, str, str], str] = {}
"""What is found and stays, as (rule, dashboard, panel), with the reason."""

NOT_TAKEN = {
    "template-instance-rule": "run and rank say which process it is; an address is another at each start.",
    "target-instance-rule": "As template-instance-rule.",
    "target-logql-rule": "There are no logs.",
    "target-logql-auto-rule": "There are no logs.",
}
"""Rules of grafana/dashboard-linter that have no counterpart here."""

DASHBOARD_LINTER = {
    "template-datasource-rule", "template-job-rule", "template-instance-rule", "template-label-promql-rule",
    "template-on-time-change-reload-rule", "panel-datasource-rule", "panel-title-description-rule", "panel-units-rule",
    "panel-no-targets-rule", "target-logql-rule", "target-logql-auto-rule", "target-promql-rule", "target-rate-interval-rule",
    "target-job-rule", "target-instance-rule", "target-counter-agg-rule", "uneditable-dashboard",
}  # fmt: skip

CHOSEN = '{job=~"$job",run=~"$run",rank=~"$rank"}'
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def found_in(board: Json, *rules: str) -> list[Finding]:
    """What the rules find, all of them unless some are named."""
    return findings(Board(board, BOARDS | {board["uid"]: board}, RECORDED), {name: RULES[name] for name in rules or RULES})


def test_there_are_five_dashboards() -> None:
    """The files are those that the documentation names, each with its uid."""
    assert {path.stem: json.loads(path.read_text(encoding="utf-8"))["uid"] for path in FILES} == {
        name: f"torch-grad-{name}" for name in ("training", "layers", "resources", "ranks", "exporter")
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_dashboard_is_as_demanded(path: Any) -> None:  # noqa: ANN401
    """No rule finds anything but what is excluded with a reason."""
    left = [found for found in found_in(json.loads(path.read_text(encoding="utf-8"))) if _key(found) not in EXCLUDED]
    assert not left, "\n".join(f"{found.rule}: {found.panel!r}: {found.text}" for found in left)


def test_exclusions_are_needed() -> None:
    """What is excluded is still found: an exclusion goes when its reason does."""
    for rule, board, panel in EXCLUDED:
        assert panel in {found.panel for found in found_in(BOARDS[board], rule)}


def _key(found: Finding) -> tuple[str, str, str]:
    return found.rule, found.dashboard, found.panel


def test_rules_of_dashboard_linter_are_rules_here() -> None:
    """Each rule of grafana/dashboard-linter is here by its name, or is said why not."""
    assert set(RULES) & DASHBOARD_LINTER == DASHBOARD_LINTER - set(NOT_TAKEN)


def sound() -> Json:
    """A dashboard with one panel of each kind that the rules treat by itself, and nothing to find."""
    graph = _panel(1, "timeseries", 0, f"sum by (rank) (rate(torch_train_steps_total{CHOSEN}[$__rate_interval]))", "rank {{rank}}")
    loss = _panel(2, "stat", 8, f"avg(torch_train_loss{CHOSEN} == torch_train_loss{CHOSEN})")
    loss["fieldConfig"]["defaults"]["thresholds"] = {"mode": "absolute", "steps": [{"color": "text", "value": None}]}
    buckets = f"sum by (le) (increase(torch_train_step_duration_seconds_bucket{CHOSEN}[$__rate_interval]))"
    heat = _panel(3, "heatmap", 16, buckets, "{{le}}")
    heat["options"] = {"yAxis": {"unit": "s"}, "cellValues": {"unit": "short"}}
    heat["targets"][0]["format"] = "heatmap"
    table = _panel(4, "table", 0, f"torch_grad_norm{CHOSEN}", "{{layer}}")
    table["gridPos"]["y"] = 8
    table["targets"][0] |= {"instant": True, "range": False, "format": "table"}
    names = ["job", "run", "rank"]
    return {
        "uid": "sound", "title": "Sound", "description": "Nothing is wrong.", "tags": ["torch-grad-exporter"], "schemaVersion": 41,
        "editable": False, "graphTooltip": 1, "time": {"from": "now-1h", "to": "now"},
        "panels": [graph, loss, heat, table],
        "links": [{"title": "More", "type": "dashboards", "tags": ["torch-grad-exporter"], "includeVars": True, "keepTime": True}],
        "templating": {"list": [
            {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
            *(_variable(name, names[:place]) for place, name in enumerate(names)),
        ]},
        "annotations": {"list": [
            {"name": "State", "datasource": DATASOURCE, "expr": f"changes(torch_train_state{CHOSEN}[1m]) > 0"},
            {"name": "Alerts", "datasource": DATASOURCE, "expr": 'ALERTS{run=~"$run"}'},
        ]},
    }  # fmt: skip


def _panel(number: int, kind: str, x: int, expression: str, legend: str = "") -> Json:
    target = {"refId": "A", "expr": expression, "legendFormat": legend, "datasource": DATASOURCE}
    return {
        "id": number, "type": kind, "title": f"Panel {number}", "description": "What it is.", "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": 0, "w": 8, "h": 8}, "targets": [target], "options": {},
        "fieldConfig": {"defaults": {"unit": "short", "noValue": "No run"}, "overrides": []},
    }  # fmt: skip


def _variable(name: str, above: list[str]) -> Json:
    chosen = ",".join(f'{other}=~"${other}"' for other in above)
    return {
        "name": name, "label": name.title(), "type": "query", "datasource": DATASOURCE, "multi": True, "includeAll": True,
        "allValue": ".+", "refresh": 2, "query": f"label_values(torch_train_info{{{chosen}}}, {name})",
    }  # fmt: skip


def test_a_sound_dashboard_has_no_findings() -> None:
    """What every broken dashboard below begins as is sound, so that what is found is the fault that was put in."""
    assert found_in(sound()) == []


Fault = Callable[[Json], object]


def _expression(text: str, panel: int = 0, **more: object) -> Fault:
    def put(board: Json) -> None:
        board["panels"][panel]["targets"][0] |= {"expr": text.replace("CHOSEN", CHOSEN), **more}

    return put


def _variable_with(place: int, **more: object) -> Fault:
    return lambda board: board["templating"]["list"][place].update(more)


def _panel_with(place: int, **more: object) -> Fault:
    return lambda board: board["panels"][place].update(more)


def _defaults_with(place: int, **more: object) -> Fault:
    return lambda board: board["panels"][place]["fieldConfig"]["defaults"].update(more)


def _override(**more: object) -> Fault:
    return lambda board: board["panels"][0]["fieldConfig"]["overrides"].append(
        {"matcher": {"id": "byName", "options": "x"}, "properties": [more]}
    )


def _link(**more: object) -> Fault:
    return lambda board: board["links"][0].update(more)


RED_AT_80 = {"mode": "absolute", "steps": [{"color": "green", "value": None}, {"color": "red", "value": 80}]}

FAULTS: list[tuple[str, str, Fault]] = [
    ("template-datasource-rule", "not one variable", _variable_with(0, name="prometheus")),
    ("template-datasource-rule", "not one variable", _variable_with(0, query="loki")),
    ("template-datasource-rule", "no label", _variable_with(0, label="")),
    ("template-job-rule", "no variable job", lambda board: board["templating"]["list"].pop(1)),
    ("template-job-rule", "multi is False", _variable_with(1, multi=False)),
    ("template-job-rule", "allValue is '.*'", _variable_with(1, allValue=".*")),
    ("template-run-rule", "no variable run", lambda board: board["templating"]["list"].pop(2)),
    ("template-run-rule", "includeAll is None", lambda board: board["templating"]["list"][3].pop("includeAll")),
    ("template-label-promql-rule", "asks for no label", _variable_with(1, query="label_values(job)")),
    ("template-label-promql-rule", "asks for no label", _variable_with(1, query="query_result(torch_train_info)")),
    ("template-label-promql-rule", "no label layer", _variable_with(1, query="label_values(torch_train_info, layer)")),
    ("template-on-time-change-reload-rule", "refresh is 1", _variable_with(2, refresh=1)),
    ("panel-datasource-rule", "P1809F7CD0C75ACF3", _panel_with(0, datasource={"type": "prometheus", "uid": "P1809F7CD0C75ACF3"})),
    ("panel-datasource-rule", "data source None", _panel_with(0, datasource=None)),
    ("panel-datasource-rule", "data source 'Prometheus'", _panel_with(0, datasource="Prometheus")),
    ("panel-datasource-rule", "no data source", lambda board: board["panels"][0].pop("datasource")),
    ("panel-datasource-rule", "data source None", lambda board: board["panels"][0]["targets"][0].update(datasource=None)),
    ("panel-datasource-rule", "no data source", lambda board: board["templating"]["list"][1].pop("datasource")),
    ("panel-title-description-rule", "no title", _panel_with(0, title="")),
    ("panel-title-description-rule", "no description", lambda board: board["panels"][0].pop("description")),
    ("panel-units-rule", "unit None", lambda board: board["panels"][0]["fieldConfig"]["defaults"].pop("unit")),
    ("panel-units-rule", "unit 'seconds'", _defaults_with(0, unit="seconds")),
    ("panel-units-rule", "unit None", lambda board: board["panels"][2]["options"].pop("yAxis")),
    ("panel-units-rule", "unit 'bytes/s'", _override(id="unit", value="bytes/s")),
    ("panel-no-targets-rule", "no query", _panel_with(0, targets=[])),
    ("panel-no-targets-rule", "no query", _expression("")),
    ("target-promql-rule", "unclosed left parenthesis", _expression("sum(torch_train_epochCHOSEN")),
    ("target-promql-rule", "expected type range vector", _expression("rate(torch_train_steps_totalCHOSEN)")),
    ("target-promql-rule", 'got "range vector"', _expression("torch_train_epochCHOSEN[$__range]")),
    ("target-promql-rule", "no PromQL", _variable_with(1, query="label_values(torch_train_info{, job)")),
    ("target-rate-interval-rule", "rate over 0:05:00", _expression("rate(torch_train_steps_totalCHOSEN[5m])")),
    ("target-rate-interval-rule", "irate over", _expression("irate(torch_train_steps_totalCHOSEN[$__interval])")),
    ("target-rate-interval-rule", "rate over", _expression("rate(torch_train_steps_totalCHOSEN[$__range])")),
    ("target-job-rule", "torch_train_epoch has no job", _expression('torch_train_epoch{run=~"$run"}')),
    ("target-job-rule", "has no job", _expression('torch_train_epoch{job="$job",run=~"$run"}')),
    ("target-job-rule", "has no job", _expression('torch_train_epochCHOSEN / torch_train_world_size{run=~"$run"}')),
    ("target-job-rule", "has no job", _variable_with(2, query="label_values(torch_train_info, run)")),
    ("target-run-rule", "torch_train_epoch has no run", _expression('torch_train_epoch{job=~"$job"}')),
    ("target-run-rule", "run:torch_train_steps:skew has no run", _expression("run:torch_train_steps:skew")),
    ("target-counter-agg-rule", "torch_train_steps_total without a rate", _expression("sum(torch_train_steps_totalCHOSEN)")),
    ("target-counter-agg-rule", "without a rate", _expression("max_over_time(torch_train_steps_totalCHOSEN[$__range])")),
    ("target-counter-agg-rule", "without a rate", _expression("torch_train_step_duration_seconds_sumCHOSEN")),
    ("target-counter-agg-rule", "without a rate", _expression("torch_train_steps_totalCHOSEN unless torch_train_epochCHOSEN")),
    ("uneditable-dashboard", "editable", lambda board: board.update(editable=True)),
    ("uneditable-dashboard", "graphTooltip", lambda board: board.update(graphTooltip=0)),
    ("uneditable-dashboard", "schemaVersion 16", lambda board: board.update(schemaVersion=16)),
    ("uneditable-dashboard", "the database's", lambda board: board.update(id=7)),
    ("uneditable-dashboard", "time is", lambda board: board.update(time={"from": "now-6h", "to": "now"})),
    ("uneditable-dashboard", "tag", lambda board: board.update(tags=["pytorch"])),
    ("uneditable-dashboard", "description", lambda board: board.pop("description")),
    ("metric-exists", "torch_train_epochs", _expression("torch_train_epochsCHOSEN")),
    ("metric-exists", "torch_train_step_duration_seconds", _expression("torch_train_step_duration_secondsCHOSEN")),
    ("metric-exists", "without one", _expression("CHOSEN")),
    ("histogram-buckets", "without le", _expression(
        "histogram_quantile(0.9, sum by (run) (rate(torch_train_step_duration_seconds_bucketCHOSEN[$__rate_interval])))")),
    ("histogram-buckets", "neither", _expression(
        "sum by (le) (rate(torch_train_step_duration_seconds_bucketCHOSEN[$__rate_interval]))")),
    ("histogram-buckets", "neither", lambda board: board["panels"][2]["targets"][0].pop("format")),
    ("histogram-buckets", "a heatmap of series without le", _expression(
        "sum(rate(torch_train_step_duration_seconds_bucketCHOSEN[$__rate_interval]))", 2, legendFormat="")),
    ("gauge-as-counter", "rate of the gauge", _expression("rate(torch_train_epochCHOSEN[$__rate_interval])")),
    ("gauge-as-counter", "sum_over_time of the gauge", _expression("sum_over_time(torch_gpu_power_wattsCHOSEN[$__range])")),
    ("summed-over-time", "no increase", lambda board: board["panels"][1]["options"].update(reduceOptions={"calcs": ["sum"]})),
    ("summed-over-time", "no increase", lambda board: board["panels"][0]["options"].update(legend={"calcs": ["max", "sum"]})),
    ("nan-in-sum", "torch_grad_norm may be NaN", _expression("sum(torch_grad_normCHOSEN)")),
    ("nan-in-sum", "torch_train_loss may be NaN", _expression("avg_over_time(torch_train_lossCHOSEN[$__range])")),
    ("nan-in-sum", "may be NaN", _expression("avg(0 < torch_grad_normCHOSEN or torch_grad_normCHOSEN)")),
    ("nan-in-sum", "may be NaN", _expression("avg(torch_grad_normCHOSEN != 0)")),
    ("nan-in-sum", "may be NaN", _expression("sum(torch_grad_normCHOSEN and torch_train_epochCHOSEN)")),
    ("nan-in-sum", "may be NaN", _expression("sum(torch_grad_normCHOSEN) == sum(torch_grad_normCHOSEN)")),
    ("legend-labels", "legend names layer", _expression("sum by (rank) (torch_train_epochCHOSEN)", legendFormat="{{layer}}")),
    ("legend-labels", "legend names rank", _expression("max(torch_train_epochCHOSEN)")),
    ("legend-labels", "legend names rank", _expression("max without (rank) (torch_train_epochCHOSEN)")),
    ("legend-labels", "legend names rank", _expression("torch_train_epochCHOSEN / on (run) torch_train_world_sizeCHOSEN")),
    ("device-of-which-host", "GPU {{device}}", _expression("torch_gpu_power_wattsCHOSEN", legendFormat="GPU {{device}}")),
    ("annotations", "no annotation from torch_train_state", lambda board: board["annotations"]["list"].pop(0)),
    ("annotations", "no annotation from ALERTS", lambda board: board["annotations"]["list"].pop(1)),
    ("annotations", "no annotation from ALERTS", lambda board: board["annotations"]["list"][1].pop("expr")),
    ("target-run-rule", "ALERTS has no run", lambda board: board["annotations"]["list"][1].update(expr="ALERTS")),
    ("no-inputs", "__inputs", lambda board: board.update(__inputs=[])),
    ("no-inputs", "DS_PROMETHEUS", _panel_with(0, datasource={"type": "prometheus", "uid": "${DS_PROMETHEUS}"})),
    ("variables-defined", "no variable layer", _expression('torch_grad_norm{job=~"$job",run=~"$run",layer=~"$layer"}')),
    ("variables-defined", "no variable layer", _panel_with(0, title="Norm of ${layer:text}")),
    ("variables-used", "is not used", lambda board: board["templating"]["list"].append(_variable("layer", []))),
    ("unique", "id of 2", _panel_with(1, id=1)),
    ("unique", "title of 2", _panel_with(1, title="Panel 1")),
    ("unique", "refId", lambda board: board["panels"][0]["targets"].append(board["panels"][0]["targets"][0])),
    ("panel-types", "type graph", _panel_with(0, type="graph")),
    ("thresholds", "red at 80", lambda board: board["panels"][1]["fieldConfig"]["defaults"].pop("thresholds")),
    ("thresholds", "red at 80", _defaults_with(1, thresholds=RED_AT_80)),
    ("thresholds", "red at 80", _defaults_with(0, color={"mode": "thresholds"})),
    ("thresholds", "red at 80", _defaults_with(0, custom={"thresholdsStyle": {"mode": "line"}})),
    ("thresholds", "red at 80", _override(id="thresholds", value=RED_AT_80)),
    ("thresholds", "rise", _defaults_with(1, thresholds={"mode": "absolute", "steps": [{"color": "red", "value": 1}]})),
    ("no-value", "sentence", lambda board: board["panels"][1]["fieldConfig"]["defaults"].pop("noValue")),
    ("no-value", "sentence", _defaults_with(0, noValue="No data")),
    ("table-queries", "query A", lambda board: board["panels"][3]["targets"][0].update(instant=False, range=True)),
    ("table-queries", "query A", lambda board: board["panels"][3]["targets"][0].pop("format")),
    ("grid", "leaves the grid", _panel_with(2, gridPos={"x": 17, "y": 0, "w": 8, "h": 8})),
    ("grid", "leaves the grid", lambda board: board["panels"][0].pop("gridPos")),
    ("grid", "lies over Panel 2", _panel_with(0, gridPos={"x": 0, "y": 0, "w": 9, "h": 8})),
    ("grid", "lies over", lambda board: board["panels"].append({
        **_panel(9, "row", 0, ""), "gridPos": {"x": 0, "y": 20, "w": 24, "h": 1}, "panels": [
            _panel(10, "timeseries", 0, "vector(1)"), _panel(11, "timeseries", 4, "vector(1)")]})),
    ("links", "no links", lambda board: board.pop("links")),
    ("links", "does not carry", _link(includeVars=False)),
    ("links", "no dashboard has the tags", _link(tags=["torch-grad-exporter", "other"])),
    ("links", "no dashboard torch-grad-lairs", _link(type="link", url="/d/torch-grad-lairs")),
    ("links", "no dashboard other", _panel_with(0, links=[{"title": "Other", "url": "/d/other?var-job=${job}"}])),
    ("links", "sound has no variable layer", _panel_with(0, links=[{"url": "/d/sound?var-layer=${__field.labels.layer}"}])),
    ("links", "sound has no variable layer", _panel_with(0, links=[{"url": "/d/sound?${layer:queryparam}"}])),
]  # fmt: skip


def _named() -> Iterator[Any]:
    seen: dict[str, int] = {}
    for rule, text, fault in FAULTS:
        seen[rule] = seen.get(rule, 0) + 1
        yield pytest.param(rule, text, fault, id=f"{rule}-{seen[rule]}")


@pytest.mark.parametrize(("rule", "text", "fault"), list(_named()))
def test_rule_finds_the_fault(rule: str, text: str, fault: Fault) -> None:
    """A fault put into a sound dashboard is found by the rule that is for it, which says what is wrong."""
    broken = copy.deepcopy(sound())
    fault(broken)
    assert any(text in found.text for found in found_in(broken, rule)), found_in(broken)


def test_each_rule_is_seen_to_find() -> None:
    """There is a fault for each rule."""
    assert {rule for rule, _, _ in FAULTS} == set(RULES)


@pytest.mark.parametrize(
    "expression",
    [
        "sum(torch_grad_normCHOSEN == torch_grad_norm)",
        "sum by (rank) (torch_grad_normCHOSEN > 0)",
        "sum(torch_grad_normCHOSEN > bool 0)",
        "sum(0 < torch_grad_normCHOSEN)",
        "max(torch_grad_normCHOSEN)",
        "sum(torch_train_epochCHOSEN > on (run) torch_grad_global_normCHOSEN * 2)",
        "sum(torch_train_epochCHOSEN unless torch_grad_global_normCHOSEN)",
        "sum(torch_grad_exporter_overhead_ratioCHOSEN)",
        "count(torch_grad_normCHOSEN)",
    ],
)
def test_sums_without_nan_are_left_alone(expression: str) -> None:
    """A comparison leaves NaN out, a maximum does not care, and what counts or measures time is never NaN."""
    board = sound()
    _expression(expression)(board)
    assert found_in(board, "nan-in-sum") == []


@pytest.mark.parametrize(
    ("expression", "labels"),
    [
        ("topk(5, torch_grad_normCHOSEN)", "layer rank run job instance"),
        (
            "histogram_quantile(0.5, sum by (le, run) (rate(torch_train_step_duration_seconds_bucketCHOSEN[$__rate_interval])))",
            "run",
        ),
        ("sum by (run) (torch_train_epochCHOSEN) * on (run) group_left (host) torch_train_infoCHOSEN", "run host"),
        ("label_replace(max by (run) (torch_train_epochCHOSEN), 'short', '$1', 'run', '(.{8}).*')", "run short"),
        ("max by (run) (torch_train_epochCHOSEN) or max by (job) (torch_train_epochCHOSEN)", "run job"),
        ("1 - max by (run) (torch_train_epochCHOSEN) unless torch_train_infoCHOSEN", "run"),
        ("rank:torch_train_steps:total", "run rank"),
    ],
)
def test_labels_of_an_expression(expression: str, labels: str) -> None:
    """A legend may name just the labels that Prometheus' documentation says are left."""
    for name in ("job", "instance", "run", "rank", "layer", "host", "short", "le"):
        board = sound()
        _expression(expression, legendFormat=f"{{{{{name}}}}}")(board)
        assert bool(found_in(board, "legend-labels")) == (name not in labels.split()), name
