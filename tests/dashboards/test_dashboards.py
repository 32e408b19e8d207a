"""The shipped dashboards are what the generator writes, and their labels and columns exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dashboards.generate.__main__ import ROOT, RUNBOOK, SERVED_RUNBOOK, differing, rendered
from dashboards.generate.panels import UNDRAWN
from dashboards.generate.queries import in_model_order, in_order
from tests.dashboards.lint import KNOWN
from tests.support.grafana import ALL, EVERYTHING, PanelQuery, dashboards, each_panel, interpolated, panels
from tests.support.tools import PATIENCE, find

BOARDS = dashboards()
QUERIES = [query for board in BOARDS.values() for query in panels(board)]
NAMES = sorted(BOARDS)


def asked(query: PanelQuery) -> set[str]:
    """Return the names of the series that a query selects."""
    return set(re.findall(r"([A-Za-z_:][\w:]*)\{", re.sub(r'"[^"]*"', "", query.expr)))


def test_files_are_what_the_generator_makes() -> None:
    """The committed files are byte for byte what `make dashboards` writes."""
    assert len(BOARDS) == 7
    assert differing() == []


@pytest.mark.slow
def test_check_reports_changed_and_extra_files(tmp_path: Path) -> None:
    """`--check` reports one changed byte, one missing file and one extra file."""
    for path in rendered():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    (tmp_path / RUNBOOK).write_text((tmp_path / RUNBOOK).read_text(encoding="utf-8") + " ", encoding="utf-8")
    (tmp_path / SERVED_RUNBOOK).unlink()
    changed = []
    for folder, first, second, other in (
        ("grafana", "ranks.json", "layers.json", "other.json"),
        ("grafana-v2", "ranks.json", "layers.json", "other.json"),
        ("prometheus", "training.alerts.yml", "gradients.alerts.yml", "other.alerts.yml"),
    ):
        place = tmp_path / "dashboards" / folder
        (place / first).write_text((place / first).read_text(encoding="utf-8") + " ", encoding="utf-8")
        (place / second).unlink()
        (place / other).write_text("{}", encoding="utf-8")
        changed += [f"dashboards/{folder}/{name}" for name in (first, second, other)]
    assert differing(tmp_path) == sorted([*changed, RUNBOOK, SERVED_RUNBOOK])


@pytest.mark.parametrize("name", NAMES)
def test_labels_exist(name: str) -> None:
    """Each label in a legend, `by`, `on` and `group_left` is one of the selected series."""
    for panel in each_panel(BOARDS[name]):
        queries = [query for query in panels(BOARDS[name]) if query.panel == panel["title"]]
        for query, target in zip(queries, panel["targets"], strict=True):  # type: ignore[call-overload]
            clauses = re.findall(r"\b(?:by|on|group_left|ignoring) \(([\w, ]*)\)", query.expr)
            used = {label for clause in clauses for label in clause.split(", ") if label}
            used |= set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            used -= {"as", "parent", "rank_name", "note"}  # which queries make
            selected = queries if panel["type"] == "table" else [query]
            assert used <= set().union(*(KNOWN[series] for one in selected for series in asked(one))), query


@pytest.mark.parametrize("name", NAMES)
def test_columns_of_tables_are_answered(name: str) -> None:
    """Each column of a table is a query's value or a label of its series."""
    for panel in each_panel(BOARDS[name]):
        if panel["type"] != "table":
            continue
        queries = [query for query in panels(BOARDS[name]) if query.panel == panel["title"]]
        values = {f"Value #{query.ref}" for query in queries} if len(queries) > 1 else {"Value"}
        arranged = next(done["options"] for done in panel["transformations"] if done["id"] == "organize")  # type: ignore[attr-defined]
        labels = set().union(*(KNOWN[series] for query in queries for series in asked(query)))
        assert set(arranged["indexByName"]) <= values | labels | {"note"}, panel["title"]
        # The value of a query whose labels alone are shown, such as torch_train_info's 1, is no column.
        assert len(values - set(arranged["indexByName"])) <= 1, panel["title"]


