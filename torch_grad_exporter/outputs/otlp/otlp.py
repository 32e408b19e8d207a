"""Families as OTLP: requests to export metrics in protobuf's wire format, ready to be sent.

Of a point only its time and its numbers change from one export to the next. So the bytes of a family's points are laid out once
per metric, `LabelRows` object and choice of rows, and an export writes the numbers into them, all rows at a time; the messages of
the official library would cost sixteen microseconds a point. What is written is `opentelemetry/proto/metrics/v1/metrics.proto`,
whose numbers of fields stand here; the tests read it with the official library.

Metrics have their full Prometheus names, so that no receiver has anything to add to them, and the same buckets.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from torch_grad_exporter.errors import Guard
from torch_grad_exporter.metrics.families import SCALE, Exemplar, Family, FloatArray, IntArray, Kind, LabelRows, Spec, by_spec
from torch_grad_exporter.outputs.otlp.protobuf import attribute, delimited, fixed, integer, opening, packed, text, zigzag

SCOPE = "torch_grad_exporter"
"""The name of the instrumentation scope."""

REQUEST_BYTES = 3_000_000
"""Bytes of one request, at most: a Collector takes 4 MiB over gRPC by default."""

BLOCK_BYTES = 1_000_000
"""Bytes of points that stay together."""

WIDTH = 160
"""Buckets of an exponential histogram, at most, as in OpenTelemetry's SDKs; beyond, two neighbours become one."""

UNITS = {"seconds": "s", "bytes": "By", "watts": "W", "celsius": "Cel", "hertz": "Hz", "joules": "J"}
"""UCUM's signs of the units that end a metric's name."""

_GAUGE, _SUM, _HISTOGRAM, _EXPONENTIAL = 5, 7, 9, 10
"""Fields of a `Metric`, one for each form of points."""

_Bytes = NDArray[np.uint8]


class Temporality(enum.Enum):
    """What the numbers of a counter or histogram are over, by OTLP's numbers."""

    DELTA = 1
    """The time since the export before."""
    CUMULATIVE = 2
    """All the time since the start."""


@dataclass(frozen=True, slots=True)
class Request:
    """An `ExportMetricsServiceRequest`. `rows`: which families it has points of, and of which rows among the present ones."""

    body: bytes
    rows: tuple[tuple[Family, slice], ...]


