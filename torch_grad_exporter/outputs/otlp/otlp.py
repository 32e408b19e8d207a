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
from dataclasses import dataclass
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


_Block = tuple[bytes, list[tuple[Family, slice]]]
"""Points, or the metric around them, that stay together, and the rows that they are of, as of `Request`."""


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
        some = (family for family in families if family.series)
        metrics = [self._guarded(spec, members, moment) for spec, members in by_spec(some).items()]
        return self._requests(metrics)

    # Metrics and requests

    def _guarded(self, spec: Spec, members: list[Family], moment: _Moment) -> list[_Block]:
        on_error = self._on_error
        if on_error is None:
            return self._blocks(spec, members, moment)

        def left_out(error: Exception) -> None:
            on_error(ValueError(f"{spec.name} cannot be encoded: {type(error).__name__}: {error}"))

        return Guard(left_out).result(self._blocks, spec, members, moment) or []

    def _blocks(self, spec: Spec, members: list[Family], moment: _Moment) -> list[_Block]:
        """A metric with the points of all its families, in `Metric`s of bounded size, as fields of `ScopeMetrics`."""
        exponential = members[0].exponential is not None
        if any((member.exponential is not None) is not exponential for member in members):
            raise ValueError("all of its families have exponential buckets, or none")
        head = text(1, spec.name) + text(2, spec.help) + text(3, UNITS.get(spec.unit, ""))
        field = {Kind.GAUGE: 5, Kind.COUNTER: 7, Kind.HISTOGRAM: 10 if exponential else 9}[spec.kind]
        tail = b"" if spec.kind is Kind.GAUGE else integer(2, self._temporality[spec.kind].value)
        if spec.kind is Kind.COUNTER:
            tail += integer(3, 1)  # it never falls
        some: list[list[_Block]] = [[]]
        for piece in itertools.chain.from_iterable(self._points(family, moment) for family in members):
            if some[-1] and sum(len(points) for points, _ in some[-1]) + len(piece[0]) > BLOCK_BYTES:
                some.append([])
            some[-1].append(piece)
        joined = [(b"".join(points for points, _ in block), [row for _, rows in block for row in rows]) for block in some if block]
        return [(delimited(2, head + delimited(field, points + tail)), rows) for points, rows in joined]

    def _requests(self, metrics: Iterable[list[_Block]]) -> Iterator[Request]:
        """Requests with as many metrics as fit; what of one metric does not fit stands in the next."""
        content: list[_Block] = []
        for blocks in metrics:
            for part, block in enumerate(blocks):
                if content and (part or sum(len(one) for one, _ in content) + len(block[0]) > REQUEST_BYTES):
                    yield self._request(content)
                    content = []
                content.append(block)
        if content:
            yield self._request(content)

    def _request(self, blocks: list[_Block]) -> Request:
        metrics = b"".join(metric for metric, _ in blocks)
        rows = tuple(row for _, rows in blocks for row in rows)
        return Request(delimited(1, self._resource + delimited(2, self._scope + metrics)), rows)

    # Points

    def _points(self, family: Family, moment: _Moment) -> Iterator[_Block]:
        """The points of a family, in pieces of bounded size."""
        if family.exponential or family.exemplars:
            each = self._one_by_one(family, moment)
            points, cuts = memoryview(b"".join(each)), _cuts(each)
        else:
            layout = self._layout(family)
            points, cuts = layout.filled(family, moment), layout.cuts
        for (begin, first), (end, rows) in itertools.pairwise([(0, 0), *cuts]):
            yield bytes(points[begin:end]), [(family, slice(first, rows))]

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

    def _one_by_one(self, family: Family, moment: _Moment) -> list[bytes]:
        """The points of histograms that differ in size from one export to the next."""
        if family.sums is None:
            raise ValueError("a histogram has sums")
        prepared = self._prepared(family, 1 if family.exponential is not None else 9)
        starts = moment.starts(self._temporality[Kind.HISTOGRAM], family).tolist()
        points = []
        for row, attributes, start in zip(family.row_numbers, prepared, starts, strict=True):
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
            points.append(delimited(1, head + b"".join(_exemplar(field, one) for one in found)))
        return points


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


@dataclass(frozen=True, slots=True)
class _Layout:
    """The points of some rows of a metric, with room for the numbers, which stand in the last bytes of each point.

    `chosen`: which rows; `tail`: those last bytes, and `places`, where they are in `template`; `cuts`: as of `_cuts`;
    `since`: which start they have, if any.
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
        places = np.cumsum([len(point) for point in points], dtype=np.int64) - len(tail)
        template = np.frombuffer(b"".join(points), dtype=np.uint8)
        return cls(chosen, template, places, np.frombuffer(tail, dtype=np.uint8), _cuts(points), since)

    def filled(self, family: Family, moment: _Moment) -> memoryview:
        """The points of a family."""
        values = family.values if family.present is None else family.values[family.present]
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
        return points.data


def _cuts(points: list[bytes]) -> list[tuple[int, int]]:
    """Where pieces of bounded size end, by bytes and by points."""
    ends = np.cumsum([len(point) for point in points], dtype=np.int64)
    last = np.flatnonzero(np.diff(ends // BLOCK_BYTES, append=-1))
    return list(zip(ends[last].tolist(), (last + 1).tolist(), strict=True))


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
