"""Sixty small faults of the kind that a careless move makes, spread over the folders of the package.

They were written down from the code alone, before anybody looked whether a test finds them: a reset that is dropped, two calls in
the wrong order, `=` for `|=`, `or` for `and`, a guard that is left out, a unit that is missing. Each changes what a user sees; none
stops an import or breaks a type. `python -m tests.mutants` plants them one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

FAR = ("test_traps.py", "metrics/test_golden.py", "test_lifecycle.py", "matrix/test_matrix.py")
"""Tests far from any one file, of everything together."""


@dataclass(frozen=True, slots=True)
class Fault:
    """In `file`, below the package, `text`, which stands there once, becomes `instead`.

    `nearest`: the tests that are run first, by their paths below `tests`; `wider`: those that are run if these find nothing.
    """

    name: str
    file: str
    text: str
    instead: str
    nearest: tuple[str, ...]
    wider: tuple[str, ...] = ()


CAPTURE = (
    Fault(
        "cleared gradients stay those of the round",
        "capture/rounds.py",
        "        self.backwards, self.again, self.captured = 0, True, False\n        self.fired.clear()\n",
        "        self.backwards, self.again, self.captured = 0, True, False\n",
        ("capture/test_rounds.py", "capture/test_net_rounds.py"),
        ("capture/test_ordinary_model.py", "capture/test_net_capture.py", "capture/test_capture.py"),
    ),
    Fault(
        "the last look alone says whether there was a clearing",
        "capture/round_pattern.py",
        "self._cleared_since_step |= found",
        "self._cleared_since_step = found",
        ("capture/test_rounds.py", "capture/test_net_rounds.py"),
        ("capture/test_ordinary_model.py", "capture/test_net_capture.py"),
    ),
    Fault(
        "a changed interval has no patience",
        "capture/schedule.py",
        "self.interval, self._since_change, self._account = interval, 0, _Account()",
        "self.interval, self._account = interval, _Account()",
        ("capture/test_schedule.py",),
        ("capture/test_cost.py", "capture/test_net_counted.py"),
    ),
    Fault(
        "misses of one rung count for the next",
        "capture/ladder.py",
        "self.mode, self._misses = mode, 0",
        "self.mode = mode",
        ("capture/test_ladder.py", "capture/test_capture.py", "capture/test_net_capture.py"),
        ("capture/test_ordinary_model.py", "capture/test_compile.py"),
    ),
    Fault(
        "gradients that were written to are untouched",
        "capture/gradient_versions.py",
        "return bool(self._after_backward.tracked) and not self.gone() and not self.written()",
        "return bool(self._after_backward.tracked) and not self.gone()",
        ("capture/test_net_capture.py", "capture/test_capture.py"),
        ("capture/test_ordinary_model.py", "capture/test_net_rounds.py"),
    ),
    Fault(
        "rounds are only counted for ever so long",
        "capture/count_only/hook.py",
        "if steps < self.rounds and moment < self.until and len(self.backwards) == steps * self.to_a_step:",
        "if steps < self.rounds and len(self.backwards) == steps * self.to_a_step:",
        ("capture/test_count_only.py",),
        ("capture/test_net_counted.py",),
    ),
    Fault(
        "each wait is one of a new round",
        "capture/waits.py",
        "        self._counted = number\n",
        "",
        ("capture/test_waits.py",),
        ("distributed/test_ranks.py",),
    ),
    Fault(
        "milliseconds of devices are seconds",
        "capture/cost.py",
        "sum(begin.elapsed_time(end) for begin, end in pairs) / 1000",
        "sum(begin.elapsed_time(end) for begin, end in pairs)",
        ("capture/test_cost.py",),
    ),
    Fault(
        "a second reduction of a step is the first",
        "capture/local.py",
        "            self._ready = reduction, table\n        total.reduced = True\n",
        "            self._ready = reduction, table\n",
        ("capture/test_local_norm.py",),
        ("distributed/test_ranks.py",),
    ),
    Fault(
        "the time on devices is told again with each step",
        "capture/progress.py",
        "        self.own_seconds = self.device_seconds = 0.0\n        return seconds\n",
        "        self.own_seconds = 0.0\n        return seconds\n",
        ("capture/test_cost.py",),
        ("capture/test_net_phases.py", "capture/test_count_only.py"),
    ),
)

AGGREGATION = (
    Fault(
        "one loss above zero makes up for one below",
        "aggregation/baseline.py",
        "self._positive = self._positive + 1 if loss > 0 else 0",
        "self._positive += 1 if loss > 0 else 0",
        ("aggregation/test_baseline.py",),
        ("aggregation/test_net_host.py", "aggregation/test_worker.py"),
    ),
    Fault(
        "gradients of which some grew were clipped",
        "aggregation/clipping.py",
        "cut = not agree and bool(ratios.max() <= 1 + UNTOUCHED)",
        "cut = not agree and bool(ratios.min() <= 1 + UNTOUCHED)",
        ("aggregation/test_gradients.py",),
        ("aggregation/test_net_host.py", "aggregation/test_properties_of_totals.py", "aggregation/test_totals_by_model.py"),
    ),
    Fault(
        "what optimizers saw of a sample stays for the next",
        "aggregation/pending.py",
        "self._sample, self._after = new, []",
        "self._sample = new",
        ("aggregation/test_gradients.py",),
        ("aggregation/test_net_host.py", "aggregation/test_totals_by_model.py"),
    ),
    Fault(
        "examples below zero count",
        "aggregation/totals.py",
        "if value >= 0 and math.isfinite(total):",
        "if value >= 0 or math.isfinite(total):",
        ("aggregation/test_worker.py", "aggregation/test_net_host.py"),
        ("collectors/test_training_values.py",),
    ),
    Fault(
        "a new consumer takes what is new to the others",
        "aggregation/gradients.py",
        "        self._cursors.add(cursor)\n",
        "        self._cursors.clear()\n        self._cursors.add(cursor)\n",
        ("aggregation/test_gradients.py", "aggregation/test_worker.py"),
        ("aggregation/test_moments.py", "aggregation/test_net_host.py", "outputs/live/test_history.py"),
    ),
    Fault(
        "a new layer is judged by the past of a removed one",
        "aggregation/layer_totals.py",
        "self._baseline.moved(index)",
        "self._baseline.moved(np.maximum(index, 0))",
        ("aggregation/test_gradients.py",),
        ("aggregation/test_rows_of_removed_layers.py", "aggregation/test_totals_by_model.py"),
    ),
)

OUTPUTS = (
    Fault(
        "a refused request fills the bucket",
        "outputs/http/admission.py",
        "            self._counted_at = now\n            if self._tokens < 1.0:\n",
        "            if self._tokens < 1.0:\n",
        ("outputs/http/test_web_config.py", "outputs/http/test_basic_auth.py"),
        ("outputs/http/test_server.py",),
    ),
    Fault(
        "the age of a scrape counts from its beginning",
        "outputs/http/shared.py",
        "        self._families = list(self._scrape())\n"
        "        self._made(form, compressed=False)\n"
        "        # The age counts from the end, else a scrape of more than a second would be too old for the first "
        "request after it.\n"
        "        self._finished = self._clock()\n",
        "        self._finished = self._clock()\n"
        "        self._families = list(self._scrape())\n"
        "        self._made(form, compressed=False)\n",
        ("outputs/http/test_server.py",),
        ("outputs/http/test_shared.py", "outputs/http/test_abuse.py"),
    ),
    Fault(
        "times that were moved are not new",
        "outputs/live/history.py",
        '        self._whole["at"][:, 0] += seconds\n        self._moved = self.count\n',
        '        self._whole["at"][:, 0] += seconds\n',
        ("outputs/live/test_history.py",),
        ("outputs/live/test_live.py",),
    ),
    Fault(
        "a counter that began anew has not grown",
        "outputs/live/recorder.py",
        "(counts != before) & (counts > 0)",
        "(counts > before) & (counts > 0)",
        ("outputs/live/test_history.py",),
        ("aggregation/test_rows_of_removed_layers.py", "outputs/live/test_live.py"),
    ),
    Fault(
        "a new row subtracts the distribution of a removed one",
        "outputs/otlp/delta.py",
        "        self._exponential.pop(place, None)\n",
        "",
        ("outputs/otlp/test_delta.py",),
        ("outputs/otlp/test_push.py", "outputs/otlp/test_otlp.py"),
    ),
    Fault(
        "an export that has hung hangs for good",
        "outputs/otlp/push.py",
        "        self._hanging = [thread for thread in self._hanging if thread.running]\n",
        "",
        ("outputs/otlp/test_push.py",),
        ("outputs/otlp/test_otlp_delivery.py",),
    ),
    Fault(
        "an exact name goes before a preference",
        "outputs/prometheus/negotiation.py",
        "rank = (quality, exactness, order)",
        "rank = (exactness, quality, order)",
        ("outputs/prometheus/test_text.py", "outputs/http/test_server.py"),
    ),
    Fault(
        "a registry shows metrics that are left to others",
        "outputs/prometheus/registry.py",
        "for spec in groups if spec in self._specs]",
        "for spec in groups]",
        ("outputs/prometheus/test_registry.py",),
        ("collectors/test_process.py",),
    ),
)

COLLECTORS = (
    Fault(
        "hardware that is away was never there",
        "collectors/host.py",
        "self._has_hardware |= bool(hardware)",
        "self._has_hardware = bool(hardware)",
        ("collectors/test_host_collector.py",),
    ),
    Fault(
        "a collector that keeps failing is tried at each scrape",
        "collectors/scrape.py",
        "        self._guards[name].failed(error)\n        self._retry_at[name] = self._clock() + RETRY_SECONDS\n",
        "        self._guards[name].failed(error)\n",
        ("collectors/test_scrape.py",),
        ("test_fault_injection.py",),
    ),
    Fault(
        "the norm of a shard is shown before its size is known",
        "collectors/gradients.py",
        'yield Family(GRAD_SHARD_NORM, layer_values["norm"], layers, sized & ~whole)',
        'yield Family(GRAD_SHARD_NORM, layer_values["norm"], layers, ~whole)',
        ("collectors/test_first_values.py", "model/test_sharding.py"),
        ("collectors/test_shards.py", "distributed/test_ranks.py", "matrix/test_distributed.py"),
    ),
    Fault(
        "examples are shown where inputs disagree",
        "collectors/training.py",
        "counted = counts.examples if clock.examples_known and counts.examples else None",
        "counted = counts.examples if counts.examples else None",
        ("collectors/test_training_values.py",),
        ("capture/test_ordinary_model.py",),
    ),
    Fault(
        "a GPU that has gone keeps its handle",
        "collectors/gpu.py",
        "                self._gpus.pop(device, None)  # It may come back under another handle.\n",
        "",
        ("collectors/test_gpu.py",),
    ),
)

STATISTICS = (
    Fault(
        "a second capture of a sample is another sample",
        "statistics/units.py",
        "last.before if sample == last.sample else last.after, last.ends, last.members",
        "last.after, last.ends, last.members",
        ("statistics/test_statistics.py",),
        ("statistics/test_statistics_reuse.py", "statistics/test_properties.py"),
    ),
    Fault(
        "beside a NaN each unit is alive",
        "statistics/host.py",
        "alive &= ~_count_nonfinite(batches, scratch, columns)",
        "alive = ~_count_nonfinite(batches, scratch, columns)",
        ("statistics/test_statistics.py",),
        ("statistics/test_properties.py", "statistics/test_statistics_reuse.py"),
    ),
    Fault(
        "gradients of another table are grouped as before",
        "statistics/grouping.py",
        "if known is not None and known[0] is table and known[1] == kinds:",
        "if known is not None and known[1] == kinds:",
        ("statistics/test_statistics_reuse.py",),
        ("capture/test_capture.py",),
    ),
    Fault(
        "an empty sparse gradient has one zero too many",
        "statistics/batches.py",
        "yield Batch((position,), (values.new_zeros(1),), None, implied - 1)",
        "yield Batch((position,), (values.new_zeros(1),), None, implied)",
        ("statistics/test_statistics.py",),
        ("statistics/test_properties.py",),
    ),
)

TRANSFER = (
    Fault(
        "a buffer that was read looks full",
        "transfer/transfer.py",
        "            bits[:] = buffer.sentinel\n",
        "",
        ("transfer/test_transfer.py",),
    ),
    Fault(
        "of records without room one is counted",
        "transfer/events.py",
        "            self.left_out += 1\n",
        "            self.left_out = 1\n",
        ("transfer/test_transfer.py", "aggregation/test_worker.py"),
        ("test_full_stages.py", "aggregation/test_net_host.py"),
    ),
    Fault(
        "a trace that nobody records is shown",
        "transfer/tracing.py",
        "if not (context.is_valid and context.trace_flags.sampled):",
        "if not (context.is_valid or context.trace_flags.sampled):",
        ("outputs/otlp/test_exemplars.py",),
    ),
)

MODEL = (
    Fault(
        "a parameter that is initialised at last is not seen",
        "model/layers.py",
        "        [*map(type, parameters)],\n",
        "",
        ("model/test_layers.py",),
        ("capture/test_ordinary_model.py", "matrix/test_matrix.py"),
    ),
    Fault(
        "an optimizer that was named never reports",
        "model/optimizers.py",
        "            self._silent.pop(found, None)\n",
        "",
        ("model/test_optimizers.py", "capture/test_net_rounds.py"),
        ("capture/test_ordinary_model.py", "capture/test_rounds.py"),
    ),
    Fault(
        "a wrapper that was found may be lost again",
        "model/replicas.py",
        "            self._wrapped.add(model)\n",
        "            pass\n",
        ("model/test_replicas.py",),
        ("distributed/test_ranks.py",),
    ),
    Fault(
        "parts of a tensor are copies of each other",
        "model/sharding.py",
        "return any(c != 0 for c, r in zip(coordinates, replicated, strict=True) if r) or _is_behind_slice(mesh)",
        "return any(c != 0 for c, _ in zip(coordinates, replicated, strict=True)) or _is_behind_slice(mesh)",
        ("model/test_sharding.py",),
        ("distributed/test_ranks.py", "matrix/test_distributed.py"),
    ),
)

DISTRIBUTED = (
    Fault(
        "a report without a new sample ends the samples before",
        "distributed/whole_run.py",
        "        elif captures.max(initial=0.0) > before.max(initial=0.0):\n",
        "        else:\n",
        ("distributed/test_whole_run.py",),
        ("distributed/test_job.py",),
    ),
    Fault(
        "a file of another process is ours",
        "distributed/discovery.py",
        "return self.path.stat().st_ino == self._inode and self.path.read_bytes() == self._content",
        "return self.path.stat().st_ino == self._inode or self.path.read_bytes() == self._content",
        ("distributed/test_discovery.py",),
    ),
    Fault(
        "a question that is under way is given up",
        "distributed/store.py",
        "            if not future.cancel():\n",
        "            if future.cancel():\n",
        ("distributed/test_store.py",),
    ),
    Fault(
        "a pod on its own is a run of several",
        "distributed/identity.py",
        'if not several or not environment.get("KUBERNETES_SERVICE_HOST"):',
        'if not several and not environment.get("KUBERNETES_SERVICE_HOST"):',
        ("distributed/test_identity.py",),
        ("distributed/test_job.py",),
    ),
)

RESOURCES = (
    Fault(
        "a counter that starts again counts from where it was",
        "resources/readings.py",
        "return value - before if value >= before else value",
        "return max(0.0, value - before)",
        ("resources/test_readings.py",),
        ("collectors/test_gpu.py", "collectors/test_host_collector.py"),
    ),
    Fault(
        "of equal limits the lowest group has it",
        "resources/cgroups.py",
        "for directory in reversed(group.directories) if",
        "for directory in group.directories if",
        ("resources/test_resources.py", "collectors/test_container.py"),
    ),
    Fault(
        "a device that is lost keeps its last values",
        "resources/devices.py",
        "                self._seen.pop(reading, None)\n",
        "",
        ("resources/test_devices.py",),
        ("collectors/test_gpu.py",),
    ),
)

RULES = (
    Fault(
        "the last steps are the slowest of the hour",
        "rules/memory.py",
        "self._hours[hour] = max(slowest, self._hours.get(hour, 0.0))",
        "self._hours[hour] = slowest",
        ("rules/test_problems.py",),
        ("rules/test_alerts_end_to_end.py",),
    ),
    Fault(
        "a few spikes of many samples are many",
        "rules/gradients.py",
        '(spikes.numbers >= THRESHOLDS["GradientExploding"]) & (spikes.numbers > OF_SAMPLES * samples)',
        '(spikes.numbers >= THRESHOLDS["GradientExploding"]) | (spikes.numbers > OF_SAMPLES * samples)',
        ("rules/test_problems.py",),
        ("rules/test_alerts_end_to_end.py", "rules/test_alerts.py"),
    ),
    Fault(
        "the last rule says how long a metric is remembered",
        "rules/watch.py",
        "seconds[spec] = max(back, seconds.get(spec, 0.0))",
        "seconds[spec] = back",
        ("rules/test_problems.py", "test_extensions.py"),
    ),
)

CONFIG = (
    Fault(
        "a variable of blanks is set",
        "config/option.py",
        'text = environment.get(one.variable, "").strip() if one.read else ""',
        'text = environment.get(one.variable, "") if one.read else ""',
        ("config/test_settings.py", "config/test_options.py"),
        ("config/test_bad_input.py",),
    ),
    Fault(
        "a model's name may not begin with another's",
        "config/kinds.py",
        'if any(other.startswith(f"{name}.") for other in models if name):',
        "if any(other.startswith(name) for other in models if name and other != name):",
        ("config/test_bad_input.py", "config/test_settings.py"),
        ("model/test_layers.py", "capture/test_ordinary_model.py"),
    ),
    Fault(
        "rank 0 is no rank that was given",
        "config/checked.py",
        "rank = place.rank if settings.rank is None else settings.rank",
        "rank = settings.rank or place.rank",
        ("config/test_settings.py", "config/test_options.py"),
        ("distributed/test_job.py", "config/test_bad_input.py", "distributed/test_identity.py"),
    ),
)

METRICS = (
    Fault(
        "a histogram has one series less",
        "metrics/families.py",
        "return rows * (len(self.spec.buckets) + 3 if self.spec.kind is Kind.HISTOGRAM else 1)",
        "return rows * (len(self.spec.buckets) + 2 if self.spec.kind is Kind.HISTOGRAM else 1)",
        ("metrics/test_catalogue.py", "outputs/prometheus/test_text.py"),
        ("metrics/test_golden.py", "test_full_stages.py"),
    ),
    Fault(
        "facts are labels that nobody else may have",
        "metrics/catalogue.py",
        'for spec in self.values() if not spec.name.endswith("_info") for label in spec.labels)',
        "for spec in self.values() for label in spec.labels)",
        ("metrics/test_catalogue.py", "config/test_settings.py"),
        ("config/test_bad_input.py",),
    ),
)

CLI = (
    Fault(
        "the name of a run may end the page's data",
        "cli/plot.py",
        'json.dumps(saved, separators=(",", ":")).replace("<", "\\\\u003c")',
        'json.dumps(saved, separators=(",", ":"))',
        ("cli/test_plot.py",),
    ),
)

ROOT = (
    Fault(
        "a boundary that is off is switched off again",
        "errors.py",
        "if self._in_a_row == self._limit and self._gave_up is not None:",
        "if self._in_a_row >= self._limit and self._gave_up is not None:",
        ("test_errors.py",),
        ("collectors/test_scrape.py", "test_fault_injection.py"),
    ),
    Fault(
        "each wish for an iteration is one iteration",
        "lifecycle.py",
        "        while not self._wakes.empty():\n            self._wakes.get()\n",
        "",
        ("test_lifecycle_threads.py",),
        ("test_lifecycle.py",),
    ),
    Fault(
        "collectors keep what they hold",
        "exporter.py",
        "        yield self._scrape.close\n",
        "",
        ("test_lifecycle.py",),
        ("test_extensions.py", "collectors/test_scrape.py", "distributed/test_whole_run.py", "distributed/test_job.py"),
    ),
    Fault(
        "what PyTorch lacks is told with each start",
        "torch_compat.py",
        "            missing[name] = True\n",
        "",
        ("test_torch_compat.py",),
    ),
)

BY_FOLDER = {
    "capture": CAPTURE,
    "aggregation": AGGREGATION,
    "outputs": OUTPUTS,
    "collectors": COLLECTORS,
    "statistics": STATISTICS,
    "transfer": TRANSFER,
    "model": MODEL,
    "distributed": DISTRIBUTED,
    "resources": RESOURCES,
    "rules": RULES,
    "config": CONFIG,
    "metrics": METRICS,
    "cli": CLI,
    "": ROOT,
}
"""The faults of each folder of the package; those of the files in its root under the empty name."""

FAULTS = tuple(fault for some in BY_FOLDER.values() for fault in some)
