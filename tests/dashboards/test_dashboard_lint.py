"""The shipped dashboards pass the checks of lint.py, and each check finds a planted fault."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
import yaml

from tests.dashboards.lint import Json, findings
from tests.support.grafana import dashboards, each_panel
from tests.support.tools import REPOSITORY
from torch_grad_exporter.cli import assets


def test_shipped_dashboards_pass() -> None:
    """No check finds a fault in the six dashboards, whose uids and settings are the documented ones."""
    for name, board in dashboards().items():
        assert findings(board) == []
        settings = {key: board[key] for key in ("uid", "editable", "time")}
        assert settings == {
            "uid": f"torch-grad-{name.removesuffix('.json')}", "editable": False, "time": {"from": "now-1h", "to": "now"},
        }  # fmt: skip
        assert not {"id", "__inputs", "__requires", "__elements"} & board.keys()
    assert len(dashboards()) == 6


@pytest.mark.parametrize("name", ["training.json", "rl.json"])
def test_the_first_row_is_one_screen(name: str) -> None:
    """The second row begins where a screen of 1440 x 900 ends: 18 rows of the grid."""
    second = [panel for panel in dashboards()[name]["panels"] if panel["type"] == "row"][1]  # type: ignore[attr-defined]
    assert second["gridPos"]["y"] <= 18


Fault = Callable[[Json], object]
CHOSEN = '{job=~"$job", run=~"$run", rank=~"$rank"}'


def _loss(board: Json) -> Json:
    """Return the panel of the loss, a graph of one query."""
    (panel,) = (panel for panel in each_panel(board) if panel["title"] == "Loss")
    return panel


def _asks(expression: str) -> Fault:
    return lambda board: _loss(board)["targets"][0].update(expr=expression.replace("CHOSEN", CHOSEN))


def _panel(**more: object) -> Fault:
    return lambda board: _loss(board).update(more)


def _defaults(**more: object) -> Fault:
    return lambda board: _loss(board)["fieldConfig"]["defaults"].update(more)


def _variable(place: int, **more: object) -> Fault:
    return lambda board: board["templating"]["list"][place].update(more)


def _table(board: Json) -> None:
    (panel,) = (panel for panel in each_panel(board) if panel["title"] == "Firing alerts")
    panel["targets"][0].pop("format")  # type: ignore[index]


FAULTS: list[tuple[str, Fault]] = [
    ("metrics: Loss: no metric torch_train_los", _asks("torch_train_losCHOSEN")),
    ("choices: Loss: torch_train_epoch has no job", _asks('torch_train_epoch{job="$job", run=~"$run"}')),
    ("choices: Loss: run:torch_train_steps:skew has no run", _asks("run:torch_train_steps:skew")),
    ("rate_interval: Loss: rate over 0:05:00", _asks("rate(torch_train_steps_totalCHOSEN[5m])")),
    ("kinds: Loss: torch_train_steps_total without a rate", _asks("sum(torch_train_steps_totalCHOSEN)")),
    ("kinds: Loss: torch_train_steps_total without a rate", _asks("max_over_time(torch_train_steps_totalCHOSEN[$__range])")),
    ("kinds: Loss: a rate of the gauge torch_train_epoch", _asks("rate(torch_train_epochCHOSEN[$__rate_interval])")),
    ("counts: Loss: an extrapolated count", _asks("round(sum(increase(torch_train_steps_totalCHOSEN[$__range])))")),
    ("totals: Loss: adds up", _panel(options={"legend": {"calcs": ["sum"]}})),
    ("nan: Loss: torch_grad_norm may be NaN", _asks("sum(torch_grad_normCHOSEN)")),
    ("nan: Loss: torch_train_value may be NaN", _asks("avg by (name) (torch_train_valueCHOSEN)")),
    ("nan: Loss: torch_train_loss may be NaN", _asks("avg_over_time(torch_train_lossCHOSEN[$__range])")),
    ("datasource: Loss: data source", _panel(datasource={"type": "prometheus", "uid": "P1809F7CD0C75ACF3"})),
    ("datasource: Loss: no data source", lambda board: _loss(board).pop("datasource")),
    ("variables: no variable job", lambda board: board["templating"]["list"].pop(1)),
    ("variables: the data source is not the default", _variable(0, current={})),
    ("variables: variable run: {'refresh': 1}", _variable(2, refresh=1)),
    ("variables: no variable layer", _panel(title="Loss of ${layer:text}")),
    ("units: Loss: unit ['seconds']", _defaults(unit="seconds")),
    ("places: Loss: leaves the grid", _panel(gridPos={"x": 17, "y": 0, "w": 8, "h": 8})),
    ("places: Loss: a gap above", _panel(gridPos={"x": 0, "y": 90, "w": 8, "h": 8})),
    ("places: Health: lies over Loss", _panel(gridPos={"x": 0, "y": 0, "w": 8, "h": 8})),
    ("places: title State of 2", _panel(title="State")),
    ("tables: Firing alerts: query A", _table),
    ("empty: Loss: nothing to draw", _panel(type="table")),
    ("empty: Loss: nothing to draw", _panel(type="heatmap")),
    ("repeats: Loss: is repeated over", _panel(repeat="value")),
    ("narrow: Loss: a legend at the right", _panel(options={"legend": {"placement": "right"}})),
    ("schemes: Loss: colours Viridis", _panel(options={"color": {"scheme": "Viridis"}})),
    ("thresholds: Loss: thresholds", _defaults(thresholds={"steps": [{"value": None}, {"value": 2}, {"value": 1}]})),
    ("links: Training dashboards", lambda board: board["links"][0].update(includeVars=False)),
    ("links: /d/torch-grad-training?var-layer=x", _defaults(links=[{"url": "/d/torch-grad-training?var-layer=x"}])),
]


@pytest.mark.parametrize(("text", "fault"), FAULTS, ids=[f"{place} {text.split(':')[0]}" for place, (text, _) in enumerate(FAULTS)])
def test_a_planted_fault_is_found(text: str, fault: Fault) -> None:
    """A fault planted in a shipped dashboard is reported."""
    board = dashboards()["training.json"]
    fault(board)
    assert any(found.startswith(text) for found in findings(board)), findings(board)


@pytest.mark.parametrize(
    "expression",
    [
        "sum(torch_grad_normCHOSEN == torch_grad_normCHOSEN)",
        "sum by (rank) (torch_grad_normCHOSEN > 0)",
        "max(torch_grad_normCHOSEN)",
        "sum(torch_train_epochCHOSEN > on (run) torch_grad_global_normCHOSEN)",
        "sum(torch_train_epochCHOSEN unless torch_grad_global_normCHOSEN)",
        "count(torch_grad_normCHOSEN)",
    ],
)
def test_a_sum_without_nan_is_accepted(expression: str) -> None:
    """A comparison, a maximum and a count are not reported as sums of NaN."""
    board = dashboards()["training.json"]
    _asks(expression)(board)
    assert findings(board) == []


def test_links_to_the_runbook_lead_somewhere() -> None:
    """Every runbook anchor of a rule or the overview exists in the page and the file, in the same case."""
    address = "https://wiki.example.org/runbook"
    files = assets.collect(runbook_url=address)
    rules = {path: yaml.safe_load(text) for path, text in files.items() if path.endswith(".alerts.yml")}
    alerts = [rule for file in rules.values() for group in file["groups"] for rule in group["rules"]]
    page = (REPOSITORY / "torch_grad_exporter/outputs/live/page/runbook.html").read_text(encoding="utf-8")
    overview = set(re.findall(rf'"({re.escape(address)}[^"]*)"', json.dumps(json.loads(files["grafana/training.json"]))))
    assert overview
    for rule in alerts:
        wanted = {text.replace("${__data.fields.alertname}", rule["alert"]) for text in overview}
        for anchor in {text.partition("#")[2] for text in (*wanted, rule["annotations"]["runbook_url"])}:
            assert f'id="{anchor}"' in page, f"the served page has no {anchor}"
            assert f'id="{anchor}"' in files["runbook.md"], f"the runbook has no {anchor}"
