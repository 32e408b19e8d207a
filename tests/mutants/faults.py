"""128 small faults of the kind that a careless move makes, 83 of them spread over the folders of the package.

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
        "return bool(self._after_backward.tracked) and self._after_backward.unchanged()",
        "return bool(self._after_backward.tracked) and not self.gone()",
        ("capture/test_local_norm.py", "capture/test_net_capture.py", "capture/test_capture.py"),
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
        "capture/device_events.py",
        "max(0.0, begin.elapsed_time(end) / 1000)",
        "max(0.0, begin.elapsed_time(end))",
        ("capture/test_cost.py", "capture/test_phases.py"),
    ),
    Fault(
        "rounds that were only counted are in the phases of a device",
        "capture/phases.py",
        "            self._on_device.restart()\n            self._on_device.enter(phase)\n",
        "            self._on_device.enter(phase)\n",
        ("capture/test_phases.py",),
        ("capture/test_net_counted.py",),
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
        "clipped=not edit.untouched and bool(edit.ratios.max() <= 1 + UNTOUCHED)",
        "clipped=not edit.untouched and bool(edit.ratios.min() <= 1 + UNTOUCHED)",
        ("aggregation/test_clipping.py",),
        ("aggregation/test_net_host.py", "aggregation/test_properties_of_totals.py", "aggregation/test_totals_by_model.py"),
    ),
    Fault(
        "what optimizers saw of a sample stays for the next",
        "aggregation/pending.py",
        "        self._after = [one for one in self._after if one.ours] if same else []\n",
        "",
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
        "outputs/live/track.py",
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
        "programs are used after one comparison",
        "statistics/kernels/choice.py",
        "                state.stage = _Stage.PROBED\n                return\n",
        "                state.stage = _Stage.PROBED\n",
        ("statistics/test_kernels_choice.py",),
    ),
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
        "self.table is table\n            and self.positions == [*gradients]",
        "self.positions == [*gradients]",
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
        "a model's name may not begin with another's",
        "model/given.py",
        'if any(other.startswith(f"{name}.") for other in models if name):',
        "if any(other.startswith(name) for other in models if name and other != name):",
        ("config/test_bad_input.py", "config/test_settings.py"),
        ("model/test_layers.py", "capture/test_ordinary_model.py"),
    ),
    Fault(
        "a parameter that is initialised at last is not seen",
        "model/layers.py",
        "        kinds,\n        [*map(_requires",
        "        [*map(_requires",
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
        "a problem ends a while after it began",
        "rules/episodes.py",
        "now - episode.held >= episode.terms.ends",
        "now - episode.began >= episode.terms.ends",
        ("rules/test_episodes.py", "actions/notify/test_notify.py"),
    ),
    Fault(
        "every other judgement by samples is left out",
        "rules/record.py",
        "        if samples <= self._judged:\n            return\n        self._judged = samples\n",
        "        if samples <= self._judged:\n            return\n        self._judged = samples + EVERY\n",
        ("rules/test_record.py",),
    ),
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

GATE = (
    Fault(
        "what is only noted makes a run unhealthy",
        "gate/verdict.py",
        "Result.FAILED if failed else Result.NOTED",
        "Result.FAILED",
        ("cli/test_check.py",),
    ),
    Fault(
        "a value that is not finite keeps to a limit",
        "gate/limits.py",
        'return math.isfinite(number) and (number >= self.value if self.kind == "min" else number <= self.value)',
        'return not (number < self.value if self.kind == "min" else number > self.value)',
        ("cli/test_check.py",),
    ),
    Fault(
        "a norm may be as small as it likes",
        "gate/baseline.py",
        "    return 1.0 if low == high else math.inf if low <= 0 else high / low\n",
        "    return 1.0 if low == high or a < b else math.inf if low <= 0 else high / low\n",
        ("cli/test_check.py",),
    ),
)

INTEGRATIONS = (
    Fault(
        "only some steps of a test are sampled",
        "integrations/pytest_plugin.py",
        '**{"port": None, "every": 1, **options}',
        '**{"port": None, **options}',
        ("integrations/test_pytest_plugin.py",),
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
        "composition.py",
        "        yield self._scrape.close\n",
        "",
        ("test_lifecycle.py",),
        ("test_extensions.py", "collectors/test_scrape.py", "distributed/test_whole_run.py", "distributed/test_job.py"),
    ),
)

TORCH_COMPAT = (
    Fault(
        "what PyTorch lacks is told with each start",
        "torch_compat/lost.py",
        "            missing[name] = True\n",
        "",
        ("test_torch_compat.py",),
    ),
)

ACTIONS = (
    Fault(
        "a new problem ends the pause of a receiver",
        "actions/notify/sink.py",
        "while self._waiting and self._clock() >= self._due and",
        "while self._waiting and",
        ("actions/notify/test_sink.py", "actions/notify/test_notify.py"),
    ),
    Fault(
        "the report of a process that has ended is heard",
        "actions/notify/job.py",
        "-math.inf if before is None else self._clock()",
        "self._clock()",
        ("actions/notify/test_job.py",),
    ),
    Fault(
        "a redirect is followed",
        "actions/notify/post.py",
        "allow_redirects=False",
        "allow_redirects=True",
        ("actions/notify/test_post.py", "actions/notify/test_notify.py"),
    ),
    Fault(
        "a norm that is not finite enters the history",
        "actions/clip/adaptive.py",
        "        count += entered\n        threshold",
        "        count += 1\n        threshold",
        ("actions/test_policies.py",),
    ),
    Fault(
        "a replaced parameter is not looked for",
        "actions/clip/table.py",
        "if changed or not self._groups.settled:",
        "if not self._groups.settled:",
        ("actions/test_clipper.py",),
    ),
    Fault(
        "sums over some of the ranks' values are lost",
        "actions/clip/measuring.py",
        "squares.index_copy_(0, positions, packed)",
        "squares.index_copy_(0, positions, packed * 0 + squares[positions])",
        ("actions/test_clipper_ranks.py",),
    ),
    Fault(
        "a saved state goes on with the training",
        "actions/clip/running.py",
        "tensor.clone() if copied else tensor",
        "tensor",
        ("actions/test_clipper.py",),
    ),
    Fault(
        "a fused optimizer leaves out all later steps",
        "actions/clip/skipping.py",
        "        del optimizer.found_inf\n",
        "        pass\n",
        ("actions/test_clipper.py",),
    ),
)

INSPECTION = (
    Fault(
        "a frozen parameter is told as one that is not used",
        "inspection/explain/rows.py",
        "if not self.gradients.trained & bit:",
        "if False:",
        ("inspection/explain/test_verdicts.py",),
    ),
    Fault(
        "a recording may be as large as it likes",
        "inspection/recorded.py",
        "if self.bytes + size > self._limit:",
        "if size > self._limit:",
        ("inspection/test_record.py",),
    ),
    Fault(
        "a layer within another counts twice in the backward",
        "inspection/own_nodes.py",
        "        if number not in taken:\n",
        "        if True:\n",
        ("inspection/test_layer_times.py",),
    ),
    Fault(
        "what the exporter takes within a layer is the layer's",
        "inspection/layer_timer.py",
        "return self.at - self._clock.own_seconds",
        "return self.at",
        ("inspection/test_layer_times.py",),
    ),
    Fault(
        "what a step that is given up has shown counts in the next one",
        "inspection/rounds.py",
        "        if self._round.number != number:\n            self._round = _Round(number)\n",
        "        if self._round.number == -1:\n            self._round = _Round(number)\n        self._round.number = number\n",
        ("inspection/test_activations.py", "inspection/test_watch.py"),
    ),
    Fault(
        "a gradient that is not finite is clipped",
        "inspection/watch.py",
        "within = (norm <= limit) | ~norm.isfinite()",
        "within = norm <= limit",
        ("inspection/test_watch.py",),
    ),
    Fault(
        "a mask of -inf is where a NaN began",
        "inspection/nan_origin/verdict.py",
        "return self.low[slot] == -math.inf and self.high[slot] in (0.0, -math.inf)",
        "return False",
        ("inspection/nan_origin/test_healthy.py",),
        ("inspection/nan_origin/test_planted.py",),
    ),
)

BY_FOLDER = {
    "actions": ACTIONS,
    "inspection": INSPECTION,
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
    "gate": GATE,
    "integrations": INTEGRATIONS,
    "": ROOT,
    "torch_compat": TORCH_COMPAT,
}
"""Faults of each folder of the package; those of the files in its root under the empty name."""

MECHANISMS = (
    Fault(
        "events are recorded while a graph is captured",
        "capture/device_events.py",
        "if (not self._free and self._made == EVENTS) or self._kind.capturing():",
        "if not self._free and self._made == EVENTS:",
        ("capture/test_phases.py",),
        ("capture/test_cost.py",),
    ),
    Fault(
        "the second forward of a checkpoint is the backward of a layer",
        "inspection/layer_timer.py",
        "                line.again()\n",
        "                pass\n",
        ("inspection/test_layer_times.py",),
    ),
    Fault(
        "the backwards of a regular round that comes to nothing are forgotten",
        "capture/regular_rounds.py",
        "            self._rounds.backwards_counted(self.backwards)\n",
        "            pass\n",
        ("capture/test_regular_rounds.py",),
    ),
    Fault(
        "nodes that are only held are not looked at",
        "capture/preparation.py",
        "if self._parts.nodes.held:",
        "if self._parts.nodes.armed:",
        ("capture/test_shapes_that_change.py", "capture/test_late_backwards.py"),
        ("capture/test_capture.py", "capture/test_net_capture.py", "capture/test_ordinary_model.py"),
    ),
    Fault(
        "only what is frozen at the end of a round is held",
        "capture/accumulate_grad.py",
        "if p is not None and (t in self._at_times or not p.requires_grad)}",
        "if p is not None and not p.requires_grad}",
        ("capture/test_late_backwards.py", "capture/test_shapes_that_change.py"),
        ("capture/test_capture.py", "capture/test_net_capture.py"),
    ),
    Fault(
        "what is thawed within a round is not held",
        "capture/accumulate_grad.py",
        "        if late and before.tracked:  # else none was hooked before, as in a round that is sampled in addition\n"
        "            self._at_times |= trained.keys() - {*before.tracked}\n",
        "",
        ("capture/test_late_backwards.py", "capture/test_shapes_that_change.py"),
        ("capture/test_capture.py", "capture/test_net_capture.py"),
    ),
    Fault(
        "a backward that only nodes have seen was announced",
        "capture/preparation.py",
        "announced = parts.ladder.announces and not unannounced",
        "announced = parts.ladder.announces",
        ("capture/test_late_backwards.py", "capture/test_capture.py"),
        ("capture/test_net_capture.py", "capture/test_shapes_that_change.py"),
    ),
    Fault(
        "what got a gradient keeps the positions of the table before",
        "capture/rounds.py",
        "        self.current.fired = fired\n",
        "        self.current.fired |= fired\n",
        ("capture/test_rounds.py", "capture/test_net_capture.py"),
        ("capture/test_capture.py", "capture/test_late_backwards.py"),
    ),
    Fault(
        "a round that is withdrawn stays pending",
        "capture/rounds.py",
        "        if self.sample_is_open:\n            self._effects.withdraw(self.current)\n",
        "",
        ("capture/test_rounds.py", "capture/test_late_backwards.py"),
        ("capture/test_capture.py", "capture/test_net_capture.py"),
    ),
    Fault(
        "gradients that are gone are unchanged",
        "capture/gradient_versions.py",
        "return not self.moved(now) and all((gradient is None) == (number is None) for gradient, number in rows)",
        "return not self.moved(now)",
        ("capture/test_net_capture.py", "capture/test_late_backwards.py"),
        ("capture/test_capture.py", "capture/test_net_rounds.py", "capture/test_ordinary_model.py"),
    ),
    Fault(
        "detectors stay where nothing is trained",
        "capture/ladder.py",
        "if parameter is None or (before is not None and (before.called is tracked or before.is_trained())):",
        "if parameter is None or before is not None:",
        ("capture/test_ladder.py", "capture/test_capture.py"),
        ("capture/test_net_capture.py", "capture/test_late_backwards.py"),
    ),
    Fault(
        "a number of items that is none divides the loss",
        "capture/round_loss.py",
        "whole=kwargs.get(ITEMS) is not None",
        "whole=ITEMS in kwargs",
        ("capture/test_round_loss.py",),
        ("capture/test_observations.py", "capture/test_count_only.py"),
    ),
    Fault(
        "a divisor that is told after the step is that of the step",
        "capture/observations.py",
        "Divided(rounds.current.number + bool(rounds.current.stepped), divisor)",
        "Divided(rounds.current.number, divisor)",
        ("capture/test_divisor.py",),
        ("capture/test_observations.py",),
    ),
    Fault(
        "a watched loader has attributes of its own",
        "capture/watched_data_loader.py",
        'object.__setattr__(stand_in, "__dict__", given.__dict__)',
        'object.__setattr__(stand_in, "__dict__", dict(given.__dict__))',
        ("capture/test_watched_data_loader.py",),
        ("capture/test_watched_loader.py", "capture/test_net_phases.py"),
    ),
    Fault(
        "what another optimizer uses was reduced by hand",
        "capture/by_hand.py",
        "found = self._left.moved().isdisjoint(mine())",
        "found = not self._left.moved()",
        ("distributed/test_by_hand.py",),
        ("capture/test_capture.py", "capture/test_local_norm.py"),
    ),
    Fault(
        "units of an optimizer that did not step were silent",
        "capture/reader.py",
        "        if others:\n            self._guards[OTHERS](self.statistics.forget, table, others, current.number)\n",
        "",
        ("capture/test_capture.py", "capture/test_net_capture.py"),
        ("statistics/test_statistics.py", "capture/test_net_rounds.py"),
    ),
    Fault(
        "gradients that repeat were clipped to a limit",
        "aggregation/clipping.py",
        " and differ >= MATCHES and spread",
        " and spread",
        ("aggregation/test_clipping.py",),
        ("aggregation/test_gradients.py", "aggregation/test_properties_of_totals.py"),
    ),
    Fault(
        "a loss scale by hand may jump",
        "aggregation/scale_by_hand.py",
        "return len(scales) >= CONFIRMED and all(0.49 < after / before < 2.01 for before, after in itertools.pairwise(scales))",
        "return len(scales) >= CONFIRMED",
        ("aggregation/test_clipping.py", "aggregation/test_gradients.py"),
        ("aggregation/test_properties_of_totals.py", "aggregation/test_totals_by_model.py"),
    ),
    Fault(
        "the share of a second optimizer waits for the next round",
        "aggregation/pending.py",
        "(stepped is None or stepped.stepped <= self._counted)):",
        "(stepped is None or bool(self._counted))):",
        ("aggregation/test_gradients.py",),
        ("aggregation/test_net_host.py", "aggregation/test_totals_by_model.py", "aggregation/test_worker.py"),
    ),
    Fault(
        "an idle layer is still that of its last sample",
        "aggregation/layer_totals.py",
        'self._values["read"][rows] = self._values["sized"][rows] = False',
        'self._values["sized"][rows] = False',
        ("aggregation/test_gradients.py", "aggregation/test_removed_layers.py"),
        ("aggregation/test_totals_by_model.py", "aggregation/test_net_host.py"),
    ),
    Fault(
        "what fills up a flat parameter is part of it",
        "model/flat_parts.py",
        "return gradient.view(-1)[: self.elements] if self.padding and gradient.dim() == 1 else gradient",
        "return gradient",
        ("matrix/test_distributed.py",),
    ),
    Fault(
        "a rank promises a step that is over",
        "actions/act/agreement.py",
        "if self._count.steps < proposal.step:",
        "if self._count.steps <= proposal.step:",
        ("actions/act/test_agreement.py",),
        ("actions/act/test_turns_of_ranks.py",),
    ),
    Fault(
        "one promise is enough",
        "actions/act/agreement.py",
        "        return not self._silent\n",
        "        return len(self._silent) < len(keys)\n",
        ("actions/act/test_agreement.py",),
        ("actions/act/test_turns_of_ranks.py",),
    ),
    Fault(
        "a proposal of an earlier start stays open",
        "actions/act/agreement.py",
        "if proposal.rank >= ranks or (proposal.rank == rank and proposal.token != self._token):",
        "if proposal.rank >= ranks:",
        ("actions/act/test_agreement.py",),
        ("actions/act/test_turns_of_ranks.py",),
    ),
    Fault(
        "what the others are to do is not looked at",
        "actions/act/agreement.py",
        "if proposal.what != self._what:",
        "if not proposal.what:",
        ("actions/act/test_turns_of_ranks.py",),
        ("actions/act/test_agreement.py",),
    ),
    Fault(
        "a bell is heard where the store did not answer",
        "actions/act/agreement.py",
        "        self._listening = True\n        for _ in range(AT_ONCE):\n",
        "        for _ in range(AT_ONCE):\n",
        ("actions/act/test_turns_of_ranks.py",),
        ("actions/act/test_agreement.py",),
    ),
    Fault(
        "a step of a base class is one more",
        "actions/act/steps.py",
        "elif called_from_step(sys._getframe(2).f_back):",
        "elif called_from_step(None):",
        ("actions/act/test_training.py",),
        ("actions/act/test_turns_of_ranks.py",),
    ),
    Fault(
        "a break does not begin the time anew",
        "actions/act/event.py",
        "            self._since = None\n            return False\n",
        "            return False\n",
        ("actions/act/test_act.py",),
        ("actions/act/test_training.py",),
    ),
    Fault(
        "a window that is not full has a mean",
        "actions/act/measurements.py",
        "if not self._values or self._values[0][0] > first:",
        "if not self._values:",
        ("actions/act/test_measurements.py",),
        ("actions/act/test_act.py",),
    ),
    Fault(
        "equal numbers of two samples are one",
        "actions/act/measurements.py",
        "if stamp == self._stamp and (value",
        "if (value",
        ("actions/act/test_measurements.py",),
        ("actions/act/test_act.py",),
    ),
    Fault(
        "any number of actions may wait",
        "actions/act/queue.py",
        "fits = len(self._waiting) < ROOM and not self._closed",
        "fits = not self._closed",
        ("actions/act/test_act.py",),
        ("actions/act/test_training.py",),
    ),
    Fault(
        "a tensor of several groups is scaled for each",
        "actions/act/schedulers.py",
        "if id(before) not in tensors:",
        "if id(group) not in tensors:",
        ("actions/act/test_training.py",),
        ("actions/act/test_act.py",),
    ),
    Fault(
        "a step within a step is clipped once more",
        "actions/clip/known.py",
        "        covered = outer is not None and outer.covered\n",
        "        covered = False\n",
        ("actions/test_clip_unusual.py",),
        ("actions/test_clip_at_steps.py",),
    ),
    Fault(
        "whoever steps within a step takes all of it over",
        "actions/clip/known.py",
        "outer.wraps = outer.wraps or owned_by(around) <= owned_by(optimizer)",
        "outer.wraps = True",
        ("actions/test_clip_unusual.py",),
        ("actions/test_clip_at_steps.py",),
    ),
    Fault(
        "one that was told stays told when its step raises",
        "actions/clip/at_steps.py",
        "one.untell(optimizer)  # a step that has raised",
        "pass",
        ("actions/test_clip_unusual.py",),
        ("actions/test_clip_at_steps.py",),
    ),
    Fault(
        "a policy that is tried stops the clipping",
        "actions/clip/at_steps.py",
        "self._wanted.dry_run, guards=self._tried)",
        "self._wanted.dry_run)",
        ("actions/test_clip_unusual.py",),
        ("actions/test_clip_at_steps.py",),
    ),
    Fault(
        "norms are those with the scale of the loss",
        "actions/clip/at_steps.py",
        "clipping(scale if isinstance(scale, torch.Tensor) else None)",
        "clipping(None)",
        ("actions/test_clip_at_steps.py",),
        ("actions/test_clip_unusual.py",),
    ),
    Fault(
        "a closure is not waited for",
        "actions/clip/at_steps.py",
        "        if closure is None:\n            clip()\n            return None\n",
        "        clip()\n        if closure is not None:\n            return None\n",
        ("actions/test_clip_at_steps.py",),
        ("actions/test_clip_unusual.py",),
    ),
    Fault(
        "a hook that the loop sets later comes last",
        "actions/clip/at_steps.py",
        "                if not hooked_last(optimizer, self._hook):",
        "                if one.handle is None:",
        ("actions/test_clip_at_steps.py",),
        ("actions/test_clip_unusual.py",),
    ),
    Fault(
        "an observed loss is what the loop made of it since",
        "actions/clip/at_steps.py",
        "loss = loss.detach().clone()",
        "loss = loss.detach()",
        ("actions/test_clip_unusual.py",),
        ("actions/test_clip_at_steps.py",),
    ),
    Fault(
        "a window with a gradient that is not finite has a mean",
        "actions/freeze/norms.py",
        "or any(bad for *_, bad in self._chunks):",
        "or not self._chunks:",
        ("actions/freeze/test_norms.py",),
        ("actions/freeze/test_freeze.py",),
    ),
    Fault(
        "of the norms since the last reading only the last one counts",
        "aggregation/cursor.py",
        "self._values[:, rows] += np.stack((np.where(known",
        "self._values[:, rows] = np.stack((np.where(known",
        ("actions/freeze/test_norms.py",),
        ("aggregation/test_cursor.py",),
    ),
    Fault(
        "a layer is frozen for as many steps fewer as there were before",
        "actions/freeze/freeze.py",
        "self._steps = steps = steps - self._before",
        "self._steps = steps",
        ("actions/freeze/test_lives.py",),
        ("actions/freeze/test_freeze.py",),
    ),
    Fault(
        "a tied parameter is frozen with any of its layers",
        "actions/freeze/layers.py",
        "if held.partners <= self._held.keys():",
        "if held.partners <= self._held.keys() or held.one.layer:",
        ("actions/freeze/test_freeze.py",),
        ("actions/freeze/test_lives.py",),
    ),
    Fault(
        "a layer that is gathered is not trained",
        "actions/freeze/layers.py",
        "if self._index.fully_sharded and None in found:",
        "if not found:",
        ("actions/freeze/test_ranks.py",),
        ("actions/freeze/test_lives.py",),
    ),
)
"""Faults of how gradients are seen and shown, of `exporter.on`, and of `clip=`. Several of them may lie in one file."""

FAULTS = (*(fault for some in BY_FOLDER.values() for fault in some), *MECHANISMS)
