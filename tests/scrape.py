"""A scrape as a flat mapping, for tests that compare single series."""

from __future__ import annotations

import numpy as np

from torch_grad_exporter import Exporter

Key = tuple[str, tuple[tuple[str, str], ...]]


def key(name: str, **labels: str) -> Key:
    """The key of a series in what `values` returns; empty labels do not count."""
    return name, tuple(sorted((k, v) for k, v in labels.items() if v))


def values(exporter: Exporter) -> dict[Key, float]:
    """Every sample of a scrape; of a histogram its cumulative `_bucket`s, its `_count` and its `_sum`."""
    found: dict[Key, float] = {}
    for family in exporter.collect():
        for position, row in enumerate(family.labels.rows):
            if family.present is not None and not family.present[position]:
                continue
            labels = dict(zip(family.spec.labels, row, strict=True))
            if family.sums is None:
                found[key(family.spec.name, **labels)] = float(family.values[position])
                continue
            found[key(family.spec.name + "_sum", **labels)] = float(family.sums[position])
            bounds = (*map(str, family.spec.buckets), "+Inf")
            for bound, count in zip(bounds, np.cumsum(family.values[position]), strict=True):
                found[key(family.spec.name + "_bucket", le=bound, **labels)] = float(count)
            found[key(family.spec.name + "_count", **labels)] = float(family.values[position].sum())
    return found


def value(exporter: Exporter, name: str, **labels: str) -> float | None:
    """One series of a scrape, `None` if it is absent."""
    return values(exporter).get(key(name, **labels))


def mode(exporter: Exporter) -> str:
    """The rung of the ladder in use."""
    found = values(exporter)
    return next(m for m in ("output", "parameter", "optimizer") if found[key("torch_grad_exporter_capture_mode", mode=m)] == 1)


def errors(exporter: Exporter) -> dict[str, float]:
    """The failures of the exporter itself that were counted, by source."""
    return {k[1][0][1]: v for k, v in values(exporter).items() if k[0] == "torch_grad_exporter_errors_total" and v}
