"""Rules on the exporter itself, as `dashboards/prometheus/exporter.alerts.yml` has them."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.metrics import catalogue as c
from torch_grad_exporter.rules.look import GOING, THRESHOLDS, Found, Look, rule
from torch_grad_exporter.rules.memory import MINUTES_10, MINUTES_15, MINUTES_30

INTERVALS = 2
"""`ExporterBlind`: so many of them have gone by without a sample."""


@rule("ExporterOverBudget", GOING)
def over_budget(look: Look) -> Iterator[Found]:
    """It takes more of the time than it may, of the last 1,000 steps and of the last ten minutes."""
    ratio, budget = look.values.one(c.EXPORTER_OVERHEAD_RATIO), look.values.one(c.EXPORTER_OVERHEAD_BUDGET)
    if ratio is not None and budget is not None:
        lately, limit = look.growth(c.EXPORTER_OVERHEAD_SECONDS, MINUTES_10) / MINUTES_10, THRESHOLDS["ExporterOverBudget"] * budget
        if ratio > limit and lately > limit:
            yield Found("warning", f"The exporter takes {ratio:.2%} of the time; its budget is {budget:.2%}.")


@rule("ExporterBlind", GOING)
def blind(look: Look) -> Iterator[Found]:
    """Its interval is the longest one there is, by a budget; or two intervals went by without a sample."""
    interval, samples = look.values.one(c.EXPORTER_SAMPLING_INTERVAL), look.values.one(c.EXPORTER_CAPTURES)
    if interval is None:
        return
    if interval >= THRESHOLDS["ExporterBlind"] and look.values.one(c.EXPORTER_OVERHEAD_BUDGET) is not None:
        yield Found("warning", f"Only each {interval:g}th step is sampled, the fewest that there can be, to keep to the budget.")
    elif samples == 0 and INTERVALS * interval < (look.values.table(c.TRAIN_STEPS).largest() or 0.0):
        yield Found("warning", "No sample has been taken yet.")
    elif samples and _stopped(look, interval):
        yield Found("warning", "No sample was taken in the last 30 minutes.")


def _stopped(look: Look, interval: float) -> bool:
    return look.growth(c.EXPORTER_CAPTURES, MINUTES_30) == 0 and INTERVALS * interval < look.growth(c.TRAIN_STEPS, MINUTES_30)


@rule("ExporterCollectorFailing", GOING)
def failing(look: Look) -> Iterator[Found]:
    """A collector fails."""
    for labels, success in look.values.rows(c.EXPORTER_COLLECTOR_SUCCESS):
        if not success:
            yield Found("warning", f"The collector {labels[0]} fails; the log says why.")


@rule("ExporterSkippingSamples", GOING)
def skipping(look: Look) -> Iterator[Found]:
    """Samples that were due were lost."""
    lost, taken = look.growth(c.EXPORTER_CAPTURES_SKIPPED, MINUTES_15), look.growth(c.EXPORTER_CAPTURES, MINUTES_15)
    share = lost / (lost + taken) if lost + taken else 0.0
    if share > THRESHOLDS["ExporterSkippingSamples"]:
        yield Found("warning", f"{share:.0%} of the samples due {look.within(MINUTES_15)} were not taken or not delivered.")


@rule("ExporterFoldedLayers", GOING)
def folded(look: Look) -> Iterator[Found]:
    """Layers are shown in groups."""
    layers = look.values.one(c.EXPORTER_LAYERS_FOLDED) or 0.0
    if layers > 0:
        yield Found("info", f"{layers:g} layers are folded into others; see max_layers.")


RULES = (over_budget, blind, failing, skipping, folded)
