"""Collector `extra`: the metrics of the registries of `prometheus_client` that `extra_registries` names."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Collection, Sequence

import numpy as np
import prometheus_client
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from torch_grad_exporter.collectors.context import CollectorContext
from torch_grad_exporter.collectors.process import STANDARD
from torch_grad_exporter.collectors.registry import Declaration, source_of
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.metrics.families import Family, Kind, LabelledRows, LabelRows, Spec

NAME = "extra"
OPTION = "extra_registries"

# What each process has, which the exporter shows itself.
COMMON = frozenset(spec.name for spec in STANDARD.specs)


class ExtraRegistries:
    """The user's registries.

    Args:
        registries: Of `prometheus_client`.
        own: Names of the exporter's metrics.

    Raises:
        ValueError: A registry has a metric of one of these names, or of another registry.
    """

    def __init__(self, registries: Sequence[prometheus_client.CollectorRegistry], own: Collection[str]) -> None:
        self._registries, self._own = tuple(registries), frozenset(own) - COMMON
        known: set[str] = set()
        for registry in self._registries:
            families: list[Family] = []
            with contextlib.suppress(Exception):  # a failure of theirs is counted at each scrape
                for metric in registry.collect():
                    families += families_of(metric)
            for family in families:
                self._check(known, family.spec.name)
            known |= {family.spec.name for family in families}

    def collect(self, errors: ErrorLog) -> list[Family]:
        """Return the families of now. What fails costs the rest of its registry, or its metric alone, and is counted."""
        guard, families = errors.boundary(source_of(NAME), limit=None), list[Family]()
        known: set[str] = set()
        for registry in self._registries:
            metrics = iter(registry.collect())
            while (metric := guard.result(next, metrics, None)) is not None:
                families += guard.result(self._converted, metric, known) or []
            known = {family.spec.name for family in families}
        return families

    def _converted(self, metric: Metric, known: Collection[str]) -> list[Family]:
        families = families_of(metric)
        for family in families:
            self._check(known, family.spec.name)
        return families

    def _check(self, known: Collection[str], name: str) -> None:
        if name in self._own:
            raise ValueError(f"{OPTION}: the metric {name} has the name of one of the exporter's; rename yours")
        if name in known:
            raise ValueError(f"{OPTION}: two registries have a metric {name}; rename one of them")


def families_of(metric: Metric) -> list[Family]:
    """Return a metric of `prometheus_client` as families: a summary and others as a gauge or counter for each of its names."""
    if metric.type == "histogram":
        return [_histogram(metric)] if metric.samples else []
    by_name: dict[str, list[Sample]] = {}
    for sample in metric.samples:
        if sample.name != f"{metric.name}_created" and sample.name not in COMMON:
            by_name.setdefault(sample.name, []).append(sample)
    families = []
    for name, samples in by_name.items():
        kind = Kind.COUNTER if name.endswith("_total") else Kind.GAUGE
        spec = Spec(name, kind, metric.documentation, _labels(samples), metric.unit, older=True)
        families.append(LabelledRows().family(spec, {_row(spec, sample): sample.value for sample in samples}))
    return families


def _histogram(metric: Metric) -> Family:
    buckets = [sample for sample in metric.samples if sample.name == f"{metric.name}_bucket"]
    bounds = sorted({float(sample.labels["le"]) for sample in buckets} - {math.inf})
    spec = Spec(metric.name, Kind.HISTOGRAM, metric.documentation, _labels(buckets, "le"), metric.unit, tuple(bounds), older=True)
    rows = dict.fromkeys(_row(spec, sample) for sample in buckets)
    place = {row: number for number, row in enumerate(rows)}
    cumulated, sums = np.zeros((len(rows), len(bounds) + 1)), np.full(len(rows), np.nan)
    for sample in buckets:
        cumulated[place[_row(spec, sample)], np.searchsorted(bounds, float(sample.labels["le"]))] = sample.value
    for sample in metric.samples:
        if sample.name == f"{metric.name}_sum":
            sums[place[_row(spec, sample)]] = sample.value
    return Family(spec, np.diff(cumulated, prepend=0), LabelRows((*rows,)), sums=sums)


def _labels(samples: Sequence[Sample], *without: str) -> tuple[str, ...]:
    names = dict.fromkeys(itertools.chain.from_iterable(sample.labels for sample in samples))
    return tuple(name for name in names if name not in without)


def _row(spec: Spec, sample: Sample) -> tuple[str, ...]:
    return tuple(sample.labels.get(name, "") for name in spec.labels)


class ExtraCollector:
    """Families of the user's registries."""

    def __init__(self, context: CollectorContext) -> None:
        self._registries, self._errors = context.extra, context.errors

    def collect(self) -> list[Family]:
        """Return the families of now."""
        return self._registries.collect(self._errors)


COLLECTOR = Declaration(NAME, (), ExtraCollector, place=88, judged=False)
