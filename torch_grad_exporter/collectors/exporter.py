"""Collector `exporter`: the cost and the health of the exporter itself."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.capture.armed_round import Lost
from torch_grad_exporter.capture.detection import Mode
from torch_grad_exporter.collectors.context import CollectorContext
from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.lifecycle import THREAD_TIME
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, LabelledRows, scalar

METRICS = Section("The exporter itself")

EXPORTER_OVERHEAD_RATIO = METRICS.gauge(
    "torch_grad_exporter_overhead_ratio",
    "Time the exporter took on the training thread, and on devices, over training time, last 1,000 steps.",
)
EXPORTER_STARTUP_RATIO = METRICS.gauge(
    "torch_grad_exporter_startup_overhead_ratio",
    "Part of torch_grad_exporter_overhead_ratio that the first samples took, lent against the budget: 0 once it is paid back; absent with a fixed interval.",
)
EXPORTER_OVERHEAD_BUDGET = METRICS.gauge(
    "torch_grad_exporter_overhead_budget_ratio",
    "The overhead budget that the sampling interval keeps to; absent with a fixed interval.",
)
EXPORTER_SAMPLING_INTERVAL = METRICS.gauge("torch_grad_exporter_sampling_interval_steps", "Steps from one sample to the next.")
EXPORTER_TIMING_INTERVAL = METRICS.gauge(
    "torch_grad_exporter_timing_interval_steps",
    "Steps from one that hooks follow to the next, among those that are not sampled: 1 where steps are irregular; else most are only counted.",
)
EXPORTER_MODELS = METRICS.gauge("torch_grad_exporter_models", "Models that start_exporter was given.")
EXPORTER_LAYERS = METRICS.gauge("torch_grad_exporter_layers", "Layers shown.")
EXPORTER_LAYERS_FOLDED = METRICS.gauge(
    "torch_grad_exporter_layers_folded", "Layers of the model that are shown only as part of a group, because of max_layers."
)
EXPORTER_SERIES = METRICS.gauge("torch_grad_exporter_series", "Time series in the previous scrape.")
EXPORTER_CAPTURE_MODE = METRICS.gauge(
    "torch_grad_exporter_capture_mode",
    "Where gradients are read: 1 for the current one of backward (at its end) and optimizer (at its step), else 0.",
    "mode",
)
EXPORTER_OVERHEAD_SECONDS = METRICS.counter(
    "torch_grad_exporter_overhead_seconds_total",
    "Time the exporter took on the training thread, and on devices: as timed, with a fixed allowance for PyTorch's calls of hooks.",
    unit="seconds",
)
EXPORTER_THREADS_CPU_SECONDS = METRICS.counter(
    "torch_grad_exporter_threads_cpu_seconds_total",
    "CPU time of the exporter's own threads, which run beside the training, from the first scrape to the last pause of each.",
    unit="seconds",
)
EXPORTER_CAPTURES = METRICS.counter("torch_grad_exporter_captures_total", "Samples taken.")
EXPORTER_CAPTURES_SKIPPED = METRICS.counter(
    "torch_grad_exporter_captures_skipped_total", "Samples that were due and not taken or not delivered, by reason.", "reason"
)
EXPORTER_UNTIMED_STEPS = METRICS.counter(
    "torch_grad_exporter_untimed_steps_total",
    "Steps that were due to be timed and are in none of the times, by what was not timed: phases or layers. The device was too far behind, a graph was being captured, or there was too much to time.",
    "what",
)
EXPORTER_ERRORS = METRICS.counter("torch_grad_exporter_errors_total", "Failures inside the exporter, by source.", "source")
EXPORTER_NOTIFICATIONS = METRICS.counter(
    "torch_grad_exporter_notifications_total",
    "Notifications by notifier: sent, failed after all tries, or dropped because too many waited or the run ended. A problem that begins is one, so is its end, and each repetition to an Alertmanager.",
    "sink", "result", opt_in="alerts",
)  # fmt: skip
EXPORTER_ACTIONS = METRICS.counter(
    "torch_grad_exporter_actions_total",
    "Actions of exporter.on by result: done, failed because it raised, refused because the ranks did not agree, or dropped because too many waited or the run ended.",
    "action", "result", opt_in="on",
)  # fmt: skip
EXPORTER_LAST_ACTION = METRICS.gauge(
    "torch_grad_exporter_last_action_timestamp_seconds",
    "Unix time at which an action of exporter.on was last done; absent before the first time.",
    "action",
    unit="seconds",
    opt_in="on",
)
ALERTS_ACTIVE = METRICS.gauge(
    "torch_alerts_active",
    "Problems that this process has detected and that have not ended, by alert.",
    "alert",
    "severity",
    opt_in="alerts",
)
# The scrape itself yields EXPORTER_SERIES and these two, which are known at its end.
EXPORTER_COLLECTOR_SUCCESS = METRICS.gauge(
    "torch_grad_exporter_collector_success", "1 where the collector succeeded at this scrape, else 0.", "collector"
)
EXPORTER_COLLECTOR_DURATION = METRICS.gauge(
    "torch_grad_exporter_collector_duration_seconds", "Time the collector took at this scrape.", "collector", unit="seconds"
)


class ExporterCollector:
    """Families about the exporter."""

    def __init__(self, context: CollectorContext) -> None:
        self._context = context
        self._rows = LabelledRows()
        self._threads_before: float | None = None

    def collect(self) -> Iterator[Family]:
        """Yield the families of now."""
        threads = THREAD_TIME.seconds
        if self._threads_before is None:  # a counter begins with 0, and there may have been another exporter in this process
            self._threads_before = threads
        snapshot, schedule, capture = self._context.snapshots.latest, self._context.schedule, self._context.capture
        table = snapshot.gradients.table
        # Before the first step it has taken nothing of their time.
        yield scalar(EXPORTER_OVERHEAD_RATIO, snapshot.totals.overhead_ratio or 0.0)
        adapts = schedule.every is None
        yield scalar(EXPORTER_STARTUP_RATIO, (snapshot.totals.lent_ratio if schedule.repaying else 0.0) if adapts else None)
        yield scalar(EXPORTER_OVERHEAD_BUDGET, schedule.budget if adapts else None)
        yield scalar(EXPORTER_SAMPLING_INTERVAL, schedule.shown_interval)
        yield scalar(EXPORTER_TIMING_INTERVAL, schedule.timing_interval)
        yield scalar(EXPORTER_MODELS, capture.models)
        yield scalar(EXPORTER_LAYERS, len(table.layers))
        yield scalar(EXPORTER_LAYERS_FOLDED, table.folded)
        yield self._rows.by_label(EXPORTER_CAPTURE_MODE, {mode.value: mode is capture.detection.mode for mode in Mode})
        yield scalar(EXPORTER_OVERHEAD_SECONDS, snapshot.totals.overhead_seconds)
        yield scalar(EXPORTER_THREADS_CPU_SECONDS, threads - self._threads_before)
        yield scalar(EXPORTER_CAPTURES, capture.samples)
        gradients = snapshot.gradients
        lost = {**capture.rounds.lost, Lost.UNDELIVERED: gradients.undelivered, Lost.UNATTRIBUTED: gradients.unattributed}
        yield self._rows.by_label(EXPORTER_CAPTURES_SKIPPED, {why.value: count for why, count in lost.items()})
        yield self._untimed()
        yield self._rows.by_label(EXPORTER_ERRORS, self._context.errors.counts())
        if (notified := self._context.notified) is not None:
            yield self._rows.family(EXPORTER_NOTIFICATIONS, notified.counts)
            yield self._rows.family(ALERTS_ACTIVE, notified.active)
        if acted := self._context.acted.counts:
            yield self._rows.family(EXPORTER_ACTIONS, acted)
        if last := self._context.acted.marks.last_done:
            yield self._rows.by_label(EXPORTER_LAST_ACTION, last)

    def _untimed(self) -> Family:
        layers = self._context.layer_times
        untimed = {"phases": self._context.clock.phases.untimed, "layers": None if layers is None else layers.untimed}
        return self._rows.by_label(EXPORTER_UNTIMED_STEPS, untimed)


COLLECTOR = Declaration("exporter", (METRICS,), ExporterCollector, place=100)
