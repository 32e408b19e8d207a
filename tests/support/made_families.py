"""Families of the catalogue's metrics with random values, as collectors would make them."""

from __future__ import annotations

import numpy as np

from tests.support.catalogue import CATALOGUE
from torch_grad_exporter.metrics.families import NO_LABELS, Family, Kind, LabelRows, Spec


def filled(spec: Spec, labels: LabelRows, generator: np.random.Generator, *, masked: bool = False) -> Family:
    """A family with random values, as a collector would make it."""
    present = generator.random(len(labels)) < 0.5 if masked else None
    if spec.kind is Kind.HISTOGRAM:
        counts = generator.integers(0, 100, (len(labels), len(spec.buckets) + 1)).astype(np.float64)
        return Family(spec, counts, labels, present, generator.random(len(labels)))
    return Family(spec, np.exp(generator.normal(size=len(labels)) * 9), labels, present)


def catalogue_families(layers: int, *, masked: bool = False) -> list[Family]:
    """Return families of the catalogue's metrics, with this many rows where there are labels."""
    generator = np.random.default_rng(7)
    shared = {
        spec.labels: LabelRows(tuple((f"layers.{i}.weight", *("x" for _ in spec.labels[1:])) for i in range(layers)))
        if spec.labels
        else NO_LABELS
        for spec in CATALOGUE.values()
    }
    return [filled(spec, shared[spec.labels], generator, masked=masked and bool(spec.labels)) for spec in CATALOGUE.values()]
