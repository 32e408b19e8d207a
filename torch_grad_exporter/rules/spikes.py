"""Rules on sudden changes: losses and gradients that spike, and clipping that leaves next to nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torch_grad_exporter.collectors.clipping import GRAD_CLIP_COEFFICIENT
from torch_grad_exporter.collectors.gradients import GRAD_CAPTURES, GRAD_GLOBAL_NORM_SPIKES, GRAD_NORM_SPIKES, GRAD_SAMPLE_STEP
from torch_grad_exporter.collectors.reinforcement import RL_REWARD_MEAN
from torch_grad_exporter.collectors.training import TRAIN_LOSS, TRAIN_LOSS_SPIKES
from torch_grad_exporter.rules.context import GOING, MINUTES_10, THRESHOLDS, RuleContext, times
from torch_grad_exporter.rules.declaration import Alert, Finding, rule
from torch_grad_exporter.rules.values import Table

# GradientExploding: the share of its samples that makes a layer spike, the share of layers that counts, the largest number of
# layers for which it does not count; the clip coefficient that leaves next to nothing, and the samples that it takes.
OF_SAMPLES, OF_LAYERS, FEW_LAYERS = 0.01, 0.25, 3
CLIPPED, SAMPLES = 0.01, 3


@rule(
    "LossSpike",
    GOING,
    Alert(
        "warning",
        """
        max by (run) (increase(torch_train_loss_spikes_total[10m])) >= 3
        unless on (run) torch_rl_reward_mean
        and on (run) torch_train_state{state!~"finished|failed"} == 1
        """,
        summary="The loss of run {{ $labels.run }} spikes.",
        description="At least three losses in 10 minutes were more than 6 sigma above the median of the last 128.",
    ),
    remembers={TRAIN_LOSS_SPIKES: MINUTES_10},
    by_samples=True,
    needs=(TRAIN_LOSS,),
    takes_samples=20,
    first_steps=(
        "Watch whether the loss returns to its level. If it does not, go back to a checkpoint from before the first spike "
        "and skip the data in between, or lower the learning rate. `record` shows in what a batch differs from an ordinary one."
    ),
    why=("One spike beyond 6 sigma is a bad batch; three in 10 minutes are a trend. OLMo-core uses 6 sigma over 128 steps."),
    note=(
        "Cannot fire where no loss is observed, nor before 20 losses. The loss of reinforcement learning is near zero by "
        "construction: runs that log a reward are not judged."
    ),
)
def loss_spikes(context: RuleContext) -> Iterator[Finding]:
    """Yield a finding if the loss jumped several times."""
    spikes = context.growth(TRAIN_LOSS_SPIKES, MINUTES_10)
    if spikes >= THRESHOLDS["LossSpike"] and context.values.one(RL_REWARD_MEAN) is None:
        yield Finding("warning", f"The loss jumped {times(spikes, 'time')} {context.within(MINUTES_10)}.", value=spikes)


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
    remembers=dict.fromkeys(
        (GRAD_GLOBAL_NORM_SPIKES, GRAD_NORM_SPIKES, GRAD_CAPTURES, GRAD_CLIP_COEFFICIENT, GRAD_SAMPLE_STEP), MINUTES_10
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
        "One spike, beyond 6 sigma and 5 times the median, may be a bad batch; three in 10 minutes are not. A "
        "quarter of the layers: this many may explode without an effect on the global norm, where other layers are "
        "larger. 0.01: layers of a healthy run have a spike now and then, so more than a hundredth of the samples "
        "have to be. Models with up to 3 layers are not judged by layer. Clipped to "
        "0.01 at each sample for 10 minutes: the learning rate is then in fact a hundredth."
    ),
    note="Cannot fire before 20 samples, nor with fewer than 3 samples in 10 minutes.",
)
def exploding(context: RuleContext) -> Iterator[Finding]:
    """Yield a finding if the global norm or many layers spiked several times, or clipping leaves next to nothing."""
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
    """Return how many layers spike, 0 unless these are many."""
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
