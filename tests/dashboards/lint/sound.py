"""A dashboard without faults, for tests to plant one at a time."""

from __future__ import annotations

from tests.dashboards.lint.model import Json

CHOSEN = '{job=~"$job",run=~"$run",rank=~"$rank"}'
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def sound() -> Json:
    """Return a dashboard with one panel of each kind that the rules treat separately, without a fault."""
    names = ["job", "run", "rank"]
    return {
        "uid": "torch-grad-training", "title": "Sound", "description": "Nothing is wrong.", "tags": ["torch-grad-exporter"],
        "schemaVersion": 41, "editable": False, "graphTooltip": 1, "time": {"from": "now-1h", "to": "now"},
        "panels": [_graph(), _stat(), _buckets(), _layers(), _alerts(), _bars(), _timeline(), _norm(), _deviations(), _trouble()],
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


def _graph() -> Json:
    return panel_of(1, "timeseries", f"sum by (rank) (rate(torch_train_steps_total{CHOSEN}[$__rate_interval]))", "rank {{rank}}")


def _stat() -> Json:
    panel = panel_of(2, "stat", f"avg(torch_train_loss{CHOSEN} == torch_train_loss{CHOSEN})")
    panel["fieldConfig"]["defaults"]["thresholds"] = NO_COLOR
    return panel


def _buckets() -> Json:
    steps = f"sum by (le) (increase(torch_train_step_duration_seconds_bucket{CHOSEN}[$__rate_interval]))"
    panel = panel_of(3, "heatmap", steps, "{{le}}")
    panel["options"] = {"yAxis": {"unit": "s"}, "cellValues": {"unit": "short", "decimals": 0}}
    panel["targets"][0]["format"] = "heatmap"
    return panel


TO_LAYER = "/d/torch-grad-layers?var-run=${__data.fields.run}&var-layer=${__data.fields.layer}"


def _layers() -> Json:
    value = {"unit": "sci", "decimals": 1, "custom.cellOptions": {"type": "gauge"}, "min": 0, "max": 10}
    return _table(4, f"topk(5, max by (run, layer) (torch_grad_norm{CHOSEN}))", value)


def _alerts() -> Json:
    severities = " or ".join(
        f'ALERTS{{alertstate="firing",run=~"$run",severity="{name}"}} * {number}'
        for number, name in ((3, "critical"), (2, "warning"), (1, "info"))
    )
    mappings = _mappings((1, "info", "blue"), (2, "warning", "orange"), (3, "critical", "red"))
    return _table(5, f"max by (run, layer, alertname) ({severities})", {"mappings": mappings})


def _bars() -> Json:
    own = "rank:torch_train_own_seconds:ratio_fastest"
    panel = panel_of(6, "bargauge", f'topk(5, {own}{{run=~"$run",rank=~"$rank"}})', "{{run}} rank {{rank}}")
    link = "/d/torch-grad-ranks?var-run=${__field.labels.run}&var-rank=${__field.labels.rank}"
    panel["fieldConfig"]["defaults"] |= {"min": 0, "max": 4, "thresholds": NO_COLOR, "links": [{"url": link}]}
    return panel


def _timeline() -> Json:
    state = 'torch_train_state{job=~"$job",run=~"$run",state="STATE"} == 1'
    states = f"max by (run) (({state.replace('STATE', 'training')}) * 1 or ({state.replace('STATE', 'failed')}) * 2)"
    return _states(7, states, "{{run}}", (1, "Training", "green"), (2, "Failed", "red"))


def _norm() -> Json:
    panel = panel_of(8, "timeseries", f"max by (run) (torch_grad_global_norm{CHOSEN})", "{{run}}")
    scale = {"scaleDistribution": {"type": "log", "log": 10}}
    panel["fieldConfig"]["defaults"] |= {"unit": "sci", "decimals": 1, "custom": scale}
    return panel


def _deviations() -> Json:
    panel = panel_of(9, "heatmap", f"max by (run, layer) (torch_grad_norm_zscore{CHOSEN})", "{{layer}}")
    colors = {"scheme": "RdYlBu", "min": -6, "max": 6}
    panel["options"] = {"yAxis": {"unit": "short"}, "color": colors, "filterValues": {"le": -1000}}
    return panel


def _trouble() -> Json:
    conditions = (
        f"(max by (run, layer) (torch_grad_missing_parameters{CHOSEN}) > 0) * 0 + 3"
        f" or (max by (run, layer) (torch_grad_dead_ratio{CHOSEN}) > 0.9) * 0 + 2"
        f" or (max by (run, layer) (torch_grad_norm{CHOSEN}) < 1e-7) * 0 + 1"
    )
    states = ((1, "Vanished", "yellow"), (2, "Dead", "orange"), (3, "No gradient", "red"))
    return _states(10, conditions, "{{layer}}", *states)


NO_COLOR: Json = {"mode": "absolute", "steps": [{"color": "text", "value": None}]}


def panel_of(number: int, kind: str, expression: str, legend: str = "") -> Json:
    """Return a panel of this kind with a place of its own, three in a row."""
    target = {"refId": "A", "expr": expression, "legendFormat": legend, "datasource": DATASOURCE}
    return {
        "id": number, "type": kind, "title": f"Panel {number}", "description": "What it is.", "datasource": DATASOURCE,
        "gridPos": {"x": 8 * (number % 3), "y": 8 * (number // 3), "w": 8, "h": 8}, "targets": [target], "options": {},
        "fieldConfig": {"defaults": {"unit": "short", "noValue": "No run is known"}, "overrides": []},
    }  # fmt: skip


def _table(number: int, expression: str, value: Json) -> Json:
    table = panel_of(number, "table", expression)
    table["targets"][0] |= {"instant": True, "range": False, "format": "table"}
    table["fieldConfig"]["overrides"] = [
        {"matcher": {"id": "byName", "options": name}, "properties": [{"id": key, "value": value} for key, value in more.items()]}
        for name, more in {"layer": {"links": [{"url": TO_LAYER}]}, "Time": {"custom.hidden": True}, "Value": value}.items()
    ]
    return table


def _states(number: int, expression: str, legend: str, *states: tuple[int, str, str]) -> Json:
    panel = panel_of(number, "state-timeline", expression, legend)
    panel["fieldConfig"]["defaults"] |= {"color": {"mode": "fixed"}, "thresholds": NO_COLOR, "mappings": _mappings(*states)}
    return panel


def _mappings(*states: tuple[int, str, str]) -> list[Json]:
    return [{"type": "value", "options": {
        str(value): {"text": text, "color": color, "index": value} for value, text, color in states}}]  # fmt: skip


def variable_of(name: str, above: list[str]) -> Json:
    """Return a variable for a label, restricted by the variables above it."""
    chosen = ",".join(f'{other}=~"${other}"' for other in above)
    return {
        "name": name, "label": name.title(), "type": "query", "datasource": DATASOURCE, "multi": True, "includeAll": True,
        "allValue": ".+", "refresh": 2, "query": f"label_values(torch_train_info{{{chosen}}}, {name})",
    }  # fmt: skip