def test_panel_ids_follow_row_and_place() -> None:
    """Panel 203 is the third of the second row, so a new panel in one row keeps saved links to other rows."""
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


def test_heatmaps_take_the_chosen_layers() -> None:
    """A query for a layer's buckets selects the chosen layers: 300 layers have 4,000 series of them."""
    buckets = [query for query in QUERIES if "torch_grad_norm_distribution_bucket" in query.expr]
    assert buckets
    assert all('layer=~"$layer"' in query.expr for query in buckets)


def test_variables_stand_for_what_grafana_writes() -> None:
    """A value is escaped, multiple values are joined, and All stays as it is."""
    expression = 'rate(x{job=~"$job", run=~"$run", layer=~"${layer}"}[$__rate_interval]) / $__range + $__interval'
    chosen = {"job": ALL, "run": ["a+b"], "layer": ["blocks.0.up", "head"]}
    assert interpolated(expression, chosen, "1m", span="2h", interval="30s") == (
        r'rate(x{job=~".+", run=~"a\\+b", layer=~"(blocks\\.0\\.up|head)"}[1m]) / 2h + 30s'
    )


@pytest.mark.server
def test_prometheus_reads_names_of_layers(tmp_path: Path) -> None:
    """Prometheus selects only the layer whose name was escaped, and orders by names or by the place in the model."""
    layers = {"blocks.2.fc.1": "blocks.002.fc.001", "blocks.10.fc.1": "blocks.010.fc.001", "blocks.113.fc": "blocks.113.fc"}
    run = "sweep_1_seed_3_of.7.8"
    series = [{"series": f'x{{run="{run}", layer="{layer}"}}', "values": "1"} for layer in layers]
    series += [{"series": f'y{{layer="{layer}"}}', "values": "1"} for layer in ("a.b(1)", "aXb(1)")]
    index = f'torch_grad_layer_index{{job="t", run="{run}"'
    series += [{"series": f'{index}, layer="{layer}"}}', "values": str(place)}
        for layer, place in (("blocks.2.fc.1", 120), ("blocks.10.fc.1", 7))]  # fmt: skip
    places = {"blocks.10.fc.1": " 0007", "blocks.2.fc.1": " 0120", "blocks.113.fc": " ~ blocks.113.fc"}
    expected = {
        interpolated(in_model_order("x * 1"), dict.fromkeys(("job", "run"), ALL), "1m"): [
            f'{{as="{run}{place}", run="{run}", layer="{layer}"}}' for layer, place in places.items()
        ],
        # A module without a place comes after the layer beside it.
        interpolated(
            in_model_order('label_replace(x * 1, "layer", "${1}relu", "layer", "(.*)1")', modules=True),
            dict.fromkeys(("job", "run"), ALL),
            "1m",
        ): [
            f'{{as="{run}{places[f"{block}.1"]} {block}.relu", run="{run}", layer="{block}.relu", parent="{block}."}}'
            for block in ("blocks.2.fc", "blocks.10.fc")
        ]
        + [f'{{as="{run} ~ blocks.113.fc", run="{run}", layer="blocks.113.fc"}}'],
        interpolated('y{layer=~"$layer"}', {"layer": ["a.b(1)"]}, "1m"): ['y{layer="a.b(1)"}'],
        in_order("x", "run", "layer"): [
            f'x{{as="{run} {padded}", run="{run}", layer="{layer}"}}' for layer, padded in layers.items()
        ],
    }
    check(tmp_path, series, {expression: dict.fromkeys(labels, 1.0) for expression, labels in expected.items()}, "0s")


