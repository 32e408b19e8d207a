"""Rules about settings, data source, variables and links: each yields (panel, text) for every fault."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.dashboards.lint import grafana
from tests.dashboards.lint import labels as lint_labels
from tests.dashboards.lint.model import Board, Json, Query, objects, strings
from tests.dashboards.lint.values import asked

Found = Iterator[tuple[str, str]]

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
BUILT_IN = ({"type": "grafana", "uid": "-- Grafana --"}, {"type": "datasource", "uid": "grafana"})


def dashboard_settings(board: Board) -> Found:
    """The JSON is classic and provisionable, with the settings that all our dashboards share."""
    wanted = {"editable": False, "graphTooltip": 1, "time": {"from": "now-1h", "to": "now"}}
    for key, value in wanted.items():
        if board.json.get(key) != value:
            yield "", f"{key} is {board.json.get(key)!r}, not {value!r}"
    if board.json.get("schemaVersion") not in {39, 40, 41}:
        yield "", f"schemaVersion {board.json.get('schemaVersion')!r} is not the classic model's"
    if not board.json.get("uid") or board.json.get("id") is not None:
        yield "", "a dashboard has a uid, and no id, which is the database's"
    if "torch-grad-exporter" not in board.json.get("tags", []):
        yield "", "the tag torch-grad-exporter is missing"
    if not board.json.get("title") or not board.json.get("description"):
        yield "", "title or description is missing"


def no_inputs(board: Board) -> Found:
    """Nothing needs the import dialogue, which provisioning never opens."""
    for key in ("__inputs", "__requires", "__elements"):
        if key in board.json:
            yield "", f"{key} is for importing by hand"
    for text in strings(board.json):
        if "${DS_" in text:
            yield "", f"{text} is for importing by hand"


def datasource_variable(board: Board) -> Found:
    """One variable named `datasource` selects the data source."""
    found = [variable for variable in board.variables() if variable["type"] == "datasource"]
    if [(variable["name"], variable.get("query")) for variable in found] != [("datasource", "prometheus")]:
        yield "", "not one variable `datasource` for Prometheus"
    for variable in found:
        if not variable.get("label"):
            yield f"variable {variable['name']}", "no label"


def datasource_everywhere(board: Board) -> Found:
    """Every query uses the selected data source, not a fixed uid or null."""
    for found in objects(board.json):
        built_in = found.get("datasource") in BUILT_IN and found.get("builtIn") == 1
        if "datasource" in found and found["datasource"] != DATASOURCE and not built_in:
            yield str(found.get("title") or found.get("name") or found.get("refId", "")), f"data source {found['datasource']!r}"
    for panel in board.panels_with_data():
        if "datasource" not in panel:
            yield panel.get("title", ""), "no data source"
    for asking in (*board.annotations(), *(v for v in board.variables() if v["type"] == "query")):
        if "datasource" not in asking:
            yield asking["name"], "no data source"


def choices(board: Board) -> Found:
    """Jobs, runs, ranks and layers can be chosen: multiple values, all by default, reloaded with the time range."""
    wanted = {"type": "query", "multi": True, "includeAll": True, "allValue": ".+", "refresh": 2}
    variables = {variable["name"]: variable for variable in board.variables()}
    for name in ("job", "run", "rank", *({"layer"} & set(variables))):
        if name not in variables:
            yield "", f"no variable {name}"
            continue
        for key, value in wanted.items():
            if variables[name].get(key) != value:
                yield f"variable {name}", f"{key} is {variables[name].get(key)!r}, not {value!r}"
        if not variables[name].get("label"):
            yield f"variable {name}", "no label"


def _variables_in(json: object) -> set[str]:
    found = {
        name
        for text in strings(json)
        for match in re.findall(r"\$(?:\{([A-Za-z]\w*)|([A-Za-z]\w*))|\[\[(\w+)", text)
        for name in match
    }
    return found - {""}


def variables_defined(board: Board) -> Found:
    """Each variable that is used exists; names of Grafana's own begin with two underscores."""
    for name in sorted(_variables_in(board.json) - {variable["name"] for variable in board.variables()}):
        yield "", f"no variable {name}"


def variables_used(board: Board) -> Found:
    """Each variable is used."""
    for variable in board.variables():
        rest = board.json | {"templating": [other for other in board.variables() if other is not variable]}
        repeats = {panel.get("repeat") for panel in board.panels()}
        if variable["name"] not in _variables_in(rest) | repeats:
            yield f"variable {variable['name']}", "is not used"


def links(board: Board) -> Found:
    """Links keep time range and variables, and lead to dashboards that have these variables."""
    found = board.json.get("links", [])
    if not found:
        yield "", "no links to other dashboards"
    for link in found:
        if not link.get("includeVars") or not link.get("keepTime"):
            yield link["title"], "does not carry variables and time"
        tags = set(link.get("tags", []))
        if link["type"] == "dashboards" and not any(tags <= set(other.get("tags", [])) for other in board.others.values()):
            yield link["title"], f"no dashboard has the tags {sorted(tags)}"
    for text in strings(board.json):
        yield from _wrong_urls(board, text)


def _wrong_urls(board: Board, text: str) -> Found:
    for uid, rest in re.findall(r"/d/([\w-]+)(\S*)", text):
        if uid not in board.others:
            yield "", f"no dashboard {uid}: {text}"
            continue
        known = {variable["name"] for variable in Board(board.others[uid], {}, {}).variables()}
        for name in sorted(set(re.findall(r"\bvar-(\w+)=|\$\{(\w+):queryparam\}", rest))):
            if "".join(name) not in known:
                yield "", f"{uid} has no variable {''.join(name)}: {text}"


def _data_links(board: Board, panel: Json) -> Iterator[tuple[str, list[Query]]]:
    queries = asked(board, panel)
    if panel["type"] == "table":
        for column in grafana.columns(board, panel):
            yield from ((link["url"], queries) for link in column.config.get("links", []))
        return
    for query in queries:
        yield from ((link["url"], [query]) for link in grafana.settings(panel, query).get("links", []))


def follows_the_run(board: Board) -> Found:
    """A link on a series of one run leads to that run, not to every chosen run."""
    for panel in board.panels_with_data():
        for url, queries in _data_links(board, panel):
            trees = [tree for query in queries if (tree := query.tree()) is not None]
            has_run = bool(trees) and all("run" in lint_labels.of(tree, board.recorded) for tree in trees)
            if has_run and "/d/" in url and not re.search(r"var-run=\$\{__(data\.fields|field\.labels)\.run\b", url):
                yield panel["title"], f"leads to all chosen runs: {url}"


def annotations(board: Board) -> Found:
    """The ends of runs and the beginnings of alerts can be marked on every graph."""
    for metric in ("torch_train_state", "ALERTS"):
        if not any(metric in note.get("expr", "") for note in board.annotations()):
            yield "", f"no annotation from {metric}"
