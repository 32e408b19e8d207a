"""The JSON of the live page and of saved runs: parts of the history, what was judged, a scrape. `docs/live.md` has its shape."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

import numpy as np

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
from torch_grad_exporter.metrics.families import Kind, Spec
from torch_grad_exporter.outputs.live.history import MEAN_AND_STDDEV, Window
from torch_grad_exporter.outputs.live.saved import NONFINITE, ZERO
from torch_grad_exporter.outputs.live.track import Part
from torch_grad_exporter.rules import THRESHOLDS
from torch_grad_exporter.rules.context import SAMPLE_SECONDS
from torch_grad_exporter.rules.declaration import Rule
from torch_grad_exporter.rules.episodes import seconds
from torch_grad_exporter.rules.record import EVERY, Record
from torch_grad_exporter.rules.values import Values
from torch_grad_exporter.rules.watch import OVER

# Quantities that are shown by their logarithm.
LOG = frozenset({"norm", "activation_rms"})

# The lowest and the highest if there is no number: by logarithm less than 32 bits can hold, since all may be zeros.
NOTHING = {False: (0.0, 1.0), True: (-46.0, -45.0)}

Json = dict[str, object]


def encoded(content: Json) -> bytes:
    """Return JSON that browsers can read; half a character is a question mark."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def json_number(value: float | None) -> float | str | None:
    """Return a number for JSON, which has only finite ones: others become a text."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def frame(part: Part, window: Window) -> Json:
    """Return which records a part of the history has."""
    return {
        "view": "whole" if window.whole else "recent",
        "first": part.first,
        "stride": part.stride,
        "times": part.times.tolist(),
        "steps": part.steps.tolist(),
    }


def columns(part: Part, names: Sequence[str]) -> Json:
    """Return the values by name, and where they were not finite."""
    content = named(part, names)
    return {**content["values"], "nonfinite": content["nonfinite"]}


def named(part: Part, names: Sequence[str]) -> dict[str, Json]:
    """Return the same with the values by themselves, for names that the user has chosen."""
    places = {name: np.flatnonzero(part.nonfinite[:, column]).tolist() for column, name in enumerate(names)}
    values: Json = {name: _numbers(part.values[:, column]) for column, name in enumerate(names)}
    return {"values": values, "nonfinite": {name: rows for name, rows in places.items() if rows}}


def _numbers(column: np.ndarray[tuple[int], np.dtype[np.float32]]) -> list[float | str | None]:
    """Return a column of the history, in which NaN stands for no value."""
    return [None if math.isnan(value) else json_number(float(f"{value:.6g}")) for value in column.tolist()]


def cells(part: Part, quantity: str) -> Json:
    """Return the values of a grid: codes of 16 bits; numbers of 32 bits where those of one layer are far below those of another."""
    if quantity in MEAN_AND_STDDEV:
        return {"scale": "raw", "low": 0.0, "high": 0.0, "codes": base64.b64encode(part.values.astype("<f4").tobytes()).decode()}
    codes, low, high = _encoded(part.values, log=quantity in LOG)
    scale = "log" if quantity in LOG else "linear"
    return {"scale": scale, "low": low, "high": high, "codes": base64.b64encode(codes.astype("<u2").tobytes()).decode()}


def _encoded(values: np.ndarray[tuple[int, int], np.dtype[np.float32]], *, log: bool) -> tuple[np.ndarray, float, float]:
    """Return values as codes, and the value, or its logarithm to base 10, of the lowest and the highest code of a number."""
    numbers = values.astype(np.float64)
    if log:
        with np.errstate(divide="ignore"):
            numbers = np.where(np.isinf(numbers), np.inf, np.log10(numbers))  # -inf is a norm of 0
    finite = np.isfinite(numbers)
    low, high = (float(numbers[finite].min()), float(numbers[finite].max())) if finite.any() else NOTHING[log]
    span = high - low if high > low else max(1.0, abs(low))
    if log:  # the first code is that of 0
        step = span / (NONFINITE - 3)
        low, span = low - step, span + step
    with np.errstate(invalid="ignore"):
        codes = np.where(finite, 1 + np.rint((numbers - low) / span * (NONFINITE - 2)), 0)
    codes[np.isneginf(numbers)] = ZERO if log else NONFINITE
    codes[np.isposinf(numbers)] = NONFINITE
    return codes.astype(np.uint16), low, low + span


def judged(record: Record) -> Json:
    """Return what was wrong in a run, and by which rules it was judged."""
    rules = [_judged_rule(rule, there=rule.name in record.there) for rule in record.rules]
    wrong = [{**asdict(problem), "others": list(problem.others), "value": json_number(problem.value)} for problem in record.wrong]
    return {"samples": record.samples, "seconds": record.seconds, "rules": rules, "wrong": wrong}


def metrics(values: Values) -> Json:
    """Return all gauges and counters."""
    content: Json = {}
    for spec in values.specs:
        rows = [] if spec.kind is Kind.HISTOGRAM else list(values.rows(spec))
        if rows:
            names, numbers = zip(*rows, strict=True)
            content[spec.name] = {
                "labels": list(spec.labels),
                "rows": list(map(list, names)),
                "values": list(map(json_number, numbers)),
            }
    return content


def _judged_rule(rule: Rule, *, there: bool) -> Json:
    waits = min((seconds(alert.for_) for alert in rule.alerts), default=0.0) * (not rule.states & OVER)  # nothing follows the end
    # A need is a metric, or one value of a metric's first label.
    needs = [f'{need[0].name}{{{need[0].labels[0]}="{need[1]}"}}' if isinstance(need, tuple) else need.name for need in rule.needs]
    # The first judgement by samples is at `EVERY` of them.
    samples = round(waits / SAMPLE_SECONDS) + rule.takes_samples + EVERY if rule.by_samples else None
    return {
        "name": rule.name,
        "judged": rule.judge is not None,
        "there": there,
        "needs": needs,
        "seconds": waits + rule.takes_seconds,
        "samples": samples,
        "least": rule.takes_samples,
    }


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
        **{name: json_number(values.one(spec)) for name, spec in _NUMBERS.items()},
        **{name: json_number(sum(value for _, value in values.rows(spec))) for name, spec in _SUMS.items()},
        "dead_layers": dead,
        "learning_rates": _learning_rates(values),
        "optimizers": sum(1 for _ in values.rows(training.TRAIN_STEPS)),
        "resources": list(_resources(values)),
    }


def _learning_rates(values: Values) -> Json:
    """Return the learning rate of the first group of each optimizer, by its name."""
    rates: Json = {}
    for (optimizer, _), rate in values.rows(training.TRAIN_LEARNING_RATE):
        rates.setdefault(optimizer, json_number(rate))
    return rates


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
        **{key: json_number(values.one(spec, name)) for key, spec in _LAYER_NUMBERS.items()},
    }


def _resources(values: Values) -> Iterable[Json]:
    """Yield name, value, limit and unit of each resource of the machine."""

    def row(name: str, value: float | None, limit: float | None, unit: str) -> Iterable[Json]:
        if value is not None:
            yield {"name": name, "value": json_number(value), "limit": json_number(limit), "unit": unit}

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
