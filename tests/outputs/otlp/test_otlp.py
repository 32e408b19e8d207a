"""OTLP, held against OpenTelemetry's own messages and its own encoder."""

from __future__ import annotations

import gc
import itertools
import math
import re
import struct
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import ExponentialHistogramDataPoint
from opentelemetry.sdk.metrics import Exemplar as SdkExemplar
from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.metrics._internal.exponential_histogram.mapping.exponent_mapping import ExponentMapping
from opentelemetry.sdk.metrics._internal.exponential_histogram.mapping.logarithm_mapping import LogarithmMapping
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from tests.support.catalogue import CATALOGUE
from tests.support.made_families import catalogue_families, filled
from tests.support.properties import no_timeout_in_a_soak
from tests.support.tools import best_of
from torch_grad_exporter.metrics.families import Exemplar, Family, IntArray, Kind, LabelRows, Spec
from torch_grad_exporter.outputs.otlp import otlp
from torch_grad_exporter.outputs.otlp.otlp import Encoder, Temporality
from torch_grad_exporter.outputs.otlp.protobuf import varint, zigzag

pytestmark = no_timeout_in_a_soak

START, SINCE, AT = 1_700_000_000_000_000_001, 1_700_000_050_000_000_002, 1_700_000_060_000_000_003
TIMES = {"start": START, "since": SINCE, "at": AT}
CONSTANT = {"run": "r1", "rank": "0"}
RESOURCE: dict[str, object] = {"service.name": "training", "process.pid": 4711}
CUMULATIVE = {Kind.COUNTER: Temporality.CUMULATIVE, Kind.HISTOGRAM: Temporality.CUMULATIVE}
DELTA = {Kind.COUNTER: Temporality.DELTA, Kind.HISTOGRAM: Temporality.DELTA}
LOW_MEMORY = {Kind.COUNTER: Temporality.CUMULATIVE, Kind.HISTOGRAM: Temporality.DELTA}

NORM = Spec("norm", Kind.GAUGE, "A norm.", ("layer",))
STEPS = Spec("steps_total", Kind.COUNTER, "Steps.", ("layer",))
BYTES = Spec("sent_bytes_total", Kind.COUNTER, "Sent.", ("device", "way"), "bytes", older=True)
SECONDS = Spec("time_seconds", Kind.HISTOGRAM, "Times.", ("layer",), "seconds", (0.001, 1.0, 1e6))
UCUM = {"seconds": "s", "bytes": "By", "watts": "W", "celsius": "Cel", "hertz": "Hz", "joules": "J", "": ""}

every_temporality = pytest.mark.parametrize(
    "temporality", [CUMULATIVE, DELTA, LOW_MEMORY], ids=["cumulative", "delta", "lowmemory"]
)

Point = tuple[object, ...]


def encoder(
    labels: Mapping[str, str] = CONSTANT,
    temporality: Mapping[Kind, Temporality] = CUMULATIVE,
    resource: Mapping[str, object] = RESOURCE,
    on_error: Callable[[BaseException], None] | None = None,
) -> Encoder:
    """An encoder of version 1.2."""
    return Encoder(labels, resource, version="1.2", temporality=temporality, on_error=on_error)


def always(since: int) -> Callable[[Family], IntArray]:
    """One time for all rows."""
    return lambda family: np.full(len(family.labels), since)


def rows(*values: str) -> LabelRows:
    """Rows with one label each."""
    return LabelRows(tuple((value,) for value in values))


# What was sent, by the official library


def read(bodies: Iterable[bytes]) -> list[Any]:
    """All metrics of some requests. A request is one resource and one scope, and has no field that the library does not know."""
    found = []
    for body in bodies:
        message = ExportMetricsServiceRequest.FromString(body)
        size, content = message.ByteSize(), message.SerializeToString(deterministic=True)
        message.DiscardUnknownFields()
        assert message.ByteSize() == size
        assert ExportMetricsServiceRequest.FromString(content).SerializeToString(deterministic=True) == content
        (resource,) = message.resource_metrics
        (scope,) = resource.scope_metrics
        assert (scope.scope.name, scope.scope.version) == ("torch_grad_exporter", "1.2")
        names = [metric.name for metric in scope.metrics]
        assert len(set(names)) == len(names)
        found += scope.metrics
    return found


def points(metric: Any) -> Any:  # noqa: ANN401 - of whichever form it has
    """The points of a metric."""
    return getattr(metric, metric.WhichOneof("data")).data_points


def bits(*numbers: float) -> bytes:
    """Floats by what they are in memory: not-a-number equals itself, and -0.0 does not equal 0.0."""
    return struct.pack(f"<{len(numbers)}d", *numbers)


def attributes_of(point: Any) -> tuple[tuple[str, str], ...]:  # noqa: ANN401 - of any form
    """The attributes in their order, all of them texts."""
    assert all(one.value.WhichOneof("value") == "string_value" for one in point.attributes)
    return tuple((one.key, one.value.string_value) for one in point.attributes)


def found_points(metric: Any) -> Iterator[Point]:  # noqa: ANN401 - a `Metric`
    """Each point as attributes, times and numbers."""
    for one in points(metric):
        head = attributes_of(one), one.start_time_unix_nano, one.time_unix_nano
        if metric.WhichOneof("data") == "histogram":
            assert (one.HasField("min"), one.HasField("max"), one.flags) == (False, False, 0)
            yield (*head, one.count, bits(one.sum), tuple(one.bucket_counts), bits(*one.explicit_bounds))
        else:
            assert one.WhichOneof("value") == "as_double"
            yield (*head, bits(one.as_double))


def declared(metric: Any) -> tuple[object, ...]:  # noqa: ANN401 - a `Metric`
    """What a metric says beside its points."""
    form = metric.WhichOneof("data")
    data = getattr(metric, form)
    temporality = 0 if form == "gauge" else data.aggregation_temporality
    return metric.name, metric.description, metric.unit, form, temporality, form == "sum" and data.is_monotonic


