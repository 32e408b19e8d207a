"""The shipped dashboards pass every lint rule, and every lint rule finds a planted fault."""

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
from tests.dashboards.lint.sound import CHOSEN, sound, variable_of
from tests.support.tools import REPOSITORY
from torch_grad_exporter.cli import assets

FILES = sorted((REPOSITORY / "dashboards" / "grafana").glob("*.json"))
BOARDS = {board["uid"]: board for board in (json.loads(path.read_text(encoding="utf-8")) for path in FILES)}
RECORDED = of_rules(REPOSITORY / "dashboards" / "prometheus")


def found_in(board: Json, *rules: str) -> list[Finding]:
    """Return what the rules report, all of them unless some are named."""
    return findings(Board(board, BOARDS | {board["uid"]: board}, RECORDED), {name: RULES[name] for name in rules or RULES})


def test_there_are_five_dashboards() -> None:
    """The files are the documented ones, each with its uid."""
    assert {path.stem: json.loads(path.read_text(encoding="utf-8"))["uid"] for path in FILES} == {
        name: f"torch-grad-{name}" for name in ("training", "layers", "resources", "ranks", "exporter")
    }


@pytest.mark.process
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_dashboard_passes_every_rule(path: Any) -> None:  # noqa: ANN401
    """No rule finds a fault in a shipped dashboard."""
    left = found_in(json.loads(path.read_text(encoding="utf-8")))
    assert not left, "\n".join(f"{found.rule}: {found.panel!r}: {found.text}" for found in left)


@pytest.mark.process
def test_sound_dashboard_has_no_findings() -> None:
    """The dashboard that the faults are planted in has none."""
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


def _swapped(board: Json, panel: int, one: str, other: str) -> None:
    """Swap the numbers of two states."""
    options = board["panels"][panel]["fieldConfig"]["defaults"]["mappings"][0]["options"]
    options[one], options[other] = options[other], options[one]


DEFAULTS = ("fieldConfig", "defaults")
STATES = ("fieldConfig", "defaults", "mappings", 0, "options")
LINK = ("fieldConfig", "defaults", "links", 0, "url")
LINK_OF_CELL = ("fieldConfig", "overrides", 0, "properties", 0, "value", 0, "url")


