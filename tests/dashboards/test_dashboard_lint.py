"""The Grafana dashboards against what is demanded of them, and each of these demands against a dashboard that does not meet it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tests.dashboards.lint import RULES, Finding, findings, grafana
from tests.dashboards.lint.labels import of_rules
from tests.dashboards.lint.model import Board, Json, strings
from tests.dashboards.lint.sound import CHOSEN, panel_of, sound, variable_of
from tests.support.tools import REPOSITORY
from torch_grad_exporter.cli import assets

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


def _override(*, matcher: str = "byName", options: str = "x", panel: int = 0, **more: object) -> Fault:
    return lambda board: board["panels"][panel]["fieldConfig"]["overrides"].append(
        {"matcher": {"id": matcher, "options": options}, "properties": [more]}
    )


def _at(panel: int, *path: str | int, value: object) -> Fault:
    def put(board: Json) -> None:
        found: Any = board["panels"][panel]
        for step in path[:-1]:
            found = found.setdefault(step, {}) if isinstance(found, dict) else found[step]
        found[path[-1]] = value

    return put


def _without(panel: int, *path: str | int) -> Fault:
    def take(board: Json) -> None:
        found: Any = board["panels"][panel]
        for step in path[:-1]:
            found = found[step]
        found.pop(path[-1])

    return take


def _note_with(place: int, **more: object) -> Fault:
    return lambda board: board["annotations"]["list"][place].update(more)


def _noted(expression: str) -> Fault:
    return lambda board: board["annotations"]["list"].append(
        {
            "name": "More",
            "datasource": board["panels"][0]["datasource"],
            "enable": False,
            "expr": expression.replace("CHOSEN", CHOSEN),
        }
    )


def _swapped(board: Json, panel: int, one: str, other: str) -> None:
    """Two states, each with the other's number."""
    options = board["panels"][panel]["fieldConfig"]["defaults"]["mappings"][0]["options"]
    options[one], options[other] = options[other], options[one]