def comparable(metrics: Iterable[Any]) -> dict[tuple[object, ...], list[Point]]:
    """All points of each metric, of which a request after another may have more."""
    found: dict[tuple[object, ...], list[Point]] = {}
    for metric in metrics:
        found.setdefault(declared(metric), []).extend(found_points(metric))
    return found


# What should have been sent, by plain loops


def as_unicode(text: str) -> str:
    """A text with `?` where it has half a character."""
    return re.sub("[\ud800-\udfff]", "?", text)


def expected_attributes(spec: Spec, row: Sequence[str], labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Those of one row."""
    constant = [(name, value) for name, value in labels.items() if name not in spec.labels]
    own = [(name, value) for name, value in zip(spec.labels, row, strict=True) if value != ""]
    return tuple((as_unicode(name), as_unicode(value)) for name, value in (*constant, *own))


def expected_points(family: Family, temporality: Mapping[Kind, Temporality], labels: Mapping[str, str]) -> Iterator[Point]:
    """Those of one family."""
    spec = family.spec
    if spec.kind is Kind.GAUGE:
        start = 0
    elif temporality[spec.kind] is Temporality.DELTA:
        start = SINCE
    else:
        start = 0 if spec.older else START
    for index, row in enumerate(family.labels.rows):
        if family.present is not None and not family.present[index]:
            continue
        head = expected_attributes(spec, row, labels), start, AT
        if family.sums is None:
            yield (*head, bits(family.values[index]))
        else:
            counts = tuple(int(count) for count in family.values[index])
            yield (*head, sum(counts), bits(family.sums[index]), counts, bits(*spec.buckets))


def expected(
    families: Iterable[Family], temporality: Mapping[Kind, Temporality] = CUMULATIVE, labels: Mapping[str, str] = CONSTANT
) -> dict[tuple[object, ...], list[Point]]:
    """As `comparable`."""
    forms = {Kind.GAUGE: "gauge", Kind.COUNTER: "sum", Kind.HISTOGRAM: "histogram"}
    found: dict[tuple[object, ...], list[Point]] = {}
    for family in families:
        spec = family.spec
        over = 0 if spec.kind is Kind.GAUGE else {Temporality.DELTA: 1, Temporality.CUMULATIVE: 2}[temporality[spec.kind]]
        counter = spec.kind is Kind.COUNTER
        key = as_unicode(spec.name), as_unicode(spec.help), UCUM.get(spec.unit, ""), forms[spec.kind], over, counter
        those = list(expected_points(family, temporality, labels))
        if those:
            found.setdefault(key, []).extend(those)
    return found


# The same by OpenTelemetry's own encoder


def official(families: Sequence[Family], temporality: Mapping[Kind, Temporality], resource: Mapping[str, Any]) -> bytes:
    """The request that OpenTelemetry makes of these families, which it gets as data of its own metrics."""
    by_spec: dict[Spec, list[Point]] = {}
    for family in families:
        by_spec.setdefault(family.spec, []).extend(expected_points(family, temporality, CONSTANT))
    metrics = [official_metric(spec, those, temporality) for spec, those in by_spec.items() if those]
    scope = sdk.ScopeMetrics(InstrumentationScope("torch_grad_exporter", "1.2"), metrics, "")
    data = sdk.MetricsData([sdk.ResourceMetrics(Resource(resource), [scope], "")])
    content: bytes = encode_metrics(data).SerializeToString(deterministic=True)
    return content


def official_metric(spec: Spec, those: list[Point], temporality: Mapping[Kind, Temporality]) -> sdk.Metric:
    """A metric of OpenTelemetry's SDK."""
    data: Any
    if spec.kind is Kind.HISTOGRAM:
        data = sdk.Histogram(
            [official_histogram(spec, one) for one in those], sdk.AggregationTemporality(temporality[spec.kind].value)
        )
        return sdk.Metric(spec.name, spec.help, UCUM[spec.unit], data)
    numbers: list[Any] = [
        sdk.NumberDataPoint(dict(labels), start or None, at, *struct.unpack("<d", value))  # type: ignore[call-overload,arg-type]
        for labels, start, at, value in those
    ]
    if spec.kind is Kind.GAUGE:
        data = sdk.Gauge(numbers)
    else:
        data = sdk.Sum(numbers, sdk.AggregationTemporality(temporality[spec.kind].value), is_monotonic=True)
    return sdk.Metric(spec.name, spec.help, UCUM[spec.unit], data)


def official_histogram(spec: Spec, point: Point, exemplars: Sequence[SdkExemplar] = ()) -> sdk.HistogramDataPoint:
    """A point of a histogram of OpenTelemetry's SDK; no least and no greatest value."""
    labels, start, at, count, total, counts, _ = point
    (number,) = struct.unpack("<d", total)  # type: ignore[arg-type]
    return sdk.HistogramDataPoint(
        dict(labels),
        start,
        at,
        count,
        number,
        counts,
        spec.buckets,
        min=None,
        max=None,
        exemplars=exemplars,  # type: ignore[arg-type,call-overload]
    )


# Families


@every_temporality
@pytest.mark.parametrize("masked", [False, True])
def test_every_declared_metric_arrives_with_its_declaration_and_values(
    temporality: Mapping[Kind, Temporality], masked: bool
) -> None:
    """Of the whole catalogue the official library reads names, helps, units, kinds, temporalities, times and all numbers."""
    families = catalogue_families(40, masked=masked)
    metrics = read(encoder(temporality=temporality).encode(families, **TIMES))
    assert [metric.name for metric in metrics] == list(CATALOGUE)
    assert comparable(metrics) == expected(families, temporality)
    assert sum(len(points(metric)) for metric in metrics) > 1000


@every_temporality
def test_the_request_is_the_one_that_opentelemetry_would_make(temporality: Mapping[Kind, Temporality]) -> None:
    """Field by field the request equals that of OpenTelemetry's own encoder for the whole catalogue, resource included."""
    resource = {
        "service.name": "größe",
        "process.pid": 2**40,
        "x": -1,
        "on": True,
        "off": False,
        "f": 1.5,
        "s": ("a", "b"),
        "e": "",
    }
    families = catalogue_families(30, masked=True)
    (ours,) = encoder(temporality=temporality, resource=resource).encode(families, **TIMES)
    theirs = official(families, temporality, resource)
    message = ExportMetricsServiceRequest.FromString(ours)
    assert message == ExportMetricsServiceRequest.FromString(theirs)
    assert message.SerializeToString(deterministic=True) == theirs


TEXTS = st.text(st.characters(), max_size=12)
LABELS = st.lists(st.sampled_from(["layer", "run", "rank", "größe", "a\udc80"]), max_size=3, unique=True).map(tuple)
BOUNDS = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=9, unique=True).map(sorted).map(tuple)
SPECIAL = np.array([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 5e-324, 1e308])


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Any metric's declaration."""
    kind = draw(st.sampled_from(Kind))
    name = draw(TEXTS.filter(lambda text: not text.endswith("_total"))) + ("_total" if kind is Kind.COUNTER else "")
    buckets = draw(BOUNDS) if kind is Kind.HISTOGRAM else ()
    unit = draw(st.sampled_from([*UCUM, "tokens"]))
    return Spec(name, kind, draw(TEXTS), draw(LABELS), unit, buckets, older=kind is Kind.COUNTER and draw(st.booleans()))


