"""Every metric, declared once: name, kind, help, labels, unit, buckets.

The names are the product's interface. `docs/metrics.md`, the golden scrape and the collectors follow
this file, and a test keeps them in step. Bucket bounds are Python floats: numpy's float32 would print
as `le="9.999999747378752e-05"`.
"""

from __future__ import annotations

from torch_grad_exporter.families import Kind, Spec

DECADES: tuple[float, ...] = tuple(float(f"1e{k}") for k in range(-8, 5))
HALF_DECADES: tuple[float, ...] = tuple(bound for k in range(-8, 5) for bound in (float(f"1e{k}"), float(f"3.16e{k}")))[:-1]
STEP_SECONDS: tuple[float, ...] = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip

CATALOGUE: dict[str, Spec] = {}
"""Every declared metric by name, in the order of declaration, which is the order of the scrape."""


def _declare(spec: Spec) -> Spec:
    if spec.name in CATALOGUE:
        raise ValueError(f"{spec.name} is declared twice")
    CATALOGUE[spec.name] = spec
    return spec


def _gauge(name: str, help_: str, *labels: str, unit: str = "", opt_in: str = "") -> Spec:
    return _declare(Spec(name, Kind.GAUGE, help_, labels, unit, opt_in=opt_in))


def _counter(name: str, help_: str, *labels: str, unit: str = "") -> Spec:
    return _declare(Spec(name, Kind.COUNTER, help_, labels, unit))


def _histogram(name: str, help_: str, buckets: tuple[float, ...], *labels: str, unit: str = "") -> Spec:
    return _declare(Spec(name, Kind.HISTOGRAM, help_, labels, unit, buckets))


# Gradients of a layer
GRAD_NORM = _gauge(
    "torch_grad_norm",
    "L2 norm of the layer's gradient at the last sampled step: reduced over data-parallel ranks, unscaled, before clipping.",
    "layer",
)
GRAD_NORM_DISTRIBUTION = _histogram(
    "torch_grad_norm_distribution",
    "L2 norm of the layer's gradient before clipping, one observation per sampled step; non-finite norms are left out.",
    DECADES,
    "layer",
)
GRAD_NORM_SQUARED = _gauge(
    "torch_grad_norm_squared",
    "Square of the L2 norm of the layer's gradient at the last sampled step; this rank's part of it where the gradient is sharded.",
    "layer",
)
# Not `torch_grad_norm_squared_total`: in OpenMetrics that counter's family is called like the gauge above.
GRAD_NORM_SQUARED_TOTAL = _counter(
    "torch_grad_norm_squared_accumulated_total",
    "Sum of torch_grad_norm_squared over sampled steps; non-finite values are left out.",
    "layer",
)
GRAD_CAPTURES = _counter(
    "torch_grad_captures_total",
    "Sampled steps in which the layer's gradient was read: what every per-layer total and histogram is over.",
    "layer",
)
GRAD_SHARD_NORM = _gauge(
    "torch_grad_shard_norm",
    "Sharded gradients only: L2 norm of this rank's part of the layer's gradient at the last sampled step, unscaled, before clipping.",
    "layer",
)
GRAD_NORM_RECENT_MAX = _gauge(
    "torch_grad_norm_recent_max",
    "Largest finite L2 norm of the layer's gradient among the samples of the last 60 seconds.",
    "layer",
)
GRAD_NORM_ZSCORE = _gauge(
    "torch_grad_norm_zscore",
    "Distance of the last logarithm of the norm from the layer's own median over its last 128 samples, in robust sigmas; absent before 20 samples.",
    "layer",
)
GRAD_NORM_SPIKES = _counter(
    "torch_grad_norm_spikes_total",
    "Samples whose norm lay beyond 6 robust sigmas and 3 times the median of the layer's own baseline, over sampled steps.",
    "layer",
)
GRAD_MAX_MAGNITUDE = _gauge(
    "torch_grad_max_magnitude",
    "Largest absolute element of the layer's gradient at the last sampled step, unscaled, before clipping.",
    "layer",
)
GRAD_NONFINITE_ELEMENTS = _counter(
    "torch_grad_nonfinite_elements_total",
    "Gradient elements that were NaN or Inf before clipping, over sampled steps.",
    "layer",
    "kind",
)
GRAD_ZERO_RATIO = _gauge(
    "torch_grad_zero_ratio",
    "Share of the layer's gradient elements that were exactly zero at the last sampled step; of this rank's part where the gradient is sharded.",
    "layer",
)
GRAD_ZERO_UNITS_RATIO = _gauge(
    "torch_grad_zero_units_ratio",
    "Share of the layer's output units whose weights' gradient was exactly zero at the last sampled step; of this rank's part where the gradient is sharded.",
    "layer",
)
GRAD_DEAD_RATIO = _gauge(
    "torch_grad_dead_ratio",
    "Share of the layer's output units whose weights' gradient was exactly zero in each of the last dead_window samples; absent before min(20, dead_window) samples; of this rank's part where the gradient is sharded.",
    "layer",
)
GRAD_MISSING_PARAMETERS = _gauge(
    "torch_grad_missing_parameters",
    "Parameters of the layer that require a gradient and got none at the last sampled step.",
    "layer",
)
GRAD_MEAN = _gauge(
    "torch_grad_mean",
    "Mean of the gradient's finite or non-finite elements at the last sampled step; of this rank's part where the gradient is sharded.",
    "layer",
    opt_in="moments",
)
GRAD_STDDEV = _gauge(
    "torch_grad_stddev",
    "Population standard deviation of the gradient's elements at the last sampled step; of this rank's part where the gradient is sharded.",
    "layer",
    opt_in="moments",
)
GRAD_MIN = _gauge(
    "torch_grad_min",
    "Smallest element of the gradient at the last sampled step; of this rank's part where the gradient is sharded.",
    "layer",
    opt_in="moments",
)
GRAD_MAX = _gauge(
    "torch_grad_max",
    "Largest element of the gradient at the last sampled step; of this rank's part where the gradient is sharded.",
    "layer",
    opt_in="moments",
)
WEIGHT_NORM = _gauge(
    "torch_weight_norm", "L2 norm of the layer's parameters after the last sampled update of the layer.", "layer", opt_in="weights"
)
WEIGHT_UPDATE_RATIO = _gauge(
    "torch_weight_update_ratio",
    "L2 norm of the layer's last sampled update over the L2 norm of its parameters before it.",
    "layer",
    opt_in="weights",
)

