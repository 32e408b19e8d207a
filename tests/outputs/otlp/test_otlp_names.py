"""Names on the way through OTLP: what a receiver that follows OpenTelemetry's rules for Prometheus makes of every metric.

Prometheus' own receiver can be built out of a Prometheus, and Debian's is. So its rules stand here once more, written after
OpenTelemetry's "Prometheus and OpenMetrics Compatibility" and the description of Prometheus' translation strategies, pinned by
examples of their documentation, and applied to what is really sent. The names that they yield have to be those of the scrape.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric as OtlpMetric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.catalogue import CATALOGUE
from torch_grad_exporter.metrics.families import Family, Kind, LabelRows, Spec
from torch_grad_exporter.outputs.otlp.otlp import Encoder, Temporality
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer

# The rules

ESCAPED = "UnderscoreEscapingWithSuffixes"
ESCAPED_BARE = "UnderscoreEscapingWithoutSuffixes"
AS_IT_IS = "NoUTF8EscapingWithSuffixes"
UNTOUCHED = "NoTranslation"
STRATEGIES = (ESCAPED, ESCAPED_BARE, AS_IT_IS, UNTOUCHED)

UNITS = {
    "d": "days",
    "h": "hours",
    "min": "minutes",
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
}
UNITS |= {"By": "bytes", "KBy": "kilobytes", "MBy": "megabytes", "GBy": "gigabytes", "TBy": "terabytes"}
UNITS |= {"KiBy": "kibibytes", "MiBy": "mebibytes", "GiBy": "gibibytes", "TiBy": "tibibytes"}
UNITS |= {"m": "meters", "V": "volts", "A": "amperes", "J": "joules", "W": "watts", "g": "grams"}
UNITS |= {"Cel": "celsius", "Hz": "hertz", "%": "percent", "1": ""}
"""UCUM's signs, and the words that Prometheus uses; a unit that is not here stays as it is."""

RATES = {"s": "second", "m": "minute", "h": "hour", "d": "day", "w": "week", "mo": "month", "y": "year"}
"""The words behind a stroke."""

GAUGE, COUNTER, UP_DOWN, HISTOGRAM, NATIVE = "gauge", "counter", "up-down counter", "histogram", "exponential histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """What of an OTLP metric its name in Prometheus depends on."""

    name: str
    unit: str
    kind: str


def words(unit: str) -> tuple[str, str]:
    """A unit in words, and what it is per; annotations in braces are no unit."""
    main, _, per = (part.strip() for part in unit.partition("/"))
    main, per = ("" if set(part) & set("{}") else part for part in (main, per))
    return UNITS.get(main, main), f"per_{RATES.get(per, per)}" if re.search("[a-zA-Z0-9]", per) else ""


def escaped(metric: Metric) -> str:
    """Words of letters, digits and colons, the unit among them if it was not, the kind last, joined by single underscores."""
    found = re.findall(r"[a-zA-Z0-9:]+", metric.name)
    for unit in words(metric.unit):
        cleaned = "_".join(re.findall(r"[a-zA-Z0-9:]+", unit))
        if cleaned and cleaned not in found:
            found.append(cleaned)
    last = "total" if metric.kind == COUNTER else "ratio" if (metric.kind, metric.unit) == (GAUGE, "1") else ""
    name = "_".join([*(word for word in found if word != last), *filter(None, [last])])
    return f"_{name}" if name[:1].isdigit() else name


def suffixed(metric: Metric) -> str:
    """The name as it is, with its unit and its kind behind it unless they are there."""
    main, per = words(metric.unit)
    last = "total" if metric.kind == COUNTER else "ratio" if (metric.kind, metric.unit) == (GAUGE, "1") else ""
    name = metric.name
    endings = [ending for ending in (per, last) if ending]
    for ending in reversed(endings):
        name = re.sub(f"(?<=.).{ending}$", "", name)
    if main and not name.endswith(main):
        name += f"_{main}"
    return "_".join([name, *endings])


def translated(metric: Metric, strategy: str) -> str:
    """The name that Prometheus' receiver gives a metric under a translation strategy."""
    if strategy == ESCAPED:
        return escaped(metric)
    if strategy == AS_IT_IS:
        return suffixed(metric)
    if strategy == UNTOUCHED:
        return metric.name
    name = "_".join(filter(None, re.split(r"[^a-zA-Z0-9:_]+", metric.name)))
    return f"_{name}" if name[:1].isdigit() else name


