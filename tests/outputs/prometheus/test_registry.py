"""The prometheus_client collector: the same samples in a registry of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.metrics.families import NO_LABELS, Family, Kind, LabelRows, Spec
from torch_grad_exporter.outputs.prometheus.registry import RegistryCollector
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer

CONSTANT = {"run": "r1", "rank": "0"}
NORM = Spec("norm", Kind.GAUGE, 'A "norm".', ("layer",))
BUSY = Spec("busy_seconds_total", Kind.COUNTER, "Busy.", unit="seconds")
TIMES = Spec("time_seconds", Kind.HISTOGRAM, "Times.", ("layer",), "seconds", (0.001, 1e6))
ABSENT = Spec("absent", Kind.GAUGE, "Never there.")
SPECS = (NORM, BUSY, TIMES, ABSENT)
LAYERS = LabelRows((("a",), ('b"\\\n',), ("c",)))
FAMILIES = (
    Family(NORM, np.array([1.0, np.nan, np.inf]), LAYERS, np.array([True, True, False])),
    Family(BUSY, np.array([2.5]), NO_LABELS),
    Family(TIMES, np.array([[1.0, 2.0, 3.0], [0.0, 0.0, 4.0], [0.0, 0.0, 0.0]]), LAYERS, sums=np.array([7.0, 8.0, 0.0])),
    Family(NORM, np.array([4.0]), LabelRows((("d",),))),
    Family(ABSENT, np.zeros(1), NO_LABELS, np.zeros(1, dtype=np.bool_)),
)


def collector(scrape: Callable[[], Iterable[Family]] = lambda: FAMILIES, errors: ErrorLog | None = None) -> RegistryCollector:
    """A collector over known families."""
    return RegistryCollector(scrape, CONSTANT, SPECS, errors=errors or ErrorLog(()))


def described(text: str, parse: Callable[[str], Iterable[Metric]]) -> list[tuple[object, ...]]:
    """Return all that a parser finds, in a form in which NaN equals NaN and the order of labels does not count."""
    return [
        (
            metric.name,
            metric.documentation,
            metric.type,
            metric.unit,
            [(sample.name, sorted(sample.labels.items()), repr(sample.value)) for sample in metric.samples],
        )
        for metric in parse(text)
    ]


def test_a_registry_shows_what_the_endpoint_shows() -> None:
    """Both formats of prometheus_client give the families, samples, helps, types and units that our own text gives."""
    registry = CollectorRegistry()
    collector().register(registry)
    text = Renderer(CONSTANT).render(FAMILIES, Format.TEXT).decode()
    openmetrics = Renderer(CONSTANT).render(FAMILIES, Format.OPENMETRICS).decode()
    assert described(generate_latest(registry).decode(), parse_text) == described(text, parse_text)
    assert described(generate_openmetrics(registry).decode(), parse_openmetrics) == described(openmetrics, parse_openmetrics)
    assert text.count("# TYPE norm ") == 1
    assert "absent" not in text


def test_close_removes_everything() -> None:
    """After close, also twice, the registry is as before; until then a second collector of the same names is refused."""
    registry = CollectorRegistry()
    Counter("mine", "The user's.", registry=registry).inc()
    before = generate_latest(registry)
    ours = collector()
    ours.register(registry)
    assert generate_latest(registry) != before
    other = collector()
    with pytest.raises(ValueError, match="norm"):
        other.register(registry)
    other.close()
    assert generate_latest(registry) != before
    ours.close()
    ours.close()
    assert generate_latest(registry) == before


def test_a_failing_scrape_leaves_the_users_metrics() -> None:
    """A scrape that raises half-way yields nothing, is counted once, and the user's own metrics are still served."""
    failure = ValueError("no")

    def scrape() -> Iterable[Family]:
        yield FAMILIES[0]
        raise failure

    registry, errors = CollectorRegistry(), ErrorLog(())
    Counter("mine", "The user's.", registry=registry).inc()
    before = generate_latest(registry)
    collector(scrape, errors).register(registry)
    assert generate_latest(registry) == before
    assert errors.counts() == {"request": 1}


def test_common_metrics_are_left_to_the_registry() -> None:
    """A common metric is left out of a registry that has one of its name, and all else is shown."""
    mine, busy = CollectorRegistry(), CollectorRegistry()
    Counter("busy_seconds", "Somebody else's.", registry=busy).inc(7)
    for registry, expected in ((mine, 2.5), (busy, 7.0)):
        RegistryCollector(lambda: FAMILIES, {}, SPECS, common={BUSY, TIMES}, errors=ErrorLog(())).register(registry)
        assert registry.get_sample_value("busy_seconds_total") == expected
        assert registry.get_sample_value("norm", {"layer": "a"}) == 1.0
    assert mine.get_sample_value("time_seconds_count", {"layer": "a"}) == 6.0
    assert busy.get_sample_value("time_seconds_count", {"layer": "a"}) is None