DEFAULTS = ("fieldConfig", "defaults")
STATES = ("fieldConfig", "defaults", "mappings", 0, "options")
LINK = ("fieldConfig", "defaults", "links", 0, "url")
LINK_OF_CELL = ("fieldConfig", "overrides", 0, "properties", 0, "value", 0, "url")


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
    ("panel-units-rule", "unit None", _without(0, *DEFAULTS, "unit")),
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
    ("target-run-rule", "ALERTS has no run", _note_with(1, expr="ALERTS")),
    ("no-inputs", "__inputs", lambda board: board.update(__inputs=[])),
    ("no-inputs", "DS_PROMETHEUS", _panel_with(0, datasource={"type": "prometheus", "uid": "${DS_PROMETHEUS}"})),
    ("variables-defined", "no variable layer", _expression('torch_grad_norm{job=~"$job",run=~"$run",layer=~"$layer"}')),
    ("variables-defined", "no variable layer", _panel_with(0, title="Norm of ${layer:text}")),
    ("variables-used", "is not used", lambda board: board["templating"]["list"].append(variable_of("layer", []))),
    ("unique", "id of 2", _panel_with(1, id=1)),
    ("unique", "title of 2", _panel_with(1, title="Panel 1")),
    ("unique", "refId", lambda board: board["panels"][0]["targets"].append(board["panels"][0]["targets"][0])),
    ("panel-types", "type graph", _panel_with(0, type="graph")),
    ("thresholds", "red at 80", _without(1, *DEFAULTS, "thresholds")),
    ("thresholds", "red at 80", _defaults_with(1, thresholds=RED_AT_80)),
    ("thresholds", "red at 80", _defaults_with(0, color={"mode": "thresholds"})),
    ("thresholds", "red at 80", _defaults_with(0, custom={"thresholdsStyle": {"mode": "line"}})),
    ("thresholds", "red at 80", _override(id="thresholds", value=RED_AT_80)),
    ("thresholds", "rise", _defaults_with(1, thresholds={"mode": "absolute", "steps": [{"color": "red", "value": 1}]})),
    ("no-value", "sentence", _without(1, *DEFAULTS, "noValue")),
    ("no-value", "sentence", _defaults_with(0, noValue="No data")),
    ("table-queries", "query A", lambda board: board["panels"][3]["targets"][0].update(instant=False, range=True)),
    ("table-queries", "query A", lambda board: board["panels"][3]["targets"][0].pop("format")),
    ("grid", "leaves the grid", _panel_with(2, gridPos={"x": 17, "y": 0, "w": 8, "h": 8})),
    ("grid", "leaves the grid", lambda board: board["panels"][0].pop("gridPos")),
    ("grid", "lies over Panel 2", _panel_with(0, gridPos={"x": 0, "y": 0, "w": 9, "h": 8})),
    ("grid", "lies over", lambda board: board["panels"].append({
        **panel_of(20, "row", (0, 60, 24), ""), "gridPos": {"x": 0, "y": 60, "w": 24, "h": 1}, "panels": [
            panel_of(21, "timeseries", (0, 61, 8), "vector(1)"), panel_of(22, "timeseries", (4, 61, 8), "vector(1)")]})),
    ("links", "no links", lambda board: board.pop("links")),
    ("links", "does not carry", _link(includeVars=False)),
    ("links", "no dashboard has the tags", _link(tags=["torch-grad-exporter", "other"])),
    ("links", "no dashboard torch-grad-lairs", _link(type="link", url="/d/torch-grad-lairs")),
    ("links", "no dashboard other", _panel_with(0, links=[{"title": "Other", "url": "/d/other?var-job=${job}"}])),
    ("links", "torch-grad-ranks has no variable layer", _panel_with(
        0, links=[{"url": "/d/torch-grad-ranks?var-layer=${__field.labels.layer}"}])),
    ("links", "torch-grad-ranks has no variable layer", _panel_with(0, links=[{"url": "/d/torch-grad-ranks?${layer:queryparam}"}])),
    # What a person saw.
    ("hidden-cells", "cells of 1e-09 and less", lambda board: board["panels"][10]["options"].pop("filterValues")),
    ("hidden-cells", "cells of 1e-09 and less", _at(10, "options", "filterValues", value={})),
    ("hidden-cells", "begin at -6", _at(10, "options", "filterValues", "le", value=-3)),
    ("hidden-cells", "begin at None", _at(10, "options", "color", value={"scheme": "RdYlBu"})),
    ("hidden-cells", "cells of 5 and more", _at(10, "options", "filterValues", value={"le": -1000, "ge": 5})),
    ("hidden-cells", "cells of 1 and less", _at(2, "options", "filterValues", value={"le": 1})),
    ("hidden-cells", "cells of 10 and more", _at(2, "options", "filterValues", value={"ge": 10})),
    ("inverted-colors", "turns RdYlBu by itself", _at(10, "options", "color", "reverse", value=True)),
    ("inverted-colors", "turns Oranges by itself", _at(2, "options", "color", value={"reverse": True})),
    ("inverted-colors", "no colour scheme Jet", _at(10, "options", "color", "scheme", value="Jet")),
    ("annotations-off", "on at first", _note_with(0, enable=True)),
    ("annotations-off", "on at first", lambda board: board["annotations"]["list"][1].pop("enable")),
    ("annotations-onsets", "region", lambda board: board["annotations"]["list"][1].pop("useValueForTime")),
    ("annotations-onsets", "region", _noted(
        'changes(torch_train_state{job=~"$job",run=~"$run",state="failed"}[$__rate_interval]) > 0')),
    ("annotations-onsets", "region", _noted("torch_train_epochCHOSEN unless changes(torch_train_epochCHOSEN[$__interval]) > 0")),
    ("annotations-onsets", "is no time", _note_with(0, expr=f"1000 * torch_train_state{CHOSEN}")),
    ("annotations-onsets", "is in seconds", _note_with(1, expr='ALERTS_FOR_STATE{run=~"$run"}')),
    ("annotations-onsets", "moves from scrape", _note_with(0,
        expr=f"1000 * timestamp(torch_train_state{CHOSEN} == 1)")),
    ("annotations-onsets", "time() moves", _note_with(0,
        expr=f"1000 * (time() - torch_train_start_timestamp_seconds{CHOSEN})")),
    ("annotations-states", "training and evaluating", _noted("changes(torch_train_stateCHOSEN[$__interval]) > 0")),
    ("annotations-states", "training and evaluating", _noted('torch_train_state{job=~"$job",run=~"$run",state!="failed"} == 1')),
    ("straggler-first", "own time or waits", _expression("max(torch_grad_exporter_overhead_ratioCHOSEN)", 6)),
    ("straggler-first", "own time or waits", _at(6, "gridPos", "y", value=5)),
    ("norm-outliers", "largest norm of each interval", lambda board: board["panels"][8]["targets"].pop()),
    ("norm-outliers", "largest norm of each interval", lambda board: board["panels"][8]["targets"][1].update(
        expr=board["panels"][8]["targets"][1]["expr"].replace("quantile(1,", "quantile(0.5,"))),
    ("state-legends", "continuous-GrYlRd", _without(7, *DEFAULTS, "color")),
    ("state-legends", "continuous-blues", _defaults_with(7, color={"mode": "continuous-blues"})),
    ("state-legends", "not shown", _at(7, "options", "legend", value={"showLegend": False})),
    ("state-legends", "not shown", _at(7, "options", "legend", value={"displayMode": "hidden"})),
    ("state-legends", "green stands for several", _at(7, *STATES, "2", "color", value="green")),
    ("state-names", "2 has no word", _without(7, *STATES, "2")),
    ("state-names", "2 has no word", _without(7, *STATES, "2", "color")),
    ("state-names", "0 has no word", _expression('torch_train_state{job=~"$job",run=~"$run",state="failed"} * 2', 7)),
    ("state-names", "3 has no word", _without(4, "fieldConfig", "overrides", 2)),
    ("state-names", "1 has no word", _expression("torch_train_stateCHOSEN", 1)),
    ("state-names", "nobody knows", _expression("torch_train_epochCHOSEN", 7)),
    ("seriousness", "Training (green) hides Failed (red)", lambda board: _swapped(board, 7, "1", "2")),
    ("seriousness", "Dead (orange) hides No gradient (red)", _expression((
        "(max by (layer) (torch_grad_dead_ratioCHOSEN) > 0.9) * 0 + 2"
        " or (max by (layer) (torch_grad_missing_parametersCHOSEN) > 0) * 0 + 3"),
        11)),
    ("seriousness", "and is called that", lambda board: _swapped(board, 11, "1", "2")),
    ("seriousness", "stand in the order ['1', '2']", _expression(
        "(torch_grad_normCHOSEN < 1e-7) * 0 + 1 or (torch_grad_dead_ratioCHOSEN > 0.9) * 0 + 2", 11)),
    ("links-of-run", "leads to all chosen runs", _at(6, *LINK, value="/d/torch-grad-ranks?${job:queryparam}&${run:queryparam}")),
    ("links-of-run", "leads to all chosen runs", _at(3, *LINK_OF_CELL, value="/d/torch-grad-ranks?var-run=$run")),
    ("links-never-empty", "the label layer is empty", _at(4, "targets", 0, "expr", value='ALERTS{run=~"$run"}')),
    ("links-never-empty", "a cell of layer may be empty", _at(4, "targets", 0, "expr", value='ALERTS{run=~"$run"}')),
    ("links-never-empty", "the label layer is empty", lambda board: board["panels"][4]["targets"][0].update(
        expr=board["panels"][4]["targets"][0]["expr"].replace('"All", "layer", ""', '"$1", "layer", "(.*)"'))),
    ("links-of-run", "leads to all chosen runs", _at(6, *LINK, value="/d/torch-grad-ranks?${job:queryparam}")),
    ("links-never-empty", "nothing has field.labels", _at(
        3, *LINK_OF_CELL, value="/d/torch-grad-ranks?var-run=${__field.labels.run}")),
    ("links-never-empty", "nothing has data.fields", _at(6, *LINK, value="/d/torch-grad-ranks?var-run=${__data.fields.run}")),
    ("gpu-first", "without a GPU", _expression("(torch_gpu_power_wattsCHOSEN > 9) * 0 + 1 and torch_train_infoCHOSEN")),
    ("links-never-empty", "the label host is empty", _at(6, *LINK, value="/d/torch-grad-ranks?var-run=${__field.labels.host}")),
    ("short-in-tiles", "letters on a tile", _defaults_with(1, noValue="No run: " + 10 * "letters ")),
    ("limits", "from 0 to 0", _defaults_with(0, min=0, max=0)),
    ("limits", "colours from 4 to -8", lambda board: board["panels"][2]["options"].update(color={"min": 4, "max": -8})),
    ("limits", "threshold of 25 on a share", _defaults_with(
        0, unit="percentunit", thresholds={"steps": [{"color": "green", "value": None}, {"color": "red", "value": 25}]})),
    ("bars", "no max", _without(6, *DEFAULTS, "max")),
    ("bars", "no min", _without(6, *DEFAULTS, "min")),
    ("bars", "Value has no max", lambda board: board["panels"][3]["fieldConfig"]["overrides"][2]["properties"].pop()),
    ("bars", "A has no max", _defaults_with(1, thresholds={"mode": "percentage", "steps": [{"color": "red", "value": None}]})),
    ("table-width", "pixels", lambda board: board["panels"][3]["gridPos"].update(w=6)),
    ("table-width", "pixels", lambda board: board["panels"][3]["fieldConfig"]["overrides"][0]["properties"].append(
        {"id": "custom.width", "value": 600})),
    ("table-width", "6 columns need 900", _at(3, "targets", 0, "expr", value=f"torch_grad_norm{CHOSEN}")),
    ("ended-runs", "has ended is missing", _at(5, "targets", 0, "expr", value=f"max by (run) (torch_train_epoch{CHOSEN})")),
    ("colors", "another colour in each panel", _without(9, *DEFAULTS, "color")),
    ("colors", "colours by name", _defaults_with(0, color={"mode": "palette-classic-by-name"})),
    ("colors", "colours by name", lambda board: board["panels"][8]["fieldConfig"]["overrides"].clear()),
    ("colors", "have one colour", _defaults_with(0, color={"mode": "fixed", "fixedColor": "red"})),
    ("decimals", "without decimals", _without(8, *DEFAULTS, "decimals")),
    ("decimals", "Value: scientific", lambda board: board["panels"][3]["fieldConfig"]["overrides"][2]["properties"].pop(1)),
    ("decimals", "yAxis: scientific", _at(2, "options", "yAxis", "unit", value="sci")),
    ("log-axis", "read 0 as short", _defaults_with(8, unit="short")),
    ("log-axis", "read 0 as percentunit", _defaults_with(8, unit="percentunit")),
    ("log-axis", "read 0 as suffix:x", _defaults_with(8, unit="suffix:x")),
    ("log-axis", "A: ticks", _override(
        id="custom.scaleDistribution", value={"type": "log", "log": 2}, matcher="byFrameRefID", options="A")),
    ("bare-rates", "unit cps", _defaults_with(0, unit="cps")),
    ("bare-rates", "unit ops", _override(id="unit", value="ops", matcher="byRegexp", options="/lay/", panel=3)),
    ("whole-counts", "not rounded", _expression("increase(torch_train_steps_totalCHOSEN[$__rate_interval])")),
    ("whole-counts", "with None decimals", _expression("round(increase(torch_train_steps_totalCHOSEN[$__rate_interval]))")),
    ("whole-counts", "with 2 decimals", _defaults_with(16, decimals=2)),
    ("whole-counts", "with None decimals", lambda board: board["panels"][2]["options"]["cellValues"].pop("decimals")),
    ("per-host", "drawn for each host, run", _at(15, "targets", 0, "expr", value=(
        f"max by (run, host) (rate(torch_host_disk_read_bytes_total{CHOSEN}[$__rate_interval])"
        " * on (job, instance, run, rank) group_left (host) torch_train_info)"))),
    ("per-host", "drawn for each rank, run", _expression("max by (run, rank) (torch_host_cpu_ratioCHOSEN)")),
    ("per-host", "drawn for each host: {{run}}", _at(15, "targets", 0, "legendFormat", value="{{run}} {{host}}")),
    ("per-host", "not in the legend", _at(15, "targets", 0, "legendFormat", value="read")),
    ("errors-that-are", "for each source", _at(16, "targets", 0, "expr", value=(
        f"round(sum by (source) (increase(torch_grad_exporter_errors_total{CHOSEN}[$__rate_interval])))"))),
    ("errors-that-are", "for each reason", _expression("rate(torch_grad_exporter_captures_skipped_totalCHOSEN[$__rate_interval])")),
    ("table-order", "sorted by nothing", lambda board: board["panels"][5]["options"].pop("sortBy")),
    ("table-order", "runs are mixed: sorted by Value", _at(5, "options", "sortBy", 0, "displayName", value="Value")),
    ("table-order", "runs are mixed: sorted by layer", _at(3, "options", "sortBy", 0, "displayName", value="layer")),
    ("table-order", "by severity", _at(4, "options", "sortBy", 0, "displayName", value="alertname")),
    ("table-order", "by severity", _at(4, "options", "sortBy", 0, "desc", value=False)),
    ("table-order", "by severity", lambda board: board["panels"][4].update(
        options={"sortBy": [{"displayName": "severity"}]},
        targets=[board["panels"][4]["targets"][0] | {"expr": 'ALERTS{run=~"$run"}'}])),
    ("gpu-first", "without a GPU", _expression("torch_gpu_power_wattsCHOSEN")),
    ("axes", "from 0 to None", _without(13, *DEFAULTS, "max")),
    ("axes", "from None to 1", _without(13, *DEFAULTS, "min")),
    ("axes", "without a threshold", _without(14, *DEFAULTS, "thresholds")),
    ("axes", "without a threshold", _without(14, *DEFAULTS, "custom")),
    ("axes", "not as a state timeline", _panel_with(12, type="timeseries")),
    ("one-screen", "loss ends in row 24", _at(9, "gridPos", "y", value=18)),
    ("one-screen", "global norm ends", _at(8, "gridPos", "h", value=20)),
    ("one-screen", "state is not shown, or in a closed row", lambda board: board["panels"][17]["panels"].append(
        board["panels"].pop(7))),
    ("one-screen", "firing alerts is not shown", lambda board: board["panels"].pop(4)),
    ("one-screen", "throughput is not shown", _panel_with(0, type="stat")),
    ("one-screen", "worst rank is not shown", lambda board: board["panels"].pop(6)),
    ("says-what-is-missing", "'Not training' does not say", _defaults_with(0, noValue="Not training")),
    ("says-what-is-missing", "does not name the rules", _defaults_with(6, noValue="There is one rank only")),
    ("says-what-is-missing", "does not name the rules", _defaults_with(4, noValue="No alert is firing now")),
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


