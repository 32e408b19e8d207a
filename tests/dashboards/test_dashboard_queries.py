"""Every query of every dashboard yields data from a real Prometheus that scrapes real training of all kinds."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.dashboards.many_runs import GPU_RUN, running
from tests.support.grafana import EVERYTHING, each_panel, interpolated, is_sentence, panels
from tests.support.nine_runs import slowly
from tests.support.real_prometheus import Prometheus
from tests.support.real_prometheus import running as a_prometheus
from tests.support.tools import REPOSITORY, eventually

pytestmark = [pytest.mark.server, pytest.mark.slow]

DASHBOARDS = sorted((REPOSITORY / "dashboards" / "grafana").glob("*.json"))
RULES = sorted((REPOSITORY / "dashboards" / "prometheus").glob("*.yml"))

CONFIGURATION = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: [{rules}/*.rules.yml, {rules}/*.alerts.yml]
scrape_configs:
  - job_name: training
    honor_labels: true
    file_sd_configs: [{{files: ["{folder}/*.json"], refresh_interval: 1s}}]
"""
RATE_INTERVAL = "4s"
"""What Grafana takes at a scrape interval of 1 s: max(interval + scrape, 4 x scrape)."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel."""

    dashboard: str
    panel: str
    expression: str


QUERIES = [
    Query(dashboard, panel, expression)
    for file in DASHBOARDS
    for dashboard, panel, _, expression in panels(json.loads(file.read_text()))
]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Start a Prometheus that scrapes all kinds of runs and evaluates the rules each second."""
    directory = tmp_path_factory.mktemp("prometheus")
    folder, rules = directory / "sd", directory / "rules"
    folder.mkdir()
    rules.mkdir()
    for file in RULES:
        if file.name.endswith((".rules.yml", ".alerts.yml")):
            (rules / file.name).write_text(re.sub(r"\binterval: \w+", "interval: 1s", file.read_text()))
    with running(folder) as targets, a_prometheus(directory, CONFIGURATION.format(rules=rules, folder=folder)) as started:
        assert eventually(lambda: up(started) == targets)
        yield started
        assert eventually(lambda: up(started) == targets)


STARTED = time.time()


def so_far() -> float:
    """Return the seconds to query: the whole scene, since the noise scale is known only until the model has converged."""
    return time.time() - STARTED


def up(prometheus: Prometheus) -> int:
    """Return the number of ranks that answer a scrape."""
    try:
        return sum(value == "1" for _, value in prometheus.query("up"))
    except OSError:
        return 0


def found(prometheus: Prometheus, query: Query, **variables: str) -> int:
    """Return how many series a query has yielded so far, with all variables at All but for those given; no row that says so."""
    chosen = EVERYTHING | variables
    answer = prometheus.series(interpolated(query.expression, chosen, RATE_INTERVAL), so_far())
    return sum(not is_sentence(labels, [float(value) for _, value in values]) for labels, values in answer)


def test_there_are_dashboards() -> None:
    """There are seven dashboards, each with queries."""
    assert len(DASHBOARDS) == 7
    assert {query.dashboard for query in QUERIES} == {json.loads(file.read_text())["title"] for file in DASHBOARDS}


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: f"{query.dashboard}: {query.panel}: {query.expression[:40]}")
def test_query_yields_data(prometheus: Prometheus, query: Query) -> None:
    """A query yields data with all variables at All, or of one run: State names runs only where they are few."""
    assert eventually(slowly(lambda: found(prometheus, query) > 0 or found(prometheus, query, run="alone") > 0))


def test_panels_that_need_hardware_are_documented(prometheus: Prometheus) -> None:
    """Only the panels that docs/dashboards.md names are empty without a GPU and a container's limits."""
    asked: dict[tuple[str, str], list[Query]] = {}
    for query in QUERIES:
        asked.setdefault((query.dashboard, query.panel), []).append(query)
    text = (REPOSITORY / "docs" / "dashboards.md").read_text()
    table = re.findall(r"^\| (.+?) \| (.+?) \|", text.partition("need hardware")[2], re.MULTILINE)
    documented = {(dashboard, panel) for dashboard, panel in table if dashboard in {query.dashboard for query in QUERIES}}
    runs = "alone|replicas|shards|adversaries"
    for panel in asked.keys() - documented:
        assert eventually(lambda panel=panel: any(found(prometheus, query, run=runs) for query in asked[panel])), panel
    assert documented <= asked.keys()
    assert not any(found(prometheus, query, run=runs) for panel in documented for query in asked[panel])


def variables(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the query variables of a dashboard by name."""
    for variable in json.loads(file.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_variables_have_values(prometheus: Prometheus, file: Path) -> None:
    """Each `label_values(SERIES, LABEL)` has values, and those of `run` are the runs."""
    names = []
    for name, variable in variables(file):
        query = variable["query"]["query"] if isinstance(variable["query"], dict) else variable["query"]
        asked = re.fullmatch(r"label_values\((.+),\s*(\w+)\)", query)
        assert asked is not None, query
        series = interpolated(asked[1], EVERYTHING, RATE_INTERVAL)

        def values(label: str = asked[2], series: str = series) -> set[str]:
            return set(prometheus.get(f"/api/v1/label/{label}/values", **{"match[]": series}))  # type: ignore[call-overload]

        assert eventually(lambda values=values: bool(values())), query
        if name == "run":
            assert eventually(lambda values=values: values() == {"alone", "replicas", "shards", "adversaries", GPU_RUN})
        names.append(name)
    assert {"job", "run"} <= set(names)


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_legends_have_their_labels(prometheus: Prometheus, file: Path) -> None:
    """Each `{{label}}` of a legend is a label of a series that the query yields."""
    for panel in each_panel(json.loads(file.read_text())):
        for target in panel.get("targets", []):  # type: ignore[attr-defined]
            # There is no label `optimizer` while a run has one optimizer.
            names = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", target.get("legendFormat", ""))) - {"optimizer"}
            asked = [interpolated(target["expr"], EVERYTHING | {"run": run}, RATE_INTERVAL) for run in (".+", "alone")]

            def are_there(names: set[str] = names, asked: list[str] = asked) -> bool:
                series = [labels for expression in asked for labels, _ in prometheus.series(expression, so_far())]
                return names <= {name for labels in series for name in labels if labels[name]}

            assert not names or eventually(slowly(are_there)), (panel["title"], target["expr"], names)