def check(tmp_path: Path, series: Sequence[dict[str, str]], expected: Mapping[str, Mapping[str, float]], at: str) -> None:
    """Let promtool compare what expressions yield: series by their labels, with their values."""
    checks = [
        {"expr": expression, "eval_time": at, "exp_samples": [{"labels": labels, "value": v} for labels, v in found.items()]}
        for expression, found in expected.items()
    ]
    test = {"rule_files": [], "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": checks}]}
    (tmp_path / "test.yml").write_text(json.dumps(test), encoding="utf-8")
    command = [find("promtool"), "test", "rules", tmp_path / "test.yml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.server
def test_distributions_show_used_buckets_only(tmp_path: Path) -> None:
    """A distribution has the buckets from the lowest to the highest with an observation, and a sentence without any."""
    bounds = ("1e-05", "0.0001", "0.001", "10", "+Inf")
    histograms = {"a": (0, 3, 4, 4, 4), "b": (0, 0, 0, 1, 3), "c": (0, 0, 0, 0, 2), "d": (2, 2, 2, 2, 2), "e": (0, 0, 0, 0, 0)}
    series, expected = [], {}
    (query,) = (query for query in QUERIES if query.panel == "Distribution of step times")
    for run, counts in histograms.items():
        own = f'job="t", run="{run}", rank="0"'
        series += [{"series": f"torch_train_world_size{{{own}}}", "values": "1x9"}]
        for bound, count in zip(bounds, counts, strict=True):
            name = f'torch_train_step_duration_seconds_bucket{{{own}, le="{bound}"}}'
            series.append({"series": name, "values": f"0 {count}x7"})
        inside = [place for place, count in enumerate(counts) if count and (not place or counts[place - 1] < counts[-1])]
        asked = interpolated(query.expr, EVERYTHING | {"run": [run]}, "9m", span="8m")
        expected[asked] = {f'{{le="{bounds[place]}"}}': counts[place] for place in inside}
    nothing = '{le="No step in this time range, or one scrape only"}'
    expected[asked] = {nothing: UNDRAWN}
    check(tmp_path, series, expected, "8m")


@pytest.mark.server
def test_layers_without_a_number_are_drawn(tmp_path: Path) -> None:
    """A layer whose gradient is NaN, Inf or zero has cells beyond the end of the scale, not holes."""
    own = 'job="t", run="r", rank="0"'
    norms = {"a": "NaN", "b": "Inf", "c": "0", "d": "1"}
    series = [{"series": f'torch_grad_norm{{{own}, layer="{layer}"}}', "values": value} for layer, value in norms.items()]
    series += [{"series": f"torch_train_world_size{{{own}}}", "values": "1"}]
    series += [{"series": f'torch_grad_norm_zscore{{{own}, layer="d"}}', "values": "2"}]
    asked = {
        query.panel: interpolated(query.expr, EVERYTHING, "1m") for query in QUERIES if query.dashboard == "Gradients by layer"
    }
    shown = {
        "Norm of every layer": {"a": 99.0, "b": 99.0, "c": -12.0, "d": 0.0},
        "Deviation of every layer from its own baseline": {"a": 99.0, "b": 99.0, "c": -99.0, "d": 2.0},
    }
    expected = {
        asked[title]: {f'{{as="r ~ {layer}", run="r", layer="{layer}"}}': value for layer, value in layers.items()}
        for title, layers in shown.items()
    }
    check(tmp_path, series, expected, "0s")


@pytest.mark.server
def test_no_quantile_is_above_the_longest_step(tmp_path: Path) -> None:
    """Steps of 1.05 s are not 1.75 s, the middle of their bucket, and a run that stands still has no quantile."""
    series = []
    for run, growth, longest in (("short", 60, "1.05"), ("long", 60, "2.5"), ("still", 0, "1.05"), ("unknown", 60, None)):
        own = f'job="t", run="{run}", rank="0"'
        series.append({"series": f"torch_train_world_size{{{own}}}", "values": "1x9"})
        for bound, count in (("1", 0), ("2.5", growth), ("+Inf", growth)):
            name = f'torch_train_step_duration_seconds_bucket{{{own}, le="{bound}"}}'
            series.append({"series": name, "values": f"0+{count}x9"})
        if longest is not None:
            series.append({"series": f"torch_train_slowest_step_seconds{{{own}}}", "values": f"{longest}x9"})
    expected = {}
    for ref, inside in (("A", 1.75), ("B", 2.485)):
        (query,) = (query for query in QUERIES if (query.panel, query.ref) == ("Step time", ref))
        asked = interpolated(query.expr, EVERYTHING, "4m")
        expected[asked] = {'{run="short"}': 1.05, '{run="long"}': inside, '{run="unknown"}': inside}
    check(tmp_path, series, expected, "8m")


@pytest.mark.server
def test_a_layer_that_pauses_is_not_listed(tmp_path: Path) -> None:
    """A table lists the last values of an ended run for an hour, and none of a layer whose run goes on without it."""
    gauges = {"norm": 3.0, "norm_zscore": -7.0, "zero_units_ratio": 0.5, "dead_ratio": 0.25, "zero_ratio": 0.75}
    names = {f"torch_grad_{name}": value for name, value in gauges.items()}
    names |= {f"run_layer:torch_grad_{name}:mean": gauges[name] for name in ("zero_units_ratio", "dead_ratio")}
    names |= {"run_layer:torch_grad_norm:rms5m": 4.0, "torch_grad_shard_norm": 2.0}
    series = []
    for run, last in (("ends", 2), ("goes-on", 20)):
        own = f'job="t", run="{run}", rank="0"'
        series.append({"series": f"torch_train_world_size{{{own}}}", "values": f"1x{last}"})
        for name, value in names.items():
            labels = f'run="{run}", layer="l"' + ("" if ":" in name else ', job="t", rank="0"')
            series.append({"series": f"{name}{{{labels}}}", "values": f"{value}x2"})
    shown = {("Largest norms", "A"): 3.0, ("Furthest from their own baseline", "A"): 7.0}
    shown |= {("Zero and dead units", ref): value for ref, value in (("A", 0.5), ("B", 0.25), ("C", 0.75))}
    expected = {
        interpolated(query.expr, EVERYTHING, "4m"): {'{layer="l", run="ends"}': shown[query.panel, query.ref]}
        for query in QUERIES
        if (query.panel, query.ref) in shown
    }
    assert len(expected) == len(shown)
    check(tmp_path, series, expected, "15m")


@pytest.mark.server
def test_many_runs_have_a_line_each(tmp_path: Path) -> None:
    """Of more than four runs the panel of norms has the largest layer, or the norm where no layer's is known."""
    refs = {
        query.ref: query.expr for query in QUERIES if query.panel.startswith("Gradient norm") and query.dashboard.startswith("T")
    }
    norms = {"global_norm": 1.0, "global_norm_after_clip": 0.5, "norm_recent_max": 2.0}
    for number in (4, 5):
        runs = "abcde"[:number]
        series = []
        for run in runs:
            own = f'job="t", run="{run}", rank="0"'
            series.append({"series": f"torch_train_world_size{{{own}}}", "values": "1"})
            for name, value in norms.items():
                if run != "a" or name != "norm_recent_max":
                    series.append({"series": f"torch_grad_{name}{{{own}}}", "values": str(value)})
        few = number == 4
        expected = {
            interpolated(refs["A"], EVERYTHING, "4m"): {f'{{run="{run}"}}': 1.0 for run in (runs if few else "a")},
            interpolated(refs["B"], EVERYTHING, "4m"): {f'{{run="{run}"}}': 0.5 for run in (runs if few else "")},
            interpolated(refs["C"], EVERYTHING, "4m"): {f'{{run="{run}"}}': 2.0 for run in runs if run != "a"},
        }
        check(tmp_path, series, expected, "0s")
