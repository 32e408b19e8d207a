"""The rule on weights: what is trained moves."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torch_grad_exporter.collectors.gradients import LAYER_FROZEN
from torch_grad_exporter.collectors.training import TRAIN_LEARNING_RATE
from torch_grad_exporter.collectors.weights import WEIGHT_CAPTURES, WEIGHT_UPDATE_RATIO
from torch_grad_exporter.rules.context import BUSY, MINUTES_30, THRESHOLDS, RuleContext, by_layer
from torch_grad_exporter.rules.declaration import Alert, Finding, rule


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
    by_samples=True,
    needs=(WEIGHT_UPDATE_RATIO,),
    first_steps=(
        "Check that the optimizer has the layer's parameters, which `explain(step, model, optimizer)` tells, with a learning rate "
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
    """Each of several updates of a layer was nothing, while the learning rate is not 0."""
    rates = context.over(TRAIN_LEARNING_RATE, MINUTES_30)
    if not (np.fmin.reduce(rates, axis=0) > 0).any():
        return
    ratios = context.highest(WEIGHT_UPDATE_RATIO, MINUTES_30)
    known = ~np.isnan(context.values.table(WEIGHT_UPDATE_RATIO).numbers)
    captures = context.increase(WEIGHT_CAPTURES, MINUTES_30).at(ratios.rows)
    trained = context.values.table(LAYER_FROZEN).at(ratios.rows) != 1
    still = (ratios.numbers == 0) & known & (captures >= THRESHOLDS["LayerNotUpdating"]) & trained
    yield from by_layer("warning", ratios, still, f"its weights have not changed in the last {context.span(MINUTES_30)}")
