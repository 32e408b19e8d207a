"""The shipped Grafana dashboards: that they are what the generator makes, and that what they ask for and lead to exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dashboards.generate.__main__ import ROOT, RUNBOOK, SERVED_RUNBOOK, differing, rendered
from dashboards.generate.board import plain
from dashboards.generate.queries import in_order
from dashboards.generate.training import dashboard as overview
from tests.support.catalogue import CATALOGUE
from tests.support.grafana import ALL, PanelQuery, dashboards, each_panel, interpolated, panels
from tests.support.tools import PATIENCE, REPOSITORY, find
from torch_grad_exporter.metrics.families import Kind

BOARDS = dashboards()
UIDS = {board["uid"]: board for board in BOARDS.values()}
QUERIES = [query for board in BOARDS.values() for query in panels(board)]
NAMES = sorted(BOARDS)

EVERYWHERE = {"job", "instance", "run", "rank"}
MADE_BY_PROMETHEUS = {
    "up": {"job", "instance"},
    "scrape_duration_seconds": {"job", "instance"},
    "scrape_samples_scraped": {"job", "instance"},
    "ALERTS": {"alertname", "alertstate", "severity", "run", "rank", "layer", "device"},
    "ALERTS_FOR_STATE": {"alertname", "severity", "run", "rank", "layer", "device"},
}


def known() -> dict[str, set[str]]:
    """The labels of every series that there can be, by its name."""
    found = dict(MADE_BY_PROMETHEUS)
    for spec in CATALOGUE.values():
        ends = ("_bucket", "_sum", "_count") if spec.kind is Kind.HISTOGRAM else ("",)
        found |= {spec.name + end: {*spec.labels, *EVERYWHERE, *({"le"} if end == "_bucket" else ())} for end in ends}
    for path in (REPOSITORY / "dashboards" / "prometheus").glob("*.rules.yml"):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                kept = re.findall(r"by \(([\w, ]+)\)", rule["expr"])
                found[rule["record"]] = {label for by in kept for label in by.split(", ")} | {"run", "rank"}
    return found


KNOWN = known()


def asked(query: PanelQuery) -> set[str]:
    """The names of the series that a query selects."""
    return set(re.findall(r"([A-Za-z_:][\w:]*)\{", re.sub(r'"[^"]*"', "", query.expr)))


def test_files_are_what_the_generator_makes() -> None:
    """The committed files are, byte for byte, what `make dashboards` would write."""
    assert len(BOARDS) == 5
    assert differing() == []


def test_a_changed_a_missing_and_an_extra_file_are_told(tmp_path: Path) -> None:
    """`--check` compares bytes: one blank more, one file less and one too many are three differences, of each kind."""
    for path in rendered():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    (tmp_path / RUNBOOK).write_text((tmp_path / RUNBOOK).read_text(encoding="utf-8") + " ", encoding="utf-8")
    (tmp_path / SERVED_RUNBOOK).unlink()
    changed = []
    for folder, first, second, other in (
        ("grafana", "ranks.json", "layers.json", "other.json"),
        ("prometheus", "training.alerts.yml", "gradients.alerts.yml", "other.alerts.yml"),
    ):
        place = tmp_path / "dashboards" / folder
        (place / first).write_text((place / first).read_text(encoding="utf-8") + " ", encoding="utf-8")
        (place / second).unlink()
        (place / other).write_text("{}", encoding="utf-8")
        changed += [f"dashboards/{folder}/{name}" for name in (first, second, other)]
    assert differing(tmp_path) == sorted([*changed, RUNBOOK, SERVED_RUNBOOK])


def test_check_is_a_command() -> None:
    """`python -m dashboards.generate --check` agrees with the committed files, and writes nothing."""
    before = {path: (ROOT / path).stat().st_mtime_ns for path in rendered()}
    done = subprocess.run([sys.executable, "-m", "dashboards.generate", "--check"], cwd=REPOSITORY, check=False, timeout=PATIENCE)
    assert done.returncode == 0
    assert {path: (ROOT / path).stat().st_mtime_ns for path in rendered()} == before


def test_making_a_dashboard_twice_gives_the_same() -> None:
    """Nothing of a dashboard depends on the moment, or on what was made before."""
    assert json.dumps(plain(overview())) == json.dumps(plain(overview()))


@pytest.mark.parametrize("name", NAMES)
def test_each_query_asks_for_series_that_exist(name: str) -> None:
    """Each name in a query is a metric of the catalogue, a recording rule, or one of Prometheus' own; and each query has one."""
    for query in panels(BOARDS[name]):
        assert asked(query), query
        assert asked(query) <= set(KNOWN), query