class Encoder:
    """Encodes families, each point with the constant labels first and the family's own after.

    Where a family has a label of the same name as a constant one, the family's own is sent; one with an empty value is left out,
    as it means no label. `resource`: attributes of the process. `temporality`: of counters and of histograms. `on_error` takes why
    a metric cannot be encoded, which costs that metric alone; without it, that is raised.
    """

    def __init__(
        self,
        constant_labels: Mapping[str, str],
        resource: Mapping[str, object],
        *,
        version: str,
        temporality: Mapping[Kind, Temporality],
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._constant_labels = dict(constant_labels)
        self._temporality = temporality
        self._on_error = on_error
        self._resource = delimited(1, b"".join(attribute(1, key, value) for key, value in resource.items()))
        self._scope = delimited(1, text(1, SCOPE) + text(2, version))
        self._layouts: WeakKeyDictionary[LabelRows, dict[Spec, _Layout]] = WeakKeyDictionary()
        self._attributes: WeakKeyDictionary[LabelRows, dict[tuple[int, tuple[str, ...]], list[bytes]]] = WeakKeyDictionary()

    def encode(self, families: Iterable[Family], *, start: int, since: int, at: int) -> list[bytes]:
        """The bodies of the `requests`, where all differences are over the same time."""
        every = self.requests(families, start=start, since=lambda family: np.full(len(family.labels), since), at=at)
        return [request.body for request in every]

    def requests(
        self, families: Iterable[Family], *, start: int, since: Callable[[Family], IntArray], at: int
    ) -> Iterator[Request]:
        """The requests, none if there is no point. Times in nanoseconds since 1970.

        `start`: from when on cumulative numbers count; `since`: from when on differences do, row by row.
        """
        moment = _Moment(start, since, at)
        some = (family for family in families if len(family.labels))
        metrics = [self._guarded(spec, members, moment) for spec, members in by_spec(some).items()]
        return self._requests(metric for metric in metrics if metric is not None and metric.blocks)

    # Metrics and requests

    def _guarded(self, spec: Spec, members: list[Family], moment: _Moment) -> _Metric | None:
        on_error = self._on_error
        if on_error is None:
            return self._metric(spec, members, moment)

        def left_out(error: Exception) -> None:
            on_error(ValueError(f"{spec.name} cannot be encoded: {type(error).__name__}: {error}"))

        return Guard(left_out).result(self._metric, spec, members, moment)

    def _metric(self, spec: Spec, members: list[Family], moment: _Moment) -> _Metric:
        exponential = members[0].exponential is not None
        if any((member.exponential is not None) is not exponential for member in members):
            raise ValueError("all of its families have exponential buckets, or none")
        head = text(1, spec.name) + text(2, spec.help) + text(3, UNITS.get(spec.unit, ""))
        if spec.kind is Kind.GAUGE:
            return _Metric(head, _GAUGE, b"", self._blocks(members, moment))
        tail = integer(2, self._temporality[spec.kind].value)
        if spec.kind is Kind.COUNTER:
            return _Metric(head, _SUM, tail + integer(3, 1), self._blocks(members, moment))
        return _Metric(head, _EXPONENTIAL if exponential else _HISTOGRAM, tail, self._blocks(members, moment))

    def _requests(self, metrics: Iterable[_Metric]) -> Iterator[Request]:
        """Requests with as many metrics as fit; what of one metric does not fit stands in the next."""
        content: list[bytes] = []
        rows: list[tuple[Family, slice]] = []
        size = 0
        for metric in metrics:
            for part, block in enumerate(metric.blocks):
                message = metric.message(b"".join(block.pieces))
                if content and (part or size + len(message) > REQUEST_BYTES):
                    yield self._request(content, rows)
                    content, rows, size = [], [], 0
                content.append(message)
                rows += [(family, slice(begin, end)) for family, (begin, end) in block.rows.items()]
                size += len(message)
        if content:
            yield self._request(content, rows)

    def _request(self, metrics: list[bytes], rows: list[tuple[Family, slice]]) -> Request:
        return Request(delimited(1, self._resource + delimited(2, self._scope + b"".join(metrics))), tuple(rows))

    # Points

    def _blocks(self, members: list[Family], moment: _Moment) -> list[_Block]:
        """The points of all families of a metric, in pieces of bounded size."""
        blocks: list[_Block] = []
        for family in members:
            pieces = (
                self._one_by_one(family, moment)
                if family.exponential or family.exemplars
                else self._layout(family).filled(family, moment)
            )
            begin = 0
            for piece, end in pieces:
                if not blocks or blocks[-1].size + len(piece) > BLOCK_BYTES:
                    blocks.append(_Block())
                blocks[-1].add(piece, family, begin, end)
                begin = end
        return blocks

    def _layout(self, family: Family) -> _Layout:
        spec, prepared = family.spec, self._layouts.setdefault(family.labels, {})
        chosen = b"" if family.present is None else family.present.tobytes()
        layout = prepared.get(spec)
        if layout is None or layout.chosen != chosen:
            attributes = self._prepared(family, 9 if spec.kind is Kind.HISTOGRAM else 7)
            layout = prepared[spec] = _Layout.of(spec, attributes, chosen, self._since(spec))
        return layout

    def _prepared(self, family: Family, field: int) -> list[bytes]:
        """The attributes of each present row, as fields of this number."""
        names = family.spec.labels
        prepared = self._attributes.setdefault(family.labels, {})
        if (field, names) not in prepared:
            constant = b"".join(attribute(field, name, value) for name, value in self._constant_labels.items() if name not in names)
            prepared[field, names] = [
                constant + b"".join(attribute(field, name, value) for name, value in zip(names, row, strict=True) if value)
                for row in family.labels.rows
            ]
        found = prepared[field, names]
        return found if family.present is None else list(itertools.compress(found, family.present.tolist()))

    def _since(self, spec: Spec) -> Temporality | None:
        """From when on the metric counts; `None` where that is not known, and for a gauge."""
        temporality = self._temporality.get(spec.kind)
        return None if spec.older and temporality is Temporality.CUMULATIVE else temporality

    def _one_by_one(self, family: Family, moment: _Moment) -> Iterator[tuple[bytes, int]]:
        """The points of histograms that differ in size from one export to the next; after each, how many there are so far."""
        if family.sums is None:
            raise ValueError("a histogram has sums")
        prepared = self._prepared(family, 1 if family.exponential is not None else 9)
        starts = moment.starts(self._temporality[Kind.HISTOGRAM], family).tolist()
        for end, (row, attributes, start) in enumerate(zip(family.row_numbers, prepared, starts, strict=True), 1):
            counts = family.values[row]
            head = attributes + fixed(2, _eight(start)) + fixed(3, _eight(moment.at))
            head += fixed(4, _eight(int(counts.sum()))) + fixed(5, np.float64(family.sums[row]).tobytes())
            found = () if family.exemplars is None else family.exemplars[row].values()
            if family.exponential is None:
                head += delimited(6, counts.astype("<u8").tobytes()) + _bounds(family.spec)
                field = 8
            else:
                head += _exponential(family.exponential[row], int(counts.sum()))
                field = 11
            yield delimited(1, head + b"".join(_exemplar(field, one) for one in found)), end


@dataclass(frozen=True, slots=True)
class _Moment:
    """When the numbers are as they are, and from when on they count, as of `Encoder.encode`."""

    start: int
    since: Callable[[Family], IntArray]
    at: int

    def starts(self, temporality: Temporality, family: Family) -> IntArray:
        """From when on each present row counts."""
        if temporality is Temporality.CUMULATIVE:
            return np.full(len(family.row_numbers), self.start, dtype=np.int64)
        return self.since(family)[slice(None) if family.present is None else family.present]


@dataclass(slots=True)
class _Block:
    """Points of a metric that stay together. `rows`: of each family those that they are of, the first one and the end."""

    pieces: list[bytes] = field(default_factory=list)
    rows: dict[Family, tuple[int, int]] = field(default_factory=dict)
    size: int = 0

    def add(self, piece: bytes, family: Family, begin: int, end: int) -> None:
        """Adds points of a family's rows, which follow those of it that are here."""
        self.pieces.append(piece)
        self.rows[family] = self.rows.get(family, (begin, begin))[0], end
        self.size += len(piece)


@dataclass(frozen=True, slots=True)
class _Metric:
    """What stands before the points of a `Metric`, the field that they are in, and what stands after them in that field."""

    head: bytes
    field: int
    tail: bytes
    blocks: list[_Block]

    def message(self, points: bytes) -> bytes:
        """The metric with these points, as a field of `ScopeMetrics`."""
        return delimited(2, self.head + delimited(self.field, points + self.tail))


@dataclass(frozen=True, slots=True)
class _Layout:
    """The points of some rows of a metric, with room for the numbers, which stand in the last bytes of each point.

    `chosen`: which rows; `tail`: those last bytes, and `places`, where they are in `template`; `cuts`: where pieces of bounded size
    end, by bytes and by rows; `since`: which start they have, if any.
    """

    chosen: bytes
    template: _Bytes
    places: IntArray
    tail: _Bytes
    cuts: list[tuple[int, int]]
    since: Temporality | None

    @classmethod
    def of(cls, spec: Spec, attributes: list[bytes], chosen: bytes, since: Temporality | None) -> _Layout:
        """The layout of points with these attributes."""
        tail = (b"" if since is None else fixed(2)) + fixed(3) + fixed(4)
        if spec.kind is Kind.HISTOGRAM:
            count = len(spec.buckets) + 1
            tail += fixed(5) + opening(6, 8 * count) + bytes(8 * count) + _bounds(spec)
        points = [delimited(1, own + tail) for own in attributes]
        ends = np.cumsum([len(point) for point in points], dtype=np.int64)
        last = np.flatnonzero(np.diff(ends // BLOCK_BYTES, append=-1))
        template = np.frombuffer(b"".join(points), dtype=np.uint8)
        cuts = list(zip(ends[last].tolist(), (last + 1).tolist(), strict=True))
        return cls(chosen, template, ends - len(tail), np.frombuffer(tail, dtype=np.uint8), cuts, since)

    def filled(self, family: Family, moment: _Moment) -> Iterator[tuple[bytes, int]]:
        """The points of a family, in pieces of bounded size; after each, how many there are so far."""
        values = family.values if family.present is None else family.values[family.present]
        if not len(values):
            return
        tails = np.tile(self.tail, (len(self.places), 1))
        place = 1
        if self.since is not None:
            _write(tails, place, moment.starts(self.since, family), "<u8")
            place += 9
        tails[:, place : place + 8] = np.frombuffer(_eight(moment.at), dtype=np.uint8)
        place += 9
        if family.sums is None:
            _write(tails, place, values, "<f8")
        else:
            _write(tails, place, values.sum(axis=1), "<u8")
            _write(tails, place + 9, family.sums if family.present is None else family.sums[family.present], "<f8")
            _write(tails, place + 17 + len(opening(6, 8 * values.shape[1])), values, "<u8")
        points = self.template.copy()
        sliding_window_view(points, len(self.tail), writeable=True)[self.places] = tails
        begin = 0
        for end, rows in self.cuts:
            yield points[begin:end].tobytes(), rows
            begin = end


def _write(tails: _Bytes, place: int, numbers: FloatArray | IntArray, form: str) -> None:
    """Writes one number, or a row of them, into each tail."""
    columns = np.ascontiguousarray(numbers.reshape(len(tails), -1).astype(form))
    tails[:, place : place + 8 * columns.shape[1]] = columns.view(np.uint8)


def _eight(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _bounds(spec: Spec) -> bytes:
    return delimited(7, np.array(spec.buckets, dtype="<f8").tobytes())


def _exponential(counts: Mapping[int, int], total: int) -> bytes:
    """Scale, zeros and buckets of an `ExponentialHistogramDataPoint`."""
    zeros = fixed(7, _eight(total - sum(counts.values())))
    if not counts:
        return integer(6, zigzag(SCALE)) + zeros
    scale = SCALE
    while (max(counts) >> SCALE - scale) - (min(counts) >> SCALE - scale) >= WIDTH:
        scale -= 1
    low = min(counts) >> SCALE - scale
    merged = [0] * ((max(counts) >> SCALE - scale) - low + 1)
    for index, count in counts.items():
        merged[(index >> SCALE - scale) - low] += count
    buckets = integer(1, zigzag(low)) + delimited(2, packed(merged))
    return integer(6, zigzag(scale)) + zeros + delimited(8, buckets)


def _exemplar(field: int, one: Exemplar) -> bytes:
    """An `Exemplar`, as such a field of a point."""
    value = np.float64(one.value).tobytes()
    return delimited(
        field, fixed(2, _eight(int(one.at * 1e9))) + fixed(3, value) + delimited(4, one.span_id) + delimited(5, one.trace_id)
    )
