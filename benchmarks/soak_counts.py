"""Whether the counters of a long run are exact: a scrape, as another project's parser reads it, beside the loop's own count."""

from __future__ import annotations

import gzip
from dataclasses import asdict, dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one training with one optimizer. `durations`: those in the histogram of step durations. `captures`: samples taken."""

    steps: float
    backward_passes: float
    samples: float
    tokens: float
    durations: float
    captures: float
    errors: float


_NAMES = {
    "torch_train_steps_total": "steps",
    "torch_train_backward_passes_total": "backward_passes",
    "torch_train_samples_total": "samples",
    "torch_train_tokens_total": "tokens",
    "torch_train_step_duration_seconds_count": "durations",
    "torch_grad_exporter_captures_total": "captures",
    "torch_grad_exporter_errors_total": "errors",
}


def expected(steps: int, batch: int, tokens: int, captures: float) -> Counts:
    """After so many ordinary steps; the first of them has no step before it that it could be timed from."""
    return Counts(steps, steps, steps * batch, steps * tokens, steps - 1, captures, 0)


def read(body: bytes) -> Counts:
    """The counts of a scrape that was compressed; of a metric with several series their sum."""
    found = dict.fromkeys(_NAMES.values(), 0.0)
    for family in text_string_to_metric_families(gzip.decompress(body).decode()):
        for sample in family.samples:
            if sample.name in _NAMES:
                found[_NAMES[sample.name]] += sample.value
    return Counts(**found)


def complaints(counts: Counts, wanted: Counts) -> list[str]:
    """What is not exact, or impossible; empty if all is well."""
    told, right = asdict(counts), asdict(wanted)
    found = [f"{told[name]:.0f} {name}, there were {right[name]:.0f}" for name in told if told[name] != right[name]]
    if not 0 < counts.captures <= wanted.steps:
        found.append(f"{counts.captures:.0f} captures in {wanted.steps:.0f} steps")
    return found
