"""Families as Prometheus' protobuf messages, `io.prometheus.client.MetricFamily`, each after its length.

Of the formats here only this one has native histograms and start times. The messages are few and small, so they are written
by hand: a library would make several objects per series. Numbers of fields: github.com/prometheus/client_model.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, compress, pairwise, repeat
from weakref import WeakKeyDictionary

import numpy as np

from torch_grad_exporter.metrics.exponential import SCALE
from torch_grad_exporter.metrics.families import Exemplar, Family, FloatArray, IntArray, Kind, LabelRows, Spec, by_spec
from torch_grad_exporter.outputs.prometheus import series

TYPES = {Kind.COUNTER: 0, Kind.GAUGE: 1, Kind.HISTOGRAM: 4}

# Buckets of a native histogram that have observations, at most: as many as OpenTelemetry's SDKs have. Beyond, two become one.
MOST = 160

# A span of no buckets: without it, a native histogram that has observed nothing would look like a classic one.
EMPTY_SPAN = b"\x62\x04\x08\x00\x10\x00"


class ProtobufRenderer:
    """Renders families, with the labels that the text has. The bytes before each number are kept as long as the rows are.

    `constant_labels`, `only_on`: see `series.shared_labels`. `start`: Unix time since when everything is counted that is not older
    than the exporter; None if unknown.
    """

    def __init__(self, constant_labels: Mapping[str, str], *, only_on: Spec | None, start: float | None) -> None:
        self._constant_labels, self._only_on = dict(constant_labels), only_on
        self._start = b"" if start is None else _timestamp(start)
        self._prepared: WeakKeyDictionary[LabelRows, dict[Spec, list[bytes]]] = WeakKeyDictionary()

    def render(self, families: Iterable[Family]) -> bytes:
        """Return the body of a scrape. Raises what iterating `families` raises, and on arrays that do not fit their rows."""
        messages = []
        for spec, members in by_spec(families).items():
            if metrics := b"".join(map(self._metrics, members)):
                unit = _text(b"\x2a", series.unit(spec)) if series.unit(spec) else b""
                about = _text(b"\x0a", spec.name) + _text(b"\x12", spec.help) + b"\x18" + _varint(TYPES[spec.kind]) + unit
                messages += [_varint(len(about) + len(metrics)), about, metrics]
        return b"".join(messages)

    def _metrics(self, family: Family) -> bytes:
        """Return the metrics of all present rows."""
        prefixes: Iterable[bytes] = self._prefixes(family.spec, family.labels)
        if family.present is not None:
            prefixes = compress(prefixes, family.present.tolist())
        if family.spec.kind is not Kind.HISTOGRAM:
            return b"".join(chain.from_iterable(zip(prefixes, _doubles(series.table(family)[:, 0]), strict=True)))
        start, metrics = self._since(family.spec, b"\x7a"), list[bytes]()
        for labels, classic, native in zip(prefixes, _classic(family), _native(family), strict=True):
            histogram = b"".join((*classic, native, start))
            length = _varint(len(histogram))
            whole = _varint(len(labels) + 1 + len(length) + len(histogram))
            metrics += [b"\x22", whole, labels, b"\x3a", length, histogram]
        return b"".join(metrics)

    def _prefixes(self, spec: Spec, labels: LabelRows) -> list[bytes]:
        """Return what is before the number of each row; of a histogram its labels alone."""
        prepared = self._prepared.setdefault(labels, {})
        if spec not in prepared:
            constant = [_pair(*label) for label in series.shared_labels(spec, self._constant_labels, self._only_on).items()]
            pairs = [
                b"".join((*constant, *(_pair(name, value) for name, value in zip(spec.labels, row, strict=True) if value)))
                for row in labels.rows
            ]
            if spec.kind is not Kind.HISTOGRAM:
                start = self._since(spec, b"\x1a") if spec.kind is Kind.COUNTER else b""
                before = (b"\x12" if spec.kind is Kind.GAUGE else b"\x1a") + _varint(len(start) + 9) + start + b"\x09"
                pairs = [b"\x22" + _varint(len(own) + len(before) + 8) + own + before for own in pairs]
            prepared[spec] = pairs
        return prepared[spec]

    def _since(self, spec: Spec, tag: bytes) -> bytes:
        """Return the field of the start time, under its tag in the message of this kind."""
        return tag + _varint(len(self._start)) + self._start if self._start and not spec.older else b""


# Histograms, without labels


def _classic(family: Family) -> Iterator[Iterable[bytes]]:
    """Yield count, sum and buckets of each present row."""
    table, bounds = series.table(family), (*family.spec.buckets, np.inf)
    exemplars: Sequence[Mapping[int, Exemplar]] | None = family.exemplars
    for row, counts, total in zip(family.row_numbers, table[:, :-2].tolist(), _doubles(table[:, -2]), strict=True):
        buckets: Iterable[bytes] = map(_bucket, counts, bounds)
        if exemplars is not None and (own := exemplars[row]):
            buckets = [
                _bucket(count, bound, own.get(place)) for place, (count, bound) in enumerate(zip(counts, bounds, strict=True))
            ]
        yield (_count(counts[-1]), b"\x11", total, *buckets)


def _native(family: Family) -> Iterator[bytes]:
    """Yield the native part of each present row, empty where nothing is counted by exponential bucket."""
    rows, exponential = np.array(family.row_numbers, dtype=np.int64), family.exponential
    if exponential is None:
        yield from repeat(b"", len(rows))
        return
    counts, buckets, schema = exponential.counts[rows], exponential.buckets, SCALE
    while (np.count_nonzero(counts, axis=1) > MOST).any():
        buckets, begins = np.unique(buckets >> 1, return_index=True)
        counts, schema = np.add.reduceat(counts, begins, axis=1), schema - 1
    zeros = family.values[rows].sum(axis=1).astype(np.int64) - counts.sum(axis=1, dtype=np.int64)
    about = b"\x28" + _signed(schema) + b"\x31" + bytes(8) + b"\x38"  # zeros alone are zeros: their threshold is 0
    place, column = np.nonzero(counts)
    begins = np.diff(place, prepend=-1) != 0  # a row
    observed = counts[place, column].astype(np.int64)
    deltas, ends = _packed(np.where(begins, observed, np.diff(observed, prepend=0)))
    # The upper bound of bucket i is base ** i here, and base ** (i + 1) in OpenTelemetry.
    numbers = buckets[column] + 1
    gaps = np.where(begins, numbers, np.diff(numbers, prepend=0) - 1)
    spans = np.flatnonzero(begins | (gaps != 0))
    lengths = np.diff(spans, append=len(gaps))
    written = [_span(offset, length) for offset, length in zip(gaps[spans].tolist(), lengths.tolist(), strict=True)]
    of_spans, of_deltas = (np.searchsorted(owners, np.arange(len(rows) + 1)).tolist() for owners in (place[spans], place))
    for zero, span, delta in zip(zeros.tolist(), pairwise(of_spans), pairwise(ends[of_deltas].tolist()), strict=True):
        packed = deltas[slice(*delta)]
        yield b"".join((about, _varint(zero), *(written[slice(*span)] or [EMPTY_SPAN]), b"\x6a", _varint(len(packed)), packed))


def _packed(numbers: IntArray) -> tuple[bytes, IntArray]:
    """Return signed numbers one after the other, and where each begins, and the last one ends."""
    numbers = np.where(numbers < 0, -2 * numbers - 1, 2 * numbers)
    lengths = np.searchsorted(1 << 7 * np.arange(1, 9), numbers, side="right") + 1
    ends = np.concatenate([[0], np.cumsum(lengths)])
    packed = np.zeros(ends[-1], dtype=np.uint8)
    for place in range(lengths.max(initial=0)):
        long = lengths > place
        packed[ends[:-1][long] + place] = (numbers[long] >> 7 * place & 0x7F) | np.where(lengths[long] > place + 1, 0x80, 0)
    return packed.tobytes(), ends


@lru_cache(1 << 13)
def _bucket(count: float, bound: float, exemplar: Exemplar | None = None) -> bytes:
    bucket = _count(count) + b"\x11" + struct.pack("<d", bound)
    if exemplar is not None:
        labels = _pair("trace_id", exemplar.trace_id.hex()) + _pair("span_id", exemplar.span_id.hex())
        at = _timestamp(exemplar.at)
        own = labels + b"\x11" + struct.pack("<d", exemplar.value) + b"\x1a" + _varint(len(at)) + at
        bucket += b"\x1a" + _varint(len(own)) + own
    return b"\x1a" + _varint(len(bucket)) + bucket


def _count(count: float) -> bytes:
    """Return the field of a count, which has another number if it is not whole: a user's histogram may be of any numbers."""
    whole = 0 <= count < 1 << 63 and count == int(count)
    return b"\x08" + _varint(int(count)) if whole else b"\x21" + struct.pack("<d", count)


