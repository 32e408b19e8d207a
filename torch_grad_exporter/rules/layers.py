"""Rules on single layers: dead ones, and those without gradient or updates."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torch_grad_exporter.collectors.gradients import (
    GRAD_DEAD_RATIO,
    GRAD_GLOBAL_NORM,
    GRAD_MISSING_PARAMETERS,
    GRAD_NORM,
    GRAD_NORM_RECENT_MAX,
    GRAD_SHARD_NORM,
    GRAD_ZERO_RATIO,
)
from torch_grad_exporter.collectors.training import TRAIN_LEARNING_RATE
from torch_grad_exporter.collectors.weights import WEIGHT_CAPTURES, WEIGHT_UNCHANGED_RATIO, WEIGHT_UPDATE_RATIO
from torch_grad_exporter.rules.context import BUSY, MINUTES_5, MINUTES_30, THRESHOLDS, RuleContext, by_layer, either
from torch_grad_exporter.rules.declaration import Alert, Finding, rule
from torch_grad_exporter.rules.values import Table

# LayerDead with severity "info".
HALF_DEAD = 0.5
DEAD_UNITS = (
    "For 30 minutes, {{ $value | humanizePercentage }} of its units have had a gradient of exactly zero in all recent samples."
)


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
    remembers=dict.fromkeys((GRAD_NORM_RECENT_MAX, GRAD_NORM, GRAD_SHARD_NORM), MINUTES_5),
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
    """Yield layers whose largest norm within five minutes is negligible beside the global norm, or else the largest layer's."""
    layers = either(*(context.highest(spec, MINUTES_5) for spec in (GRAD_NORM_RECENT_MAX, GRAD_NORM, GRAD_SHARD_NORM)))
    whole, reference = context.values.table(GRAD_GLOBAL_NORM).largest(), "global norm"
    if whole is None:
        whole = either(context.values.table(GRAD_NORM), context.values.table(GRAD_SHARD_NORM)).largest()
        reference = "largest layer's norm"
    if whole is not None:
        small = layers.numbers < THRESHOLDS["GradientVanishing"] * whole
        missing = context.values.table(GRAD_MISSING_PARAMETERS).at(layers.rows) > 0
        small, zero = small & ~missing & ~context.frozen(layers), layers.numbers == 0
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
        description=DEAD_UNITS,
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
        description=DEAD_UNITS,
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
    """Yield layers of which half or more of the units are dead."""
    ratios = context.values.table(GRAD_DEAD_RATIO)
    half, gone = ratios.numbers > HALF_DEAD, ratios.numbers > THRESHOLDS["LayerDead"]
    trained = ~context.frozen(ratios)
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
    """Yield layers with parameters that got no gradient."""
    missing = context.values.table(GRAD_MISSING_PARAMETERS)
    trained = ~context.frozen(missing)
    yield from by_layer("warning", missing, (missing.numbers > 0) & trained, "parameters got no gradient")


