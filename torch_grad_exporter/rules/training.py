"""Rules on the progress of the run, as `dashboards/prometheus/training.alerts.yml` has them."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.collectors.gpu import GPU_UTILIZATION
from torch_grad_exporter.collectors.training import (
    TRAIN_LAST_ACTIVITY_TIMESTAMP,
    TRAIN_LAST_STEP_TIMESTAMP,
    TRAIN_LOSS_NONFINITE,
    TRAIN_LOSS_SPIKES,
    TRAIN_PHASE_SECONDS,
    TRAIN_SLOWEST_STEP,
    TRAIN_START_TIMESTAMP,
)
from torch_grad_exporter.rules.context import BUSY, GOING, THRESHOLDS, Finding, RuleContext, duration, rule, times
from torch_grad_exporter.rules.memory import MINUTES_5, MINUTES_10

SLOW, SLOWEST = 5.0, 1800.0
"""`TrainingStalled`: so many of the slowest of the last steps have to have gone by, too, for `SLOWEST` seconds at most.

For these an evaluation may be silent as well.
"""

PAUSES = 1.5
"""`TrainingStalled`: a pause may be so many times as long as the longest of a day, however long that was."""

STARVED = 0.5
"""`DataLoaderStarvation` as a critical one."""

FED = 0.5
"""`DataLoaderStarvation`: a GPU that is in use for so much of the time does not wait for data."""


@rule("TrainingFailed", frozenset({"failed"}))
def failed(_context: RuleContext) -> Iterator[Finding]:
    """The run has failed; as long as the process reports it, it was not started again."""
    yield Finding("critical", "An exception ended the training.")


@rule("TrainingNonFiniteLoss", GOING)
def nonfinite_loss(context: RuleContext) -> Iterator[Finding]:
    """A loss was not finite."""
    losses = context.lately(TRAIN_LOSS_NONFINITE, MINUTES_5).largest() or 0.0
    if losses > 0:
        yield Finding("critical", f"The loss was NaN or Inf {times(losses, 'time')} {context.since(MINUTES_5)}.")


@rule("TrainingStalled", BUSY)
def stalled(context: RuleContext) -> Iterator[Finding]:
    """Nothing has happened for longer than each of four limits, of which unknown ones do not count."""
    age = context.age(TRAIN_LAST_ACTIVITY_TIMESTAMP)
    last, start = context.values.one(TRAIN_LAST_STEP_TIMESTAMP), context.values.one(TRAIN_START_TIMESTAMP)
    first = None if last is None or start is None else last - start  # in place of the slowest step until there were two
    slowest, of_a_day = context.values.one(TRAIN_SLOWEST_STEP), context.memories.slowest_step.seconds()
    usual = first if slowest is None else slowest
    longest = usual if of_a_day is None else max(of_a_day, slowest or 0.0)
    evaluation = SLOWEST if context.state == "evaluating" else 0.0
    limits = (THRESHOLDS["TrainingStalled"], min(SLOW * (usual or 0.0), SLOWEST), PAUSES * (longest or 0.0), evaluation)
    if age is not None and age > max(limits):
        yield Finding("critical", f"Nothing has happened for {duration(age)}.")


@rule("TrainingNeverStarted", frozenset({"initialising"}))
def never_started(context: RuleContext) -> Iterator[Finding]:
    """There was no step yet."""
    age = context.age(TRAIN_START_TIMESTAMP)
    if age is not None and age > THRESHOLDS["TrainingNeverStarted"]:
        yield Finding("warning", f"No step has been taken in the {duration(age)} since the start.")


@rule("LossSpike", GOING)
def loss_spikes(context: RuleContext) -> Iterator[Finding]:
    """The loss jumped again and again."""
    spikes = context.growth(TRAIN_LOSS_SPIKES, MINUTES_10)
    if spikes >= THRESHOLDS["LossSpike"]:
        yield Finding("warning", f"The loss jumped {times(spikes, 'time')} {context.within(MINUTES_10)}.")


@rule("DataLoaderStarvation", BUSY)
def starvation(context: RuleContext) -> Iterator[Finding]:
    """Much of the time is spent waiting for data, and no GPU is in use meanwhile."""
    phases = dict(context.increase(TRAIN_PHASE_SECONDS, MINUTES_5).items())
    total = sum(phases.values())
    share = phases.get(("data",), 0.0) / total if total else 0.0
    in_use = context.mean(GPU_UTILIZATION, MINUTES_5).largest() or 0.0
    if share > THRESHOLDS["DataLoaderStarvation"] and in_use < FED:
        severity = "critical" if share > STARVED else "warning"
        yield Finding(severity, f"{share:.0%} of the time {context.within(MINUTES_5)} went by waiting for data.")


RULES = (failed, nonfinite_loss, stalled, never_started, loss_spikes, starvation)