# Gradients of the whole model, one series per optimizer where several own different parameters
GRAD_GLOBAL_NORM = _gauge(
    "torch_grad_global_norm",
    "L2 norm over the gradients of all tracked parameters at the last sampled step, or at the last step for which observe(grad_norm=) gave it; unscaled, before clipping.",
    "optimizer",
)
GRAD_GLOBAL_NORM_DISTRIBUTION = _histogram(
    "torch_grad_global_norm_distribution",
    "L2 norm over all tracked parameters before clipping, one observation per sampled or observed step; non-finite norms are left out.",
    HALF_DECADES,
    "optimizer",
)
GRAD_GLOBAL_NORM_SPIKES = _counter(
    "torch_grad_global_norm_spikes_total",
    "Samples whose global norm lay beyond 6 robust sigmas and 3 times the median of its own baseline, over sampled steps.",
    "optimizer",
)
GRAD_GLOBAL_NORM_AFTER_CLIP = _gauge(
    "torch_grad_global_norm_after_clip",
    "L2 norm over all tracked parameters as the optimizer saw it at the last sampled step: unscaled, after clipping.",
    "optimizer",
)
GRAD_CLIP_COEFFICIENT = _gauge(
    "torch_grad_clip_coefficient",
    "Global norm after clipping over the global norm before it at the last sampled step; 1 where nothing was clipped.",
    "optimizer",
)
GRAD_CLIPPED_STEPS = _counter(
    "torch_grad_clipped_steps_total", "Steps whose gradients were clipped, over sampled steps.", "optimizer"
)
GRAD_NONFINITE_STEPS = _counter(
    "torch_grad_nonfinite_steps_total",
    "Steps with any NaN or Inf gradient element, over sampled steps and those whose norm was observed, by what became of the step: stepped, skipped or unknown.",
    "optimizer",
    "outcome",
)
GRAD_SAMPLE_STEP = _gauge("torch_grad_sample_step", "Optimizer step of the last sample.", "optimizer")