@lru_cache(1 << 13)
def _span(offset: int, length: int) -> bytes:
    span = b"\x08" + _signed(offset) + b"\x10" + _varint(length)
    return b"\x62" + _varint(len(span)) + span


def _doubles(values: FloatArray) -> list[bytes]:
    # Of all that is not a number, one would mean to Prometheus that the series has ended.
    values = np.where(np.isnan(values), np.nan, values).astype("<f8")
    numbers: list[bytes] = np.frombuffer(values.tobytes(), "V8").tolist()
    return numbers


def _pair(name: str, value: str) -> bytes:
    """Return a label of a metric or an exemplar: in both it is field 1."""
    pair = _text(b"\x0a", name) + _text(b"\x12", value)
    return b"\x0a" + _varint(len(pair)) + pair


def _text(tag: bytes, text: str) -> bytes:
    encoded = text.encode("utf-8", "replace")
    return tag + _varint(len(encoded)) + encoded


def _timestamp(seconds: float) -> bytes:
    whole, microseconds = divmod(round(seconds * 1e6), 1_000_000)
    return b"\x08" + _varint(whole) + b"\x10" + _varint(1000 * microseconds)


@lru_cache(1 << 13)
def _signed(number: int) -> bytes:
    return _varint(2 * number if number >= 0 else -2 * number - 1)


@lru_cache(1 << 13)
def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
