"""Rules on the exporter itself."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.collectors.exporter import (
    EXPORTER_CAPTURES,
    EXPORTER_CAPTURES_SKIPPED,
    EXPORTER_COLLECTOR_SUCCESS,
    EXPORTER_LAYERS_FOLDED,
    EXPORTER_OVERHEAD_BUDGET,
    EXPORTER_OVERHEAD_RATIO,
    EXPORTER_OVERHEAD_SECONDS,
    EXPORTER_SAMPLING_INTERVAL,
)
from torch_grad_exporter.collectors.training import TRAIN_STEPS
from torch_grad_exporter.rules.context import GOING, MINUTES_10, MINUTES_15, MINUTES_30, THRESHOLDS, RuleContext
from torch_grad_exporter.rules.declaration import Alert, Finding, Group, rule

INTERVALS = 2
"""`ExporterBlind`: the number of intervals without a sample."""


@rule(
    "ExporterOverBudget",
    GOING,
    Alert(
        "warning",
        """
        max by (run) (
          torch_grad_exporter_overhead_ratio > 1.2 * torch_grad_exporter_overhead_budget_ratio
          and rate(torch_grad_exporter_overhead_seconds_total[10m]) > 1.2 * torch_grad_exporter_overhead_budget_ratio
          and on (run, rank) torch_train_state{state!~"finished|failed"} == 1
        )
        """,
        for_="15m",
        summary="The exporter exceeds its overhead budget in run {{ $labels.run }}.",
        description=(
            "On at least one rank it takes {{ $value | humanizePercentage }} of the training time, more than 1.2 "
            "times its overhead_budget."
        ),
    ),
    needs=(EXPORTER_OVERHEAD_BUDGET,),
    first_steps=(
        "The training is sound, only a little slower. Leave layers out (include=, exclude=), switch options off, or "
        "raise overhead_budget=."
    ),
    why=(
        "1.2: the interval follows an estimate of what a sample costs, so the actual share may be some percent "
        "above the budget. 10m: the exporter takes its first samples in a row. Where steps are long, those weigh in "
        "the last 1,000 steps for a long time, so the last 10 minutes have to exceed the budget as well."
    ),
    note="Cannot fire with a fixed interval (`every=`), which has no budget.",
)
def over_budget(context: RuleContext) -> Iterator[Finding]:
    """It exceeds its budget over the last 1,000 steps and over the last ten minutes."""
    ratio, budget = context.values.one(EXPORTER_OVERHEAD_RATIO), context.values.one(EXPORTER_OVERHEAD_BUDGET)
    if ratio is not None and budget is not None:
        lately, limit = (
            context.growth(EXPORTER_OVERHEAD_SECONDS, MINUTES_10) / MINUTES_10,
            THRESHOLDS["ExporterOverBudget"] * budget,
        )
        if ratio > limit and lately > limit:
            yield Finding("warning", f"The exporter takes {ratio:.2%} of the time; its budget is {budget:.2%}.", value=ratio)


@rule(
    "ExporterBlind",
    GOING,
    Alert(
        "warning",
        """
        max by (run) (
          (
            torch_grad_exporter_sampling_interval_steps >= 4096 and torch_grad_exporter_overhead_budget_ratio
            or
            2 * torch_grad_exporter_sampling_interval_steps
            < on (run, rank, job, instance) max by (run, rank, job, instance) (torch_train_steps_total)
            and on (run, rank, job, instance) torch_grad_exporter_captures_total == 0
            or
            2 * torch_grad_exporter_sampling_interval_steps
            < on (run, rank, job, instance) max by (run, rank, job, instance) (increase(torch_train_steps_total[30m]))
            and on (run, rank, job, instance) increase(torch_grad_exporter_captures_total[30m]) == 0
          )
          and on (run, rank) torch_train_state{state!~"finished|failed"} == 1
        )
        """,
        for_="15m",
        summary="The exporter does not see the gradients of run {{ $labels.run }}.",
        description=(
            "It takes no samples, or the fewest that it can, which still cost too much for its budget. Alerts on "
            "gradients may be missed."
        ),
    ),
    needs=(EXPORTER_SAMPLING_INTERVAL,),
    first_steps=(
        "Read the exporter's warnings in the run's log. Raise overhead_budget=, leave layers out, or give it the "
        "optimizer (optimizers=) or the steps (exporter.step())."
    ),
    why=(
        "4096: at the longest interval there is, the exporter misses what happens between two samples. 2: two "
        "intervals have gone by without a sample. 30m: the same, for an exporter that has stopped sampling."
    ),
    note=("A long interval that the user asked for (`every=`) does not fire it: the cap is for intervals that follow a budget."),
)
def blind(context: RuleContext) -> Iterator[Finding]:
    """The budget requires the longest interval there is, or two intervals passed without a sample."""
    interval, samples = context.values.one(EXPORTER_SAMPLING_INTERVAL), context.values.one(EXPORTER_CAPTURES)
    if interval is None:
        return
    if interval >= THRESHOLDS["ExporterBlind"] and context.values.one(EXPORTER_OVERHEAD_BUDGET) is not None:
        yield Finding(
            "warning",
            f"To keep to the budget, only one step in {interval:g} is sampled, the longest interval there is.",
            value=interval,
        )
    elif samples == 0 and INTERVALS * interval < (context.values.table(TRAIN_STEPS).largest() or 0.0):
        yield Finding("warning", "No sample has been taken yet.")
    elif samples and _stopped(context, interval):
        yield Finding("warning", "No sample was taken in the last 30 minutes.")


def _stopped(context: RuleContext, interval: float) -> bool:
    return context.growth(EXPORTER_CAPTURES, MINUTES_30) == 0 and INTERVALS * interval < context.growth(TRAIN_STEPS, MINUTES_30)


@rule(
    "ExporterCollectorFailing",
    GOING,
    Alert(
        "warning",
        """
        count by (run, collector) (
          max by (run, rank, collector) (torch_grad_exporter_collector_success) == 0
          unless on (run, rank) torch_train_state{state=~"finished|failed"} == 1
        )
        """,
        for_="5m",
        keep_firing_for="5m",
        summary="The collector {{ $labels.collector }} of the exporter fails in run {{ $labels.run }}.",
        description="It fails on {{ $value }} ranks, and its metrics are missing there.",
    ),
    first_steps=(
        "Read the first failure, with its traceback, in the run's log. Training does not depend on it. Switch the "
        "collector off (collectors=) if you do not need it."
    ),
    why="For 5m: a collector that took too long at one scrape may answer at the next.",
    note="Has `unless` where the others have `and`: if the collector `training` fails, there is no state.",
)
def failing(context: RuleContext) -> Iterator[Finding]:
    """A collector fails."""
    for labels, success in context.values.rows(EXPORTER_COLLECTOR_SUCCESS):
        if not success:
            yield Finding("warning", f"The collector {labels[0]} fails; the log says why.")


@rule(
    "ExporterSkippingSamples",
    GOING,
    Alert(
        "warning",
        """
        max by (run) (
          sum without (reason) (increase(torch_grad_exporter_captures_skipped_total[15m]))
          / (
            sum without (reason) (increase(torch_grad_exporter_captures_skipped_total[15m]))
            + increase(torch_grad_exporter_captures_total[15m]) > 0
          )
          and on (run, rank) torch_train_state{state!~"finished|failed"} == 1
        ) > 0.1
        """,
        for_="15m",
        summary="The exporter loses samples of run {{ $labels.run }}.",
        description=(
            "{{ $value | humanizePercentage }} of the samples due in the last 15 minutes were not taken or not delivered; "
            "the label `reason` of torch_grad_exporter_captures_skipped_total says why."
        ),
    ),
    first_steps=(
        "Check whether torch_grad_exporter_errors_total rises. If not, the metrics are right, only from fewer "
        "samples; the log may have a warning."
    ),
    why="A tenth of what was due. Unusual loops lose some samples, and that does no harm.",
)
def skipping(context: RuleContext) -> Iterator[Finding]:
    """Samples that were due were lost."""
    lost = sum(context.increase(EXPORTER_CAPTURES_SKIPPED, MINUTES_15).numbers)
    taken = context.growth(EXPORTER_CAPTURES, MINUTES_15)
    share = lost / (lost + taken) if lost + taken else 0.0
    if share > THRESHOLDS["ExporterSkippingSamples"]:
        yield Finding(
            "warning", f"{share:.0%} of the samples due {context.within(MINUTES_15)} were not taken or not delivered.", value=share
        )


@rule(
    "ExporterFoldedLayers",
    GOING,
    Alert(
        "info",
        """
        max by (run) (
          torch_grad_exporter_layers_folded and on (run, rank) torch_train_state{state!~"finished|failed"} == 1
        ) > 0
        """,
        for_="5m",
        summary="The exporter shows layers of run {{ $labels.run }} in groups.",
        description="{{ $value }} layers exceed its cap (max_layers=) and are shown as part of a group.",
    ),
    first_steps="Leave layers out (include=, exclude=) or raise max_layers=.",
)
def folded(context: RuleContext) -> Iterator[Finding]:
    """Layers are shown in groups."""
    layers = context.values.one(EXPORTER_LAYERS_FOLDED) or 0.0
    if layers > 0:
        yield Finding("info", f"{layers:g} layers are folded into others; see max_layers.", value=layers)


RULES = (over_budget, blind, failing, skipping, folded)

GROUP = Group(
    "exporter",
    "torch_grad_exporter_exporter_alerts",
    "Alerts on the exporter itself: whether it costs too much, and whether it still sees the training.",
    (
        (
            "Scrape with `honor_labels: true`. docs/runbook.md says what each alert means and what to do. Alerts "
            "carry `run`, and `collector` if they are about one; never `rank`, `job` or `instance`: a problem of "
            "the exporter on one rank is mostly one on all ranks."
        ),
        (
            '`and on (run, rank) torch_train_state{state!~"finished|failed"} == 1` restricts an alert to ranks that '
            "go on. Where torch_train_state is not stored (metric_relabel_configs), no alert of this file fires."
        ),
    ),
    RULES,
)
