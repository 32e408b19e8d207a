"""The dashboards as resources of Grafana's second schema, `dashboard.grafana.app/v2beta1`, made from the classic JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Json = dict[str, Any]

VERSION = "dashboard.grafana.app/v2beta1"

# The numbers of the classic JSON.
_SYNC = ("Off", "Crosshair", "Tooltip")
_REFRESH = ("never", "onDashboardLoad", "onTimeRangeChanged")
_SORT = ("disabled", "alphabeticalAsc", "alphabeticalDesc", "numericalAsc", "numericalDesc", "alphabeticalCaseInsensitiveAsc",
    "alphabeticalCaseInsensitiveDesc", "naturalAsc", "naturalDesc")  # fmt: skip


def resource(board: Mapping[str, Any]) -> Json:
    """Return the resource of a dashboard, for `kubectl`, `grafanactl` and Grafana's own API.

    Raises:
        ValueError: The dashboard has a setting that has no place here yet.
    """
    rows = _rows(board["panels"])
    panels = [panel for _, inner in rows for panel in inner]
    _known(board, "annotations description editable fiscalYearStartMonth graphTooltip links panels refresh schemaVersion tags "
        "templating time timezone title uid")  # fmt: skip
    spec = {
        "annotations": [_annotation(note) for note in board["annotations"]["list"]],
        "cursorSync": _SYNC[board["graphTooltip"]],
        "description": board["description"],
        "editable": board["editable"],
        "elements": {_name(panel): {"kind": "Panel", "spec": _panel(panel)} for panel in panels},
        "layout": {"kind": "RowsLayout", "spec": {"rows": [_row(row, inner) for row, inner in rows]}},
        "links": board["links"],
        "preload": False,
        "tags": board["tags"],
        "timeSettings": {
            "from": board["time"]["from"],
            "to": board["time"]["to"],
            "timezone": board["timezone"],
            "autoRefresh": board["refresh"],
            "autoRefreshIntervals": ["5s", "10s", "30s", "1m", "5m", "15m", "30m", "1h", "2h", "1d"],
            "hideTimepicker": False,
            "fiscalYearStartMonth": board["fiscalYearStartMonth"],
        },
        "title": board["title"],
        "variables": [_variable(each) for each in board["templating"]["list"]],
    }
    return {"apiVersion": VERSION, "kind": "Dashboard", "metadata": {"name": board["uid"]}, "spec": spec}


def _known(given: Mapping[str, Any], names: str) -> None:
    """Raise if there is a setting that would be lost."""
    if lost := given.keys() - set(names.split()):
        raise ValueError(f"{given.get('title') or given.get('name')}: no place in {VERSION} for {', '.join(sorted(lost))}")


def _rows(panels: Sequence[Json]) -> list[tuple[Json, list[Json]]]:
    """Return each row with its panels, which stand behind it, or in it if it is collapsed."""
    rows: list[tuple[Json, list[Json]]] = []
    for panel in panels:
        if panel["type"] == "row":
            rows.append((panel, list(panel["panels"])))
        else:
            rows[-1][1].append(panel)
    return rows


def _row(row: Json, panels: Sequence[Json]) -> Json:
    _known(row, "collapsed gridPos id panels title type")
    top = min(panel["gridPos"]["y"] for panel in panels)
    items = [{"kind": "GridLayoutItem", "spec": _item(panel, top)} for panel in panels]
    layout = {"kind": "GridLayout", "spec": {"items": items}}
    return {"kind": "RowsLayoutRow", "spec": {"title": row["title"], "collapse": row["collapsed"], "layout": layout}}


def _item(panel: Json, top: int) -> Json:
    place = panel["gridPos"]
    item = {"x": place["x"], "y": place["y"] - top, "width": place["w"], "height": place["h"]}
    item["element"] = {"kind": "ElementReference", "name": _name(panel)}
    if "repeat" in panel:
        direction = {"direction": panel["repeatDirection"], "maxPerRow": panel["maxPerRow"]}
        item["repeat"] = {"mode": "variable", "value": panel["repeat"], **direction}
    return item


def _name(panel: Json) -> str:
    return f"panel-{panel['id']}"


def _panel(panel: Json) -> Json:
    _known(panel, "datasource description fieldConfig gridPos id links maxDataPoints maxPerRow options repeat repeatDirection "
        "targets title transformations transparent type")  # fmt: skip
    data = {
        "queries": [{"kind": "PanelQuery", "spec": _query(target)} for target in panel["targets"]],
        "transformations": [{"kind": each["id"], "spec": each} for each in panel.get("transformations", ())],
        "queryOptions": {name: panel[name] for name in ("maxDataPoints",) if name in panel},
    }
    return {
        "id": panel["id"],
        "title": panel["title"],
        "description": panel["description"],
        "links": [{name: link[name] for name in ("title", "url", "targetBlank")} for link in panel.get("links", ())],
        "transparent": panel["transparent"],
        "data": {"kind": "QueryGroup", "spec": data},
        "vizConfig": {
            "kind": "VizConfig",
            "group": panel["type"],
            "version": "",
            "spec": {"options": panel["options"], "fieldConfig": panel["fieldConfig"]},
        },
    }


def _query(target: Json) -> Json:
    asked = {name: value for name, value in target.items() if name not in ("datasource", "refId")}
    return {"refId": target["refId"], "hidden": False, "query": _data_query(target["datasource"], asked)}


def _data_query(datasource: Json, spec: Json) -> Json:
    """Return a query of a data source, which is named by its variable."""
    named = {"name": datasource["uid"]}
    return {"kind": "DataQuery", "group": datasource["type"], "version": "v0", "datasource": named, "spec": spec}


def _annotation(note: Json) -> Json:
    _known(note, "builtIn datasource enable expr hide iconColor name textFormat titleFormat useValueForTime")
    own = {name: note[name] for name in ("enable", "hide", "iconColor", "name")}
    rest = {name: note[name] for name in ("expr", "textFormat", "titleFormat", "useValueForTime")}
    query = _data_query(note["datasource"], {"expr": note["expr"], "refId": "Anno"})
    return {"kind": "AnnotationQuery", "spec": {**own, "builtIn": False, "query": query, "legacyOptions": rest}}


def _variable(given: Json) -> Json:
    common = ("allValue", "allowCustomValue", "current", "description", "includeAll", "label", "multi", "name", "skipUrlSync")
    _known(given, "datasource query refresh sort type " + " ".join(common))
    spec = {name: given[name] for name in common if name in given}
    spec |= {"hide": "dontHide", "options": [], "regex": "", "refresh": _REFRESH[given.get("refresh", 1)]}
    if given["type"] == "datasource":
        return {"kind": "DatasourceVariable", "spec": {**spec, "pluginId": given["query"]}}
    query = _data_query(given["datasource"], {"__legacyStringValue": given["query"]})
    return {
        "kind": "QueryVariable",
        "spec": {**spec, "query": query, "definition": given["query"], "sort": _SORT[given["sort"]]},
    }
