"""Rules on gradients, as `dashboards/prometheus/gradients.alerts.yml` has them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torch_grad_exporter.collectors.gradients import (
    GRAD_CAPTURES,
    GRAD_CLIP_COEFFICIENT,
    GRAD_DEAD_RATIO,
    GRAD_GLOBAL_NORM,
    GRAD_GLOBAL_NORM_SPIKES,
    GRAD_MISSING_PARAMETERS,
    GRAD_NONFINITE_ELEMENTS,
    GRAD_NONFINITE_STEPS,
    GRAD_NORM,
    GRAD_NORM_RECENT_MAX,
    GRAD_NORM_SPIKES,
    GRAD_SAMPLE_STEP,
    GRAD_SHARD_NORM,
)
from torch_grad_exporter.collectors.training import TRAIN_SKIPPED_STEPS, TRAIN_STEPS
from torch_grad_exporter.rules.context import BUSY, GOING, THRESHOLDS, Finding, RuleContext, by_layer, either, rule, times
from torch_grad_exporter.rules.memory import HOUR, MINUTES_5, MINUTES_10
from torch_grad_exporter.rules.values import Table

OF_SAMPLES, OF_LAYERS, FEW_LAYERS = 0.01, 0.25, 3
"""`GradientExploding`: a layer does if more than so many of its samples spiked; so many of the layers; of more than so few."""

CLIPPED, SAMPLES = 0.01, 3
"""`GradientExploding`: so much is left of the gradients, at so many samples at least."""

HALF_DEAD = 0.5
"""`LayerDead` as an information."""

NAMED = 3
"""Layers that one sentence names, at most."""

ROUNDING = 2.0**-23
"""What is remembered of layers is rounded by less than so much of itself."""

SKIPPED = "skipped"
"""What became of a step, as a label."""


@rule("TrainingNonFiniteGradients", GOING)
def nonfinite(context: RuleContext) -> Iterator[Finding]:
    """Steps were taken on gradients that are not finite, or more were skipped for such than taken."""
    taken = _sum(context.lately(GRAD_NONFINITE_STEPS, MINUTES_5), skipped=False)
    if taken > 0:
        text = f"Gradients were NaN or Inf in {times(taken, 'unskipped step')}, {context.since(MINUTES_5)}"
        yield _with_layers(context, context.lately(GRAD_NONFINITE_ELEMENTS, MINUTES_5), text)
    elif _mostly_skipped(context):
        skipped, steps = context.growth(TRAIN_SKIPPED_STEPS, MINUTES_10), context.growth(TRAIN_STEPS, MINUTES_10)
        text = f"Gradients were NaN or Inf: {times(skipped)} skipped and {steps:g} taken {context.within(MINUTES_10)}"
        yield _with_layers(context, context.increase(GRAD_NONFINITE_ELEMENTS, MINUTES_10), text)


def _with_layers(context: RuleContext, grown: Table, text: str) -> Finding:
    """Adds in which layers it was, in the order of the model; of a step that was not sampled none are known."""
    whole = context.values.table(GRAD_NONFINITE_ELEMENTS).numbers
    chosen = {grown.rows[row][0] for row in np.flatnonzero(grown.numbers > ROUNDING * whole).tolist()}
    layers = tuple(dict.fromkeys(layer for layer, _ in grown.rows if layer in chosen))
    if not layers:
        return Finding("critical", f"{text}.")
    rest = f" and {len(layers) - NAMED} more" if len(layers) > NAMED else ""
    return Finding("critical", f"{text}, in {', '.join(layers[:NAMED])}{rest}.", layers[0], layers[1:])


def _mostly_skipped(context: RuleContext) -> bool:
    return (
        context.growth(TRAIN_SKIPPED_STEPS, HOUR) >= THRESHOLDS["TrainingNonFiniteGradients"]
        and context.growth(TRAIN_SKIPPED_STEPS, MINUTES_10) > context.growth(TRAIN_STEPS, MINUTES_10)
        and _sum(context.increase(GRAD_NONFINITE_STEPS, HOUR), skipped=True) > 0
    )


def _sum(table: Table, *, skipped: bool) -> float:
    """Of the steps that were skipped, or of all others."""
    return float(sum(count for (_, outcome), count in table.items() if count > 0 and (outcome == SKIPPED) == skipped))


@rule("GradientExploding", GOING)
def exploding(context: RuleContext) -> Iterator[Finding]:
    """The global norm spiked again and again, or the norms of many layers did, or next to nothing is left after clipping."""
    spikes, layers = context.growth(GRAD_GLOBAL_NORM_SPIKES, MINUTES_10), _spiking(context)
    if spikes >= THRESHOLDS["GradientExploding"]:
        yield Finding("warning", f"The global gradient norm spiked {times(spikes, 'time')} {context.within(MINUTES_10)}.")
    elif layers:
        yield Finding("warning", f"The norms of {times(layers, 'layer')} spiked again and again {context.within(MINUTES_10)}.")
    elif _clipped(context):
        yield Finding("warning", "All gradients of the last 10 minutes were clipped to less than a hundredth.")


def _spiking(context: RuleContext) -> int:
    """How many layers do, if these are many."""
    spikes = context.increase(GRAD_NORM_SPIKES, MINUTES_10)
    samples = context.increase(GRAD_CAPTURES, MINUTES_10).at(spikes.rows)
    known = int(np.count_nonzero(~np.isnan(spikes.numbers)))
    many = (spikes.numbers >= THRESHOLDS["GradientExploding"]) & (spikes.numbers > OF_SAMPLES * samples)
    layers = int(np.count_nonzero(many))
    return layers if known > FEW_LAYERS and layers >= OF_LAYERS * known else 0


def _clipped(context: RuleContext) -> bool:
    highest = context.highest(GRAD_CLIP_COEFFICIENT, MINUTES_10)
    known = ~np.isnan(context.was(GRAD_CLIP_COEFFICIENT, MINUTES_10))
    steps = context.over(GRAD_SAMPLE_STEP, MINUTES_10)
    changes = (steps[1:] != steps[:-1]) & ~np.isnan(steps[1:]) & ~np.isnan(steps[:-1])
    sampled = Table(context.values.table(GRAD_SAMPLE_STEP).rows, changes.sum(axis=0).astype(np.float64)).at(highest.rows)
    return bool(((highest.numbers < CLIPPED) & known & (sampled >= SAMPLES)).any())


@rule("GradientVanishing", BUSY)
def vanishing(context: RuleContext) -> Iterator[Finding]:
    """The largest norm of a layer within five minutes is negligible compared with the global one, or else the largest layer's."""
    layers = either(*(context.highest(spec, MINUTES_5) for spec in (GRAD_NORM_RECENT_MAX, GRAD_NORM, GRAD_SHARD_NORM)))
    whole, reference = context.values.table(GRAD_GLOBAL_NORM).largest(), "global norm"
    if whole is None:
        whole = either(context.values.table(GRAD_NORM), context.values.table(GRAD_SHARD_NORM)).largest()
        reference = "largest layer's norm"
    if whole is not None:
        small = layers.numbers < THRESHOLDS["GradientVanishing"] * whole
        missing = context.values.table(GRAD_MISSING_PARAMETERS).at(layers.rows) > 0
        small, zero = small & ~missing, layers.numbers == 0
        yield from by_layer("warning", layers, small & zero, "its norm is zero")
        yield from by_layer("warning", layers, small & ~zero, f"its norm is less than a ten-millionth of the {reference}")


@rule("LayerDead", BUSY)
def dead(context: RuleContext) -> Iterator[Finding]:
    """Nine tenths of a layer's units are dead, or half of them."""
    ratios = context.values.table(GRAD_DEAD_RATIO)
    gone = ratios.numbers > THRESHOLDS["LayerDead"]
    yield from by_layer("warning", ratios, gone, "more than 90 % of its units are dead")
    yield from by_layer("info", ratios, (ratios.numbers > HALF_DEAD) & ~gone, "more than half of its units are dead")


@rule("LayerWithoutGradient", BUSY)
def without_gradient(context: RuleContext) -> Iterator[Finding]:
    """Parameters of a layer got no gradient."""
    missing = context.values.table(GRAD_MISSING_PARAMETERS)
    yield from by_layer("warning", missing, missing.numbers > 0, "parameters got no gradient")


RULES = (nonfinite, exploding, vanishing, dead, without_gradient)
