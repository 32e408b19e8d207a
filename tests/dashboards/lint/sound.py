"""A dashboard in which nothing is wrong, for faults to be put in one at a time."""

from __future__ import annotations

from tests.dashboards.lint.model import Json
from tests.dashboards.lint.overview import OVERVIEW

CHOSEN = '{job=~"$job",run=~"$run",rank=~"$rank"}'
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def sound() -> Json:
    """A dashboard with one panel of each kind that the rules treat by itself, and nothing to find."""
    names = ["job", "run", "rank"]
    return {
        "uid": OVERVIEW, "title": "Sound", "description": "Nothing is wrong.", "tags": ["torch-grad-exporter"], "schemaVersion": 41,
        "editable": False, "graphTooltip": 1, "time": {"from": "now-1h", "to": "now"},
        "panels": [*_numbers_and_tables(), *_pictures(), *_below_the_screen()],
        "links": [{"title": "More", "type": "dashboards", "tags": ["torch-grad-exporter"], "includeVars": True, "keepTime": True}],
        "templating": {"list": [
            {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
            *(variable_of(name, names[:place]) for place, name in enumerate(names)),
        ]},
        "annotations": {"list": [
            _note("Ends", f"1000 * (torch_train_last_activity_timestamp_seconds{CHOSEN} and on (run, rank) "
                          'torch_train_state{job=~"$job",run=~"$run",state=~"finished|failed"} == 1)'),
            _note("Alerts", '1000 * ALERTS_FOR_STATE{run=~"$run"}'),
        ]},
    }  # fmt: skip


def _note(name: str, expression: str) -> Json:
    return {"name": name, "datasource": DATASOURCE, "expr": expression, "enable": False, "useValueForTime": True}


def _numbers_and_tables() -> list[Json]:
    """The first row, in which the table of layers stands last, and two tables."""
    graph = panel_of(
        1, "timeseries", (0, 0, 8), f"sum by (rank) (rate(torch_train_steps_total{CHOSEN}[$__rate_interval]))", "rank {{rank}}"
    )
    loss = panel_of(2, "stat", (8, 0, 8), f"avg(torch_train_loss{CHOSEN} == torch_train_loss{CHOSEN})")
    loss["fieldConfig"]["defaults"]["thresholds"] = NO_COLOR
    buckets = f"sum by (le) (increase(torch_train_step_duration_seconds_bucket{CHOSEN}[$__rate_interval]))"
    heat = panel_of(3, "heatmap", (16, 0, 4), buckets, "{{le}}")
    heat["options"] = {"yAxis": {"unit": "s"}, "cellValues": {"unit": "short", "decimals": 0}}
    heat["targets"][0]["format"] = "heatmap"
    layers = f"topk(5, max by (run, layer) (torch_grad_norm{CHOSEN}))"
    to_layer = "/d/torch-grad-layers?var-run=${__data.fields.run}&var-layer=${__data.fields.layer}"
    table = _table(
        4,
        (0, 8, 12),
        layers,
        {
            "layer": {"links": [{"url": to_layer}]},
            "Time": {"custom.hidden": True},
            "Value": {"unit": "sci", "decimals": 1, "custom.cellOptions": {"type": "gauge"}, "min": 0, "max": 10},
        },
        "Value",
    )
    serious = " or ".join(
        f'ALERTS{{alertstate="firing",run=~"$run",severity="{name}"}} * {number}'
        for number, name in ((3, "critical"), (2, "warning"), (1, "info"))
    )
    alerts = _table(
        5,
        (12, 8, 12),
        f'label_replace(max by (run, layer, alertname) ({serious}), "layer", "All", "layer", "")',
        {
            "layer": {"links": [{"url": to_layer}]},
            "Time": {"custom.hidden": True},
            "Value": {"mappings": _mappings((1, "info", "blue"), (2, "warning", "orange"), (3, "critical", "red"))},
        },
        "Value",
    )
    alerts["fieldConfig"]["defaults"]["noValue"] = "No alert fires, or the rules are not loaded"
    runs = _table(6, (12, 40, 12), f"max by (run) (last_over_time(torch_train_epoch{CHOSEN}[1h]))", {}, "run", desc=False)
    return [graph, loss, heat, table, alerts, runs]


def _pictures() -> list[Json]:
    """What the overview shows on its first screen beside them."""
    own = "rank:torch_train_own_seconds:ratio_fastest"
    worst = panel_of(7, "bargauge", (20, 0, 4), f'topk(5, {own}{{run=~"$run",rank=~"$rank"}})', "{{run}} rank {{rank}}")
    worst["fieldConfig"]["defaults"] |= {
        "noValue": "Not known without the rules",
        "min": 0,
        "max": 4,
        "thresholds": NO_COLOR,
        "links": [{"url": "/d/torch-grad-ranks?var-run=${__field.labels.run}&var-rank=${__field.labels.rank}"}],
    }
    state = 'torch_train_state{job=~"$job",run=~"$run",state="STATE"} == 1'
    states = f"max by (run) (({state.replace('STATE', 'training')}) * 1 or ({state.replace('STATE', 'failed')}) * 2)"
    timeline = panel_of(8, "state-timeline", (0, 14, 8), states, "{{run}}")
    timeline["fieldConfig"]["defaults"] |= {
        "color": {"mode": "fixed"},
        "thresholds": NO_COLOR,
        "mappings": _mappings((1, "Training", "green"), (2, "Failed", "red")),
    }
    norm = panel_of(9, "timeseries", (8, 14, 8), f"max by (run) (torch_grad_global_norm{CHOSEN})", "{{run}}")
    norm["fieldConfig"]["defaults"] |= {
        "unit": "sci",
        "decimals": 1,
        "color": {"mode": "palette-classic-by-name"},
        "custom": {"scaleDistribution": {"type": "log", "log": 10}},
    }
    buckets = f"sum by (run, le) (rate(torch_grad_global_norm_distribution_bucket{CHOSEN}[$__rate_interval]))"
    norm["targets"].append(
        norm["targets"][0] | {"refId": "B", "expr": f"histogram_quantile(1, {buckets})", "legendFormat": "{{run}} most"}
    )
    norm["fieldConfig"]["overrides"] = [
        {"matcher": {"id": "byFrameRefID", "options": "B"}, "properties": [{"id": "color", "value": {"mode": "palette-classic"}}]}
    ]
    lost = panel_of(10, "timeseries", (16, 14, 8), f"avg by (run) (torch_train_loss{CHOSEN} > -Inf)", "{{run}}")
    lost["fieldConfig"]["defaults"]["color"] = {"mode": "palette-classic-by-name"}
    return [worst, timeline, norm, lost]


def _below_the_screen() -> list[Json]:
    """One panel for each rule about something else."""
    field = panel_of(11, "heatmap", (0, 22, 12), f"max by (run, layer) (torch_grad_norm_zscore{CHOSEN})", "{{layer}}")
    field["options"] = {
        "yAxis": {"unit": "short"},
        "color": {"scheme": "RdYlBu", "min": -6, "max": 6},
        "filterValues": {"le": -1000},
    }
    trouble = panel_of(
        12,
        "state-timeline",
        (12, 22, 12),
        (
            f"(max by (run, layer) (torch_grad_missing_parameters{CHOSEN}) > 0) * 0 + 3"
            f" or (max by (run, layer) (torch_grad_dead_ratio{CHOSEN}) > 0.9) * 0 + 2"
            f" or (max by (run, layer) (torch_grad_norm{CHOSEN}) < 1e-7) * 0 + 1"
        ),
        "{{layer}}",
    )
    trouble["fieldConfig"]["defaults"] |= {
        "color": {"mode": "fixed"},
        "thresholds": NO_COLOR,
        "mappings": _mappings((1, "Vanished", "yellow"), (2, "Dead", "orange"), (3, "No gradient", "red")),
    }
    throttled = f"max by (host) ((rate(torch_gpu_throttled_seconds_total{CHOSEN}[$__rate_interval]) > bool 0.1)" + JOINED
    heat = panel_of(13, "state-timeline", (0, 30, 8), throttled, "{{host}}")
    heat["fieldConfig"]["defaults"] |= {
        "color": {"mode": "fixed"},
        "thresholds": NO_COLOR,
        "mappings": _mappings((0, "Free", "green"), (1, "Held back", "red")),
    }
    busy = panel_of(14, "timeseries", (8, 30, 4), f"max by (host) (torch_gpu_utilization_ratio{CHOSEN}{JOINED}", "{{host}}")
    busy["fieldConfig"]["defaults"] |= {"unit": "percentunit", "min": 0, "max": 1}
    hot = panel_of(15, "timeseries", (12, 30, 4), f"max by (host) (torch_gpu_temperature_celsius{CHOSEN}{JOINED}", "{{host}}")
    hot["fieldConfig"]["defaults"] |= {
        "unit": "celsius",
        "custom": {"thresholdsStyle": {"mode": "line"}},
        "thresholds": {"mode": "absolute", "steps": [{"color": "transparent", "value": None}, {"color": "orange", "value": 85}]},
    }
    read = f"max by (host) (rate(torch_host_disk_read_bytes_total{CHOSEN}[$__rate_interval]){JOINED}"
    disk = panel_of(16, "timeseries", (16, 30, 8), read, "{{host}} read")
    disk["fieldConfig"]["defaults"]["unit"] = "Bps"
    errors = f"sum by (run, source) (increase(torch_grad_exporter_errors_total{CHOSEN}[$__rate_interval]))"
    failed = panel_of(17, "timeseries", (0, 40, 12), f"round({errors}) > 0", "{{run}} {{source}}")
    failed["fieldConfig"]["defaults"]["decimals"] = 0
    heading = {"id": 18, "type": "row", "title": "More", "gridPos": {"x": 0, "y": 21, "w": 24, "h": 1}, "panels": []}
    return [field, trouble, heat, busy, hot, disk, failed, heading]


JOINED = (
    " * on (job, instance, run, rank) group_left (host) max by (job, instance, run, rank, host) "
    '(torch_train_info{job=~"$job",run=~"$run",rank=~"$rank"}))'
)
NO_COLOR: Json = {"mode": "absolute", "steps": [{"color": "text", "value": None}]}


def panel_of(number: int, kind: str, place: tuple[int, int, int], expression: str, legend: str = "") -> Json:
    """A panel of this kind at x, y and with this width."""
    target = {"refId": "A", "expr": expression, "legendFormat": legend, "datasource": DATASOURCE}
    x, y, width = place
    return {
        "id": number, "type": kind, "title": f"Panel {number}", "description": "What it is.", "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": 6 if y in {8, 14} else 8}, "targets": [target], "options": {},
        "fieldConfig": {"defaults": {"unit": "short", "noValue": "No run is known"}, "overrides": []},
    }  # fmt: skip


def _table(
    number: int, place: tuple[int, int, int], expression: str, columns: dict[str, Json], by: str, *, desc: bool = True
) -> Json:
    table = panel_of(number, "table", place, expression)
    table["targets"][0] |= {"instant": True, "range": False, "format": "table"}
    table["options"]["sortBy"] = [{"displayName": by, "desc": desc}]
    table["fieldConfig"]["overrides"] = [
        {"matcher": {"id": "byName", "options": name}, "properties": [{"id": key, "value": value} for key, value in more.items()]}
        for name, more in columns.items()
    ]
    return table


def _mappings(*states: tuple[int, str, str]) -> list[Json]:
    return [{"type": "value", "options": {
        str(value): {"text": text, "color": color, "index": value} for value, text, color in states}}]  # fmt: skip


def variable_of(name: str, above: list[str]) -> Json:
    """A variable for a label, chosen by those above it."""
    chosen = ",".join(f'{other}=~"${other}"' for other in above)
    return {
        "name": name, "label": name.title(), "type": "query", "datasource": DATASOURCE, "multi": True, "includeAll": True,
        "allValue": ".+", "refresh": 2, "query": f"label_values(torch_train_info{{{chosen}}}, {name})",
    }  # fmt: skip
