"""The families as a `prometheus_client` collector, for users who serve a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from torch_grad_exporter.exposition import samples
from torch_grad_exporter.families import Family, Spec


class RegistryCollector:
    """Shows the same samples as `/metrics` in a `CollectorRegistry`, from `register` until `close`.

    A scrape that raises yields nothing here and goes to `on_error` with the source `"request"`: the
    user's own metrics in the registry stay. Where a family has a label of the same name as a constant
    one, the family's own is shown.
    """

    def __init__(
        self,
        scrape: Callable[[], Iterable[Family]],
        constant_labels: Mapping[str, str],
        specs: Iterable[Spec],
        *,
        on_error: Callable[[str, BaseException], None],
    ) -> None:
        self._scrape = scrape
        self._constant_labels = dict(constant_labels)
        self._specs = tuple(specs)
        self._on_error = on_error
        self._registry: CollectorRegistry | None = None

    def register(self, registry: CollectorRegistry) -> None:
        """Adds the collector. Raises ValueError if the registry has a metric of one of these names already."""
        registry.register(self)
        self._registry = registry

    def close(self) -> None:
        """Takes the collector out of the registry. Idempotent."""
        registry, self._registry = self._registry, None
        if registry is not None:
            registry.unregister(self)

    def describe(self) -> Iterable[Metric]:
        """All metrics that may come, without samples: the registry asks for the names and must not start a scrape."""
        return [_metric(spec) for spec in self._specs]

    def collect(self) -> Iterable[Metric]:
        """The metrics as of now, without those that have no present row."""
        try:
            metrics = [self._filled(spec, members) for spec, members in samples.by_spec(self._scrape()).items()]
        except Exception as exc:  # noqa: BLE001 the boundary of a request: the user's own metrics must not go with ours
            self._on_error("request", exc)
            return []
        return [metric for metric in metrics if metric.samples]

    def _filled(self, spec: Spec, members: list[Family]) -> Metric:
        metric = _metric(spec)
        for family in members:
            for labels, values in zip(self._labels(family), samples.table(family).tolist(), strict=True):
                for (suffix, le), value in zip(samples.columns(spec), values, strict=True):
                    metric.add_sample(spec.name + suffix, labels if le is None else {**labels, "le": le}, value)
        return metric

    def _labels(self, family: Family) -> Iterator[dict[str, str]]:
        for row in samples.present_rows(family):
            own = {name: value for name, value in zip(family.spec.labels, row, strict=True) if value}
            yield {**self._constant_labels, **own}


def _metric(spec: Spec) -> Metric:
    return Metric(samples.family_name(spec), spec.help, spec.kind.value, samples.unit(spec))
