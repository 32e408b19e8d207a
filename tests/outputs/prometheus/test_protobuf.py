"""Protobuf, read by Google's library: what the text has, native histograms, and start times."""

from __future__ import annotations

import math
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support import protobuf
from tests.support.made_families import catalogue_families
from tests.support.properties import series as text_series
from torch_grad_exporter import start_exporter
from torch_grad_exporter.metrics.exponential import Exponential
from torch_grad_exporter.metrics.families import NO_LABELS, Exemplar, Family, Kind, LabelRows, Spec
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer
from torch_grad_exporter.store.exponential import ExponentialRows

NORM = Spec("norm", Kind.GAUGE, "A norm.", ("layer",))
STEPS = Spec("steps_total", Kind.COUNTER, "Steps.", ("layer",))
OLD = Spec("sent_bytes_total", Kind.COUNTER, "Sent.", unit="bytes", older=True)
SECONDS = Spec("time_seconds", Kind.HISTOGRAM, "Times.", ("layer",), "seconds", (0.001, 1.0, 1e6))


def render(*families: Family, start: float | None = None) -> bytes:
    """Return the body of a scrape."""
    return Renderer({"run": "r"}, start=start).render(families, Format.PROTOBUF)


def rows(*layers: str) -> LabelRows:
    """Return rows with one label each."""
    return LabelRows(tuple((layer,) for layer in layers))


def distribution(*values: list[float]) -> Family:
    """Return a histogram that has observed these values, a list for each row."""
    counts, exponential = np.zeros((len(values), 4)), ExponentialRows(len(values))
    for row, own in enumerate(values):
        np.add.at(counts[row], np.searchsorted(SECONDS.buckets, own), 1)
        exponential.enter(np.full(len(own), row), np.array(own, dtype=np.float64))
    labels = rows(*map(str, range(len(values))))
    return Family(SECONDS, counts, labels, sums=np.zeros(len(labels)), exponential=exponential.of(range(len(values))))


@pytest.mark.slow
def test_every_declared_metric_is_as_in_the_text() -> None:
    """Each metric of the catalogue has its name, help and type, and exactly the samples of the text."""
    families = catalogue_families(40, masked=True)
    body = render(*families, start=time.time())
    result, reference = protobuf.series(body), text_series(families)
    assert {key: repr(value) for key, value in result.items()} == {key: repr(value) for key, value in reference.items()}
    assert len(result) > 1000
    declared = {family.spec.name: (family.spec.help, family.spec.kind.value) for family in families if family.series}
    assert {message.name: (message.help, protobuf.KINDS[message.type]) for message in protobuf.families(body)} == declared


def test_a_training_is_as_in_the_text() -> None:
    """A scrape of a training has the same samples in both formats, and its native histograms count what the classic ones do."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with start_exporter(model, port=None, every=1) as exporter:
        for number in range(30):
            optimizer.zero_grad()
            (model(torch.randn(4, 3)).square().sum() * (number != 9)).backward()
            optimizer.step()
        families = list(exporter.collect())
    body = render(*families)
    result, reference = protobuf.series(body), text_series(families)
    assert {key: repr(value) for key, value in result.items()} == {key: repr(value) for key, value in reference.items()}
    counted = {}
    for message in protobuf.families(body):
        for metric in message.metric if protobuf.KINDS[message.type] == "histogram" else ():
            own = metric.histogram
            assert own.zero_count + sum(protobuf.native(own).values()) == own.sample_count
            counted[message.name] = own.sample_count
            for bucket in own.bucket:
                inside = [count for (lower, upper), count in protobuf.native(own).items() if upper <= bucket.upper_bound]
                touched = [count for (lower, upper), count in protobuf.native(own).items() if lower < bucket.upper_bound]
                assert own.zero_count + sum(inside) <= bucket.cumulative_count <= own.zero_count + sum(touched)
    names = {"torch_grad_norm_distribution": 30, "torch_grad_global_norm_distribution": 30, "torch_train_step_duration_seconds": 29}
    assert counted == names


def test_labels_and_values_are_exact() -> None:
    """Any text comes back, a lone surrogate as `?`, an empty label not at all; numbers bit for bit, but no NaN says stale."""
    stale = np.array([0x7FF0000000000002], dtype=np.uint64).view(np.float64)[0]
    texts = ['a\\b"c\nd', "\0", "größe 😀", "x" * 20_000, "a\udc80b", "", "e", "f"]
    values = np.array([math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308, 0.1 + 0.2, math.nan, stale])
    (message,) = protobuf.families(render(Family(NORM, values, rows(*texts))))
    result = list(protobuf.samples(message))
    assert [labels.get("layer", "") for _, labels, _ in result] == [text.replace("\udc80", "?") for text in texts]
    numbers = np.array([value for *_, value in result])
    assert numbers.tobytes() == np.array([*values[:-1], math.nan]).tobytes()


def test_families_of_one_metric_are_one_message() -> None:
    """Families of one metric are in one message where it appeared first; one without a present row is in none."""
    none = np.zeros(1, dtype=np.bool_)
    families = [
        Family(NORM, np.array([1.0]), rows("a")),
        Family(STEPS, np.array([2.0]), rows("a")),
        Family(NORM, np.array([3.0]), rows("b"), none),
        Family(NORM, np.array([4.0]), rows("run")),
        Family(SECONDS, np.ones((1, 4)), rows("a"), none, np.ones(1)),
    ]
    messages = protobuf.families(render(*families))
    assert [(message.name, [value for *_, value in protobuf.samples(message)]) for message in messages] == [
        ("norm", [1.0, 4.0]), ("steps_total", [2.0]),
    ]  # fmt: skip
    own = Renderer({"layer": "constant"}).render([Family(NORM, np.ones(1), rows("own"))], Format.PROTOBUF)
    assert protobuf.series(own) == {("norm", "layer=own"): 1.0}
    own = Renderer({"job": "j"}, only_on=STEPS).render(families, Format.PROTOBUF)
    assert set(protobuf.series(own)) == {("norm", "layer=a"), ("norm", "layer=run"), ("steps_total", "job=j", "layer=a")}


def test_counters_and_histograms_say_since_when_they_count() -> None:
    """They have the start, but for those that are older and for gauges; without a start none has one."""
    families = [
        Family(NORM, np.ones(1), rows("a")), Family(STEPS, np.ones(1), rows("a")), Family(OLD, np.ones(1), NO_LABELS),
        distribution([1.0]),
    ]  # fmt: skip
    for start, expected in ((1_700_000_000.25, (1_700_000_000, 250_000_000)), (None, None)):
        known = {message.name: message for message in protobuf.families(render(*families, start=start))}
        steps, times = known["steps_total"].metric[0].counter, known["time_seconds"].metric[0].histogram
        for own in (steps, times):
            at = own.created_timestamp
            assert ((at.seconds, at.nanos) if own.HasField("created_timestamp") else None) == expected
        assert not known["sent_bytes_total"].metric[0].counter.HasField("created_timestamp")
        assert (known["sent_bytes_total"].unit, known["steps_total"].unit, known["time_seconds"].unit) == ("bytes", "", "seconds")


def test_exemplars_are_at_their_buckets() -> None:
    """An exemplar is at the bucket of its observation, with value, time and trace."""
    first = Exemplar(0.0005, 1_700_000_001.5, bytes(range(1, 17)), bytes(range(8)))
    last = Exemplar(1e9, 1_700_000_002.0, b"\xff" * 16, b"\xfe" * 8)
    family = Family(SECONDS, np.ones((2, 4)), rows("a", "b"), None, np.ones(2), exemplars=({}, {0: first, 3: last}))
    (message,) = protobuf.families(render(family))
    known = [
        [(place, bucket.exemplar) for place, bucket in enumerate(metric.histogram.bucket) if bucket.HasField("exemplar")]
        for metric in message.metric
    ]
    assert known[0] == []
    for (place, read), (bucket, sent) in zip(known[1], ((0, first), (3, last)), strict=True):
        labels = {pair.name: pair.value for pair in read.label}
        assert labels == {"trace_id": sent.trace_id.hex(), "span_id": sent.span_id.hex()}
        assert (place, read.value, read.timestamp.ToNanoseconds()) == (bucket, sent.value, round(sent.at * 1e9))


def test_counts_that_are_not_whole_stay_so() -> None:
    """A user's histogram may count by weights: then its numbers are those of the text, as floats."""
    values = np.array([[0.5, 1.0, 0.0, 2.25], [1.0, 0.0, 2.0, 0.0], [math.nan, 1.0, 1.0, -1.0]])
    family = Family(SECONDS, values, rows("a", "b", "c"), sums=np.ones(3))
    assert repr(protobuf.series(render(family))) == repr(text_series([family]))