@st.composite
def exports(draw: st.DrawFn) -> list[list[Family]]:
    """Several exports of the same rows, of which some are present, in values that change; two families of each metric."""
    declarations = draw(st.lists(specs(), min_size=1, max_size=3, unique_by=lambda spec: as_unicode(spec.name)))
    texts = draw(st.lists(TEXTS, min_size=1, max_size=8))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    held = [(spec, labels_of(spec, texts, generator)) for spec in declarations * 2]
    generator.shuffle(held)
    return [[family_of(spec, labels, generator) for spec, labels in held] for _ in range(3)]


def labels_of(spec: Spec, texts: Sequence[str], generator: np.random.Generator) -> LabelRows:
    """None to five rows of these texts."""
    count = int(generator.integers(0, 6))
    return LabelRows(tuple(tuple(texts[int(generator.integers(len(texts)))] for _ in spec.labels) for _ in range(count)))


def family_of(spec: Spec, labels: LabelRows, generator: np.random.Generator) -> Family:
    """A family with any values: the special ones, and whatever 64 bits can be."""
    count = len(labels)
    present = None if generator.random() < 0.3 else generator.random(count) < generator.random()
    values = np.frombuffer(generator.bytes(8 * count), dtype=np.float64).copy()
    np.copyto(values, generator.choice(SPECIAL, count), where=generator.random(count) < 0.3)
    if spec.kind is not Kind.HISTOGRAM:
        return Family(spec, values, labels, present)
    counts = np.floor(2.0 ** generator.uniform(0, 49, (count, len(spec.buckets) + 1))) * generator.integers(0, 2)
    return Family(spec, counts, labels, present, values)


@given(
    drawn=exports(),
    temporality=st.sampled_from([CUMULATIVE, DELTA, LOW_MEMORY]),
    labels=st.dictionaries(st.sampled_from(["run", "rank", "team"]), TEXTS.filter(bool), max_size=3),
    block=st.sampled_from([1, 50, 300, 10**6]),
)
def test_whatever_is_encoded_is_what_the_official_library_reads(
    drawn: list[list[Family]], temporality: Mapping[Kind, Temporality], labels: dict[str, str], block: int
) -> None:
    """Any texts, values, choices of rows and sizes of requests come back as they went in, from export to export of one encoder."""
    ours = encoder(labels, temporality)
    with mock.patch.object(otlp, "BLOCK_BYTES", block), mock.patch.object(otlp, "REQUEST_BYTES", 3 * block):
        for families in drawn:
            metrics = read(ours.encode(iter(families), **TIMES))
            assert comparable(metrics) == expected(families, temporality, labels)


def test_values_are_exact() -> None:
    """Not-a-number, infinities, both zeros, the smallest and the largest float come back bit for bit, in sums of histograms too."""
    values = [math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, -2.2e-308, 1e308, 1.7976931348623157e308, 0.1 + 0.2, 2.0**53 + 2]
    labels = rows(*(f"l{i}" for i in range(len(values))))
    numbers = np.array(values)
    counts = np.zeros((len(values), 4))
    families = [Family(NORM, numbers, labels), Family(STEPS, numbers, labels), Family(SECONDS, counts, labels, sums=numbers)]
    gauge, counter, histogram = read(encoder().encode(families, **TIMES))
    assert bits(*(one.as_double for one in points(gauge))) == bits(*values)
    assert bits(*(one.as_double for one in points(counter))) == bits(*values)
    assert bits(*(one.sum for one in points(histogram))) == bits(*values)
    assert all(one.HasField("sum") for one in points(histogram))


def test_bucket_counts_are_exact() -> None:
    """Counts of 0, of one to eight bytes and just below 2 ** 53 arrive as whole numbers, with the number of all beside them."""
    counts = [[0, 127, 128, 255], [2**16, 2**32 + 1, 2**40 + 3, 2**52 - 1], [0, 0, 0, 0]]
    family = Family(SECONDS, np.array(counts, dtype=np.float64), rows("a", "b", "c"), sums=np.zeros(3))
    (metric,) = read(encoder().encode([family], **TIMES))
    assert [list(one.bucket_counts) for one in points(metric)] == counts
    assert [one.count for one in points(metric)] == [sum(row) for row in counts]
    assert {tuple(one.explicit_bounds) for one in points(metric)} == {(0.001, 1.0, 1e6)}


