"""Rules on gradients; `weights.py` has that on weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torch_grad_exporter.collectors.clipping import GRAD_CLIP_COEFFICIENT
from torch_grad_exporter.collectors.gradients import (
    GRAD_CAPTURES,
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
    LAYER_FROZEN,
)
from torch_grad_exporter.collectors.training import TRAIN_SKIPPED_STEPS, TRAIN_STEPS
from torch_grad_exporter.metrics.families import BoolArray
from torch_grad_exporter.rules.context import (
    BUSY,
    GOING,
    HOUR,
    MINUTES_5,
    MINUTES_10,
    THRESHOLDS,
    RuleContext,
    by_layer,
    either,
    times,
)
from torch_grad_exporter.rules.declaration import Alert, Finding, Group, rule
from torch_grad_exporter.rules.origin import ANNOTATION, origin
from torch_grad_exporter.rules.values import Table
from torch_grad_exporter.rules.weights import not_updating

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


@rule(
    "TrainingNonFiniteGradients",
    GOING,
    Alert(
        "critical",
        """
        max by (run) (
          increase(torch_grad_nonfinite_steps_total{outcome!="skipped"}[5m]) > 0
          or
          torch_grad_nonfinite_steps_total{outcome!="skipped"} > 0
          and on (run, rank, job, instance) time() - torch_train_start_timestamp_seconds < 600
          or
          increase(torch_train_skipped_steps_total[1h]) >= 20
          and on (run, rank) (
            max by (run, rank) (increase(torch_train_skipped_steps_total[10m]))
            > (
              max by (run, rank) (increase(torch_train_steps_total[10m]))
              or 0 * max by (run, rank) (increase(torch_train_skipped_steps_total[10m]))
            )
          )
          and on (run, rank) increase(torch_grad_nonfinite_steps_total{outcome="skipped"}[1h]) > 0
        )
        and on (run) torch_train_state{state!~"finished|failed"} == 1
        """,
        keep_firing_for="1h",
        summary="Gradients of run {{ $labels.run }} are NaN or infinite.",
        description=(
            "In the last minutes the optimizer took a step on gradients that are NaN or infinite, or most steps "
            "were skipped because of such gradients. Affected layers: "
            "run_layer:torch_grad_nonfinite_elements:increase5m." + ANNOTATION
        ),
    ),
    by_samples=True,
    needs=(GRAD_NONFINITE_STEPS,),
    first_steps=(
        "Stop the run and go back to a checkpoint from before the first such step; one written after it is "
        'worthless. Start again with nan_origin="always", which names the module where it begins.'
    ),
    why=(
        "One step on NaN is enough. In the first 600 s of a process its whole count matters, since `increase` does "
        "not show what came before the first scrape. Mixed precision skips steps by design. Skips are a fault once "
        "there are more of them than steps, and 20 in an hour: from its default of 2^16 a GradScaler has then come "
        "down to 2^-4."
    ),
    note=(
        "The exporter reads sampled steps only. With a long interval the alert fires at the next sample; a NaN in "
        "the weights is in all samples from then on. The condition on skipped steps cannot fire where a step takes "
        "more than 5 minutes."
    ),
)
def nonfinite(context: RuleContext) -> Iterator[Finding]:
    """Steps were taken on gradients that are not finite, or more were skipped for such than taken."""
    taken = _sum(context.lately(GRAD_NONFINITE_STEPS, MINUTES_5), skipped=False)
    if taken > 0:
        text = f"{origin(context)}Gradients were NaN or Inf in {times(taken, 'unskipped step')}, {context.since(MINUTES_5)}"
        yield _with_layers(context, context.lately(GRAD_NONFINITE_ELEMENTS, MINUTES_5), text, taken)
    elif _mostly_skipped(context):
        skipped, steps = context.growth(TRAIN_SKIPPED_STEPS, MINUTES_10), context.growth(TRAIN_STEPS, MINUTES_10)
        text = (
            f"{origin(context)}Gradients were NaN or Inf: {times(skipped)} skipped and {steps:g} taken {context.within(MINUTES_10)}"
        )
        yield _with_layers(context, context.increase(GRAD_NONFINITE_ELEMENTS, MINUTES_10), text, skipped)


def _with_layers(context: RuleContext, grown: Table, text: str, value: float) -> Finding:
    """Adds in which layers it was, in the order of the model; of a step that was not sampled none are known."""
    whole = context.values.table(GRAD_NONFINITE_ELEMENTS).numbers
    chosen = {grown.rows[row][0] for row in np.flatnonzero(grown.numbers > ROUNDING * whole).tolist()}
    layers = tuple(dict.fromkeys(layer for layer, _ in grown.rows if layer in chosen))
    if not layers:
        return Finding("critical", f"{text}.", value=value)
    rest = f" and {len(layers) - NAMED} more" if len(layers) > NAMED else ""
    return Finding("critical", f"{text}, in {', '.join(layers[:NAMED])}{rest}.", layers[0], layers[1:], value)


def _mostly_skipped(context: RuleContext) -> bool:
    return (
        context.growth(TRAIN_SKIPPED_STEPS, HOUR) >= THRESHOLDS["TrainingNonFiniteGradients"]
        and context.growth(TRAIN_SKIPPED_STEPS, MINUTES_10) > context.growth(TRAIN_STEPS, MINUTES_10)
        and _sum(context.increase(GRAD_NONFINITE_STEPS, HOUR), skipped=True) > 0
    )


def _sum(table: Table, *, skipped: bool) -> float:
    """Of the steps that were skipped, or of all others."""
    return float(sum(count for (_, outcome), count in table.items() if count > 0 and (outcome == SKIPPED) == skipped))


@rule(
    "GradientExploding",
    GOING,
    Alert(
        "warning",
        """
        (
          max by (run) (increase(torch_grad_global_norm_spikes_total[10m])) >= 3
          or
          count by (run) (
            max by (run, layer) (
              increase(torch_grad_norm_spikes_total{layer!="(removed)"}[10m])
              > 0.01 * increase(torch_grad_captures_total{layer!="(removed)"}[10m])
            ) >= 3
          )
          / (count by (run) (count by (run, layer) (torch_grad_norm_spikes_total{layer!="(removed)"})) > 3)
          >= 0.25
          or
          max by (run) (
            max_over_time(torch_grad_clip_coefficient[10m]) < 0.01
            and torch_grad_clip_coefficient offset 10m
            and changes(torch_grad_sample_step[10m]) >= 3
          )
        )
        and on (run) torch_train_state{state!~"finished|failed"} == 1
        """,
        summary="Gradients of run {{ $labels.run }} explode.",
        description=(
            "Within 10 minutes the global norm, or the norms of a quarter of the layers, exceeded 6 sigma of their "
            "own past at least three times, or all samples were clipped to less than a hundredth."
        ),
    ),
    by_samples=True,
    needs=(GRAD_CAPTURES,),
    takes_samples=20,
    first_steps=(
        "Check what rose first in torch_grad_norm_zscore. If the loss rises as well, lower the learning rate and go "
        "back to a checkpoint from before the first spike. activations=True and exporter.watch on the model's output tell "
        "unusual inputs from wrong targets."
    ),
    why=(
        "One spike, beyond 6 sigma and 3 times the median, may be a bad batch; three in 10 minutes are not. A "
        "quarter of the layers: so many may explode without an effect on the global norm, where other layers are "
        "larger. 0.01: of 12,000 samples of a healthy demo in 10 minutes, up to 13 of a layer were spikes, so more "
        "than a hundredth of the samples have to be. Models with up to 3 layers are not judged by layer. Clipped to "
        "0.01 at each sample for 10 minutes: the learning rate is then in fact a hundredth."
    ),
    note="Cannot fire before 20 samples, nor with fewer than 3 samples in 10 minutes.",
)
def exploding(context: RuleContext) -> Iterator[Finding]:
    """The global norm spiked again and again, or the norms of many layers did, or next to nothing is left after clipping."""
    spikes, layers = context.growth(GRAD_GLOBAL_NORM_SPIKES, MINUTES_10), _spiking(context)
    if spikes >= THRESHOLDS["GradientExploding"]:
        yield Finding(
            "warning", f"The global gradient norm spiked {times(spikes, 'time')} {context.within(MINUTES_10)}.", value=spikes
        )
    elif layers:
        yield Finding(
            "warning", f"The norms of {times(layers, 'layer')} spiked again and again {context.within(MINUTES_10)}.", value=layers
        )
    elif _clipped(context):
        yield Finding("warning", f"All gradients {context.within(MINUTES_10)} were clipped to less than a hundredth.")


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


@rule(
    "GradientVanishing",
    BUSY,
    Alert(
        "warning",
        """
        max by (run, layer) (
          (
            max_over_time(torch_grad_norm_recent_max[5m])
            or max_over_time(torch_grad_norm[5m])
            or max_over_time(torch_grad_shard_norm[5m])
          )
          and on (run, rank, job, instance) torch_train_state{state=~"training|evaluating"} == 1
        )
        < on (run) group_left ()
        1e-7 * (
          max by (run) (
            torch_grad_global_norm < +Inf
            and on (run, rank, job, instance) torch_train_state{state=~"training|evaluating"} == 1
          )
          or max by (run) (
            (torch_grad_norm < +Inf or torch_grad_shard_norm < +Inf)
            and on (run, rank, job, instance) torch_train_state{state=~"training|evaluating"} == 1
          )
        )
        unless on (run, layer) torch_grad_missing_parameters > 0
        unless on (run, layer) torch_layer_frozen == 1
        """,
        for_="10m",
        summary="Layer {{ $labels.layer }} of run {{ $labels.run }} gets almost no gradient.",
        description=(
            "For 15 minutes the norm of its gradient, now {{ $value | humanize }}, has been below a ten-millionth of the "
            "global norm. The layer learns nothing."
        ),
    ),
    by_samples=True,
    needs=(GRAD_NORM, GRAD_SHARD_NORM),
    first_steps=(
        "Find the affected layer nearest to the output: the cause lies directly behind it. activations=True shows at which module "
        "the gradient is lost. Freeze a layer that is meant to be idle."
    ),
    why=(
        "Float32 rounds away a ten-millionth of the global norm; SageMaker Debugger has this limit as an absolute "
        "one. It takes 5 minutes until the largest sample leaves the window; with 10 minutes of `for` that is 15."
    ),
    note=(
        "For a sharded layer the largest part of a rank stands for the whole. Where the global norm is not known, "
        "as under FSDP2 without observe(grad_norm=), the largest layer stands for it. Accumulated sums of squares "
        "would not do: they round away the square of a ten-millionth. The text file of a process that has ended "
        "does not count."
    ),
)
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
        small, zero = small & ~missing & ~_frozen(context, layers), layers.numbers == 0
        yield from by_layer("warning", layers, small & zero, "its norm is zero")
        yield from by_layer("warning", layers, small & ~zero, f"its norm is less than a ten-millionth of the {reference}")


@rule(
    "LayerDead",
    BUSY,
    Alert(
        "warning",
        """
        run_layer:torch_grad_dead_ratio:mean > 0.9
        unless on (run, layer) torch_layer_frozen == 1
        and on (run) torch_train_state{state=~"training|evaluating"} == 1
        """,
        for_="30m",
        summary="Layer {{ $labels.layer }} of run {{ $labels.run }} is dead.",
        description=(
            "For 30 minutes, {{ $value | humanizePercentage }} of its units have had a gradient of exactly zero in "
            "all recent samples."
        ),
    ),
    Alert(
        "info",
        """
        run_layer:torch_grad_dead_ratio:mean > 0.5
        unless on (run, layer) torch_layer_frozen == 1
        and on (run) torch_train_state{state=~"training|evaluating"} == 1
        """,
        for_="30m",
        summary="Half of layer {{ $labels.layer }} of run {{ $labels.run }} is dead.",
        description=(
            "For 30 minutes, {{ $value | humanizePercentage }} of its units have had a gradient of exactly zero in "
            "all recent samples."
        ),
    ),
    by_samples=True,
    needs=(GRAD_DEAD_RATIO,),
    takes_samples=20,
    first_steps=(
        "Check when it began: a jump points at a spike of the gradients or of the learning rate at that time. "
        "activations=True shows whether a ReLU behind it gives nothing but zeros. Dead rows of an embedding are normal."
    ),
    why=("From half of the units on, the model loses capacity; at nine tenths the layer passes on almost nothing."),
    note=(
        "Cannot fire before 20 samples, nor for layers without output units, nor where one row of a weight is split across ranks."
    ),
)
def dead(context: RuleContext) -> Iterator[Finding]:
    """Nine tenths of a layer's units are dead, or half of them."""
    ratios = context.values.table(GRAD_DEAD_RATIO)
    half, gone = ratios.numbers > HALF_DEAD, ratios.numbers > THRESHOLDS["LayerDead"]
    trained = ~_frozen(context, ratios)
    yield from by_layer("warning", ratios, gone & trained, "more than 90 % of its units are dead")
    yield from by_layer("info", ratios, half & ~gone & trained, "more than half of its units are dead")