# Native histograms

magnitudes = st.one_of(
    st.just(0.0), st.floats(1e-3, 1e3), st.floats(1e-300, 1.7e308), st.integers(-1000, 1023).map(lambda power: 2.0**power)
)


@given(st.lists(st.lists(magnitudes, max_size=40), min_size=1, max_size=4))
def test_native_buckets_have_the_values_in_their_bounds(values: list[list[float]]) -> None:
    """Each bucket counts the values in its bounds, to within rounding; zeros are in the bucket of zeros, and none is lost."""
    (message,) = protobuf.families(render(distribution(*values)))
    for own, metric in zip(values, message.metric, strict=True):
        histogram = metric.histogram
        counts = protobuf.native(histogram)
        assert (histogram.schema, histogram.zero_threshold, histogram.zero_count) == (3, 0.0, own.count(0.0))
        assert histogram.sample_count == len(own) == histogram.zero_count + sum(counts.values())
        assert histogram.positive_span or histogram.zero_count  # else Prometheus would see a classic histogram
        for (lower, upper), count in counts.items():
            near = [value for value in own if lower * (1 - 1e-13) < value <= upper * (1 + 1e-13)]
            inside = [value for value in own if lower * (1 + 1e-13) < value <= upper * (1 - 1e-13)]
            assert len(inside) <= count <= len(near)


def test_a_wide_distribution_gets_wider_buckets() -> None:
    """Of values over the whole range of doubles, at most 160 buckets are there, down to Prometheus' coarsest schema."""
    generator = np.random.default_rng(3)
    for decades, schema in ((1, 3), (9, 2), (600, -4)):
        values = (10.0 ** generator.uniform(-decades / 2, decades / 2, 4000)).tolist()
        (message,) = protobuf.families(render(distribution(values, [])))
        wide, empty = (metric.histogram for metric in message.metric)
        counts = protobuf.native(wide)
        assert (wide.schema, empty.schema) == (schema, schema)
        assert len(counts) <= 160
        assert [(span.offset, span.length) for span in empty.positive_span] == [(0, 0)]
        exact = Counter(math.ceil(math.log2(value) * 2.0**schema) for value in values)
        assert sorted(counts.values()) == sorted(exact.values())


def test_counts_by_mapping_are_those_of_the_rows() -> None:
    """What is made of mappings is read back as these, without zeros."""
    given_counts = [{-20: 3, 5: 1}, {}, {7: 2, 8: 0}]
    assert list(Exponential.of(given_counts)) == [{-20: 3, 5: 1}, {}, {7: 2}]
    assert [len(Exponential.of([])), list(Exponential.of([{}]))] == [0, [{}]]