def translated_label(key: str, strategy: str) -> str:
    """The label that an attribute becomes."""
    if strategy in (AS_IT_IS, UNTOUCHED):
        return key
    name = re.sub(r"[^a-zA-Z0-9_]", "_", key)
    if name.startswith("__"):
        return name
    name = re.sub("__+", "_", name)  # OpenTelemetry's rule; Prometheus leaves them, by default.
    return f"key{name}" if name.startswith("_") else f"key_{name}" if name[0].isdigit() else name


RESERVED = {"le", "quantile", "job", "instance", "__name__", "__type__", "__unit__"}
"""Labels that a receiver sets itself, over those of a point."""

EXAMPLES = [
    (ESCAPED, Metric("(lambda).function.executions(#)", "", UP_DOWN), "lambda_function_executions"),
    (ESCAPED, Metric("system.filesystem.usage", "By", GAUGE), "system_filesystem_usage_bytes"),
    (ESCAPED, Metric("system.network.dropped", "{packets}", UP_DOWN), "system_network_dropped"),
    (ESCAPED, Metric("system.network.dropped", "packets", UP_DOWN), "system_network_dropped_packets"),
    (ESCAPED, Metric("system.memory.utilization", "1", GAUGE), "system_memory_utilization_ratio"),
    (ESCAPED, Metric("astro.light.speed", "m/s", GAUGE), "astro_light_speed_meters_per_second"),
    (ESCAPED, Metric("system.processes.created", "", COUNTER), "system_processes_created_total"),
    (ESCAPED, Metric("http.server.request.duration", "s", HISTOGRAM), "http_server_request_duration_seconds"),
    (ESCAPED, Metric("request_size", "By", NATIVE), "request_size_bytes"),
    (ESCAPED, Metric("requests.count", "1", COUNTER), "requests_count_total"),
    (ESCAPED, Metric("requests", "1/s", GAUGE), "requests_per_second"),
    (ESCAPED, Metric("custom_metric", "By/{custom}", GAUGE), "custom_metric_bytes"),
    (ESCAPED, Metric("requests_total", "", COUNTER), "requests_total"),
    (ESCAPED, Metric("total_requests", "", COUNTER), "requests_total"),
    (ESCAPED, Metric("cpu_usage_ratio", "1", GAUGE), "cpu_usage_ratio"),
    (ESCAPED, Metric("response_time_seconds", "s", GAUGE), "response_time_seconds"),
    (ESCAPED, Metric("metric__with__underscores", "unit__of__it", GAUGE), "metric_with_underscores_unit_of_it"),
    (ESCAPED, Metric("123metric", "", GAUGE), "_123metric"),
    (ESCAPED, Metric("broken.metric.speed", "km/h", GAUGE), "broken_metric_speed_km_per_hour"),
    (ESCAPED, Metric("broken.metric.speed", "km/°", GAUGE), "broken_metric_speed_km"),
    (ESCAPED, Metric("broken.metric.success_percent", "%", GAUGE), "broken_metric_success_percent"),
    (ESCAPED, Metric("hw.cpu.speed_limit", "Hz", GAUGE), "hw_cpu_speed_limit_hertz"),
    (ESCAPED, Metric("system.network.packets", "packets", COUNTER), "system_network_packets_total"),
    (ESCAPED_BARE, Metric("metric@with#special$chars", "s", COUNTER), "metric_with_special_chars"),
    (ESCAPED_BARE, Metric("123metric", "", GAUGE), "_123metric"),
    (AS_IT_IS, Metric("requêsts", "", COUNTER), "requêsts_total"),
    (AS_IT_IS, Metric("requests", "1/s", COUNTER), "requests_per_second_total"),
    (AS_IT_IS, Metric("cpu.usagé", "1", GAUGE), "cpu.usagé_ratio"),
    (AS_IT_IS, Metric("cpu_seconds_total", "s", COUNTER), "cpu_seconds_total"),
    (AS_IT_IS, Metric("response_time", "ms", HISTOGRAM), "response_time_milliseconds"),
    (UNTOUCHED, Metric("http.server.duration", "s", COUNTER), "http.server.duration"),
]


@pytest.mark.parametrize(("strategy", "metric", "name"), EXAMPLES, ids=[f"{s}-{m.name}-{m.unit}" for s, m, _ in EXAMPLES])
def test_the_rules_are_those_of_the_documentation(strategy: str, metric: Metric, name: str) -> None:
    """The examples that the documentation of OpenTelemetry, its Collector and Prometheus' translator give come out as they say."""
    assert translated(metric, strategy) == name


