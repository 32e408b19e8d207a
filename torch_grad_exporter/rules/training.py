"""Rules on the progress of the run, as `dashboards/prometheus/training.alerts.yml` has them."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.metrics import catalogue as c
from torch_grad_exporter.rules.look import BUSY, GOING, THRESHOLDS, Found, Look, duration, rule, times
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
def failed(_look: Look) -> Iterator[Found]:
    """The run has failed; as long as the process tells of it, it was not started again."""
    yield Found("critical", "An exception ended the training.")


@rule("TrainingNonFiniteLoss", GOING)
def nonfinite_loss(look: Look) -> Iterator[Found]:
    """A loss was not finite."""
    losses = look.lately(c.TRAIN_LOSS_NONFINITE, MINUTES_5).largest() or 0.0
    if losses > 0:
        yield Found("critical", f"The loss was NaN or Inf {times(losses, 'time')} {look.since(MINUTES_5)}.")


@rule("TrainingStalled", BUSY)
def stalled(look: Look) -> Iterator[Found]:
    """Nothing has happened for longer than each of four times, of which those that are not known do not count."""
    age = look.age(c.TRAIN_LAST_ACTIVITY_TIMESTAMP)
    last, start = look.values.one(c.TRAIN_LAST_STEP_TIMESTAMP), look.values.one(c.TRAIN_START_TIMESTAMP)
    first = None if last is None or start is None else last - start  # stands for the slowest step until there were two
    slowest, of_a_day = look.values.one(c.TRAIN_SLOWEST_STEP), look.memories.slowest_step.seconds()
    usual = first if slowest is None else slowest
    longest = usual if of_a_day is None else max(of_a_day, slowest or 0.0)
    evaluation = SLOWEST if look.state == "evaluating" else 0.0
    limits = (THRESHOLDS["TrainingStalled"], min(SLOW * (usual or 0.0), SLOWEST), PAUSES * (longest or 0.0), evaluation)
    if age is not None and age > max(limits):
        yield Found("critical", f"Nothing has happened for {duration(age)}.")


@rule("TrainingNeverStarted", frozenset({"initialising"}))
def never_started(look: Look) -> Iterator[Found]:
    """There was no step yet."""
    age = look.age(c.TRAIN_START_TIMESTAMP)
    if age is not None and age > THRESHOLDS["TrainingNeverStarted"]:
        yield Found("warning", f"No step has been taken in the {duration(age)} since the start.")


@rule("LossSpike", GOING)
def loss_spikes(look: Look) -> Iterator[Found]:
    """The loss jumped again and again."""
    spikes = look.growth(c.TRAIN_LOSS_SPIKES, MINUTES_10)
    if spikes >= THRESHOLDS["LossSpike"]:
        yield Found("warning", f"The loss jumped {times(spikes, 'time')} {look.within(MINUTES_10)}.")


@rule("DataLoaderStarvation", BUSY)
def starvation(look: Look) -> Iterator[Found]:
    """Much of the time goes by waiting for data, and no GPU is in use meanwhile."""
    phases = dict(look.increase(c.TRAIN_PHASE_SECONDS, MINUTES_5).items())
    total = sum(phases.values())
    share = phases.get(("data",), 0.0) / total if total else 0.0
    in_use = look.mean(c.GPU_UTILIZATION, MINUTES_5).largest() or 0.0
    if share > THRESHOLDS["DataLoaderStarvation"] and in_use < FED:
        severity = "critical" if share > STARVED else "warning"
        yield Found(severity, f"{share:.0%} of the time {look.within(MINUTES_5)} went by waiting for data.")


RULES = (failed, nonfinite_loss, stalled, never_started, loss_spikes, starvation)
