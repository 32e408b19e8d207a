"""The shipped dashboards pass the checks of lint.py."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from tests.dashboards.lint import findings
from tests.support.grafana import dashboards
from tests.support.tools import REPOSITORY
from torch_grad_exporter.cli import assets


def test_shipped_dashboards_pass() -> None:
    """No check finds a fault in the seven dashboards, whose uids and settings are the documented ones."""
    for name, board in dashboards().items():
        assert findings(board) == []
        settings = {key: board[key] for key in ("uid", "editable", "time")}
        assert settings == {
            "uid": f"torch-grad-{name.removesuffix('.json')}", "editable": False, "time": {"from": "now-1h", "to": "now"},
        }  # fmt: skip
        assert not {"id", "__inputs", "__requires", "__elements"} & board.keys()
    assert len(dashboards()) == 7


@pytest.mark.parametrize("name", ["training.json", "rl.json", "goodput.json"])
def test_the_first_row_is_one_screen(name: str) -> None:
    """The second row begins where a screen of 1440 x 900 ends: 18 rows of the grid."""
    second = [panel for panel in dashboards()[name]["panels"] if panel["type"] == "row"][1]  # type: ignore[attr-defined]
    assert second["gridPos"]["y"] <= 18


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