@pytest.mark.parametrize(
    ("key", "label"),
    [("http.method", "http_method"), ("123invalid", "key_123invalid"), ("_own", "key_own"), ("__reserved__", "__reserved__")],
)
def test_the_rules_for_labels_are_those_of_the_documentation(key: str, label: str) -> None:
    """What no label's name may have becomes an underscore, and no name begins with a digit."""
    assert translated_label(key, ESCAPED) == label
    assert translated_label(key, UNTOUCHED) == key


# What is sent


def example(spec: Spec) -> Family:
    """A row of a metric."""
    labels = LabelRows((tuple(f"a {name}" for name in spec.labels),))
    if spec.kind is Kind.HISTOGRAM:
        return Family(spec, np.ones((1, len(spec.buckets) + 1)), labels, sums=np.ones(1))
    return Family(spec, np.ones(1), labels)


FAMILIES = [example(spec) for spec in CATALOGUE.values()]
CONSTANT = {"run": "r1", "rank": "0", "team": "tests"}

Samples = set[tuple[str, frozenset[tuple[str, str]]]]
"""Names and labels, without the bounds of buckets, which receivers write as they like."""


def sent() -> list[OtlpMetric]:
    """Every metric of the catalogue, as the encoder sends it and OpenTelemetry's library reads it."""
    temporality = dict.fromkeys((Kind.COUNTER, Kind.HISTOGRAM), Temporality.CUMULATIVE)
    encoder = Encoder(CONSTANT, {"service.name": "training"}, version="1", temporality=temporality)
    requests = [ExportMetricsServiceRequest.FromString(body) for body in encoder.encode(FAMILIES, start=1, since=1, at=2)]
    return [
        metric
        for request in requests
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    ]


def described(metric: OtlpMetric) -> Metric:
    """What a receiver goes by; fails for what it would drop, such as a sum of differences."""
    form = metric.WhichOneof("data")
    if form == "gauge":
        return Metric(metric.name, metric.unit, GAUGE)
    data = getattr(metric, str(form))
    assert data.aggregation_temporality == Temporality.CUMULATIVE.value
    return Metric(metric.name, metric.unit, HISTOGRAM if form == "histogram" else COUNTER if data.is_monotonic else UP_DOWN)


def received(metric: OtlpMetric, strategy: str) -> Samples:
    """The samples that a receiver stores."""
    described_ = described(metric)
    name = translated(described_, strategy)
    names = [f"{name}_bucket", f"{name}_sum", f"{name}_count"] if described_.kind == HISTOGRAM else [name]
    found: Samples = set()
    for point in getattr(metric, str(metric.WhichOneof("data"))).data_points:
        labels = [(translated_label(one.key, strategy), one.value.string_value) for one in point.attributes]
        assert len(dict(labels)) == len(labels)
        found |= {(one, frozenset(labels)) for one in names}
    return found


def scraped() -> Samples:
    """The samples of a scrape, as Prometheus' client reads it."""
    text = Renderer(CONSTANT).render(FAMILIES, Format.TEXT).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(one.name, frozenset((name, value) for name, value in one.labels.items() if name != "le")) for one in samples}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_metric_has_the_names_and_labels_of_the_scrape(strategy: str) -> None:
    """All metrics of the catalogue, histograms with their three names, are stored as a scrape of the same would be."""
    metrics = sent()
    assert [metric.name for metric in metrics] == list(CATALOGUE)
    found: Samples = set().union(*(received(metric, strategy) for metric in metrics))
    assert found == scraped()
    histograms = sum(spec.kind is Kind.HISTOGRAM for spec in CATALOGUE.values())
    assert len(found) == len(CATALOGUE) + 2 * histograms > 100


def test_every_unit_is_the_one_that_the_name_ends_in() -> None:
    """A metric with a unit is sent with UCUM's sign for it, and no other has one: a receiver would add its word to the name."""
    for metric in sent():
        unit = CATALOGUE[metric.name].unit
        assert (UNITS[metric.unit] if metric.unit else "") == unit
        assert unit in metric.name.split("_") or not unit


def test_no_label_is_one_that_a_receiver_sets() -> None:
    """A label called `job` would be replaced by the name of the service, and `le` by a bound."""
    names = {name for spec in CATALOGUE.values() for name in spec.labels} | {"run", "rank"}
    assert not names & RESERVED
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", name) for name in names)
    assert not any(name.startswith("otel_scope_") for name in names)
