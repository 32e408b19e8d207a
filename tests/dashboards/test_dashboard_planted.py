"""Faults that a person saw in Grafana, planted one at a time in the dashboards that are shipped: the lint finds each."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.dashboards.lint import RULES, findings
from tests.dashboards.lint.labels import of_rules
from tests.dashboards.lint.model import Board, Json, objects
from tests.support.tools import REPOSITORY

BOARDS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((REPOSITORY / "dashboards" / "grafana").glob("*.json"))
}
BY_UID = {board["uid"]: board for board in BOARDS.values()}
RECORDED = of_rules(REPOSITORY / "dashboards" / "prometheus")

Plant = Callable[[Json], object]


def panels(board: Json, kind: str, asking: str = "") -> Iterator[Json]:
    """The panels of this kind of which a query has this in it, a regular expression."""
    for panel in (inner for top in board["panels"] for inner in (top, *top.get("panels", []))):
        text = "\n".join(target["expr"] for target in panel.get("targets", []))
        if panel["type"] == kind and re.search(asking, text):
            yield panel


def in_each(kind: str, asking: str, put: Plant) -> Plant:
    """The fault in each panel of a kind that asks for something."""

    def plant(board: Json) -> None:
        for panel in panels(board, kind, asking):
            put(panel)

    return plant


def value(*path: str | int, to: object) -> Plant:
    """A value at a path within the panel."""

    def put(panel: Json) -> None:
        found: Any = panel
        for step in path[:-1]:
            found = found[step] if isinstance(found, list) else found.setdefault(step, {})
        found[path[-1]] = copy.deepcopy(to)

    return put


def without(*keys: str) -> Plant:
    """A setting taken out of the field config, and of the overrides."""

    def put(panel: Json) -> None:
        config = panel["fieldConfig"]
        for key in keys:
            config["defaults"].pop(key, None)
        for override in config["overrides"]:
            override["properties"] = [setting for setting in override["properties"] if setting["id"] not in keys]

    return put


def written(pattern: str, by: str) -> Plant:
    """Queries with something else in the place of a pattern."""

    def put(panel: Json) -> None:
        for target in panel["targets"]:
            target["expr"] = re.sub(pattern, by, target["expr"])

    return put


def defaults(**more: object) -> Plant:
    """Other defaults of the field config."""
    return lambda panel: panel["fieldConfig"]["defaults"].update(more)


def noted(**more: object) -> Plant:
    """The annotations with other settings."""

    def plant(board: Json) -> None:
        for note in board["annotations"]["list"]:
            note.update(more)

    return plant


def following_all(panel: Json) -> None:
    """Links to all chosen runs."""
    for link in objects(panel["fieldConfig"]):
        if "url" in link:
            link["url"] = link["url"].replace("var-run=${__field.labels.run}", "${run:queryparam}")


def swapped(panel: Json) -> None:
    """Dead with the smaller number of the two, as if a vanished gradient were worse."""
    options = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
    dead, vanished = (next(key for key, result in options.items() if result["text"] == text) for text in ("Dead", "Vanished"))
    words = options[dead], options[vanished]
    options[min(dead, vanished)], options[max(dead, vanished)] = words


def backwards(panel: Json) -> None:
    """The conditions of a query with the numbers of their states the other way round."""
    for target in panel["targets"]:
        target["expr"] = re.sub(r"\* 0 \+ (\d)", lambda found: f"* 0 + {5 - int(found[1])}", target["expr"])


def a_state_less(panel: Json) -> None:
    """The first state without its word."""
    options = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
    options.pop(min(options))


def without_buckets(panel: Json) -> None:
    """No query of the histogram."""
    panel["targets"] = [target for target in panel["targets"] if "_bucket" not in target["expr"]]


def into_a_closed_row(board: Json) -> None:
    """The table of alerts in a row that is to be opened first."""
    chosen = next(panels(board, "table", "ALERTS"))
    board["panels"].remove(chosen)
    board["panels"].append({"id": 9900, "type": "row", "title": "More", "collapsed": True, "panels": [chosen],
                            "gridPos": {"x": 0, "y": 0, "w": 24, "h": 1}})  # fmt: skip


def gpu_first(board: Json) -> None:
    """In the place of the first panel one that needs a GPU."""
    first = min((panel for panel in board["panels"] if panel["type"] != "row"), key=lambda panel: panel["gridPos"]["y"])
    first["type"] = "timeseries"
    first["targets"] = copy.deepcopy(next(panels(board, "timeseries", "torch_gpu_power_watts"))["targets"])


FIRING = 'ALERTS{alertstate="firing", run=~"$run"}'
STATE = 'torch_train_state{job=~"$job", run=~"$run"}'

PLANTED: dict[str, tuple[str, str, str, Plant]] = {
    "heatmap without filterValues": (
        "hidden-cells", "layers", "1e-09", in_each("heatmap", "log10", lambda panel: panel["options"].pop("filterValues", None))),
    "heatmap with empty filterValues": (
        "hidden-cells", "layers", "1e-09", in_each("heatmap", "zscore", value("options", "filterValues", to={}))),
    "histogram that hides single counts": (
        "hidden-cells", "training", "cells of 1 and less",
        in_each("heatmap", "_bucket", value("options", "filterValues", to={"le": 1}))),
    "colours turned back": (
        "inverted-colors", "layers", "RdYlBu", in_each("heatmap", "zscore", value("options", "color", "reverse", to=True))),
    "annotations on": ("annotations-off", "ranks", "on at first", noted(enable=True)),
    "annotations without a time": ("annotations-onsets", "training", "region", noted(useValueForTime=False)),
    "annotation of all that fires": ("annotations-onsets", "layers", "region", noted(expr=FIRING, useValueForTime=False)),
    "annotation of each state": ("annotations-states", "exporter", "evaluating", noted(expr=f"1000 * {STATE}")),
    "exporter's cost in the place of the slowest rank": ("straggler-first", "training", "waits", in_each(
        "stat", "own_seconds|gradient_wait", value("targets", to=[
            {"refId": "A", "expr": 'max(torch_grad_exporter_overhead_ratio{job=~"$job", run=~"$run"})'}]))),
    "dead is called vanished": ("seriousness", "layers", "is called that", in_each("state-timeline", "dead_ratio", swapped)),
    "vanished comes before dead": ("seriousness", "layers", "stand in the order",
        in_each("state-timeline", "dead_ratio", backwards)),
    "states without a colour mode": ("state-legends", "ranks", "continuous", in_each("state-timeline", "", without("color"))),
    "states without a legend": (
        "state-legends", "exporter", "not shown",
        in_each("state-timeline", "", value("options", "legend", "showLegend", to=False))),
    "state without a word": ("state-names", "ranks", "has no word", in_each("state-timeline", "", a_state_less)),
    "link to all runs": ("links-of-run", "training", "leads to all", in_each("timeseries", "torch_train_loss", following_all)),
    "link from an empty cell": ("links-never-empty", "training", "layer", in_each("table", "ALERTS", written('"All"', '""'))),
    "norm at scrapes only": (
        "norm-outliers", "training", "largest norm", in_each("timeseries", "torch_grad_global_norm", without_buckets)),
    "bar of any length": ("bars", "training", "no max", in_each("bargauge", "", without("max"))),
    "bar in a table without a maximum": ("bars", "ranks", "no max", in_each("table", "", without("max"))),
    "bar in a table without a minimum": ("bars", "layers", "no min", in_each("table", "zero_units", without("min"))),
    "table in half of its width": (
        "table-width", "training", "pixels", in_each("table", "torch_train_world_size", value("gridPos", "w", to=7))),
    "columns without widths": ("table-width", "exporter", "pixels", in_each("table", "", lambda panel: [
        without("custom.width")(panel), value("gridPos", "w", to=12)(panel)])),
    "runs that have ended are left out": (
        "ended-runs", "training", "has ended", in_each("table", "world_size", written(r"last_over_time\((.*?)\[1h\]\)", r"(\1)"))),
    "colours by name of several": (
        "colors", "ranks", "by name", in_each("timeseries", "own_seconds", defaults(color={"mode": "palette-classic-by-name"}))),
    "run with another colour": ("colors", "training", "another colour",
        in_each("timeseries", "torch_train_loss", without("color"))),
    "scientific without decimals": ("decimals", "training", "decimals",
        in_each("timeseries", "learning_rate", without("decimals"))),
    "ticks that are all 0": ("log-axis", "layers", "read 0",
        in_each("timeseries", "torch_grad_norm_recent_max", defaults(unit="short"))),
    "steps in c/s": ("bare-rates", "training", "cps", in_each("timeseries", "torch_train_samples_total", defaults(unit="cps"))),
    "events of 1.33": ("whole-counts", "resources", "not rounded", in_each("timeseries", "increase", written(r"\bround\(", "("))),
    "events with decimals": ("whole-counts", "ranks", "2 decimals", in_each("timeseries", "increase", defaults(decimals=2))),
    "host drawn for each run": ("per-host", "resources", "for each host, run", in_each(
        "timeseries", "torch_host_", written(r"max by \(host\)", "max by (run, host)"))),
    "zeros of each source": ("errors-that-are", "exporter", "source",
        in_each("timeseries", "errors_total", written(r" > 0\b", ""))),
    "alerts by time": ("table-order", "training", "severity", in_each("table", "ALERTS", value(
        "options", "sortBy", to=[{"displayName": "Since", "desc": True}]))),
    "runs mixed": ("table-order", "training", "runs are mixed", in_each("table", "world_size", value("options", "sortBy", to=[]))),
    "GPUs first": ("gpu-first", "resources", "without a GPU", gpu_first),
    "utilisation on any axis": ("axes", "resources", "utilisation", in_each("timeseries", "torch_gpu_utilization", without("max"))),
    "temperature without a limit": (
        "axes", "resources", "temperature", in_each("timeseries", "temperature", without("thresholds", "custom.thresholdsStyle"))),
    "throttling as lines": (
        "axes", "resources", "throttling",
        in_each("state-timeline", "gpu_throttled", lambda panel: panel.update(type="timeseries"))),
    "loss below the screen": ("one-screen", "training", "loss ends",
        in_each("timeseries", "torch_train_loss", value("gridPos", "y", to=30))),
    "alerts in a closed row": ("one-screen", "training", "firing alerts", into_a_closed_row),
    "rules that nobody names": ("says-what-is-missing", "ranks", "rules", in_each(
        "timeseries", "own_seconds", defaults(noValue="There is only one rank here"))),
    "a sentence on a tile": ("short-in-tiles", "training", "letters", in_each(
        "stat", "excess_ratio", defaults(noValue="One rank, or own time unknown: on CUDA, under FSDP2, without the rules"))),
    "a bar without length": ("limits", "training", "from 0 to 0", in_each("bargauge", "", defaults(max=0))),
    "per cent on a share": ("limits", "training", "threshold of 25", in_each("stat", "excess_ratio", value(
        "fieldConfig", "defaults", "thresholds", "steps", 1, "value", to=25))),
    "no data": ("says-what-is-missing", "training", "No data", in_each("stat", "", defaults(noValue="No data"))),
}  # fmt: skip


def found(board: Json, rule: str, text: str) -> set[tuple[str, str]]:
    """What the rule finds that says this, as panel and text."""
    all_found = findings(Board(board, BY_UID, RECORDED), {rule: RULES[rule]})
    return {(one.panel, one.text) for one in all_found if text in one.text}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_found(fault: str) -> None:
    """The rule that is for the fault finds it, and found nothing of it before."""
    rule, name, text, plant = PLANTED[fault]
    broken = copy.deepcopy(BOARDS[name])
    plant(broken)
    assert broken != BOARDS[name], "nothing was planted"
    assert not found(BOARDS[name], rule, text)
    assert found(broken, rule, text)


def test_each_rule_of_what_was_seen_has_a_plant() -> None:
    """Every rule after `hidden-cells` in the list is tried on the shipped dashboards too."""
    names = list(RULES)
    assert set(names[names.index("hidden-cells") :]) == {rule for rule, *_ in PLANTED.values()}
