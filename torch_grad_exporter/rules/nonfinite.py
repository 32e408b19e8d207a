"""Rules on NaN and Inf, in the loss and in gradients, with the place where `nan_origin=` saw them first."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torch_grad_exporter.collectors.gradients import GRAD_NONFINITE_ELEMENTS, GRAD_NONFINITE_STEPS
from torch_grad_exporter.collectors.nan_origin import NONFINITE_ORIGIN_STEP
from torch_grad_exporter.collectors.training import TRAIN_LOSS, TRAIN_LOSS_NONFINITE, TRAIN_SKIPPED_STEPS, TRAIN_STEPS
from torch_grad_exporter.rules.context import GOING, HOUR, MINUTES_5, MINUTES_10, THRESHOLDS, RuleContext, times
from torch_grad_exporter.rules.declaration import Alert, Finding, rule
from torch_grad_exporter.rules.values import Table

# Layers that one sentence names, at most.
NAMED = 3

# The past of layers is remembered in 32 bits: rounded by less than this share.
ROUNDING = 2.0**-23

# A value of the label `outcome`.
SKIPPED = "skipped"

# Kinds of places that may only follow from another place.
ALREADY = frozenset({"parameter", "buffer", "unknown"})

_SENTENCES = {
    "forward": "{layer} gave {kind} in the forward",
    "backward": "{layer} gave {kind} in the backward",
    "parameter": "A parameter of {layer} was {kind} already",
    "buffer": "A buffer of {layer} was {kind} already",
    "batch": "The batch had {kind}",
    "loss": "{kind} came from the loss, outside of any module",
    "reduction": "{kind} came to {layer} with the reduction over ranks",
}

# Ends of an alert's description, as templates of Prometheus: the layers with most such elements; the last places of a run.
LAYERS = (
    '{{ with query (printf "topk(3, sum by (layer) (run_layer:torch_grad_nonfinite_elements:increase5m{run=%q}) > 0)" '
    "$labels.run) }} Affected layers:{{ range $i, $row := . }}{{ if $i }},{{ end }} {{ $row.Labels.layer }}{{ end }}.{{ end }}"
)
ANNOTATION = (
    '{{ range query (printf "topk(3, torch_nonfinite_origin_step{run=%q})" $labels.run) }} nan_origin has found '
    "{{ .Labels.layer }} ({{ .Labels.pass }}, {{ .Labels.kind }}) at step {{ .Value }}.{{ end }}"
)


def origin(context: RuleContext) -> str:
    """Return a sentence on the last place, with a space behind it; empty if none is known. Places of `ALREADY` come last."""
    places = [(row, step) for row, step in context.values.table(NONFINITE_ORIGIN_STEP).items()]
    if not places:
        return ""
    (layer, stage, kind), step = max(places, key=lambda place: (place[0][1] not in ALREADY, place[1]))
    sentence = _SENTENCES.get(stage, "The origin of {kind} is not known").format(layer=layer, kind={"nan": "NaN"}.get(kind, "Inf"))
    return f"{sentence}, at step {step:g}. "


@rule(
    "TrainingNonFiniteLoss",
    GOING,
    Alert(
        "critical",
        """
        max by (run) (
          increase(torch_train_loss_nonfinite_total[5m]) > 0
          or
          torch_train_loss_nonfinite_total > 0
          and on (run, rank, job, instance) time() - torch_train_start_timestamp_seconds < 600
        )
        and on (run) torch_train_state{state!~"finished|failed"} == 1
        """,
        keep_firing_for="30m",
        summary="The loss of run {{ $labels.run }} is NaN or infinite.",
        description=(
            "A loss observed in the last minutes is NaN or infinite. Unless the loop skips such steps, the weights "
            "are lost, and all further steps are wasted." + ANNOTATION
        ),
    ),
    remembers={TRAIN_LOSS_NONFINITE: MINUTES_5},
    by_samples=True,
    needs=(TRAIN_LOSS,),
    first_steps=(
        "Check whether it continues. One such loss with finite gradients is a bad batch or a skipped step; "
        'otherwise stop the run and go back to a checkpoint; nan_origin="always" names the module where it begins.'
    ),
    why=(
        "One is enough: the weights are next. In the first 600 s of a process its whole count matters, since "
        "`increase` does not show what came before the first scrape."
    ),
    note=("Cannot fire where no loss is observed: that takes `exporter.observe(loss=...)`, or a model that returns its loss."),
)
def nonfinite_loss(context: RuleContext) -> Iterator[Finding]:
    """Yield a finding if a loss was not finite."""
    losses = context.recent(TRAIN_LOSS_NONFINITE, MINUTES_5).largest() or 0.0
    if losses > 0:
        text = f"{origin(context)}The loss was NaN or Inf {times(losses, 'time')} {context.since(MINUTES_5)}."
        yield Finding("critical", text, value=losses)


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
            "were skipped because of such gradients." + LAYERS + ANNOTATION
        ),
    ),
    remembers={
        GRAD_NONFINITE_STEPS: HOUR,
        GRAD_NONFINITE_ELEMENTS: MINUTES_10,
        TRAIN_SKIPPED_STEPS: HOUR,
        TRAIN_STEPS: MINUTES_10,
    },
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
def nonfinite_gradients(context: RuleContext) -> Iterator[Finding]:
    """Yield a finding if steps were taken on gradients that are not finite, or most steps were skipped for such."""
    taken = _sum(context.recent(GRAD_NONFINITE_STEPS, MINUTES_5), skipped=False)
    if taken > 0:
        text = f"{origin(context)}Gradients were NaN or Inf in {times(taken, 'unskipped step')}, {context.since(MINUTES_5)}"
        yield _with_layers(context, context.recent(GRAD_NONFINITE_ELEMENTS, MINUTES_5), text, taken)
    elif _mostly_skipped(context):
        skipped, steps = context.growth(TRAIN_SKIPPED_STEPS, MINUTES_10), context.growth(TRAIN_STEPS, MINUTES_10)
        text = (
            f"{origin(context)}Gradients were NaN or Inf: {times(skipped)} skipped and {steps:g} taken {context.within(MINUTES_10)}"
        )
        yield _with_layers(context, context.increase(GRAD_NONFINITE_ELEMENTS, MINUTES_10), text, skipped)


def _with_layers(context: RuleContext, grown: Table, text: str, value: float) -> Finding:
    """Return the finding with its layers, in the order of the model; none are known of a step that was not sampled."""
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
    """Return the number of steps that were skipped, or of all others."""
    return float(sum(count for (_, outcome), count in table.items() if count > 0 and (outcome == SKIPPED) == skipped))
