"""The lint rules of the Grafana dashboards, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.dashboards.lint import drawing, panels, queries, settings
from tests.dashboards.lint.model import Board

Rule = Callable[[Board], Iterator[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault that a rule reports."""

    rule: str
    dashboard: str
    panel: str
    text: str


RULES: dict[str, Rule] = {
    # Names of grafana/dashboard-linter.
    "template-datasource-rule": settings.datasource_variable,
    "template-job-rule": settings.choices,
    "template-label-promql-rule": queries.variable_query,
    "panel-datasource-rule": settings.datasource_everywhere,
    "panel-title-description-rule": panels.titles,
    "panel-units-rule": panels.units,
    "panel-no-targets-rule": panels.panel_targets,
    "target-promql-rule": queries.promql,
    "target-rate-interval-rule": queries.rate_interval,
    "target-job-rule": queries.job_matcher,
    "target-counter-agg-rule": queries.counter,
    "uneditable-dashboard": settings.dashboard_settings,
    # Our own rules about the JSON.
    "target-run-rule": queries.run_matcher,
    "metric-exists": queries.metric_exists,
    "histogram-buckets": queries.histogram,
    "gauge-as-counter": queries.gauge,
    "summed-over-time": queries.summed_over_time,
    "nan-in-sum": queries.nan,
    "legend-labels": queries.legend,
    "annotations": settings.annotations,
    "no-inputs": settings.no_inputs,
    "variables-defined": settings.variables_defined,
    "variables-used": settings.variables_used,
    "unique": panels.unique,
    "panel-types": panels.panel_types,
    "thresholds": panels.thresholds,
    "no-value": panels.no_value,
    "table-queries": panels.table_queries,
    "grid": panels.grid,
    "links": settings.links,
    "links-of-run": settings.follows_the_run,
    # Rules about what Grafana draws with its defaults merged in.
    "hidden-cells": drawing.hidden_cells,
    "inverted-colors": drawing.inverted_colors,
    "state-legends": drawing.state_legends,
    "state-names": drawing.states_have_names,
    "seriousness": drawing.seriousness,
    "bars": drawing.bars,
    "decimals": drawing.decimals,
    "log-axis": drawing.log_axis,
    "limits": drawing.limits,
}


def findings(board: Board, rules: dict[str, Rule] = RULES) -> list[Finding]:
    """Return the faults of a dashboard, each once."""
    name = str(board.json.get("uid"))
    return [Finding(title, name, panel, text) for title, rule in rules.items() for panel, text in dict.fromkeys(rule(board))]
