"""Rules on the loss."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.collectors.training import TRAIN_LOSS, TRAIN_LOSS_NONFINITE, TRAIN_LOSS_SPIKES
from torch_grad_exporter.rules.context import GOING, MINUTES_5, MINUTES_10, THRESHOLDS, RuleContext, times
from torch_grad_exporter.rules.declaration import Alert, Finding, rule, server_rule
from torch_grad_exporter.rules.origin import ANNOTATION, origin


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
    """A loss was not finite."""
    losses = context.lately(TRAIN_LOSS_NONFINITE, MINUTES_5).largest() or 0.0
    if losses > 0:
        text = f"{origin(context)}The loss was NaN or Inf {times(losses, 'time')} {context.since(MINUTES_5)}."
        yield Finding("critical", text, value=losses)


@rule(
    "LossSpike",
    GOING,
    Alert(
        "warning",
        """
        max by (run) (increase(torch_train_loss_spikes_total[10m])) >= 3
        and on (run) torch_train_state{state!~"finished|failed"} == 1
        """,
        summary="The loss of run {{ $labels.run }} spikes.",
        description="At least three losses in 10 minutes were more than 6 sigma above the median of the last 128.",
    ),
    by_samples=True,
    needs=(TRAIN_LOSS,),
    takes_samples=20,
    first_steps=(
        "Watch whether the loss returns to its level. If it does not, go back to a checkpoint from before the first spike "
        "and skip the data in between, or lower the learning rate. `record` shows in what a batch differs from an ordinary one."
    ),
    why=("One spike beyond 6 sigma is a bad batch; three in 10 minutes are a trend. OLMo-core uses 6 sigma over 128 steps."),
    note="Cannot fire where no loss is observed, nor before 20 losses.",
)
def loss_spikes(context: RuleContext) -> Iterator[Finding]:
    """The loss jumped again and again."""
    spikes = context.growth(TRAIN_LOSS_SPIKES, MINUTES_10)
    if spikes >= THRESHOLDS["LossSpike"]:
        yield Finding("warning", f"The loss jumped {times(spikes, 'time')} {context.within(MINUTES_10)}.", value=spikes)


LOSS_NOT_IMPROVING = server_rule(
    "LossNotImproving",
    Alert(
        "info",
        """
        avg_over_time(run:torch_train_loss:mean[6h]) >= avg_over_time(run:torch_train_loss:mean[6h] offset 6h)
        and count_over_time(run:torch_train_loss:mean[6h] offset 6h) >= 0.9 * count_over_time(run:torch_train_loss:mean[6h])
        and count_over_time(run:torch_train_loss:mean[6h]) >= 0.9 * count_over_time(run:torch_train_loss:mean[6h] offset 6h)
        and on (run) torch_train_state{state=~"training|evaluating"} == 1
        """,
        for_="30m",
        summary="The loss of run {{ $labels.run }} no longer falls.",
        description=("Its mean over the last 6 hours, {{ $value | humanize }}, is not below the mean of the 6 hours before."),
    ),
    first_steps=(
        "Look at the loss on validation data and at the learning rate, and decide whether the run is worth its machines. "
        "weights=True shows whether the weights still move."
    ),
    why=(
        "Two windows of 6 h, each with at least nine tenths of the values of the other: half an hour without "
        "Prometheus does not silence the alert, a run that is too young does."
    ),
    note="Cannot fire where no loss is observed, nor in the first 12 hours.",
)
