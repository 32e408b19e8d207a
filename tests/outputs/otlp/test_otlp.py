"""What is pushed, read by OpenTelemetry's own messages: names, declarations, labels, times and numbers."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import ExponentialHistogramDataPoint
from opentelemetry.sdk.metrics._internal.exponential_histogram.mapping.exponent_mapping import (
    ExponentMapping,  # private: no public one
)
from opentelemetry.sdk.metrics._internal.exponential_histogram.mapping.logarithm_mapping import (
    LogarithmMapping,
)  # private: no public one

from tests.outputs.otlp.support import CUMULATIVE, DELTA, LABELS, PREFERENCE, Training, closing, sent, sent_metrics
from tests.support import otlp_receiver as receivers
from tests.support.catalogue import CATALOGUE
from tests.support.made_families import catalogue_families
from tests.support.otlp_receiver import attributes, expected
from torch_grad_exporter.metrics.exponential import Exponential
from torch_grad_exporter.metrics.families import Exemplar, Family, Kind, LabelRows, Spec

NORM = Spec("norm", Kind.GAUGE, "A norm.", ("layer",))
STEPS = Spec("steps_total", Kind.COUNTER, "Steps.", ("layer",))
BYTES = Spec("sent_bytes_total", Kind.COUNTER, "Sent.", ("device",), "bytes", older=True)
SECONDS = Spec("time_seconds", Kind.HISTOGRAM, "Times.", ("layer",), "seconds", (0.001, 1.0, 1e6))
EXPONENTIAL = {"EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION": "base2_exponential_bucket_histogram"}
UCUM = {"seconds": "s", "bytes": "By", "watts": "W", "celsius": "Cel", "hertz": "Hz", "joules": "J", "": ""}


def rows(*values: str) -> LabelRows:
    """Return rows with one label each."""
    return LabelRows(tuple((value,) for value in values))


def points(metric: Any) -> Any:  # noqa: ANN401 - of whichever form it has
    """Return the points of a metric."""
    return getattr(metric, metric.WhichOneof("data")).data_points


@pytest.mark.slow
@pytest.mark.parametrize("preference", ["cumulative", "delta"])
def test_every_declared_metric_arrives(preference: str) -> None:
    """The official library reads each metric of the catalogue with its declaration, temporality and exact numbers."""
    temporality = {Kind.COUNTER: DELTA if preference == "delta" else CUMULATIVE}
    temporality[Kind.HISTOGRAM] = temporality[Kind.COUNTER]
    families = catalogue_families(40, masked=True)
    (requests,) = sent(families, **{PREFERENCE.removeprefix("OTEL_"): preference})
    metrics = [metric for request in requests for metric in receivers.metrics(request)]
    assert {metric.name for metric in metrics} <= CATALOGUE.keys()
    for metric in metrics:
        spec = CATALOGUE[metric.name]
        form = {Kind.GAUGE: "gauge", Kind.COUNTER: "sum", Kind.HISTOGRAM: "histogram"}[spec.kind]
        assert (metric.description, metric.unit, metric.WhichOneof("data")) == (spec.help, UCUM.get(spec.unit, ""), form)
        if spec.kind is not Kind.GAUGE:
            assert getattr(metric, form).aggregation_temporality == temporality[spec.kind]
        assert spec.kind is not Kind.COUNTER or metric.sum.is_monotonic
    if preference == "delta":  # the first export of a total that is older than the exporter has nothing to subtract from
        families = [family for family in families if not (family.spec.older and family.spec.kind is Kind.COUNTER)]
    received = {key: point for request in requests for key, point in receivers.points(request)}
    assert received == expected(families, LABELS)
    assert len(received) > 1000
    scopes = {scope.scope.name for request in requests for item in request.resource_metrics for scope in item.scope_metrics}
    assert scopes == {"torch_grad_exporter"}


def test_labels_are_those_of_the_scrape() -> None:
    """Any text arrives, a lone surrogate is `?`, an empty label is absent, and a family's own label wins over a constant one."""
    texts = ['a\\b"c\nd', "\0", "größe 😀", "x" * 20_000, "a\udc80b", ""]
    family = Family(NORM, np.ones(len(texts)), rows(*texts))
    (metric,) = sent_metrics(family, labels={**LABELS, "layer": "constant", "team": "ü"})
    constant = {**LABELS, "team": "ü"}
    wanted = [{**constant, "layer": text.replace("\udc80", "?")} for text in texts[:-1]] + [constant]
    assert [attributes(point.attributes) for point in points(metric)] == wanted


def test_times_say_since_when_a_number_counts() -> None:
    """Gauges and totals older than the exporter have no start, totals that of the exporter, differences the last export."""
    before = time.time_ns()
    values = np.array([4.0])
    families = [Family(spec, values, rows("a")) for spec in (NORM, STEPS, BYTES)]
    exports = [*sent(families, families), sent(families, families, **{PREFERENCE.removeprefix("OTEL_"): "delta"})[1]]
    first, second, delta = (
        {metric.name: points(metric)[0] for request in requests for metric in receivers.metrics(request)} for requests in exports
    )
    assert first["norm"].start_time_unix_nano == first["sent_bytes_total"].start_time_unix_nano == 0
    assert before <= first["steps_total"].start_time_unix_nano < first["steps_total"].time_unix_nano
    assert first["steps_total"].start_time_unix_nano == second["steps_total"].start_time_unix_nano
    assert second["steps_total"].time_unix_nano > first["steps_total"].time_unix_nano
    assert 0 < delta["steps_total"].start_time_unix_nano < delta["steps_total"].time_unix_nano < time.time_ns()
    assert delta["steps_total"].start_time_unix_nano == delta["sent_bytes_total"].start_time_unix_nano
    assert (delta["steps_total"].as_double, delta["sent_bytes_total"].as_double) == (0.0, 0.0)


