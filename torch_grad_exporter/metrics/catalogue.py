"""Every metric, declared once: name, kind, help, labels, unit, buckets.

The names are the product's interface. `docs/metrics.md`, the golden scrape and the collectors follow
this file, and a test keeps them in step. Bucket bounds are Python floats: numpy's float32 would print
as `le="9.999999747378752e-05"`.
"""

from __future__ import annotations

from torch_grad_exporter.metrics.families import Kind, Spec

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


def _counter(name: str, help_: str, *labels: str, unit: str = "", opt_in: str = "", older: bool = False) -> Spec:
    return _declare(Spec(name, Kind.COUNTER, help_, labels, unit, opt_in=opt_in, older=older))


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
    "Samples whose norm lay beyond 6 robust sigmas and 3 times the median of the layer's own baseline, over sampled steps; of a sharded layer, the norm of this rank's part.",
    "layer",
)
GRAD_MAX_MAGNITUDE = _gauge(
    "torch_grad_max_magnitude",
    "Largest absolute element of the layer's gradient at the last sampled step, unscaled, before clipping.",
    "layer",
)
GRAD_NONFINITE_ELEMENTS = _counter(
    "torch_grad_nonfinite_elements_total",
    "Gradient elements that were NaN or Inf before clipping, over sampled steps; of what several ranks have a copy of, one counts.",
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
GRAD_UNITS = _gauge(
    "torch_grad_units",
    "Output units of the layer's weights that have a gradient: what the shares of units are of; of this rank's part where the gradient is sharded.",
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
    "torch_weight_norm",
    "L2 norm of the layer's parameters after the last sampled update of the layer; absent where they are sharded.",
    "layer",
    opt_in="weights",
)
WEIGHT_UPDATE_RATIO = _gauge(
    "torch_weight_update_ratio",
    "L2 norm of the layer's last sampled update over the L2 norm of its parameters before it; of a sharded layer, over this rank's part.",
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
    "Samples whose global norm lay beyond 6 robust sigmas and 3 times the median of its own baseline, over sampled steps; of sharded gradients, the norm over this rank's parts, unless observe(grad_norm=) gives that of the whole.",
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
GRAD_LOCAL_NORM = _gauge(
    "torch_grad_local_norm",
    "L2 norm over the gradients of all tracked parameters that DistributedDataParallel reduces, of this rank alone, before the mean over ranks is taken, at the last sampled step; unscaled, before clipping. Absent where several backwards of a step reduce, as with accumulation without no_sync().",
    "optimizer",
    opt_in="local_norm",
)
GRAD_NOISE_SCALE = _gauge(
    "torch_grad_noise_scale",
    "Simple gradient noise scale in samples, tr(Sigma) / |G|^2 (McCandlish et al. 2018, An Empirical Model of Large-Batch Training, appendix A.1), from the norms of this rank's gradient and of the mean over ranks, which are taken to have batches of one size; both terms averaged over about 100 samples; absent before 20, and while the noise hides the gradient, so that the estimate of |G|^2 is not above 0.",
    "optimizer",
    opt_in="local_norm",
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
    "Time from the end of one round of optimizer steps to the end of the next, every step; where steps are short they enter in lots, up to half a second later than torch_train_steps.",
    STEP_SECONDS,
    unit="seconds",
)
TRAIN_PHASE_SECONDS = _counter(
    "torch_train_phase_seconds_total",
    "Time by phase of the training step: data, forward, backward, optimizer, and outside for everything between steps. Over timed steps: all, or one of each torch_grad_exporter_timing_interval_steps where steps are very short.",
    "phase",
    unit="seconds",
)
TRAIN_GRADIENT_WAIT_SECONDS = _counter(
    "torch_train_gradient_wait_seconds_total",
    "Time from this rank's last gradient to the end of the backward, in which DistributedDataParallel waits for other ranks and the network, over sampled steps; on CPUs only.",
    unit="seconds",
)
TRAIN_GRADIENT_WAITS = _counter(
    "torch_train_gradient_waits_total", "Sampled steps that torch_train_gradient_wait_seconds_total is over."
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
    "Observed losses above 6 robust sigmas over the median of the last 128; by their logarithms while all are positive.",
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

# The whole run: rank 0 with the collector whole_run, which is off by default
RUN_RANKS_REPORTING = _gauge(
    "torch_run_ranks_reporting",
    "Ranks that have reported lately: within 30 seconds, longer with more than 256 ranks. The other torch_run metrics are absent while that is not all of them.",
    opt_in="whole_run",
)
RUN_FEWEST_STEPS = _gauge(
    "torch_run_fewest_steps", "Optimizer steps of the rank that had the fewest when it last reported.", opt_in="whole_run"
)
RUN_MOST_STEPS = _gauge(
    "torch_run_most_steps", "Optimizer steps of the rank that had the most when it last reported.", opt_in="whole_run"
)
RUN_GLOBAL_NORM_RMS = _gauge(
    "torch_run_grad_global_norm_rms",
    "Root mean square, over the last samples of each rank, of the norm over all layers and ranks; gradients of which a rank has only a summand are left out, here as in the norms themselves.",
    opt_in="whole_run",
)
RUN_NORM_RMS = _gauge(
    "torch_run_grad_norm_rms",
    "Root mean square, over the last samples of each rank, of the norm of the layer's whole gradient, however it is sharded.",
    "layer", opt_in="whole_run",
)  # fmt: skip
RUN_DEAD_RATIO = _gauge(
    "torch_run_grad_dead_ratio", "torch_grad_dead_ratio over the units of all ranks.", "layer", opt_in="whole_run"
)
RUN_NONFINITE_ELEMENTS = _counter(
    "torch_run_grad_nonfinite_elements_total",
    "Sum of torch_grad_nonfinite_elements over all ranks, over sampled steps.", "layer", "kind", opt_in="whole_run",
)  # fmt: skip

# Resources: the memory of CUDA devices, or of another accelerator, as PyTorch's allocator counts it
CUDA_MEMORY_ALLOCATED = _gauge(
    "torch_cuda_memory_allocated_bytes", "Memory of the device that tensors occupy.", "device", unit="bytes"
)
CUDA_MEMORY_RESERVED = _gauge(
    "torch_cuda_memory_reserved_bytes", "Memory of the device that PyTorch's caching allocator holds.", "device", unit="bytes"
)
CUDA_MEMORY_ACTIVE = _gauge(
    "torch_cuda_memory_active_bytes",
    "Memory of the device in blocks that tensors occupy or that wait for a stream to be done with them.",
    "device",
    unit="bytes",
)
CUDA_MEMORY_INACTIVE_SPLIT = _gauge(
    "torch_cuda_memory_inactive_split_bytes",
    "Memory of the device in free rests of blocks that are partly in use: what fragmentation costs.",
    "device",
    unit="bytes",
)
CUDA_MEMORY_REQUESTED = _gauge(
    "torch_cuda_memory_requested_bytes",
    "Memory of the device that was asked for, before the allocator rounded it up.",
    "device",
    unit="bytes",
)
CUDA_MEMORY_PEAK_ALLOCATED = _gauge(
    "torch_cuda_memory_peak_allocated_bytes",
    "Largest amount of memory of the device that tensors occupied, since the start or since the program reset PyTorch's peaks.",
    "device",
    unit="bytes",
)
CUDA_MEMORY_PEAK_RESERVED = _gauge(
    "torch_cuda_memory_peak_reserved_bytes",
    "Largest amount of memory of the device that the allocator held, since the start or since the program reset PyTorch's peaks.",
    "device",
    unit="bytes",
)
CUDA_MEMORY_TOTAL = _gauge("torch_cuda_memory_total_bytes", "Memory that the device has.", "device", unit="bytes")
CUDA_ALLOC_RETRIES = _counter(
    "torch_cuda_alloc_retries_total",
    "Allocations that only succeeded after the allocator had given its cached memory back to the driver.",
    "device",
    older=True,
)
CUDA_OOMS = _counter("torch_cuda_ooms_total", "Allocations that failed for want of memory.", "device", older=True)

# Resources: GPUs as the driver sees them, through NVML
GPU_UTILIZATION = _gauge(
    "torch_gpu_utilization_ratio", "Share of the driver's last sample period in which a kernel ran on the GPU.", "device", "uuid"
)
GPU_MEMORY_USED = _gauge(
    "torch_gpu_memory_used_bytes", "Memory of the GPU that all processes on it use.", "device", "uuid", unit="bytes"
)
GPU_POWER = _gauge("torch_gpu_power_watts", "Power that the GPU draws.", "device", "uuid", unit="watts")
GPU_TEMPERATURE = _gauge("torch_gpu_temperature_celsius", "Temperature of the GPU.", "device", "uuid", unit="celsius")
GPU_SM_CLOCK = _gauge(
    "torch_gpu_sm_clock_hertz", "Clock frequency of the GPU's streaming multiprocessors.", "device", "uuid", unit="hertz"
)
GPU_ENERGY = _counter(
    "torch_gpu_energy_joules_total",
    "Energy that the GPU has used since its driver was loaded; goes on where a GPU or a driver that is reset starts again.",
    "device",
    "uuid",
    unit="joules",
    older=True,
)
GPU_THROTTLED = _counter(
    "torch_gpu_throttled_seconds_total",
    "Time for which the GPU's clocks were held down, by reason; reasons may overlap.",
    "device", "uuid", "reason",
    unit="seconds",
    older=True,
)  # fmt: skip
GPU_ECC_ERRORS = _counter(
    "torch_gpu_ecc_errors_total",
    "Memory errors since the driver was loaded, by kind: corrected or uncorrected; goes on where a GPU or a driver that is reset starts again.",
    "device", "uuid", "kind",
    older=True,
)  # fmt: skip

# Resources: the process, under the names that all Prometheus clients use
PROCESS_VIRTUAL_MEMORY = _gauge("process_virtual_memory_bytes", "Virtual memory of the process.", unit="bytes")
PROCESS_RESIDENT_MEMORY = _gauge("process_resident_memory_bytes", "Resident memory of the process.", unit="bytes")
PROCESS_START_TIME = _gauge("process_start_time_seconds", "Unix time at which the process started.", unit="seconds")
PROCESS_CPU_SECONDS = _counter(
    "process_cpu_seconds_total",
    "CPU time of the process, in user and kernel mode, without its children.",
    unit="seconds",
    older=True,
)
PROCESS_OPEN_FDS = _gauge("process_open_fds", "Open file descriptors of the process.")
PROCESS_MAX_FDS = _gauge("process_max_fds", "Most file descriptors that the process may open.")
PYTHON_INFO = _gauge(
    "python_info",
    "The Python interpreter as labels; the value is always 1.",
    "implementation", "major", "minor", "patchlevel", "version",
)  # fmt: skip
PYTHON_GC_COLLECTIONS = _counter(
    "python_gc_collections_total", "Runs of the garbage collector, by generation.", "generation", older=True
)
PYTHON_GC_OBJECTS_COLLECTED = _counter(
    "python_gc_objects_collected_total",
    "Objects that the garbage collector freed, by generation.",
    "generation",
    older=True,
)
PYTHON_GC_OBJECTS_UNCOLLECTABLE = _counter(
    "python_gc_objects_uncollectable_total",
    "Objects that the garbage collector could not free, by generation.",
    "generation",
    older=True,
)

# Resources: the process and its children, such as the workers of a DataLoader, through psutil
PROCESS_THREADS = _gauge("torch_process_threads", "Threads of the process.")
PROCESS_IO_READ = _counter(
    "torch_process_io_read_bytes_total",
    "Bytes that the process had storage read for it; on Linux also its children that have ended.",
    unit="bytes",
    older=True,
)
PROCESS_IO_WRITE = _counter(
    "torch_process_io_write_bytes_total",
    "Bytes that the process had written to storage; on Linux also its children that have ended.",
    unit="bytes",
    older=True,
)
PROCESS_UNIQUE_MEMORY = _gauge(
    "torch_process_unique_memory_bytes",
    "Memory in pages that only this process has, so that its end would free it; forked workers share pages with it, and it falls while they do. Some seconds old, minutes where the process has hundreds of gigabytes.",
    unit="bytes",
)
PROCESS_CHILDREN = _gauge(
    "torch_process_children",
    "Child processes that run, such as the workers of a DataLoader, and theirs.",
)
PROCESS_CHILDREN_MEMORY = _gauge(
    "torch_process_children_memory_bytes",
    "Memory of the child processes that run, for each the pages that only it has: a forked worker shares the rest with its parent. Some seconds old, minutes where they have hundreds of gigabytes.",
    unit="bytes",
)
PROCESS_CHILDREN_CPU_SECONDS = _counter(
    "torch_process_children_cpu_seconds_total",
    "CPU time of the child processes, also of those that have ended.",
    unit="seconds",
    older=True,
)

# Resources: the host
HOST_CPU = _gauge("torch_host_cpu_ratio", "Share of all the host's processors that was busy since the previous scrape.")
HOST_MEMORY_TOTAL = _gauge("torch_host_memory_total_bytes", "Memory of the host.", unit="bytes")
HOST_MEMORY_AVAILABLE = _gauge(
    "torch_host_memory_available_bytes", "Memory of the host that programs can get without swapping.", unit="bytes"
)
HOST_DISK_READ = _counter("torch_host_disk_read_bytes_total", "Bytes read from the host's disks.", unit="bytes", older=True)
HOST_DISK_WRITE = _counter("torch_host_disk_write_bytes_total", "Bytes written to the host's disks.", unit="bytes", older=True)
HOST_NETWORK_RECEIVE = _counter(
    "torch_host_network_receive_bytes_total",
    "Bytes received by network hardware; where there is none, as in a container, on all interfaces other than loopback.",
    unit="bytes",
    older=True,
)
HOST_NETWORK_TRANSMIT = _counter(
    "torch_host_network_transmit_bytes_total",
    "Bytes sent by network hardware; where there is none, as in a container, on all interfaces other than loopback.",
    unit="bytes",
    older=True,
)

# Resources: the container, or whatever else limits the process through control groups
CONTAINER_MEMORY_LIMIT = _gauge(
    "torch_container_memory_limit_bytes",
    "Smallest memory limit of the process' control group and those above it; absent where there is none.",
    unit="bytes",
)
CONTAINER_MEMORY_WORKING_SET = _gauge(
    "torch_container_memory_working_set_bytes",
    "Memory in use, without what the kernel can drop at once, of the control group with the smallest limit, or else of the process' own.",
    unit="bytes",
)
CONTAINER_CPU_LIMIT = _gauge(
    "torch_container_cpu_limit_cores",
    "Smallest processor limit of the process' control group and those above it; absent where there is none.",
)
CONTAINER_CPU_THROTTLED = _counter(
    "torch_container_cpu_throttled_seconds_total",
    "Time for which the control group with the smallest processor limit was held back; absent without a limit.",
    unit="seconds",
    older=True,
)

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

STANDARD = frozenset(spec for spec in CATALOGUE.values() if spec.name.startswith(("process_", "python_")))
"""What every Prometheus client of this language shows under the same names."""