FAULTS: list[tuple[str, str, Fault]] = [
    ("template-datasource-rule", "not one variable", _variable_with(0, query="loki")),
    ("template-job-rule", "no variable job", lambda board: board["templating"]["list"].pop(1)),
    ("template-job-rule", "includeAll is None", lambda board: board["templating"]["list"][3].pop("includeAll")),
    ("template-job-rule", "refresh is 1", _variable_with(2, refresh=1)),
    ("template-label-promql-rule", "asks for no label", _variable_with(1, query="label_values(job)")),
    ("panel-datasource-rule", "P1809F7CD0C75ACF3", _panel_with(0, datasource={"type": "prometheus", "uid": "P1809F7CD0C75ACF3"})),
    ("panel-title-description-rule", "no description", lambda board: board["panels"][0].pop("description")),
    ("panel-units-rule", "unit 'seconds'", _defaults_with(0, unit="seconds")),
    ("panel-no-targets-rule", "no query", _panel_with(0, targets=[])),
    ("target-promql-rule", "unclosed left parenthesis", _expression("sum(torch_train_epochCHOSEN")),
    ("target-promql-rule", "expected type range vector", _expression("rate(torch_train_steps_totalCHOSEN)")),
    ("target-rate-interval-rule", "rate over 0:05:00", _expression("rate(torch_train_steps_totalCHOSEN[5m])")),
    ("target-job-rule", "torch_train_epoch has no job", _expression('torch_train_epoch{job="$job",run=~"$run"}')),
    ("target-run-rule", "torch_train_epoch has no run", _expression('torch_train_epoch{job=~"$job"}')),
    ("target-run-rule", "run:torch_train_steps:skew has no run", _expression("run:torch_train_steps:skew")),
    ("target-counter-agg-rule", "torch_train_steps_total without a rate", _expression("sum(torch_train_steps_totalCHOSEN)")),
    ("target-counter-agg-rule", "without a rate", _expression("max_over_time(torch_train_steps_totalCHOSEN[$__range])")),
    ("uneditable-dashboard", "editable", lambda board: board.update(editable=True)),
    ("metric-exists", "torch_train_step_duration_seconds", _expression("torch_train_step_duration_secondsCHOSEN")),
    ("histogram-buckets", "without le", _expression(
        "histogram_quantile(0.9, sum by (run) (rate(torch_train_step_duration_seconds_bucketCHOSEN[$__rate_interval])))")),
    ("histogram-buckets", "neither", _expression(
        "sum by (le) (rate(torch_train_step_duration_seconds_bucketCHOSEN[$__rate_interval]))")),
    ("gauge-as-counter", "rate of the gauge", _expression("rate(torch_train_epochCHOSEN[$__rate_interval])")),
    ("summed-over-time", "no increase", lambda board: board["panels"][1]["options"].update(reduceOptions={"calcs": ["sum"]})),
    ("nan-in-sum", "torch_grad_norm may be NaN", _expression("sum(torch_grad_normCHOSEN)")),
    ("nan-in-sum", "torch_train_loss may be NaN", _expression("avg_over_time(torch_train_lossCHOSEN[$__range])")),
    ("legend-labels", "legend names layer", _expression("sum by (rank) (torch_train_epochCHOSEN)", legendFormat="{{layer}}")),
    ("annotations", "no annotation from ALERTS", lambda board: board["annotations"]["list"].pop(1)),
    ("no-inputs", "DS_PROMETHEUS", _panel_with(0, datasource={"type": "prometheus", "uid": "${DS_PROMETHEUS}"})),
    ("variables-defined", "no variable layer", _panel_with(0, title="Norm of ${layer:text}")),
    ("variables-used", "is not used", lambda board: board["templating"]["list"].append(variable_of("layer", []))),
    ("unique", "id of 2", _panel_with(1, id=1)),
    ("panel-types", "type graph", _panel_with(0, type="graph")),
    ("thresholds", "red at 80", _without(1, *DEFAULTS, "thresholds")),
    ("no-value", "sentence", _defaults_with(0, noValue="No data")),
    ("table-queries", "query A", lambda board: board["panels"][3]["targets"][0].pop("format")),
    ("grid", "leaves the grid", _panel_with(1, gridPos={"x": 17, "y": 0, "w": 8, "h": 8})),
    ("grid", "lies over", _panel_with(1, gridPos={"x": 15, "y": 0, "w": 8, "h": 8})),
    ("links", "does not carry", lambda board: board["links"][0].update(includeVars=False)),
    ("links", "no variable layer", _defaults_with(0, links=[{"url": "/d/torch-grad-training?var-layer=x"}])),
    ("links-of-run", "leads to all chosen runs", _at(5, *LINK, value="/d/torch-grad-ranks?${job:queryparam}&${run:queryparam}")),
    ("links-of-run", "leads to all chosen runs", _at(3, *LINK_OF_CELL, value="/d/torch-grad-ranks?var-run=$run")),
    ("hidden-cells", "cells of 1e-09 and less", _at(8, "options", "filterValues", value={})),
    ("inverted-colors", "RdYlBu is reversed", _at(8, "options", "color", "reverse", value=True)),
    ("state-legends", "continuous-GrYlRd", _without(6, *DEFAULTS, "color")),
    ("state-names", "2 has no word", _without(6, *STATES, "2")),
    ("seriousness", "Training (green) hides Failed (red)", lambda board: _swapped(board, 6, "1", "2")),
    ("seriousness", "Dead (orange) hides No gradient (red)", _expression((
        "(max by (layer) (torch_grad_dead_ratioCHOSEN) > 0.9) * 0 + 2"
        " or (max by (layer) (torch_grad_missing_parametersCHOSEN) > 0) * 0 + 3"),
        9)),
    ("bars", "no max", _without(5, *DEFAULTS, "max")),
    ("decimals", "without decimals", _without(7, *DEFAULTS, "decimals")),
    ("log-axis", "read 0 as percentunit", _defaults_with(7, unit="percentunit")),
    ("limits", "from 0 to 0", _defaults_with(0, min=0, max=0)),
    ("limits", "colours from 4 to -8", lambda board: board["panels"][2]["options"].update(color={"min": 4, "max": -8})),
]  # fmt: skip


def _named() -> Iterator[Any]:
    seen: dict[str, int] = {}
    for rule, text, fault in FAULTS:
        seen[rule] = seen.get(rule, 0) + 1
        yield pytest.param(rule, text, fault, id=f"{rule}-{seen[rule]}")


@pytest.mark.process
@pytest.mark.parametrize(("rule", "text", "fault"), list(_named()))
def test_rule_finds_the_fault(rule: str, text: str, fault: Fault) -> None:
    """A planted fault is reported by its rule."""
    broken = copy.deepcopy(sound())
    fault(broken)
    assert any(text in found.text for found in found_in(broken, rule)), found_in(broken)


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
    """A comparison, a maximum and a count are not reported as sums of NaN."""
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
    """A legend may name exactly the labels that Prometheus leaves on the series."""
    for name in ("job", "instance", "run", "rank", "layer", "host", "short", "le"):
        board = sound()
        _expression(expression, legendFormat=f"{{{{{name}}}}}")(board)
        assert bool(found_in(board, "legend-labels")) == (name not in labels.split()), name


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
    """No state is reported that the expression cannot return."""
    board = sound()
    _expression(expression, 6)(board)
    assert found_in(board, "state-names") == []


def test_links_to_the_runbook_lead_somewhere() -> None:
    """Every runbook anchor of a rule or the overview exists in the page and the file, in the same case."""
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


def test_defaults_are_merged_as_grafana_does() -> None:
    """Objects are merged key by key; a list or a number replaces the default."""
    heat = sound()["panels"][8]
    heat["options"] = {"filterValues": {}, "color": {"scheme": "RdYlBu"}, "legend": None}
    merged = grafana.options(heat)
    assert merged["filterValues"] == {"le": 1e-9}
    assert merged["color"] | {"steps": 64, "reverse": False, "mode": "scheme"} == merged["color"]
    assert merged["legend"] is None
    assert grafana.config(sound()["panels"][0])["color"]["mode"] == "palette-classic"