def _links_by(expression: str) -> list[Finding]:
    """What is found of a link by the label `rank` on these series."""
    board = sound()
    _expression(expression, 6)(board)
    return found_in(board, "links-never-empty")


@pytest.mark.parametrize(
    ("expression", "sure"),
    [
        ("max by (run, rank) (torch_train_epochCHOSEN)", True),
        ("max by (run) (torch_train_epochCHOSEN)", False),
        ("max by (run, rank) (torch_train_epochCHOSEN) or max by (run) (torch_train_epochCHOSEN)", False),
        ('label_replace(max by (run) (torch_train_epochCHOSEN), "rank", "All", "rank", "")', True),
        ('label_replace(max by (run) (torch_train_epochCHOSEN), "rank", "All", "", "")', True),
        ('label_replace(max by (run) (torch_train_epochCHOSEN), "rank", "$1", "rank", "(.*)")', False),
        ('label_replace(max by (run) (torch_train_epochCHOSEN), "rank", "All", "rank", "x.*")', False),
        ('label_replace(max by (run) (torch_train_epochCHOSEN), "rank", "$1", "run", "(.+)")', True),
        (
            "max by (run) (torch_train_epochCHOSEN) * on (run) group_right () max by (run, rank) (torch_train_world_sizeCHOSEN)",
            True,
        ),
        ('ALERTS{run=~"$run"}', False),
    ],
)
def test_labels_that_are_never_empty(expression: str, sure: bool) -> None:
    """A link may be filled in by the labels that each series has, of which Prometheus gives an empty one to none."""
    assert (_links_by(expression) == []) == sure


