"""A scrape as a flat mapping, for tests that compare single series."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from torch_grad_exporter import Exporter

Key = tuple[str, tuple[tuple[str, str], ...]]


OFF = dict.fromkeys(("process", "host", "container", "gpu", "cuda_memory"), False)
"""Collectors that ask the machine, disabled. On a busy one they may not answer within a second, which counts as a failure."""


def key(name: str, /, **labels: str) -> Key:
    """The key of a series in what `values` returns; empty labels do not count."""
    return name, tuple(sorted((k, v) for k, v in labels.items() if v))


@functools.cache
def _labels(names: tuple[str, ...], row: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """A series' labels as in `key`."""
    return key("", **dict(zip(names, row, strict=True)))[1]


@functools.cache
def _buckets(name: str, names: tuple[str, ...], row: tuple[str, ...], bounds: tuple[float, ...]) -> list[Key]:
    """The keys of a histogram's buckets."""
    return [(f"{name}_bucket", _labels((*names, "le"), (*row, bound))) for bound in (*map(str, bounds), "+Inf")]


def values(exporter: Exporter) -> dict[Key, float]:
    """Every sample of a scrape; of a histogram its cumulative `_bucket`s, its `_count` and its `_sum`."""
    found: dict[Key, float] = {}
    for family in exporter.collect():
        name, names = family.spec.name, tuple(family.spec.labels)
        for position, row in enumerate(family.labels.rows):
            if family.present is not None and not family.present[position]:
                continue
            labels = _labels(names, tuple(row))
            if family.sums is None:
                found[name, labels] = float(family.values[position])
                continue
            found[f"{name}_sum", labels] = float(family.sums[position])
            buckets = _buckets(name, names, tuple(row), family.spec.buckets)
            found.update(zip(buckets, np.cumsum(family.values[position]).tolist(), strict=True))
            found[f"{name}_count", labels] = found[buckets[-1]]
    return found


def value(exporter: Exporter, name: str, /, **labels: str) -> float | None:
    """One series of a scrape, `None` if it is absent."""
    return values(exporter).get(key(name, **labels))


def mode(exporter: Exporter) -> str:
    """Return where gradients are read: after the backward, or at the step (`optimizer`)."""
    found = values(exporter)
    return next(m for m in ("backward", "optimizer") if found[key("torch_grad_exporter_capture_mode", mode=m)] == 1)


def lost(exporter: Exporter) -> dict[str, float]:
    """Samples that were due and are not shown, by the reason."""
    return {k[1][0][1]: v for k, v in values(exporter).items() if k[0] == "torch_grad_exporter_captures_skipped_total" and v}


def outcomes(exporter: Exporter, **labels: str) -> dict[str, float]:
    """Return the steps with a gradient that is not finite by their outcome, without zeros."""
    names = ("stepped", "skipped", "unknown")
    counts = {outcome: value(exporter, "torch_grad_nonfinite_steps_total", outcome=outcome, **labels) for outcome in names}
    return {outcome: count for outcome, count in counts.items() if count}


def errors(exporter: Exporter) -> dict[str, float]:
    """The failures of the exporter itself that were counted, by source."""
    return errors_in(values(exporter))


def errors_in(scrape: Mapping[Key, float]) -> dict[str, float]:
    """The same, of a scrape that is there."""
    return {k[1][0][1]: v for k, v in scrape.items() if k[0] == "torch_grad_exporter_errors_total" and v}
