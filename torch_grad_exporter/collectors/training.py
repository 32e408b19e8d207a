"""Collector `training`: steps, phases, losses, learning rates and the state of the run."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from torch_grad_exporter.capture.progress import PHASES
from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.distributed.identity import hostname
from torch_grad_exporter.metrics.buckets import STEP_SECONDS
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, LabelledRows, scalar
from torch_grad_exporter.version import __version__

if TYPE_CHECKING:
    from torch_grad_exporter.collectors.context import CollectorContext
    from torch_grad_exporter.store.run_table import TotalsSnapshot

METRICS = Section("Training")

TRAIN_INFO = METRICS.gauge(
    "torch_train_info",
    "Facts about the training process as labels; the value is always 1.",
    "torch_version", "exporter_version", "python_version", "host", "local_rank", "devices",
)  # fmt: skip
TRAIN_STATE = METRICS.gauge(
    "torch_train_state",
    "State of the training run: 1 for the current one of initialising, training, evaluating, finished and failed, else 0.",
    "state",
)
TRAIN_WORLD_SIZE = METRICS.gauge("torch_train_world_size", "Ranks of the run.")
TRAIN_STEPS = METRICS.counter("torch_train_steps_total", "Optimizer steps.", "optimizer")
TRAIN_EARLIER_STEPS = METRICS.gauge(
    "torch_train_earlier_steps",
    "Optimizer steps of the training before those that torch_train_steps_total counts, as the loop reported; torch_grad_sample_step includes them. Absent if nothing was resumed.",
)
TRAIN_BACKWARD_PASSES = METRICS.counter("torch_train_backward_passes_total", "Backward passes.")
TRAIN_SKIPPED_STEPS = METRICS.counter(
    "torch_train_skipped_steps_total",
    "Backward passes that no optimizer step followed, as after an overflow under mixed precision.",
)
TRAIN_STEP_DURATION = METRICS.histogram(
    "torch_train_step_duration_seconds",
    "Time from the end of one round of optimizer steps to the end of the next, every step.",
    STEP_SECONDS,
    unit="seconds",
)
TRAIN_PHASE_SECONDS = METRICS.counter(
    "torch_train_phase_seconds_total",
    "Time by phase of the training step: data, forward, backward, optimizer, and outside for everything between steps. On an accelerator in the time of the device that most parameters are on, where data and outside are what it waits for the host in them. Over the steps that hooks follow, of which torch_grad_exporter_timing_interval_steps tells how many there are, and without what the exporter itself takes on a CPU.",
    "phase",
    unit="seconds",
)
TRAIN_GRADIENT_WAIT_SECONDS = METRICS.counter(
    "torch_train_gradient_wait_seconds_total",
    "Time from this rank's last gradient to the end of the backward, in which DistributedDataParallel waits for other ranks and the network, over sampled steps; on CPUs only.",
    unit="seconds",
)
TRAIN_GRADIENT_WAITS = METRICS.counter(
    "torch_train_gradient_waits_total", "Sampled steps that torch_train_gradient_wait_seconds_total covers."
)
TRAIN_SAMPLES = METRICS.counter(
    "torch_train_samples_total",
    "Training examples as observed, else the first dimension of the model's tensor inputs, summed over training forwards; absent where the inputs disagree or there are several models. A step that is only counted has as many examples as the last ones that hooks followed.",
)
TRAIN_TOKENS = METRICS.counter("torch_train_tokens_total", "Training tokens as observed.")
TRAIN_LOSS = METRICS.gauge(
    "torch_train_loss",
    "Last observed loss; where none is observed, that of the last whole round whose losses were read from the model's output.",
)
TRAIN_EPOCH = METRICS.gauge("torch_train_epoch", "Last observed epoch.")
TRAIN_LOSS_NONFINITE = METRICS.counter("torch_train_loss_nonfinite_total", "Observed losses that were NaN or Inf.")
TRAIN_LOSS_SPIKES = METRICS.counter(
    "torch_train_loss_spikes_total",
    "Observed losses above 6 robust sigmas over the median of the last 128; by their logarithms while all are positive.",
)
TRAIN_LEARNING_RATE = METRICS.gauge("torch_train_learning_rate", "Learning rate of a parameter group.", "optimizer", "group")
TRAIN_LOSS_SCALE = METRICS.gauge("torch_train_loss_scale", "Loss scale of the gradient scaler.")
TRAIN_LAST_STEP_TIMESTAMP = METRICS.gauge(
    "torch_train_last_step_timestamp_seconds", "Unix time of the last optimizer step.", unit="seconds"
)
TRAIN_LAST_ACTIVITY_TIMESTAMP = METRICS.gauge(
    "torch_train_last_activity_timestamp_seconds",
    "Unix time of the last forward pass, backward pass or optimizer step.",
    unit="seconds",
)
TRAIN_START_TIMESTAMP = METRICS.gauge(
    "torch_train_start_timestamp_seconds", "Unix time at which the exporter was started.", unit="seconds"
)
TRAIN_SLOWEST_STEP = METRICS.gauge("torch_train_slowest_step_seconds", "Longest of the last 128 steps.", unit="seconds")

STATES = ("initialising", "training", "evaluating", "finished", "failed")


class TrainingCollector:
    """Families of the step clock and the training totals."""

    def __init__(self, context: CollectorContext) -> None:
        self._context = context
        self._rows = LabelledRows()

    def collect(self) -> Iterator[Family]:
        """Yield the families of now."""
        totals, clock = self._context.snapshots.latest.totals, self._context.clock
        counts = self._context.snapshots.counts
        yield self._rows.family(TRAIN_INFO, self._facts())
        yield self._state()
        yield scalar(TRAIN_WORLD_SIZE, self._context.identity.world_size)
        # An optimizer that is known and has not stepped has a 0: else its first steps would be no increase to Prometheus.
        steps = {name: counts.steps.get(number, 0) for number, name in enumerate(tuple(self._context.optimizers))}
        yield self._rows.by_label(TRAIN_STEPS, steps)
        yield scalar(TRAIN_EARLIER_STEPS, clock.earlier)
        yield scalar(TRAIN_BACKWARD_PASSES, counts.backward_passes)
        yield scalar(TRAIN_SKIPPED_STEPS, clock.skipped)
        yield self._durations(totals)
        # On an accelerator the host's clock only times launches, and phases are timed by its events.
        on_host = self._context.capture.devices <= {"cpu"}
        if clock.phases.by_events or (on_host and clock.phases.known):
            yield from self._phase_seconds()
        if on_host:
            waits = self._context.waits
            yield scalar(TRAIN_GRADIENT_WAIT_SECONDS, None if waits.rounds is None else waits.seconds)
            yield scalar(TRAIN_GRADIENT_WAITS, waits.rounds)
        counted = counts.examples if clock.examples_known and counts.examples else None
        yield scalar(TRAIN_SAMPLES, totals.sums.get("samples", counted))
        yield scalar(TRAIN_TOKENS, totals.sums.get("tokens"))
        yield scalar(TRAIN_LOSS, totals.last.get("loss"))
        yield scalar(TRAIN_EPOCH, totals.last.get("epoch"))
        yield scalar(TRAIN_LOSS_NONFINITE, totals.loss_nonfinite)
        yield scalar(TRAIN_LOSS_SPIKES, totals.loss_spikes)
        yield self._rows.family(TRAIN_LEARNING_RATE, totals.learning_rates)
        yield scalar(TRAIN_LOSS_SCALE, totals.last.get("loss_scale"))
        yield scalar(TRAIN_LAST_STEP_TIMESTAMP, clock.last_step)
        yield scalar(TRAIN_LAST_ACTIVITY_TIMESTAMP, clock.last_activity)
        yield scalar(TRAIN_START_TIMESTAMP, clock.started)
        yield scalar(TRAIN_SLOWEST_STEP, totals.slowest)

    def _facts(self) -> dict[tuple[str, ...], float]:
        """Return the row of `torch_train_info`, none while the devices are unknown: a series that changed its labels would be two."""
        expected, seen = self._context.expected_devices, self._context.capture.devices
        devices = seen if seen - expected else expected
        if not devices:
            return {}
        rank, kinds = str(self._context.identity.local_rank), ",".join(sorted(devices))
        return {(str(torch.__version__), __version__, platform.python_version(), hostname(), rank, kinds): 1.0}

    def _durations(self, totals: TotalsSnapshot) -> Family:
        buckets, sums = totals.duration_buckets[None, :], np.array([totals.duration_sum])
        exemplars = (totals.exemplars,) if totals.exemplars else None
        return Family(TRAIN_STEP_DURATION, buckets, sums=sums, exponential=totals.duration_exponential, exemplars=exemplars)

    def _state(self) -> Family:
        clock = self._context.clock
        running = "evaluating" if clock.evaluating else "training" if clock.last_step is not None else "initialising"
        current = self._context.ending.state or running
        return self._rows.by_label(TRAIN_STATE, {state: state == current for state in STATES})

    def _phase_seconds(self) -> Iterator[Family]:
        # Not with 0 from the start: a model that is never called as a whole has no phases, and a series must not disappear.
        phases = self._context.clock.phases
        if "forward" in phases.seen:
            shown = [phase for phase in PHASES if phase in phases.seen or phase == "outside"]
            yield self._rows.by_label(TRAIN_PHASE_SECONDS, {phase: phases.seconds[phase] for phase in shown})


COLLECTOR = Declaration("training", (METRICS,), TrainingCollector, place=20)