@pytest.mark.slow
def test_ten_thousand_layers_arrive_once() -> None:
    """Requests are no larger than a receiver takes over gRPC, and no point is lost or doubled."""
    layers = rows(*(f"model.blocks.{number}.attention.weight" for number in range(10_000)))
    numbers = np.arange(10_000.0)
    counts = np.stack([numbers, numbers + 1, numbers * 0, numbers], axis=1)
    families = [Family(NORM, numbers, layers), Family(STEPS, numbers, layers), Family(SECONDS, counts, layers, sums=numbers)]
    (requests,) = sent(families)
    assert len(requests) > 1
    assert max(request.ByteSize() for request in requests) < 4 * 2**20
    received = [result for request in requests for result in receivers.points(request)]
    assert len(received) == 30_000
    assert dict(received) == expected(families, LABELS)


# Exponential histograms and exemplars


def exponential(*families: Family) -> list[ExponentialHistogramDataPoint]:
    """Return the points that the official library reads."""
    (metric,) = sent_metrics(*families, **EXPONENTIAL)
    assert metric.WhichOneof("data") == "exponential_histogram"
    return list(points(metric))


def distribution(*counts: dict[int, int], zeros: tuple[int, ...] = ()) -> Family:
    """Return a histogram with these exponential buckets and zeros in each row, which the explicit ones sum up."""
    values = np.zeros((len(counts), len(SECONDS.buckets) + 1))
    values[:, 1] = [sum(result.values()) for result in counts]
    values[:, 0] = zeros or 0
    sums = np.arange(len(counts), dtype=np.float64)
    return Family(SECONDS, values, rows(*map(str, range(len(counts)))), sums=sums, exponential=Exponential.of(counts))


def buckets(point: ExponentialHistogramDataPoint) -> dict[int, int]:
    """Return the counts by index, zeros left out."""
    assert not point.negative.bucket_counts
    return {point.positive.offset + i: count for i, count in enumerate(point.positive.bucket_counts) if count}


def mapping(scale: int) -> LogarithmMapping | ExponentMapping:
    """Return OpenTelemetry's own meaning of the indexes of a scale."""
    return LogarithmMapping(scale) if scale > 0 else ExponentMapping(scale)


def test_exponential_buckets_are_opentelemetrys() -> None:
    """Observations over up to 10 ** 390 are in the buckets of OpenTelemetry's SDK at the finest scale that has 160 of them."""
    normal = np.random.default_rng(5).normal(size=2000)
    observed = [np.exp(normal * width).clip(1e-300, 1e300).tolist() for width in (0.01, 1.0, 4.0, 12.0, 60.0, 150.0)]
    exact = LogarithmMapping(3).map_to_index
    for point, values in zip(exponential(distribution(*(Counter(map(exact, some)) for some in observed))), observed, strict=True):
        assert buckets(point) == Counter(mapping(point.scale).map_to_index(value) for value in values)
        assert (point.count, point.zero_count) == (2000, 0)
        assert len(point.positive.bucket_counts) <= 160
        if point.scale < 3:
            finer = [mapping(point.scale + 1).map_to_index(value) for value in (min(values), max(values))]
            assert finer[1] - finer[0] + 1 > 160
        else:
            assert values in observed[:2]


def test_step_durations_stay_classic(clean: pytest.MonkeyPatch) -> None:
    """With exponential buckets norms have them, and step durations the buckets, sum and count that rules and dashboards read."""
    for name, text in EXPONENTIAL.items():
        clean.setenv(f"OTEL_{name}", text)
    with receivers.HttpReceiver() as receiver:
        with closing(Training(receiver.endpoint)) as training:
            training.step(3)
        last = {metric.name: metric for request in receiver.taken for metric in receivers.metrics(request)}
    assert last["torch_grad_norm_distribution"].WhichOneof("data") == "exponential_histogram"
    assert last["torch_train_step_duration_seconds"].WhichOneof("data") == "histogram"
    (point,) = points(last["torch_train_step_duration_seconds"])
    assert point.count == sum(point.bucket_counts) == 2
    assert point.sum > 0


def test_exemplars_arrive_with_their_traces() -> None:
    """Exemplars stand at their points with value, time and trace, beside explicit and exponential buckets."""
    first = Exemplar(0.0005, 1_700_000_001.5, bytes(range(1, 17)), bytes(range(8)))
    second = Exemplar(-0.0, 1_700_000_002.5, b"\xff" * 16, b"\xfe" * 8)
    plain = distribution({-8: 1}, {0: 2})
    for options, form in (({}, "histogram"), (EXPONENTIAL, "exponential_histogram")):
        family = Family(SECONDS, plain.values, plain.labels, None, plain.sums, plain.exponential, ({0: first, 2: second}, {}))
        (metric,) = sent_metrics(family, **options)
        assert metric.WhichOneof("data") == form
        item, other = (point.exemplars for point in points(metric))
        assert len(other) == 0
        assert [(e.as_double, e.time_unix_nano, e.trace_id, e.span_id) for e in item] == [
            (e.value, int(e.at * 2) * 500_000_000, e.trace_id, e.span_id) for e in (first, second)
        ]