@pytest.mark.parametrize(
    "expression",
    [
        "(torch_train_stateCHOSEN == 1) * 2",
        "max by (run) ((torch_train_stateCHOSEN == 1) * 1 or (torch_train_stateCHOSEN > 0) * 2)",
        "(rate(torch_train_steps_totalCHOSEN[$__rate_interval]) > bool 0) + 1",
        "last_over_time(torch_train_stateCHOSEN[5m]) + 1",
        "1 + group by (run) (torch_train_epochCHOSEN)",
        "(torch_train_epochCHOSEN > 3) * 0 + 1 unless torch_train_world_sizeCHOSEN",
        "torch_train_epochCHOSEN == 2",
        "(torch_train_stateCHOSEN == 1) * on (run) group_left () max by (run) (torch_train_infoCHOSEN)",
    ],
)
def test_values_of_an_expression(expression: str) -> None:
    """The values that an expression can give are those that it can, so that a state without a word is found and no other."""
    board = sound()
    _expression(expression, 7)(board)
    assert found_in(board, "state-names") == []


@pytest.mark.parametrize("unit", ["count:steps/s", "suffix:x", "si:mW", "prefix:~", "sci"])
def test_units_of_ones_own(unit: str) -> None:
    """What a unit is made of after the colon is free."""
    board = sound()
    _defaults_with(0, unit=unit)(board)
    assert found_in(board, "panel-units-rule") == []


