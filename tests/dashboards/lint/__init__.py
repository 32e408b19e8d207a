"""What is demanded of the Grafana dashboards: every rule by its name, and what the rules find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.dashboards.lint import panels, queries, settings
from tests.dashboards.lint.model import Board

Rule = Callable[[Board], Iterator[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found."""

    rule: str
    dashboard: str
    panel: str
    text: str


RULES: dict[str, Rule] = {
    # Those of grafana/dashboard-linter, by its names.
    "template-datasource-rule": settings.datasource_variable,
    "template-job-rule": settings.job_variable,
    "template-label-promql-rule": queries.variable_query,
    "template-on-time-change-reload-rule": settings.reload_on_time_change,
    "panel-datasource-rule": settings.datasource_everywhere,
    "panel-title-description-rule": panels.titles,
    "panel-units-rule": panels.units,
    "panel-no-targets-rule": panels.panel_targets,
    "target-promql-rule": queries.promql,
    "target-rate-interval-rule": queries.rate_interval,
    "target-job-rule": queries.job_matcher,
    "target-counter-agg-rule": queries.counter,
    "uneditable-dashboard": settings.dashboard_settings,
    # Of our own: what users of other exporters complain about.
    "template-run-rule": settings.run_and_rank_variables,
    "target-run-rule": queries.run_matcher,
    "metric-exists": queries.metric_exists,
    "histogram-buckets": queries.histogram,
    "gauge-as-counter": queries.gauge,
    "summed-over-time": queries.summed_over_time,
    "nan-in-sum": queries.nan,
    "legend-labels": queries.legend,
    "device-of-which-host": queries.device_legend,
    "annotations": queries.state_change_annotations,
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
}


def findings(board: Board, rules: dict[str, Rule] = RULES) -> list[Finding]:
    """What all rules find in a dashboard."""
    name = str(board.json.get("uid"))
    return [Finding(title, name, panel, text) for title, rule in rules.items() for panel, text in rule(board)]