@rule(
    "LayerNotUpdating",
    BUSY,
    Alert(
        "warning",
        """
        max by (run, layer) (
          max_over_time(torch_weight_update_ratio[30m])
          and torch_weight_update_ratio
          and on (run, rank, job, instance) torch_train_state{state=~"training|evaluating"} == 1
        ) == 0
        and on (run, layer) max by (run, layer) (
          increase(torch_weight_captures_total{layer!="(removed)"}[30m])
        ) >= 3
        and on (run) max by (run) (min_over_time(torch_train_learning_rate[30m])) > 0
        unless on (run, layer) torch_layer_frozen == 1
        """,
        for_="15m",
        summary="The weights of layer {{ $labels.layer }} of run {{ $labels.run }} do not change.",
        description=(
            "All of the optimizer's updates of the layer that were measured in the last 30 minutes were exactly zero, "
            "though the learning rate is not."
        ),
    ),
    remembers=dict.fromkeys((WEIGHT_UPDATE_RATIO, WEIGHT_CAPTURES, TRAIN_LEARNING_RATE), MINUTES_30),
    by_samples=True,
    needs=(WEIGHT_UPDATE_RATIO,),
    first_steps=(
        "Check that the optimizer has the layer's parameters, which `explain(step, model, optimizer)` shows, with a learning rate "
        "above 0. If their type is bf16 or fp16, a small update rounds to nothing."
    ),
    why=(
        "3 updates: a layer such as an expert may get no gradient in one sample, hardly in all. The weights of a few layers are "
        "measured at each sample, so 30 minutes are several turns of most models. For 15m: a learning rate that warms up begins "
        "with updates that bf16 rounds away. A learning rate that was 0 in the last 30 minutes explains weights that stand still."
    ),
    note=(
        "Needs weights=True, and a learning rate that is known. It cannot fire where a layer has its turn less than three times in "
        "30 minutes: torch_weight_captures_total says how often. Steps that a gradient scaler left out are no updates."
    ),
)
def not_updating(context: RuleContext) -> Iterator[Finding]:
    """Yield layers whose recent updates were all exactly 0 while the learning rate is not."""
    rates = context.over(TRAIN_LEARNING_RATE, MINUTES_30)
    if not (np.fmin.reduce(rates, axis=0) > 0).any():
        return
    ratios = context.highest(WEIGHT_UPDATE_RATIO, MINUTES_30)
    known = ~np.isnan(context.values.table(WEIGHT_UPDATE_RATIO).numbers)
    captures = context.increase(WEIGHT_CAPTURES, MINUTES_30).at(ratios.rows)
    trained = ~context.frozen(ratios)
    still = (ratios.numbers == 0) & known & (captures >= THRESHOLDS["LayerNotUpdating"]) & trained
    yield from by_layer("warning", ratios, still, f"its weights have not changed in the last {context.span(MINUTES_30)}")


@rule(
    "UpdatesLost",
    BUSY,
    Alert(
        "warning",
        """
        max by (run, layer) (
          torch_weight_unchanged_ratio
          and on (run, rank, job, instance) torch_train_state{state=~"training|evaluating"} == 1
        )
        - max by (run, layer) (torch_grad_zero_ratio)
        > 0.5
        and on (run, layer) max by (run, layer) (torch_weight_update_ratio) > 0
        and on (run) max by (run) (torch_train_learning_rate) > 0
        unless on (run, layer) torch_layer_frozen == 1
        """,
        for_="30m",
        summary="Most of the updates of layer {{ $labels.layer }} of run {{ $labels.run }} are lost to rounding.",
        description=(
            "For 30 minutes more than half of its elements, now {{ $value | humanizePercentage }}, have had a gradient and stayed "
            "as they were."
        ),
    ),
    by_samples=True,
    needs=(WEIGHT_UNCHANGED_RATIO,),
    first_steps=(
        "If the layer's parameters are bf16 or fp16, keep them in float32 and compute under torch.autocast, or use an optimizer "
        "that sums up what rounding loses or that rounds stochastically. Else the learning rate is too small for the weights."
    ),
    why=(
        "Half of the elements that have a gradient: in float32 next to none stay as they are, in bf16 all whose update is below a "
        "512th of them. For 30m: a learning rate that warms up begins with updates that bf16 rounds away. LayerNotUpdating "
        "stands for a layer that does not move at all."
    ),
    note=(
        "Needs weights=True, and a learning rate that is known. Also fires, without a fault, where an optimizer keeps float32 "
        "copies of bf16 parameters or rounds stochastically: silence it there."
    ),
)
def updates_lost(context: RuleContext) -> Iterator[Finding]:
    """Yield layers most of whose elements have a gradient and stay as they are, while the learning rate is not 0."""
    if not (context.values.table(TRAIN_LEARNING_RATE).largest() or 0.0) > 0:
        return
    unchanged = context.values.table(WEIGHT_UNCHANGED_RATIO)
    zero, moved = (context.values.table(spec).at(unchanged.rows) for spec in (GRAD_ZERO_RATIO, WEIGHT_UPDATE_RATIO))
    lost = Table(unchanged.rows, unchanged.numbers - zero)
    chosen = (lost.numbers > THRESHOLDS["UpdatesLost"]) & (moved > 0) & ~context.frozen(lost)
    yield from by_layer("warning", lost, chosen, "rounding loses most of its updates")
