"""Collector `training`: steps, phases, losses, learning rates and the state of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from torch_grad_exporter.aggregation.totals import TotalsSnapshot
from torch_grad_exporter.capture.progress import PHASES, StepClock
from torch_grad_exporter.collectors.context import CollectorContext
from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.metrics.buckets import STEP_SECONDS
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, RowCache, scalar

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
TRAIN_BACKWARD_PASSES = METRICS.counter("torch_train_backward_passes_total", "Backward passes.")
TRAIN_SKIPPED_STEPS = METRICS.counter(
    "torch_train_skipped_steps_total",
    "Backward passes that no optimizer step followed, as after an overflow under mixed precision.",
)
TRAIN_STEP_DURATION = METRICS.histogram(
    "torch_train_step_duration_seconds",
    "Time from the end of one round of optimizer steps to the end of the next, every step; where steps are short they enter in lots, up to half a second later than torch_train_steps.",
    STEP_SECONDS,
    unit="seconds",
)
TRAIN_PHASE_SECONDS = METRICS.counter(
    "torch_train_phase_seconds_total",
    "Time by phase of the training step: data, forward, backward, optimizer, and outside for everything between steps. Over timed steps: all, or one of each torch_grad_exporter_timing_interval_steps where steps are very short.",
    "phase",
    unit="seconds",
)
TRAIN_GRADIENT_WAIT_SECONDS = METRICS.counter(
    "torch_train_gradient_wait_seconds_total",
    "Time from this rank's last gradient to the end of the backward, in which DistributedDataParallel waits for other ranks and the network, over sampled steps; on CPUs only.",
    unit="seconds",
)
TRAIN_GRADIENT_WAITS = METRICS.counter(
    "torch_train_gradient_waits_total", "Sampled steps that torch_train_gradient_wait_seconds_total is over."
)
TRAIN_SAMPLES = METRICS.counter(
    "torch_train_samples_total",
    "Training examples as observed, else the first dimension of the model's tensor inputs, summed over training forwards; absent where the inputs disagree or there are several models. Steps that are not timed are taken for as many examples as the timed one before them.",
)
TRAIN_TOKENS = METRICS.counter("torch_train_tokens_total", "Training tokens as observed.")
TRAIN_LOSS = METRICS.gauge("torch_train_loss", "Last observed loss.")
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
    """Families of the step clock and the training totals. `info`: the labels of `torch_train_info`, `None` while unknown.

    `ended`: "finished" or "failed" once the run is over, else `None`. `phases`: whether the host's clock can
    time phases; on an accelerator it only times launches, so phases are absent there.
    """

    name = "training"

    def __init__(
        self,
        snapshot: Callable[[], TotalsSnapshot],
        clock: StepClock,
        names: Sequence[str],
        *,
        info: Callable[[], Mapping[str, str] | None],
        world_size: int,
        ended: Callable[[], str | None],
        phases: Callable[[], bool],
    ) -> None:
        self._snapshot = snapshot
        self._clock = clock
        self._names = names
        self._info = info
        self._world_size = world_size
        self._ended = ended
        self._phases = phases
        self._rows = {spec: RowCache() for spec in (TRAIN_INFO, TRAIN_STEPS, TRAIN_LEARNING_RATE)}
        self._states, self._phase_rows = RowCache(), RowCache()

    def collect(self) -> Iterator[Family]:
        """The families as of now."""
        totals, clock = self._snapshot(), self._clock
        yield self._facts()
        yield self._state()
        yield scalar(TRAIN_WORLD_SIZE, self._world_size)
        counts = clock.counts()
        yield self._steps(counts.steps)
        yield scalar(TRAIN_BACKWARD_PASSES, counts.backward_passes)
        yield scalar(TRAIN_SKIPPED_STEPS, clock.skipped)
        yield self._durations(totals)
        yield from self._phase_seconds()
        waits = clock.gradient_waits.rounds if self._phases() else None
        yield scalar(TRAIN_GRADIENT_WAIT_SECONDS, None if waits is None else clock.gradient_waits.seconds)
        yield scalar(TRAIN_GRADIENT_WAITS, waits)
        counted = counts.examples if clock.examples_known and counts.examples else None
        yield scalar(TRAIN_SAMPLES, totals.sums.get("samples", counted))
        yield scalar(TRAIN_TOKENS, totals.sums.get("tokens"))
        yield scalar(TRAIN_LOSS, totals.last.get("loss"))
        yield scalar(TRAIN_EPOCH, totals.last.get("epoch"))
        yield scalar(TRAIN_LOSS_NONFINITE, totals.loss_nonfinite)
        yield scalar(TRAIN_LOSS_SPIKES, totals.loss_spikes)
        yield from self._learning_rates(totals)
        yield scalar(TRAIN_LOSS_SCALE, totals.last.get("loss_scale"))
        yield scalar(TRAIN_LAST_STEP_TIMESTAMP, clock.last_step)
        yield scalar(TRAIN_LAST_ACTIVITY_TIMESTAMP, clock.last_activity)
        yield scalar(TRAIN_START_TIMESTAMP, clock.started)
        yield scalar(TRAIN_SLOWEST_STEP, totals.slowest)

    def _facts(self) -> Family:
        info = self._info()
        rows = () if info is None else (tuple(info[name] for name in TRAIN_INFO.labels),)
        return Family(TRAIN_INFO, np.ones(len(rows)), self._rows[TRAIN_INFO].get(rows))

    def _durations(self, totals: TotalsSnapshot) -> Family:
        buckets, sums = totals.duration_buckets[None, :], np.array([totals.duration_sum])
        return Family(TRAIN_STEP_DURATION, buckets, sums=sums, exemplars=(totals.exemplars,) if totals.exemplars else None)

    def _state(self) -> Family:
        clock = self._clock
        running = "evaluating" if clock.evaluating else "training" if clock.last_step is not None else "initialising"
        current = self._ended() or running
        rows = self._states.get(tuple((state,) for state in STATES))
        return Family(TRAIN_STATE, np.array([float(state == current) for state in STATES]), rows)

    def _steps(self, steps: Mapping[int, int]) -> Family:
        # An optimizer that is known and has not stepped has a 0: else its first steps would be no increase to Prometheus.
        names = tuple(self._names)
        rows = self._rows[TRAIN_STEPS].get(tuple((name,) for name in names))
        return Family(TRAIN_STEPS, np.array([steps.get(number, 0) for number in range(len(names))], dtype=np.float64), rows)

    def _phase_seconds(self) -> Iterator[Family]:
        # Not with 0 from the start: a model that is never called as a whole has no phases, and a series must not go again.
        seen = self._clock.phases.seen
        if "forward" not in seen or not self._phases():
            return
        phases = [phase for phase in PHASES if phase in seen or phase == "outside"]
        seconds = self._clock.phases.seconds
        rows = self._phase_rows.get(tuple((phase,) for phase in phases))
        yield Family(TRAIN_PHASE_SECONDS, np.array([seconds[phase] for phase in phases]), rows)

    def _learning_rates(self, totals: TotalsSnapshot) -> Iterator[Family]:
        rows = self._rows[TRAIN_LEARNING_RATE].get(tuple(totals.learning_rates))
        yield Family(TRAIN_LEARNING_RATE, np.array(list(totals.learning_rates.values())), rows)


def _make(context: CollectorContext) -> TrainingCollector:
    snapshots = context.snapshots
    return TrainingCollector(
        lambda: snapshots.latest.totals,
        context.clock,
        context.optimizers,
        info=context.info,
        world_size=context.identity.world_size,
        ended=context.ended,
        phases=context.phases_timed,
    )


COLLECTOR = Declaration("training", (METRICS,), _make, place=20)
