"""What is demanded of settings, data source, variables and links. Each rule yields (panel, text) for what it finds."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.dashboards.lint.model import Board, objects, strings

Found = Iterator[tuple[str, str]]

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
BUILT_IN = ({"type": "grafana", "uid": "-- Grafana --"}, {"type": "datasource", "uid": "grafana"})


def dashboard_settings(board: Board) -> Found:
    """Classic JSON that can be provisioned, with the settings that all our dashboards share."""
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
    """Nothing that only the dialog for importing fills in: provisioning leaves it as it is."""
    for key in ("__inputs", "__requires", "__elements"):
        if key in board.json:
            yield "", f"{key} is for importing by hand"
    for text in strings(board.json):
        if "${DS_" in text:
            yield "", f"{text} is for importing by hand"


def datasource_variable(board: Board) -> Found:
    """One variable chooses the data source, and is called `datasource`."""
    found = [variable for variable in board.variables() if variable["type"] == "datasource"]
    if [(variable["name"], variable.get("query")) for variable in found] != [("datasource", "prometheus")]:
        yield "", "not one variable `datasource` for Prometheus"
    for variable in found:
        if not variable.get("label"):
            yield f"variable {variable['name']}", "no label"


def datasource_everywhere(board: Board) -> Found:
    """Whatever asks a data source asks the chosen one: no uid of one certain Grafana, no null."""
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


def _choice(board: Board, name: str) -> Found:
    """A variable to choose by: several at once, all by default, and asked for again when the time range changes."""
    wanted = {"type": "query", "multi": True, "includeAll": True, "allValue": ".+", "refresh": 2}
    found = [variable for variable in board.variables() if variable["name"] == name]
    if not found:
        yield "", f"no variable {name}"
    for key, value in wanted.items():
        if found and found[0].get(key) != value:
            yield f"variable {name}", f"{key} is {found[0].get(key)!r}, not {value!r}"
    if found and not found[0].get("label"):
        yield f"variable {name}", "no label"


def job_variable(board: Board) -> Found:
    """The jobs can be chosen."""
    return _choice(board, "job")


def run_and_rank_variables(board: Board) -> Found:
    """Runs and ranks can be chosen, and layers where there is a variable for them."""
    for name in ("run", "rank", *(v["name"] for v in board.variables() if v["name"] == "layer")):
        yield from _choice(board, name)


def reload_on_time_change(board: Board) -> Found:
    """What can be chosen is what there is in the time range shown."""
    for variable in board.variables():
        if variable["type"] == "query" and variable.get("refresh") != 2:
            yield f"variable {variable['name']}", f"refresh is {variable.get('refresh')!r}, not 2, on a change of the time range"


def _variables_in(json: object) -> set[str]:
    found = {
        name
        for text in strings(json)
        for match in re.findall(r"\$(?:\{([A-Za-z]\w*)|([A-Za-z]\w*))|\[\[(\w+)", text)
        for name in match
    }
    return found - {""}


def variables_defined(board: Board) -> Found:
    """Each variable that is used exists; Grafana's own begin with two underscores."""
    for name in sorted(_variables_in(board.json) - {variable["name"] for variable in board.variables()}):
        yield "", f"no variable {name}"


def variables_used(board: Board) -> Found:
    """Each variable changes something."""
    for variable in board.variables():
        rest = board.json | {"templating": [other for other in board.variables() if other is not variable]}
        repeats = {panel.get("repeat") for panel in board.panels()}
        if variable["name"] not in _variables_in(rest) | repeats:
            yield f"variable {variable['name']}", "is not used"


def links(board: Board) -> Found:
    """Dashboards are linked to each other by the time range and the variables; each link leads to a dashboard and what it knows."""
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