def test_constant_labels_come_first_and_a_familys_own_wins() -> None:
    """Attributes are the constant labels in their order and then the row's; of one name only the row's, and no empty one."""
    spec = Spec("sent", Kind.GAUGE, "Sent.", ("device", "run", "way"))
    labels = LabelRows((("gpu0", "own", "in"), ("", "own", ""), ("gpu0", "", "out")))
    (metric,) = read(encoder({"run": "constant", "team": "x"}).encode([Family(spec, np.ones(3), labels)], **TIMES))
    assert [attributes_of(one) for one in points(metric)] == [
        (("team", "x"), ("device", "gpu0"), ("run", "own"), ("way", "in")),
        (("team", "x"), ("run", "own")),
        (("team", "x"), ("device", "gpu0"), ("way", "out")),
    ]


@pytest.mark.parametrize(
    ("temporality", "starts"), [(CUMULATIVE, [0, START, 0, START]), (DELTA, [0, SINCE, SINCE, SINCE])], ids=["cumulative", "delta"]
)
def test_times_say_since_when_a_number_counts(temporality: Mapping[Kind, Temporality], starts: list[int]) -> None:
    """A gauge has no start, nor has a total older than the exporter; others have that of the exporter or the last export."""
    labels = LabelRows((("a", "b"),))
    one = rows("a")
    families = [
        Family(NORM, np.ones(1), one),
        Family(STEPS, np.ones(1), one),
        Family(BYTES, np.ones(1), labels),
        Family(SECONDS, np.ones((1, 4)), one, sums=np.ones(1)),
    ]
    found = [points(metric)[0] for metric in read(encoder(temporality=temporality).encode(families, **TIMES))]
    assert [point.start_time_unix_nano for point in found] == starts
    assert {point.time_unix_nano for point in found} == {AT}


def test_rows_may_come_and_go_from_export_to_export() -> None:
    """With one `LabelRows` object the present rows change in each of 40 exports, to none, all and back, in all kinds of metrics."""
    generator = np.random.default_rng(3)
    labels, ours = rows(*(f"layer {'x' * i}" for i in range(17))), encoder()
    masks = [generator.random(17) < share for share in (0.0, 1.0, 0.5, 0.9) for _ in range(5)]
    for mask in [None, *masks, None, *masks]:
        families = [
            Family(NORM, generator.random(17), labels, mask),
            Family(STEPS, generator.random(17), labels, None if mask is None else ~mask),
            Family(SECONDS, generator.integers(0, 9, (17, 4)).astype(np.float64), labels, mask, generator.random(17)),
        ]
        assert comparable(read(ours.encode(families, **TIMES))) == expected(families)


def test_each_export_has_its_own_times_and_values() -> None:
    """The bytes that are kept between exports carry nothing of the one before, nor do bytes that were given away change."""
    labels, ours = rows("a", "b"), encoder()
    first = ours.encode([Family(STEPS, np.array([1.0, 2.0]), labels)], start=1, since=2, at=3)
    kept = [bytes(body) for body in first]
    second = ours.encode([Family(STEPS, np.array([5.0, 6.0]), labels)], start=1, since=20, at=30)
    assert first == kept
    found = [[(one.start_time_unix_nano, one.time_unix_nano, one.as_double) for one in points(*read(b))] for b in (first, second)]
    assert found == [[(1, 3, 1.0), (1, 3, 2.0)], [(1, 30, 5.0), (1, 30, 6.0)]]


def test_families_of_one_metric_are_one_metric() -> None:
    """Families of one metric that come apart are one `Metric`, where it appeared first, with the points in their order."""
    families = [
        Family(NORM, np.array([1.0]), rows("a")),
        Family(STEPS, np.array([2.0]), rows("a")),
        Family(NORM, np.array([3.0]), rows("b"), np.zeros(1, dtype=np.bool_)),
        Family(NORM, np.array([4.0, 5.0]), rows("c", "d")),
    ]
    metrics = read(encoder().encode(iter(families), **TIMES))
    assert [(m.name, [one.as_double for one in points(m)]) for m in metrics] == [("norm", [1.0, 4.0, 5.0]), ("steps_total", [2.0])]


def test_metrics_that_share_their_rows_keep_their_own_declarations() -> None:
    """Two metrics on one `LabelRows` object, of other label names and kinds, do not take what was prepared for each other."""
    labels = rows("a", "b")
    other = Spec("other", Kind.GAUGE, "Other.", ("device",))
    families = [Family(spec, np.array([1.0, 2.0]), labels) for spec in (NORM, other, STEPS)]
    families.append(Family(SECONDS, np.ones((2, 4)), labels, sums=np.ones(2)))
    assert comparable(read(encoder().encode(families, **TIMES))) == expected(families)


def test_without_points_there_is_no_request() -> None:
    """Neither no families, nor one without rows, nor one whose rows are all absent makes a request or a metric."""
    none = np.zeros(1, dtype=np.bool_)
    empty = [
        Family(NORM, np.ones(0), LabelRows(())),
        Family(STEPS, np.ones(1), rows("a"), none),
        Family(SECONDS, np.ones((1, 4)), rows("a"), none, np.ones(1)),
        Family(SECONDS, np.ones((0, 4)), LabelRows(()), sums=np.ones(0), exponential=()),
    ]
    assert encoder().encode([], **TIMES) == []
    assert encoder().encode(empty, **TIMES) == []
    (metric,) = read(encoder().encode([*empty, Family(NORM, np.ones(1), rows("b"))], **TIMES))
    assert metric.name == "norm"


