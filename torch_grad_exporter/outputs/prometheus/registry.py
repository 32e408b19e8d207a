"""RegistryCollector: the metrics in a registry of prometheus_client that the user has."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping

import prometheus_client.samples
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.metrics.families import Family, Spec, by_spec
from torch_grad_exporter.outputs.prometheus import series


class RegistryCollector:
    """Shows the same series as `/metrics` in a `CollectorRegistry`, from `register` until `close`.

    A scrape that raises yields nothing here: the user's own metrics in the registry stay.

    `specs`: all metrics that may come, of which the `common` ones are left to the registry if it has some of these names.
    `constant_labels`, `only_on`: see `series.shared_labels`.
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
        metrics = [self._filled(spec, members) for spec, members in by_spec(self._scrape()).items() if spec in self._specs]
        return [metric for metric in metrics if metric.samples]

    def _filled(self, spec: Spec, members: list[Family]) -> Metric:
        metric = _metric(spec)
        constant = series.shared_labels(spec, self._constant_labels, self._only_on)
        for family in members:
            known, place = series.exemplars(family), itertools.count()
            for row, values in zip(series.labels(family, constant), series.table(family).tolist(), strict=True):
                for (suffix, le), value in zip(series.columns(spec), values, strict=True):
                    exemplar = None
                    if (of := known.get(next(place))) is not None:
                        ids = {"trace_id": of.trace_id.hex(), "span_id": of.span_id.hex()}
                        exemplar = prometheus_client.samples.Exemplar(ids, of.value, of.at)
                    own = row if le is None else {**row, "le": le}
                    metric.add_sample(spec.name + suffix, own, value, exemplar=exemplar)
        return metric


def _metric(spec: Spec) -> Metric:
    return Metric(series.family_name(spec), spec.help, spec.kind.value, series.unit(spec))