@pytest.mark.parametrize("name", NAMES)
def test_labels_exist(name: str) -> None:
    """Each label in a legend, in `by`, `on` and `group_left`, is one of the series that the query selects.

    The queries of a table keep the labels of all its columns, of which one of them may have none.
    """
    for panel in each_panel(BOARDS[name]):
        queries = [query for query in panels(BOARDS[name]) if query.panel == panel["title"]]
        for query, target in zip(queries, panel["targets"], strict=True):  # type: ignore[call-overload]
            clauses = re.findall(r"\b(?:by|on|group_left|ignoring) \(([\w, ]*)\)", query.expr)
            used = {label for clause in clauses for label in clause.split(", ") if label}
            used |= set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            selected = queries if panel["type"] == "table" else [query]
            assert used <= set().union(*(KNOWN[series] for one in selected for series in asked(one))), query


@pytest.mark.parametrize("name", NAMES)
def test_columns_of_tables_are_answered(name: str) -> None:
    """Each column of a table is the value of one of its queries, or a label on all that they select."""
    for panel in each_panel(BOARDS[name]):
        if panel["type"] != "table":
            continue
        queries = [query for query in panels(BOARDS[name]) if query.panel == panel["title"]]
        values = {f"Value #{query.ref}" for query in queries} if len(queries) > 1 else {"Value"}
        arranged = next(done["options"] for done in panel["transformations"] if done["id"] == "organize")  # type: ignore[attr-defined]
        labels = set().union(*(KNOWN[series] for query in queries for series in asked(query)))
        assert set(arranged["indexByName"]) <= values | labels, panel["title"]
        # The value of a query whose labels alone are shown, such as torch_train_info's 1, is no column.
        assert len(values - set(arranged["indexByName"])) <= 1, panel["title"]


def test_ids_are_unique_and_say_where_a_panel_stands() -> None:
    """Panel 203 is the third of the second row: a panel more in one row leaves saved links to the others right."""
    for board in BOARDS.values():
        row = 0
        for panel in board["panels"]:  # type: ignore[attr-defined]
            if panel["type"] == "row":
                row += 100
                place, inner = row, [inside["id"] for inside in panel["panels"]]
                assert panel["id"] == row
                assert inner == list(range(row + 1, row + 1 + len(inner)))
            else:
                place += 1
                assert panel["id"] == place


def addresses(found: object) -> list[str]:
    """The addresses of all links on values, however deep."""
    if isinstance(found, dict):
        own = [link["url"] for link in found.get("links") or [] if "url" in link] if "links" in found else []
        if found.get("id") == "links":
            own = [link["url"] for link in found["value"]]
        return own + [url for key, value in found.items() if key != "links" for url in addresses(value)]
    return [url for item in found for url in addresses(item)] if isinstance(found, list) else []


def test_links_lead_to_variables_that_are_there() -> None:
    """Each link goes to one of the five, and sets only variables that it has."""
    found = [url for board in BOARDS.values() for url in addresses(board["panels"])]
    assert len(found) > 20
    for url in found:
        uid, _, parameters = url.removeprefix("/d/").partition("?")
        variables = {variable["name"] for variable in UIDS[uid]["templating"]["list"]}  # type: ignore[index]
        named = re.findall(r"var-(\w+)=", parameters) + re.findall(r"\$\{(\w+):queryparam\}", parameters)
        assert {"datasource", "job", "run"} <= set(named) <= variables, url
        assert "${__url_time_range}" in parameters


def test_the_overview_leads_further() -> None:
    """Each panel of the overview but the learning rate leads to another dashboard; together they lead to all four."""
    led = {
        panel["title"]: set(re.findall(r"/d/([\w-]+)", " ".join(addresses(panel)))) for panel in each_panel(BOARDS["training.json"])
    }
    assert [title for title, targets in led.items() if not targets] == ["Learning rate"]
    assert set().union(*led.values()) >= set(UIDS) - {"torch-grad-training"}