@rule(
    "LayerWithoutGradient",
    BUSY,
    Alert(
        "warning",
        """
        max by (run, layer) (
          torch_grad_missing_parameters
          and on (run, rank, job, instance) torch_train_state{state=~"training|evaluating"} == 1
        ) > 0
        unless on (run, layer) torch_layer_frozen == 1
        """,
        for_="15m",
        summary="Layer {{ $labels.layer }} of run {{ $labels.run }} gets no gradient.",
        description="{{ $value }} of its parameters require a gradient and have received none for 15 minutes.",
    ),
    by_samples=True,
    needs=(GRAD_MISSING_PARAMETERS,),
    first_steps=(
        "Run `explain(step, model)` from `torch_grad_exporter`: it names the line where the way to the loss is cut. Freeze "
        "parameters that are not to be trained."
    ),
    why="For 15m: an expert may get no training examples for a while.",
    note="The text file of a process that has ended does not count.",
)
def without_gradient(context: RuleContext) -> Iterator[Finding]:
    """Parameters of a layer got no gradient."""
    missing = context.values.table(GRAD_MISSING_PARAMETERS)
    trained = ~_frozen(context, missing)
    yield from by_layer("warning", missing, (missing.numbers > 0) & trained, "parameters got no gradient")


def _frozen(context: RuleContext, layers: Table) -> BoolArray:
    """Which of these layers an action has frozen: what they show is of their last sample before, and is meant so."""
    found: BoolArray = context.values.table(LAYER_FROZEN).at(layers.rows) == 1
    return found


RULES = (nonfinite, exploding, vanishing, dead, without_gradient, not_updating)

GROUP = Group(
    "gradients",
    "torch_grad_exporter_gradient_alerts",
    "Alerts on gradients.",
    (
        (
            "Needs ranks.rules.yml in the same folder. Scrape with `honor_labels: true`. docs/runbook.md says what "
            "each alert means and what to do. Alerts carry `run`, and `layer` if they are about one layer; never "
            "`rank`, `job` or `instance`: the ranks of a run share their gradients."
        ),
        (
            '`and on (run) torch_train_state{state!~"finished|failed"} == 1` restricts an alert to runs that go on. '
            "Where torch_train_state is not stored (metric_relabel_configs), no alert of this file fires. With "
            '`state=~"training|evaluating"` an evaluation does not restart the `for`. `x < +Inf` leaves out gauges '
            "that are NaN or Inf."
        ),
    ),
    RULES,
)
