"""What is demanded of the Grafana dashboards: every rule by its name, and what the rules find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.dashboards.lint import drawing, following, numbers, overview, panels, queries, settings
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
    "annotations": following.both_are_there,
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
    # What a person saw when Grafana had drawn the panels: held against its defaults, not against the JSON alone.
    "hidden-cells": drawing.hidden_cells,
    "inverted-colors": drawing.inverted_colors,
    "annotations-off": following.annotations_off,
    "annotations-onsets": following.onsets_only,
    "annotations-states": following.no_state_changes,
    "straggler-first": overview.straggler_first,
    "state-legends": drawing.state_legends,
    "state-names": drawing.states_have_names,
    "seriousness": drawing.seriousness,
    "links-of-run": following.follows_the_run,
    "links-never-empty": following.no_empty_links,
    "norm-outliers": overview.outliers_between_samples,
    "bars": drawing.bars,
    "table-width": drawing.table_width,
    "ended-runs": overview.ended_runs,
    "colors": drawing.colors,
    "decimals": numbers.decimals,
    "log-axis": numbers.log_axis,
    "bare-rates": numbers.bare_rates,
    "whole-counts": numbers.whole_counts,
    "per-host": drawing.per_host,
    "errors-that-are": numbers.errors_that_are,
    "table-order": numbers.table_order,
    "gpu-first": numbers.needs_gpu_first,
    "axes": drawing.axes,
    "one-screen": overview.one_screen,
    "says-what-is-missing": numbers.says_what_is_missing,
    "short-in-tiles": numbers.short_in_tiles,
    "limits": numbers.limits,
}


def findings(board: Board, rules: dict[str, Rule] = RULES) -> list[Finding]:
    """What all rules find in a dashboard, each finding once."""
    name = str(board.json.get("uid"))
    return [Finding(title, name, panel, text) for title, rule in rules.items() for panel, text in dict.fromkeys(rule(board))]