# Training
TRAIN_INFO = _gauge(
    "torch_train_info",
    "Facts about the training process as labels; the value is always 1.",
    "torch_version", "exporter_version", "python_version", "host", "local_rank", "devices",
)  # fmt: skip
TRAIN_STATE = _gauge(
    "torch_train_state",
    "State of the training run: 1 for the current one of initialising, training, evaluating, finished and failed, else 0.",
    "state",
)
TRAIN_WORLD_SIZE = _gauge("torch_train_world_size", "Ranks of the run.")
TRAIN_STEPS = _counter("torch_train_steps_total", "Optimizer steps.", "optimizer")
TRAIN_BACKWARD_PASSES = _counter("torch_train_backward_passes_total", "Backward passes.")
TRAIN_SKIPPED_STEPS = _counter(
    "torch_train_skipped_steps_total",
    "Backward passes that no optimizer step followed, as after an overflow under mixed precision.",
)
TRAIN_STEP_DURATION = _histogram(
    "torch_train_step_duration_seconds",
    "Time from the end of one round of optimizer steps to the end of the next, every step.",
    STEP_SECONDS,
    unit="seconds",
)
TRAIN_PHASE_SECONDS = _counter(
    "torch_train_phase_seconds_total",
    "Time by phase of the training step: data, forward, backward, optimizer, and outside for everything between steps. Over timed steps: all, or one of each torch_grad_exporter_timing_interval_steps where steps are very short.",
    "phase",
    unit="seconds",
)
TRAIN_SAMPLES = _counter(
    "torch_train_samples_total",
    "Training samples as observed, else the first dimension of the model's tensor inputs, summed over training forwards; absent where the inputs disagree or there are several models. Steps that are not timed are taken for as many samples as the timed one before them.",
)
TRAIN_TOKENS = _counter("torch_train_tokens_total", "Training tokens as observed.")
TRAIN_LOSS = _gauge("torch_train_loss", "Last observed loss.")
TRAIN_EPOCH = _gauge("torch_train_epoch", "Last observed epoch.")
TRAIN_LOSS_NONFINITE = _counter("torch_train_loss_nonfinite_total", "Observed losses that were NaN or Inf.")
TRAIN_LOSS_SPIKES = _counter(
    "torch_train_loss_spikes_total",
    "Observed losses above 6 robust sigmas over the median of the last 128.",
)
TRAIN_LEARNING_RATE = _gauge("torch_train_learning_rate", "Learning rate of a parameter group.", "optimizer", "group")
TRAIN_LOSS_SCALE = _gauge("torch_train_loss_scale", "Loss scale of the gradient scaler.")
TRAIN_LAST_STEP_TIMESTAMP = _gauge(
    "torch_train_last_step_timestamp_seconds", "Unix time of the last optimizer step.", unit="seconds"
)
TRAIN_LAST_ACTIVITY_TIMESTAMP = _gauge(
    "torch_train_last_activity_timestamp_seconds",
    "Unix time of the last forward pass, backward pass or optimizer step.",
    unit="seconds",
)
TRAIN_START_TIMESTAMP = _gauge(
    "torch_train_start_timestamp_seconds", "Unix time at which the exporter was started.", unit="seconds"
)
TRAIN_SLOWEST_STEP = _gauge("torch_train_slowest_step_seconds", "Longest of the last 128 steps.", unit="seconds")

# The exporter itself
EXPORTER_OVERHEAD_RATIO = _gauge(
    "torch_grad_exporter_overhead_ratio",
    "Time the exporter took on the training thread, and on devices, over training time, last 1,000 steps.",
)
EXPORTER_OVERHEAD_BUDGET = _gauge(
    "torch_grad_exporter_overhead_budget_ratio",
    "The overhead budget that the sampling interval keeps to; absent with a fixed interval.",
)
EXPORTER_SAMPLING_INTERVAL = _gauge("torch_grad_exporter_sampling_interval_steps", "Steps from one sample to the next.")
EXPORTER_TIMING_INTERVAL = _gauge(
    "torch_grad_exporter_timing_interval_steps",
    "Steps from one that is timed to the next: 1, unless steps are so short that timing each would take up the overhead budget.",
)
EXPORTER_LAYERS = _gauge("torch_grad_exporter_layers", "Layers shown.")
EXPORTER_LAYERS_FOLDED = _gauge(
    "torch_grad_exporter_layers_folded", "Layers of the model that are shown only as part of a group, for the cap on layers."
)
EXPORTER_SERIES = _gauge("torch_grad_exporter_series", "Time series in the previous scrape.")
EXPORTER_CAPTURE_MODE = _gauge(
    "torch_grad_exporter_capture_mode",
    "How gradients are captured: 1 for the current one of output, parameter and optimizer, else 0.",
    "mode",
)
EXPORTER_OVERHEAD_SECONDS = _counter(
    "torch_grad_exporter_overhead_seconds_total",
    "Time the exporter took on the training thread, and on devices: as timed, with a fixed allowance for PyTorch's calls of hooks.",
    unit="seconds",
)
EXPORTER_CAPTURES = _counter("torch_grad_exporter_captures_total", "Samples taken.")
EXPORTER_CAPTURES_SKIPPED = _counter(
    "torch_grad_exporter_captures_skipped_total", "Samples that were due and not taken or not delivered."
)
EXPORTER_ERRORS = _counter("torch_grad_exporter_errors_total", "Failures inside the exporter, by source.", "source")
EXPORTER_COLLECTOR_SUCCESS = _gauge(
    "torch_grad_exporter_collector_success", "1 where the collector succeeded at this scrape, else 0.", "collector"
)
EXPORTER_COLLECTOR_DURATION = _gauge(
    "torch_grad_exporter_collector_duration_seconds", "Time the collector took at this scrape.", "collector", unit="seconds"
)
