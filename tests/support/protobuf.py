"""Reads Prometheus' protobuf by Google's library, from a declaration of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from google.protobuf import timestamp_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from prometheus_client.utils import floatToGoString

from tests.support.properties import Series

ACCEPT = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
PACKAGE = "io.prometheus.client"

# As client_model publishes them: number, type and name of each field, `*` for those that are repeated.
MESSAGES = {
    "LabelPair": "1 string name, 2 string value",
    "Gauge": "1 double value",
    "Counter": "1 double value, 2 Exemplar exemplar, 3 Timestamp created_timestamp",
    "Untyped": "1 double value",
    "Histogram": "1 uint64 sample_count, 4 double sample_count_float, 2 double sample_sum, 3 Bucket *bucket, "
    "15 Timestamp created_timestamp, 5 sint32 schema, 6 double zero_threshold, 7 uint64 zero_count, 8 double zero_count_float, "
    "9 BucketSpan *negative_span, 10 sint64 *negative_delta, 11 double *negative_count, "
    "12 BucketSpan *positive_span, 13 sint64 *positive_delta, 14 double *positive_count, 16 Exemplar *exemplars",
    "Bucket": "1 uint64 cumulative_count, 4 double cumulative_count_float, 2 double upper_bound, 3 Exemplar exemplar",
    "BucketSpan": "1 sint32 offset, 2 uint32 length",
    "Exemplar": "1 LabelPair *label, 2 double value, 3 Timestamp timestamp",
    "Metric": "1 LabelPair *label, 2 Gauge gauge, "
    "3 Counter counter, 5 Untyped untyped, 7 Histogram histogram, 6 int64 timestamp_ms",
    "MetricFamily": "1 string name, 2 string help, 3 int32 type, 4 Metric *metric, 5 string unit",
}
KINDS = ("counter", "gauge", "summary", "untyped", "histogram")
"""By the number of the type."""


def _message(name: str, fields: str) -> DescriptorProto:
    message = DescriptorProto(name=name)
    for number, kind, label in (field.split() for field in fields.split(", ")):
        field = message.field.add(name=label.strip("*"), number=int(number))
        field.label = field.LABEL_REPEATED if "*" in label else field.LABEL_OPTIONAL
        if kind in MESSAGES:
            field.type_name = f".{PACKAGE}.{kind}"
        elif kind == "Timestamp":
            field.type_name = ".google.protobuf.Timestamp"
        field.type = getattr(FieldDescriptorProto, f"TYPE_{'MESSAGE' if field.type_name else kind.upper()}")
    return message


def _family_class() -> Any:  # noqa: ANN401 - made at run time
    pool = DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    file = FileDescriptorProto(name="metrics.proto", package=PACKAGE, syntax="proto2", dependency=[timestamp_pb2.DESCRIPTOR.name])
    file.message_type.extend(_message(name, fields) for name, fields in MESSAGES.items())
    pool.Add(file)  # type: ignore[no-untyped-call]
    return GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.MetricFamily"))


MetricFamily = _family_class()


def families(body: bytes) -> list[Any]:
    """Return the messages of a body, each of which has a name of its own, and no field that is not declared."""
    messages, at = [], 0
    while at < len(body):
        length = shift = 0
        while True:
            length |= (body[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if body[at - 1] < 0x80:
                break
        message = MetricFamily.FromString(body[at : at + length])
        at += length
        # What is not declared would be kept when the message is copied, and lost here.
        known = type(message).FromString(message.SerializeToString())
        known.DiscardUnknownFields()
        assert known.ByteSize() == message.ByteSize()
        messages.append(message)
    assert at == len(body)
    assert len({message.name for message in messages}) == len(messages)
    return messages


def samples(message: Any) -> Iterator[tuple[str, dict[str, str], float]]:  # noqa: ANN401 - a `MetricFamily`
    """Yield the samples that the text of a family has."""
    for metric in message.metric:
        labels = {pair.name: pair.value for pair in metric.label}
        assert len(labels) == len(metric.label)
        assert [field.name for field, _ in metric.ListFields() if field.name != "label"] == [KINDS[message.type]]
        if KINDS[message.type] != "histogram":
            yield message.name, labels, getattr(metric, KINDS[message.type]).value
            continue
        histogram = metric.histogram
        for bucket in histogram.bucket:
            le = floatToGoString(bucket.upper_bound)
            yield f"{message.name}_bucket", {**labels, "le": le}, bucket.cumulative_count_float or float(bucket.cumulative_count)
        yield f"{message.name}_sum", labels, histogram.sample_sum
        yield f"{message.name}_count", labels, histogram.sample_count_float or float(histogram.sample_count)


def series(body: bytes) -> Series:
    """Return every sample by name and labels, as `properties.series` does of a text; none stands twice."""
    all_samples = [sample for message in families(body) for sample in samples(message)]
    result = {(name, *sorted(f"{k}={v}" for k, v in labels.items() if k != "run")): value for name, labels, value in all_samples}
    assert len(result) == len(all_samples)
    return result


def native(histogram: Any) -> dict[tuple[float, float], int]:  # noqa: ANN401 - a `Histogram`
    """Return the counts of a native histogram by bounds, (lower, upper], as Prometheus' specification defines them."""
    assert not histogram.negative_span
    counts, index, count, deltas = dict[tuple[float, float], int](), 0, 0, list(histogram.positive_delta)
    for span in histogram.positive_span:
        index += span.offset
        for _ in range(span.length):
            count += deltas.pop(0)
            power = index / 2**histogram.schema
            lower = (index - 1) / 2**histogram.schema
            counts[_power(lower), _power(power)] = count
            index += 1
    assert deltas == []
    return counts


def _power(exponent: float) -> float:
    return 2.0**exponent if exponent < 1024 else math.inf
