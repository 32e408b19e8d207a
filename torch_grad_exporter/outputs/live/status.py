"""Numbers of the live page: of the run, of its resources and of each layer, by a scrape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch_grad_exporter.collectors import (
    clipping,
    container,
    cuda_memory,
    exporter,
    gpu,
    gradients,
    host,
    process,
    training,
)
from torch_grad_exporter.metrics.families import Spec
from torch_grad_exporter.outputs.live.encoding import Json, number
from torch_grad_exporter.rules import THRESHOLDS, Values

# Shown as they are, of the first optimizer if there are several.
_NUMBERS: Mapping[str, Spec] = {
    "started": training.TRAIN_START_TIMESTAMP,
    "epoch": training.TRAIN_EPOCH,
    "loss": training.TRAIN_LOSS,
    "learning_rate": training.TRAIN_LEARNING_RATE,
    "global_norm": gradients.GRAD_GLOBAL_NORM,
    "global_norm_after_clip": clipping.GRAD_GLOBAL_NORM_AFTER_CLIP,
    "clip_coefficient": clipping.GRAD_CLIP_COEFFICIENT,
    "skipped_steps": training.TRAIN_SKIPPED_STEPS,
    "nonfinite_losses": training.TRAIN_LOSS_NONFINITE,
    "loss_spikes": training.TRAIN_LOSS_SPIKES,
    "layers": exporter.EXPORTER_LAYERS,
    "last_step": training.TRAIN_LAST_STEP_TIMESTAMP,
    "last_sample_step": gradients.GRAD_SAMPLE_STEP,
    "overhead_ratio": exporter.EXPORTER_OVERHEAD_RATIO,
    "startup_overhead_ratio": exporter.EXPORTER_STARTUP_RATIO,
    "overhead_budget_ratio": exporter.EXPORTER_OVERHEAD_BUDGET,
    "sampling_interval_steps": exporter.EXPORTER_SAMPLING_INTERVAL,
    "series": exporter.EXPORTER_SERIES,
}

_SUMS: Mapping[str, Spec] = {
    "nonfinite_elements": gradients.GRAD_NONFINITE_ELEMENTS,
    "nonfinite_steps": gradients.GRAD_NONFINITE_STEPS,
    "spikes": gradients.GRAD_GLOBAL_NORM_SPIKES,
}

_LAYER_NUMBERS: Mapping[str, Spec] = {
    "captures": gradients.GRAD_CAPTURES,
    "spikes": gradients.GRAD_NORM_SPIKES,
    "units": gradients.GRAD_UNITS,
    "dead_ratio": gradients.GRAD_DEAD_RATIO,
    "zero_ratio": gradients.GRAD_ZERO_RATIO,
    "max_magnitude": gradients.GRAD_MAX_MAGNITUDE,
    "norm": gradients.GRAD_NORM,
    "shard_norm": gradients.GRAD_SHARD_NORM,
}


def numbers(values: Values) -> Json:
    """Return the numbers of the run that a scrape has."""
    dead = sum(1 for _, ratio in values.rows(gradients.GRAD_DEAD_RATIO) if ratio > THRESHOLDS["LayerDead"])
    return {
        **{name: number(values.one(spec)) for name, spec in _NUMBERS.items()},
        **{name: number(sum(value for _, value in values.rows(spec))) for name, spec in _SUMS.items()},
        "dead_layers": dead,
        "optimizers": sum(1 for _ in values.rows(training.TRAIN_STEPS)),
        "resources": list(_resources(values)),
    }


def step(values: Values) -> float:
    """Return the number of the last step in the whole training."""
    here = max((steps for _, steps in values.rows(training.TRAIN_STEPS)), default=0)
    return here + (values.one(training.TRAIN_EARLIER_STEPS) or 0)


def of_layer(values: Values, name: str) -> Json:
    """Return what a scrape has of a layer."""
    bounds, counts = gradients.GRAD_NORM_DISTRIBUTION.buckets, values.histogram(gradients.GRAD_NORM_DISTRIBUTION, name)
    kinds = [values.one(gradients.GRAD_NONFINITE_ELEMENTS, name, kind) or 0.0 for kind in ("nan", "inf")]
    return {
        "layer": name,
        "distribution": None if counts is None else {"bounds": list(bounds), "counts": counts.tolist()},
        "nonfinite_elements": sum(kinds),
        **{key: number(values.one(spec, name)) for key, spec in _LAYER_NUMBERS.items()},
    }


def _resources(values: Values) -> Iterable[Json]:
    """Yield name, value, limit and unit of each resource of the machine."""

    def row(name: str, value: float | None, limit: float | None, unit: str) -> Iterable[Json]:
        if value is not None:
            yield {"name": name, "value": number(value), "limit": number(limit), "unit": unit}

    total, available = values.one(host.HOST_MEMORY_TOTAL), values.one(host.HOST_MEMORY_AVAILABLE)
    yield from row("Process memory", values.one(process.PROCESS_RESIDENT_MEMORY), total, "bytes")
    yield from row("Worker processes' memory", values.one(process.PROCESS_CHILDREN_MEMORY) or None, total, "bytes")
    if total is not None and available is not None:
        yield from row("Host memory", total - available, total, "bytes")
    limit = values.one(container.CONTAINER_MEMORY_LIMIT)
    yield from row("Container memory", values.one(container.CONTAINER_MEMORY_WORKING_SET) if limit else None, limit, "bytes")
    yield from row("Host processors", values.one(host.HOST_CPU), 1.0, "ratio")
    for labels, reserved in values.rows(cuda_memory.CUDA_MEMORY_RESERVED):
        yield from row(f"Device {labels[0]} memory reserved", reserved, values.one(cuda_memory.CUDA_MEMORY_TOTAL, *labels), "bytes")
    for labels, used in values.rows(gpu.GPU_UTILIZATION):
        yield from row(f"GPU {labels[0]} in use", used, 1.0, "ratio")
        yield from row(f"GPU {labels[0]} temperature", values.one(gpu.GPU_TEMPERATURE, *labels), None, "celsius")
        yield from row(f"GPU {labels[0]} power", values.one(gpu.GPU_POWER, *labels), None, "watts")