def test_links_to_the_runbook_lead_somewhere() -> None:
    """Each alert's section is found by the anchor that its rule and the overview name, to the letter: anchors have cases."""
    address = "https://wiki.example.org/runbook"
    files = assets.collect(runbook_url=address)
    rules = {path: yaml.safe_load(text) for path, text in files.items() if path.endswith(".alerts.yml")}
    alerts = [rule for file in rules.values() for group in file["groups"] for rule in group["rules"]]
    page = (REPOSITORY / "torch_grad_exporter/outputs/live/page/runbook.html").read_text(encoding="utf-8")
    overview = {text for text in strings(json.loads(files["grafana/training.json"])) if text.startswith(address)}
    assert overview
    for rule in alerts:
        wanted = {text.replace("${__data.fields.alertname}", rule["alert"]) for text in overview} | {
            rule["annotations"]["runbook_url"]
        }
        for anchor in {text.partition("#")[2] for text in wanted}:
            assert f'id="{anchor}"' in page, f"the served page has no {anchor}"
            assert f'id="{anchor}"' in files["runbook.md"], f"the runbook has no {anchor}"
    for text in (page, files["runbook.md"]):
        within = set(re.findall(r'href="#(\w+)"', text)) | set(re.findall(r"\]\(#(\w+)\)", text))
        assert within, "no links within the runbook"
        assert {anchor for anchor in within if f'id="{anchor}"' not in text} == set()