def test_heatmaps_of_layers_are_restricted_to_chosen_ones() -> None:
    """What asks for the buckets of a layer's histogram takes the chosen layers: 300 layers are 4,000 series of them."""
    buckets = [query for query in QUERIES if "torch_grad_norm_distribution_bucket" in query.expr]
    assert buckets
    assert all('layer=~"$layer"' in query.expr for query in buckets)


def test_variables_stand_for_what_grafana_writes() -> None:
    """One value is escaped for a regular expression in a quoted string, several are joined, All and a text stand as they are."""
    expression = 'rate(x{job=~"$job", run=~"$run", layer=~"${layer}"}[$__rate_interval]) / $__range + $__interval'
    chosen = {"job": ALL, "run": ["a+b"], "layer": ["blocks.0.up", "head"]}
    assert interpolated(expression, chosen, "1m", span="2h", interval="30s") == (
        r'rate(x{job=~".+", run=~"a\\+b", layer=~"(blocks\\.0\\.up|head)"}[1m]) / 2h + 30s'
    )


def test_prometheus_reads_an_escaped_name_as_it_is(tmp_path: Path) -> None:
    """Of two layers, `a.b(1)` and `aXb(1)`, Prometheus selects the first with what is made of its name."""
    expression = interpolated('x{layer=~"$layer"}', {"layer": ["a.b(1)"]}, "1m")
    series = [{"series": f'x{{layer="{layer}"}}', "values": "1"} for layer in ("a.b(1)", "aXb(1)")]
    expected = {"expr": expression, "eval_time": "0s", "exp_samples": [{"labels": 'x{layer="a.b(1)"}', "value": 1}]}
    test = {"rule_files": [], "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [expected]}]}
    path = tmp_path / "test.yml"
    path.write_text(json.dumps(test), encoding="utf-8")
    done = subprocess.run([find("promtool"), "test", "rules", path], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_layers_are_in_natural_order_whatever_the_run_is_called(tmp_path: Path) -> None:
    """`as` sorts block 2 before block 10, also of a run with numbers in its name: they do not count."""
    layers = {"blocks.2.fc.1": "blocks.002.fc.001", "blocks.10.fc.1": "blocks.010.fc.001", "blocks.113.fc": "blocks.113.fc"}
    run = "sweep_1_seed_3_of.7.8"
    series = [{"series": f'x{{run="{run}", layer="{layer}"}}', "values": "1"} for layer in layers]
    samples = [
        {"labels": f'x{{as="{run} {padded}", run="{run}", layer="{layer}"}}', "value": 1} for layer, padded in layers.items()
    ]
    expected = {"expr": in_order("x", "run", "layer"), "eval_time": "0s", "exp_samples": samples}
    test = {"rule_files": [], "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [expected]}]}
    path = tmp_path / "test.yml"
    path.write_text(json.dumps(test), encoding="utf-8")
    done = subprocess.run([find("promtool"), "test", "rules", path], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_tied_to_one_grafana() -> None:
    """No data source but the variable, no import dialogue, no panel of another's plugin, and provisioned files are not editable."""
    for name, board in BOARDS.items():
        text = (ROOT / "dashboards" / "grafana" / name).read_text(encoding="utf-8")
        assert set(re.findall(r'"uid": "([^"]+)"', text)) - set(UIDS) == {"${datasource}"}
        assert "__inputs" not in text
        assert "DS_PROMETHEUS" not in text
        assert board["editable"] is False
        assert board["schemaVersion"] in {39, 40, 41}


def test_functions_of_the_generator_are_small() -> None:
    """The generator keeps to the project's measure: half of its functions have 10 lines at most, none has above 50."""
    lengths = sorted(
        len(re.split(r"\n(?=\S)", body)[0].rstrip().splitlines()) + 1
        for path in (REPOSITORY / "dashboards" / "generate").glob("*.py")
        for body in re.split(r"^def ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    )
    assert lengths[len(lengths) // 2] <= 10
    assert lengths[-1] <= 50
