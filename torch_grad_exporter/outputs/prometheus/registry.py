"""The families as a `prometheus_client` collector, for users who serve a registry of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping

import prometheus_client.samples
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.metrics.families import Exemplar, Family, Spec, by_spec
from torch_grad_exporter.outputs.prometheus import series


class RegistryCollector:
    """Shows the same series as `/metrics` in a `CollectorRegistry`, from `register` until `close`.

    A scrape that raises yields nothing here: the user's own metrics in the registry stay.

    Args:
        scrape: Returns the metrics.
        constant_labels: Of every series; a family's own label of that name wins.
        specs: All metrics that may come.
        only_on: The metric that has the constant labels instead, None for all.
        common: Metrics that are left to the registry if it has some of these names.
        errors: Counts failures under `request`.
    """

    def __init__(
        self,
        scrape: Callable[[], Iterable[Family]],
        constant_labels: Mapping[str, str],
        specs: Iterable[Spec],
        *,
        only_on: Spec | None = None,
        common: Collection[Spec] = (),
        errors: ErrorLog,
    ) -> None:
        self._scrape, self._constant_labels, self._only_on = scrape, dict(constant_labels), only_on
        self._specs, self._common = tuple(specs), common
        self._guard = errors.boundary("request", limit=None)
        self._registry: CollectorRegistry | None = None

    def register(self, registry: CollectorRegistry) -> None:
        """Add the collector. Raises ValueError if the registry has a metric of one of these names already."""
        try:
            registry.register(self)
        except ValueError:
            # Most registries have a process collector of their own; the default one has it from the start.
            self._specs = tuple(spec for spec in self._specs if spec not in self._common)
            registry.register(self)
        self._registry = registry

    def close(self) -> None:
        """Remove the collector from the registry. Idempotent."""
        registry, self._registry = self._registry, None
        if registry is not None:
            registry.unregister(self)

    def describe(self) -> Iterable[Metric]:
        """Return all metrics, without series: the registry needs the names and must not start a scrape."""
        return [_metric(spec) for spec in self._specs]

    def collect(self) -> Iterable[Metric]:
        """Return the present metrics, without those that have no present row."""
        return self._guard.result(self._metrics) or []

    def _metrics(self) -> list[Metric]:
        groups = by_spec(self._scrape())
        metrics = [self._filled(spec, groups[spec]) for spec in groups if spec in self._specs]
        return [metric for metric in metrics if metric.samples]

    def _filled(self, spec: Spec, members: list[Family]) -> Metric:
        metric = _metric(spec)
        constant = series.shared_labels(spec, self._constant_labels, self._only_on)
        for family in members:
            exemplars, place = series.exemplars(family), itertools.count()
            for labels, values in zip(series.labels(family, constant), series.table(family).tolist(), strict=True):
                for (suffix, le), value in zip(series.columns(spec), values, strict=True):
                    exemplar = _exemplar(exemplars.get(next(place)))
                    own = labels if le is None else {**labels, "le": le}
                    metric.add_sample(spec.name + suffix, own, value, exemplar=exemplar)
        return metric


def _exemplar(exemplar: Exemplar | None) -> prometheus_client.samples.Exemplar | None:
    if exemplar is None:
        return None
    labels = {"trace_id": exemplar.trace_id.hex(), "span_id": exemplar.span_id.hex()}
    return prometheus_client.samples.Exemplar(labels, exemplar.value, exemplar.at)


def _metric(spec: Spec) -> Metric:
    return Metric(series.family_name(spec), spec.help, spec.kind.value, series.unit(spec))
