"""What tests of properties share: how many examples they try, and reading a scrape back.

`HYPOTHESIS_PROFILE=soak` tries many more, other ones at each run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, Phase, settings
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "short")

settings.register_profile(
    "base",
    deadline=None,
    database=None,
    print_blob=True,
    # Big tensors are slow to draw, and that is what they are for.
    suppress_health_check=list(HealthCheck),
    # Explaining runs a failing example under a tracer, which takes minutes.
    phases=set(Phase) - {Phase.explain},
)
settings.register_profile("short", settings.get_profile("base"), derandomize=True, max_examples=80, stateful_step_count=30)
settings.register_profile("soak", settings.get_profile("base"), max_examples=1000, stateful_step_count=60)
settings.load_profile(PROFILE)

no_timeout_in_a_soak = pytest.mark.timeout(120 if PROFILE == "short" else 0)

Series = dict[tuple[str, ...], float]


def series(families: Iterable[Family], form: Format = Format.TEXT) -> Series:
    """Every sample that the official parser finds in the text, by name and labels; none stands twice."""
    parse = parse_text if form is Format.TEXT else parse_openmetrics
    text = Renderer({"run": "r"}).render(families, form).decode()
    samples = [one for metric in parse(text) for one in metric.samples]
    found = {(one.name, *sorted(f"{k}={v}" for k, v in one.labels.items() if k != "run")): float(one.value) for one in samples}
    assert len(found) == len(samples)
    return found


def both_formats(families: Iterable[Family]) -> Series:
    """Every sample of a scrape, which both formats have alike."""
    kept = list(families)
    plain, openmetrics = series(kept, Format.TEXT), series(kept, Format.OPENMETRICS)
    assert {k: repr(v) for k, v in plain.items()} == {k: repr(v) for k, v in openmetrics.items()}
    return plain


def totals(found: Series) -> Series:
    """What belongs to counters and histograms."""
    return {key: value for key, value in found.items() if key[0].endswith(("_total", "_bucket", "_sum", "_count"))}