def _titles(panel: Json) -> list[tuple[str, float]]:
    board = sound() | {"panels": [panel]}
    return [(column.title, column.width()) for column in grafana.columns(Board(board, {}, RECORDED), board["panels"][0])]


def test_columns_of_a_table() -> None:
    """A table shows what its transformations leave, by the names and in the order that they give; overrides go by either name."""
    table = sound()["panels"][3]
    table["targets"][0]["expr"] = f"max by (run, layer, rank) (torch_grad_norm{CHOSEN})"
    table["fieldConfig"]["overrides"] = [
        {"matcher": {"id": "byName", "options": "Norm"}, "properties": [{"id": "custom.width", "value": 90}]},
        {"matcher": {"id": "byRegexp", "options": "/^lay/"}, "properties": [{"id": "custom.minWidth", "value": 50}]},
    ]
    assert _titles(table) == [("layer", 50), ("rank", 150), ("run", 150), ("Time", 150), ("Value", 150)]
    table["transformations"] = [
        {"id": "filterFieldsByName", "options": {"include": {"names": ["layer", "run", "Value", "host"]}}},
        {"id": "organize", "options": {
            "indexByName": {"Value": 0, "layer": 1, "run": 2}, "renameByName": {"Value": "Norm"}, "excludeByName": {"run": True}}},
    ]  # fmt: skip
    assert _titles(table) == [("Norm", 90), ("layer", 50)]
    table["targets"].append(table["targets"][0] | {"refId": "B"})
    assert _titles(table) == [("layer", 50)]
    table["fieldConfig"]["overrides"][1]["properties"].append({"id": "custom.hidden", "value": True})
    assert _titles(table) == []


def test_width_of_a_panel() -> None:
    """Of 1,440 pixels a panel of all 24 columns has 1,374 for its content, one of half of them a little less than half."""
    assert [grafana.inner_width(columns) for columns in (24, 12, 8)] == [1374, 674, 440]


def test_defaults_are_merged_as_grafana_does() -> None:
    """Objects are merged key by key, an empty one hides nothing of Grafana's; a list or a number takes the place of the other."""
    heat = sound()["panels"][10]
    heat["options"] = {"filterValues": {}, "color": {"scheme": "RdYlBu"}, "legend": None}
    merged = grafana.options(heat)
    assert merged["filterValues"] == {"le": 1e-9}
    assert merged["color"] | {"steps": 64, "reverse": False, "mode": "scheme"} == merged["color"]
    assert merged["legend"] is None
    assert grafana.config(sound()["panels"][0])["color"]["mode"] == "palette-classic"