def test_texts_survive_whatever_they_contain() -> None:
    """All planes of Unicode, a zero byte and 20,000 characters in labels, helps, resource come back; half a character is `?`."""
    texts = ["\x00", 'a\nb"\\', "ä", "€", "😀" * 5000, "\U0010ffff", "x" * 20_000, "\ud800", "a\udfffb", " "]
    family = Family(Spec("norm", Kind.GAUGE, "H\udc00 ü", ("layer",)), np.arange(float(len(texts))), rows(*texts))
    bodies = encoder({"run": "r\udc80"}, resource={"service.name": "s\udc80ß"}).encode([family], **TIMES)
    (metric,) = read(bodies)
    assert metric.description == "H? ü"
    assert [dict(attributes_of(one))["layer"] for one in points(metric)] == [*texts[:-3], "?", "a?b", " "]
    assert {dict(attributes_of(one))["run"] for one in points(metric)} == {"r?"}
    (resource,) = ExportMetricsServiceRequest.FromString(bodies[0]).resource_metrics
    assert resource.resource.attributes[0].value.string_value == "s?ß"


def test_resource_attributes_of_all_types() -> None:
    """Texts, numbers, truth values and sequences of them arrive with their types; anything else as its text."""
    given: dict[str, object] = {
        "text": "t", "empty": "", "zero": 0, "one": 1, "negative": -(2**63), "large": 2**63 - 1, "true": True, "false": False,
        "float": -0.0, "nan": math.nan, "list": ["a", ""], "numbers": (1, -2), "mixed": (True, 2, 0.5, "x"), "none": [],
        "path": None,
    }  # fmt: skip
    (body,) = encoder(resource=given).encode([Family(NORM, np.ones(1), rows("a"))], **TIMES)
    (found,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
    assert [one.key for one in found.resource.attributes] == list(given)
    by_key = {one.key: plain(one.value) for one in found.resource.attributes}
    assert repr(by_key) == repr({**{k: list(v) if isinstance(v, tuple) else v for k, v in given.items()}, "path": "None"})


def plain(value: Any) -> object:  # noqa: ANN401 - an `AnyValue`
    """What an `AnyValue` holds."""
    form = value.WhichOneof("value")
    return [plain(one) for one in value.array_value.values] if form == "array_value" else getattr(value, form)


# Sizes


def names_and_sizes(bodies: Iterable[bytes]) -> list[list[tuple[str, int]]]:
    """The metrics of each request and how many points each has there."""
    return [[(metric.name, len(points(metric))) for metric in read([body])] for body in bodies]


@pytest.mark.parametrize(("request_bytes", "block_bytes"), [(3000, 1000), (1000, 1000), (100_000, 500), (1, 1), (5000, 10**6)])
def test_what_is_too_much_for_a_request_goes_into_the_next(
    request_bytes: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No point is lost or doubled, whatever the limits; a metric is in a request once; none is larger than it must be."""
    monkeypatch.setattr(otlp, "REQUEST_BYTES", request_bytes)
    monkeypatch.setattr(otlp, "BLOCK_BYTES", block_bytes)
    families = catalogue_families(25, masked=True)
    bodies = encoder().encode(families, **TIMES)
    assert comparable(read(bodies)) == expected(families)
    assert len(bodies) > 1
    largest = 1500  # of a point, and of what is around points
    assert max(map(len, bodies)) <= max(request_bytes, block_bytes) + largest


def test_requests_are_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request ends where the next metric would not fit, or where the next piece of the same metric begins."""
    monkeypatch.setattr(otlp, "REQUEST_BYTES", 2000)
    monkeypatch.setattr(otlp, "BLOCK_BYTES", 1000)
    labels = rows(*(f"l{i}" for i in range(30)))
    families = [
        Family(NORM, np.ones(30), labels),
        Family(STEPS, np.ones(1), rows("a")),
        Family(SECONDS, np.ones((1, 4)), rows("a"), sums=np.ones(1)),
    ]
    found = names_and_sizes(encoder().encode(families, **TIMES))
    assert [len(request) for request in found] == [1, 3]
    assert [sum(size for name, size in request if name == "norm") for request in found] == [found[0][0][1], 30 - found[0][0][1]]
    assert found[1][1:] == [("steps_total", 1), ("time_seconds", 1)]


def test_ten_thousand_rows_with_the_real_limits() -> None:
    """10,000 rows of a gauge, a counter and a histogram arrive in their order, in requests that a Collector takes over gRPC."""
    generator = np.random.default_rng(1)
    labels = rows(*(f"model.layers.{i}.self_attn.q_proj.weight" for i in range(10_000)))
    mask = generator.random(10_000) < 0.9
    families = [filled(spec, labels, generator) for spec in (NORM, STEPS, CATALOGUE["torch_grad_norm_distribution"])]
    families[0] = Family(NORM, families[0].values, labels, mask)
    bodies = encoder().encode(families, **TIMES)
    assert sum(map(len, bodies)) > 5_000_000
    assert max(map(len, bodies)) < 4 << 20
    assert len(bodies) <= 5
    found: dict[str, list[Any]] = {}
    for metric in read(bodies):
        found.setdefault(metric.name, []).extend(points(metric))
    norms, steps, distribution = found.values()
    assert np.array_equal([one.as_double for one in norms], families[0].values[mask])
    assert np.array_equal([one.as_double for one in steps], families[1].values)
    assert np.array_equal([one.bucket_counts for one in distribution], families[2].values)
    assert np.array_equal([one.sum for one in distribution], families[2].sums)
    for those, chosen in ((norms, np.flatnonzero(mask).tolist()), (steps, range(10_000)), (distribution, range(10_000))):
        assert [one.attributes[-1].value.string_value for one in those] == [labels.rows[row][0] for row in chosen]


# Which rows a request has


@pytest.mark.parametrize("limit", [1, 400, 1000, 10**6])
def test_a_request_says_of_which_rows_its_points_are(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the limits, the rows that requests say they have are those of their points, in the same order, each row once."""
    monkeypatch.setattr(otlp, "BLOCK_BYTES", limit)
    monkeypatch.setattr(otlp, "REQUEST_BYTES", 2 * limit)
    mask = np.arange(31) % 3 > 0
    families = [
        Family(NORM, np.ones(31), rows(*(f"n{i}" for i in range(31))), mask),
        Family(STEPS, np.ones(9), rows(*(f"s{i}" for i in range(9)))),
        distribution(*[{i: 1} for i in range(31)], labels=rows(*(f"d{i}" for i in range(31)))),
        Family(NORM, np.ones(2), rows("n31", "n32")),
    ]
    families[2] = replace(families[2], present=~mask)
    ours = encoder()
    requests = list(ours.requests(families, start=START, since=always(SINCE), at=AT))
    told = [
        [family.labels.rows[row][0] for family, some in request.rows for row in list(family.row_numbers)[some]]
        for request in requests
    ]
    sent = [[dict(attributes_of(p))["layer"] for m in read([one.body]) for p in points(m)] for one in requests]
    assert told == sent
    assert len(requests) > 1 or limit == 10**6
    assert sum(map(len, sent)) == len({name for request in sent for name in request}) == 20 + 2 + 9 + 11


@pytest.mark.parametrize("exponential", [False, True])
def test_differences_may_count_from_different_times_on(exponential: bool) -> None:
    """Each row's start is its own, also where rows are absent; cumulative points keep theirs."""
    since, present = np.array([SINCE, SINCE + 7, SINCE - 5]), np.array([True, False, True])
    histogram = distribution({1: 1}, {2: 1}, {3: 1})
    families = [
        Family(STEPS, np.ones(3), rows("a", "b", "c"), present),
        replace(histogram, present=present, exponential=histogram.exponential if exponential else None),
    ]
    for temporality in (DELTA, LOW_MEMORY):
        ours = encoder(temporality=temporality)
        found = read(one.body for one in ours.requests(families, start=START, since=lambda _: since, at=AT))
        starts = [[point.start_time_unix_nano for point in points(metric)] for metric in found]
        assert starts == [[SINCE, SINCE - 5] if temporality is DELTA else [START, START], [SINCE, SINCE - 5]]


def test_a_metric_that_cannot_be_encoded_costs_itself_alone() -> None:
    """Of a row with too many labels, exponential buckets beside none, and too much in buckets, each is told by its metric.

    The other metrics are sent as ever, in this export and the next one, and so are these when they are right again.
    """
    failures: list[BaseException] = []
    ours = encoder(on_error=failures.append)
    other = Spec("other_seconds", Kind.HISTOGRAM, "Others.", ("layer",), "seconds", (1.0,))
    right = [Family(NORM, np.ones(1), rows("a")), Family(STEPS, np.ones(1), rows("a"))]
    wrong = [
        Family(Spec("wide", Kind.GAUGE, "Wide.", ("layer",)), np.ones(1), LabelRows((("a", "b"),))),
        distribution({1: 1}),
        Family(SECONDS, np.ones((1, 4)), rows("b"), sums=np.ones(1)),
        Family(other, np.ones((1, 2)), rows("a"), sums=np.ones(1), exponential=({1: 3},)),
    ]
    for _ in range(2):
        failures.clear()
        requests = list(ours.requests([right[0], *wrong, right[1]], start=START, since=always(SINCE), at=AT))
        assert comparable(read(one.body for one in requests)) == expected(right)
        assert [family for one in requests for family, _ in one.rows] == right
        assert [str(one).partition(" cannot")[0] for one in failures] == ["wide", "time_seconds", "other_seconds"]
    fine = [*right, wrong[2], Family(wrong[0].spec, np.ones(1), rows("a"))]
    found = ours.requests(fine, start=START, since=always(SINCE), at=AT)
    assert comparable(read(one.body for one in found)) == expected(fine)
    assert len(failures) == 3


# What is kept between exports


class CountedRows(tuple[tuple[str, ...], ...]):  # noqa: SLOT001 - a tuple's subclass can have no slots
    """Label rows that know how often they were read."""

    reads = 0

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        self.reads += 1
        return super().__iter__()


def test_rows_are_laid_out_once() -> None:
    """Label rows are read at the first export and in no later one, also not for another metric or choice of rows."""
    kept = CountedRows((("a",), ("b",)))
    labels, ours = LabelRows(kept), encoder()
    for mask in (None, [True, False], None, [False, True]):
        present = None if mask is None else np.array(mask)
        assert ours.encode([Family(NORM, np.ones(2), labels, present), Family(STEPS, np.ones(2), labels, present)], **TIMES)
    assert kept.reads == 1


def test_what_is_laid_out_goes_with_its_rows() -> None:
    """The encoder keeps no label rows alive that no collector holds any more."""
    ours, labels = encoder(), rows("a")
    ours.encode([Family(NORM, np.ones(1), labels)], **TIMES)
    reference = weakref.ref(labels)
    del labels
    gc.collect()
    assert reference() is None


def test_encoding_is_much_faster_than_opentelemetrys() -> None:
    """2,000 points take less than a tenth of the time of OpenTelemetry's own encoder, of which the points exist already."""
    generator = np.random.default_rng(0)
    labels = rows(*(f"model.layers.{i}.self_attn.q_proj" for i in range(500)))
    specs = [NORM, STEPS, CATALOGUE["torch_grad_norm_squared"], CATALOGUE["torch_grad_norm_distribution"]]
    families = [filled(spec, labels, generator) for spec in specs]
    metrics = [official_metric(family.spec, list(expected_points(family, CUMULATIVE, CONSTANT)), CUMULATIVE) for family in families]
    scope = sdk.ScopeMetrics(InstrumentationScope("s"), metrics, "")
    data = sdk.MetricsData([sdk.ResourceMetrics(Resource({}), [scope], "")])
    ours = encoder()
    ours.encode(families, **TIMES)
    theirs = best_of(2, lambda: encode_metrics(data).SerializeToString())
    assert best_of(7, lambda: ours.encode(families, **TIMES)) < theirs / 10


# Exponential buckets


def distribution(*counts: Mapping[int, int], zeros: Sequence[int] = (), labels: LabelRows | None = None) -> Family:
    """A histogram of `SECONDS` with these exponential buckets, and so many zeros in each row; the explicit ones say the same."""
    none = zeros or [0] * len(counts)
    table = np.zeros((len(counts), 4))
    table[:, 0] = none
    table[:, 1] = [sum(row.values()) for row in counts]
    return Family(
        SECONDS, table, labels or rows(*map(str, range(len(counts)))), sums=np.arange(float(len(counts))), exponential=counts
    )


def exponential(family: Family, **options: Any) -> list[ExponentialHistogramDataPoint]:  # noqa: ANN401 - of `encoder`
    """The points that the official library reads."""
    (metric,) = read(encoder(**options).encode([family], **TIMES))
    assert metric.WhichOneof("data") == "exponential_histogram"
    assert metric.exponential_histogram.aggregation_temporality == 2
    return list(points(metric))


def buckets(point: ExponentialHistogramDataPoint) -> dict[int, int]:
    """The counts by index, zeros left out."""
    assert not point.negative.bucket_counts
    return {point.positive.offset + i: count for i, count in enumerate(point.positive.bucket_counts) if count}


def mapping(scale: int) -> LogarithmMapping | ExponentMapping:
    """OpenTelemetry's own meaning of the indexes of a scale."""
    return LogarithmMapping(scale) if scale > 0 else ExponentMapping(scale)


@pytest.mark.parametrize("width", [0.01, 1.0, 4.0, 12.0, 60.0, 150.0])
def test_exponential_buckets_are_those_of_opentelemetry(width: float) -> None:
    """Observations over up to 10 ** 390 are in the buckets in which OpenTelemetry's SDK puts them at the scale that is sent."""
    values = np.exp(np.random.default_rng(5).normal(size=2000) * width).clip(1e-300, 1e300).tolist()
    counts = Counter(LogarithmMapping(3).map_to_index(value) for value in values)
    (point,) = exponential(distribution(counts))
    assert buckets(point) == Counter(mapping(point.scale).map_to_index(value) for value in values)
    assert (point.count, point.zero_count) == (2000, 0)
    # No finer scale, up to the one at which we count, would do with so few buckets.
    assert len(point.positive.bucket_counts) <= 160
    if point.scale < 3:
        finer = [mapping(point.scale + 1).map_to_index(value) for value in (min(values), max(values))]
        assert finer[1] - finer[0] + 1 > 160
    assert (point.scale < 3) == (width >= 4)


INDEXES = st.one_of(st.integers(-20, 20), st.integers(-9000, 8200))


@given(counts=st.dictionaries(INDEXES, st.integers(1, 2**40), max_size=30), zeros=st.integers(0, 2**33))
def test_exponential_buckets_are_merged_by_their_definition(counts: dict[int, int], zeros: int) -> None:
    """Bucket i of scale 3 is part of bucket floor(i / 2 ** k) of scale 3 - k; k is the least that leaves 160 buckets at most."""
    (point,) = exponential(distribution(counts, zeros=[zeros]))
    step = 2 ** (3 - point.scale)
    merged: Counter[int] = Counter()
    for index, count in counts.items():
        merged[math.floor(index / step)] += count
    assert buckets(point) == merged
    assert (point.count, point.zero_count) == (zeros + sum(counts.values()), zeros)
    needed = next(k for k in itertools.count() if not counts or max(counts) // 2**k - min(counts) // 2**k < 160)
    assert point.scale == 3 - needed


@pytest.mark.parametrize(
    ("counts", "scale", "sent"),
    [
        ({0: 1, 159: 2}, 3, {0: 1, 159: 2}),
        ({0: 1, 160: 2}, 2, {0: 1, 80: 2}),
        ({-1: 1, 159: 2}, 2, {-1: 1, 79: 2}),
        ({-320: 1, -1: 2}, 2, {-160: 1, -1: 2}),
        ({-2: 1, -1: 2, 0: 4, 1: 8, 300: 16}, 2, {-1: 3, 0: 12, 150: 16}),
    ],
    ids=["160", "161", "161 from -1", "320 below 1", "neighbours"],
)
def test_neighbours_become_one_bucket_where_there_are_too_many(counts: dict[int, int], scale: int, sent: dict[int, int]) -> None:
    """160 buckets stay as they are; of 161, every two from an even index on become one."""
    (point,) = exponential(distribution(counts))
    assert (point.scale, buckets(point)) == (scale, sent)


def test_exponential_counts_of_any_size() -> None:
    """Counts above 127, 2 ** 14 and 2 ** 32, a lone bucket below 1, zeros alone and nothing at all arrive in their rows."""
    given = [{-5: 1, -4: 128, 7: 2**14, 8: 2**32 + 5}, {-1: 1}, {}, {}, {0: 127}]
    found = exponential(distribution(*given, zeros=[0, 3, 4, 0, 0]))
    assert [buckets(point) for point in found] == given
    assert [point.zero_count for point in found] == [0, 3, 4, 0, 0]
    assert [point.count for point in found] == [2**32 + 5 + 2**14 + 129, 4, 4, 0, 127]
    assert [point.sum for point in found] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert {point.scale for point in found} == {3}
    assert {(point.start_time_unix_nano, point.time_unix_nano) for point in found} == {(START, AT)}
    assert [attributes_of(point) for point in found] == [(("run", "r1"), ("rank", "0"), ("layer", str(i))) for i in range(5)]


def test_exponential_rows_may_be_absent() -> None:
    """Only the present rows are sent, each with its own buckets and attributes, and differences begin with the last export."""
    family = distribution({1: 1}, {2: 2}, {3: 3})
    chosen = Family(SECONDS, family.values, family.labels, np.array([True, False, True]), family.sums, family.exponential)
    (metric,) = read(encoder(temporality=DELTA).encode([chosen], **TIMES))
    assert metric.exponential_histogram.aggregation_temporality == 1
    found = points(metric)
    assert [(dict(attributes_of(point))["layer"], buckets(point)) for point in found] == [("0", {1: 1}), ("2", {3: 3})]
    assert {point.start_time_unix_nano for point in found} == {SINCE}


def test_exponential_histograms_are_split_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 points, each in many bytes, arrive once each over requests of bounded size."""
    monkeypatch.setattr(otlp, "REQUEST_BYTES", 9000)
    monkeypatch.setattr(otlp, "BLOCK_BYTES", 3000)
    given = [{i: i + 1, i + 40: 7} for i in range(300)]
    bodies = encoder().encode([distribution(*given)], **TIMES)
    assert [buckets(point) for metric in read(bodies) for point in points(metric)] == given
    assert len(bodies) > 5
    assert max(map(len, bodies)) < 3500


def test_an_exponential_histogram_is_the_one_that_opentelemetry_would_make() -> None:
    """Field by field the points equal those of OpenTelemetry's encoder."""
    given = [{-3: 5, -1: 300}, {2: 2**33}]
    theirs = [
        sdk.ExponentialHistogramDataPoint(
            {**CONSTANT, "layer": str(row)}, START, AT, sum(counts.values()) + 2, float(row), 3, 2,
            sdk.Buckets(min(counts), [counts.get(i, 0) for i in range(min(counts), max(counts) + 1)]), sdk.Buckets(0, []), 0,
            min=None, max=None,  # type: ignore[arg-type]
        )
        for row, counts in enumerate(given)
    ]  # fmt: skip
    metric = sdk.Metric("time_seconds", "Times.", "s", sdk.ExponentialHistogram(theirs, sdk.AggregationTemporality.CUMULATIVE))
    data = sdk.MetricsData([sdk.ResourceMetrics(Resource({}), [sdk.ScopeMetrics(InstrumentationScope("s"), [metric], "")], "")])
    (reference,) = encode_metrics(data).resource_metrics[0].scope_metrics[0].metrics
    assert read(encoder().encode([distribution(*given, zeros=[2, 2])], **TIMES)) == [reference]


# Exemplars


def test_exemplars_arrive_with_their_traces() -> None:
    """Exemplars stand at their points with value, time and trace, as OpenTelemetry's own encoder writes them."""
    found = {
        0: Exemplar(0.0005, 1_700_000_001.5, bytes(range(1, 17)), bytes(range(8))),
        2: Exemplar(-0.0, 1_700_000_002.5, b"\xff" * 16, b"\xfe" * 8),
    }
    counts = np.array([[1.0, 0.0, 1.0, 200.0], [1.0, 2.0, 3.0, 4.0]])
    family = Family(SECONDS, counts, rows("a", "b"), sums=np.array([0.5, 1.5]), exemplars=(found, {}))
    theirs = [
        SdkExemplar({}, one.value, int(one.at * 2) * 500_000_000, int.from_bytes(one.span_id), int.from_bytes(one.trace_id))
        for one in found.values()
    ]
    made = list(expected_points(family, CUMULATIVE, CONSTANT))
    those = [official_histogram(SECONDS, made[0], theirs), official_histogram(SECONDS, made[1])]
    metric = sdk.Metric("time_seconds", "Times.", "s", sdk.Histogram(those, sdk.AggregationTemporality.CUMULATIVE))
    data = sdk.MetricsData([sdk.ResourceMetrics(Resource({}), [sdk.ScopeMetrics(InstrumentationScope("s"), [metric], "")], "")])
    (reference,) = encode_metrics(data).resource_metrics[0].scope_metrics[0].metrics
    assert [len(point.exemplars) for point in reference.histogram.data_points] == [2, 0]
    assert read(encoder().encode([family], **TIMES)) == [reference]


def test_exemplars_beside_exponential_buckets_are_sent_too() -> None:
    """A histogram that has both loses neither."""
    one = Exemplar(0.5, 1_700_000_001.0, bytes(range(16)), bytes(range(8)))
    plain_one = distribution({-8: 1})
    family = Family(SECONDS, plain_one.values, plain_one.labels, None, plain_one.sums, plain_one.exponential, ({1: one},))
    (point,) = exponential(family)
    assert buckets(point) == {-8: 1}
    assert [(e.as_double, e.trace_id, e.span_id) for e in point.exemplars] == [(0.5, one.trace_id, one.span_id)]


# The wire format


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**14 - 1, 2**14, 2**32, 2**63, 2**64 - 1])
def test_varints_are_those_of_protobuf(number: int) -> None:
    """A whole number has the bytes that the official library gives it."""
    reference = ExponentialHistogramDataPoint.Buckets(bucket_counts=[number]).SerializeToString()
    assert reference[0] == 2 << 3 | 2
    assert varint(number) == reference[2:]


@pytest.mark.parametrize("number", [0, 1, -1, 2, -2, 63, -64, 64, 2**31 - 1, -(2**31)])
def test_numbers_of_either_sign_are_those_of_protobuf(number: int) -> None:
    """A number of a type with zigzag has the bytes that the official library gives it."""
    reference = ExponentialHistogramDataPoint(scale=number).SerializeToString()
    assert reference == (b"" if number == 0 else bytes([6 << 3]) + varint(zigzag(number)))
