"""Collector `goodput`: where the time of the run went."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.inspection.time_by_cause import STEP
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, LabelledRows, scalar

if TYPE_CHECKING:
    from torch_grad_exporter.collectors.context import CollectorContext

GOODPUT = Section("Goodput")

TRAIN_TIME_SECONDS = GOODPUT.counter(
    "torch_train_time_seconds_total",
    "Time since the start of the exporter by cause: starting until the end of the first step, compiling, data, step, evaluation, checkpoint, stalled, recomputed and other. They add up to it, but for the time since the last step as long as that may be any of them. See docs/goodput.md.",
    "cause",
    unit="seconds",
)
TRAIN_GOODPUT = GOODPUT.gauge(
    "torch_train_goodput_ratio",
    "Share of the time since the start of the exporter that went into steps, without waits for data and steps that are recomputed. With state_dir= since the start of the run's first process, with the time between processes. Absent before there was a step after the first.",
)
TRAIN_EARLIER_TIME_SECONDS = GOODPUT.gauge(
    "torch_train_earlier_time_seconds",
    "Time by cause of the run's earlier processes, as the state in state_dir= has it, and in down the time between them. Absent if there were none.",
    "cause",
    unit="seconds",
    opt_in="state_dir",
)
TRAIN_RESTARTS = GOODPUT.gauge(
    "torch_train_restarts", "Earlier processes of the run, by the state in state_dir=.", opt_in="state_dir"
)
TRAIN_MODEL_FLOPS = GOODPUT.counter(
    "torch_train_model_flops_total",
    "Floating-point operations of all steps of this rank: flops_per_step= times the steps.",
    opt_in="flops_per_step",
)
TRAIN_MFU = GOODPUT.gauge(
    "torch_train_mfu_ratio",
    "Model FLOPs utilization: operations of a step over the mean duration of the last 128 steps, without evaluations, checkpoints and stalls, and over what the device can do at most. Absent where that is not known.",
    opt_in="flops_per_step",
)


class GoodputCollector:
    """Families of times by cause, of earlier processes and of operations."""

    def __init__(self, context: CollectorContext) -> None:
        self._times, self._ending, self._state = context.times, context.ending, context.state
        self._flops, self._peak = context.flops_per_step, context.peak_flops
        self._rows = LabelledRows()

    def collect(self) -> Iterator[Family]:
        """Yield the families of now."""
        seconds = self._times.seconds(over=self._ending.state is not None)
        earlier = {} if self._state is None else self._state.seconds
        yield self._rows.by_label(TRAIN_TIME_SECONDS, seconds)
        together, steps = sum(seconds.values()) + sum(earlier.values()), seconds[STEP] + earlier.get(STEP, 0.0)
        yield scalar(TRAIN_GOODPUT, steps / together if steps else None)
        if self._state is not None:
            yield self._rows.by_label(TRAIN_EARLIER_TIME_SECONDS, earlier)
            yield scalar(TRAIN_RESTARTS, self._state.processes)
        if self._flops is not None:
            step, peak = self._times.mean_step, self._peak()
            yield scalar(TRAIN_MODEL_FLOPS, self._flops * self._times.steps)
            yield scalar(TRAIN_MFU, self._flops / step / peak if step and peak else None)


COLLECTOR = Declaration("goodput", (GOODPUT,), GoodputCollector, place=21, judged=False)
