"""Rules on the exporter itself, as `dashboards/prometheus/exporter.alerts.yml` has them."""

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
from torch_grad_exporter.rules.context import GOING, THRESHOLDS, Finding, RuleContext, rule
from torch_grad_exporter.rules.memory import MINUTES_10, MINUTES_15, MINUTES_30

INTERVALS = 2
"""`ExporterBlind`: so many of them have gone by without a sample."""


@rule("ExporterOverBudget", GOING)
def over_budget(context: RuleContext) -> Iterator[Finding]:
    """It takes more of the time than it may, of the last 1,000 steps and of the last ten minutes."""
    ratio, budget = context.values.one(EXPORTER_OVERHEAD_RATIO), context.values.one(EXPORTER_OVERHEAD_BUDGET)
    if ratio is not None and budget is not None:
        lately, limit = (
            context.growth(EXPORTER_OVERHEAD_SECONDS, MINUTES_10) / MINUTES_10,
            THRESHOLDS["ExporterOverBudget"] * budget,
        )
        if ratio > limit and lately > limit:
            yield Finding("warning", f"The exporter takes {ratio:.2%} of the time; its budget is {budget:.2%}.")


@rule("ExporterBlind", GOING)
def blind(context: RuleContext) -> Iterator[Finding]:
    """Its interval is the longest one there is, by a budget; or two intervals went by without a sample."""
    interval, samples = context.values.one(EXPORTER_SAMPLING_INTERVAL), context.values.one(EXPORTER_CAPTURES)
    if interval is None:
        return
    if interval >= THRESHOLDS["ExporterBlind"] and context.values.one(EXPORTER_OVERHEAD_BUDGET) is not None:
        yield Finding("warning", f"Only each {interval:g}th step is sampled, the fewest that there can be, to keep to the budget.")
    elif samples == 0 and INTERVALS * interval < (context.values.table(TRAIN_STEPS).largest() or 0.0):
        yield Finding("warning", "No sample has been taken yet.")
    elif samples and _stopped(context, interval):
        yield Finding("warning", "No sample was taken in the last 30 minutes.")


def _stopped(context: RuleContext, interval: float) -> bool:
    return context.growth(EXPORTER_CAPTURES, MINUTES_30) == 0 and INTERVALS * interval < context.growth(TRAIN_STEPS, MINUTES_30)


@rule("ExporterCollectorFailing", GOING)
def failing(context: RuleContext) -> Iterator[Finding]:
    """A collector fails."""
    for labels, success in context.values.rows(EXPORTER_COLLECTOR_SUCCESS):
        if not success:
            yield Finding("warning", f"The collector {labels[0]} fails; the log says why.")


@rule("ExporterSkippingSamples", GOING)
def skipping(context: RuleContext) -> Iterator[Finding]:
    """Samples that were due were lost."""
    lost, taken = context.growth(EXPORTER_CAPTURES_SKIPPED, MINUTES_15), context.growth(EXPORTER_CAPTURES, MINUTES_15)
    share = lost / (lost + taken) if lost + taken else 0.0
    if share > THRESHOLDS["ExporterSkippingSamples"]:
        yield Finding("warning", f"{share:.0%} of the samples due {context.within(MINUTES_15)} were not taken or not delivered.")


@rule("ExporterFoldedLayers", GOING)
def folded(context: RuleContext) -> Iterator[Finding]:
    """Layers are shown in groups."""
    layers = context.values.one(EXPORTER_LAYERS_FOLDED) or 0.0
    if layers > 0:
        yield Finding("info", f"{layers:g} layers are folded into others; see max_layers.")


RULES = (over_budget, blind, failing, skipping, folded)
