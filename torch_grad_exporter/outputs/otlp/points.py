"""Families as OpenTelemetry's metrics.

Metrics have their full Prometheus names, so that no receiver has anything to add to them, and the same buckets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from opentelemetry.sdk.metrics import Exemplar as SdkExemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Buckets,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.metrics.exponential import SCALE
from torch_grad_exporter.metrics.families import Exemplar, Family, Kind, LabelRows, by_spec
from torch_grad_exporter.outputs.otlp.delivery import SOURCE
from torch_grad_exporter.outputs.otlp.delta import Deltas
from torch_grad_exporter.version import __version__

# The instrumentation scope.
SCOPE = InstrumentationScope("torch_grad_exporter", __version__)

# Buckets of an exponential histogram, at most, as in OpenTelemetry's SDKs; beyond, two neighbours become one.
WIDTH = 160

# UCUM's signs of the units that end a metric's name.
UNITS = {"seconds": "s", "bytes": "By", "watts": "W", "celsius": "Cel", "hertz": "Hz", "joules": "J"}

# Points of one request, at most: encoded in about 15 ms by code that other threads can interrupt, and less than the 1 MB that nginx
# lets through.
POINTS = 1_000

# The smallest and the largest observation of a histogram, which are not kept; in the SDK's types they are never absent.
UNKNOWN: Any = None

Attributes = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Portion:
    """One request. `rows`: its families, and for each which of the present rows."""

    data: MetricsData
    rows: tuple[tuple[Family, slice], ...]


class Points:
    """Makes metrics of families, each point with the constant labels first and the family's own after.

    Where a family has a label of the same name as a constant one, the family's own is sent; one with an empty value is left out, as
    it means no label. A failure to encode a metric costs that metric alone.

    `attributes`: of the process. `start`: of cumulative numbers, in nanoseconds since 1970, like all times here.
    """

    def __init__(
        self, constant_labels: Mapping[str, str], attributes: Mapping[str, Any], deltas: Deltas, errors: ErrorLog, *, start: int
    ) -> None:
        self._constant_labels, self._deltas, self._errors, self._start = constant_labels, deltas, errors, start
        self._resource = resource(attributes)
        self._attributes: WeakKeyDictionary[LabelRows, dict[tuple[str, ...], list[Attributes]]] = WeakKeyDictionary()

    def portions(self, families: Iterable[Family], at: int) -> Iterator[Portion]:
        """Yield the requests of an export with the numbers `at` a time: first those of the whole process, its state among them.

        No request has both these and rows of layers, which are many. A metric that cannot be encoded is left out.
        """
        ordered = sorted((family for group in by_spec(families).values() for family in group), key=_by_layer)
        for _, alike in itertools.groupby(ordered, key=_by_layer):
            rows: list[tuple[Family, slice]] = []
            room = POINTS
            for family in alike:
                start, count = 0, len(family.row_numbers)
                while start < count:
                    end = min(count, start + room)
                    rows.append((family, slice(start, end)))
                    room, start = room - (end - start), end
                    if not room:
                        yield self._portion(rows, at)
                        rows, room = [], POINTS
            if rows:
                yield self._portion(rows, at)

    def _portion(self, rows: Iterable[tuple[Family, slice]], at: int) -> Portion:
        metrics, sent = list[Metric](), list[tuple[Family, slice]]()
        for family, piece in rows:
            try:
                metrics.append(self._metric(family, piece, at))
                sent.append((family, piece))
            except Exception as error:  # noqa: BLE001 - it costs this metric alone
                text = f"{family.spec.name} cannot be encoded: {type(error).__name__}: {error}"
                self._errors.report_first(SOURCE, ValueError(text))
        return Portion(MetricsData([ResourceMetrics(self._resource, [ScopeMetrics(SCOPE, metrics, "")], "")]), tuple(sent))

    def _metric(self, family: Family, piece: slice, at: int) -> Metric:
        """Return the points of some of the present rows."""
        spec, rows = family.spec, family.row_numbers[piece]
        prepared = self._prepared(family)
        attributes = [prepared[row] for row in rows]
        data: Gauge | Sum | Histogram | ExponentialHistogram
        if spec.kind is Kind.GAUGE:
            values = family.values[rows].tolist()
            data = Gauge([NumberDataPoint(of, 0, at, value) for of, value in zip(attributes, values, strict=True)])
        else:
            temporality = AggregationTemporality.DELTA if spec.kind in self._deltas.kinds else AggregationTemporality.CUMULATIVE
            starts = [0 if spec.older else self._start] * len(rows)  # from when on each row counts, 0 where that is not known
            if spec.kind in self._deltas.kinds:
                starts = self._deltas.since(family)[rows].tolist()
            if spec.kind is Kind.COUNTER:
                numbers = zip(attributes, starts, family.values[rows].tolist(), strict=True)
                points = [NumberDataPoint(of, start, at, value) for of, start, value in numbers]
                data = Sum(points, temporality, is_monotonic=True)
            else:
                places = [(family, row, of, start, at) for of, start, row in zip(attributes, starts, rows, strict=True)]
                if family.exponential is None:
                    data = Histogram([_explicit(*place) for place in places], temporality)
                else:
                    data = ExponentialHistogram([_exponential(*place) for place in places], temporality)
        return Metric(spec.name, spec.help, UNITS.get(spec.unit, ""), data)

    def _prepared(self, family: Family) -> list[Attributes]:
        """Return the attributes of each row, kept as long as the rows are."""
        names, kept = family.spec.labels, self._attributes.setdefault(family.labels, {})
        if names not in kept:
            constant = {name: text(value) for name, value in self._constant_labels.items() if name not in names}
            kept[names] = [
                constant | {name: text(value) for name, value in zip(names, row, strict=True) if value}
                for row in family.labels.rows
            ]
        return kept[names]


def resource(attributes: Mapping[str, Any]) -> Resource:
    """Return the resource of all that is sent."""
    return Resource({key: text(value) if isinstance(value, str) else value for key, value in attributes.items()})


def text(value: str) -> str:
    """Return a text as it can be sent: half a character is a question mark."""
    return value.encode("utf-8", "replace").decode()


def _explicit(family: Family, row: int, attributes: Attributes, start: int, at: int) -> HistogramDataPoint:
    counts, total = family.values[row].astype(int).tolist(), _sum(family, row)
    bounds, exemplars = family.spec.buckets, _exemplars(family, row)
    return HistogramDataPoint(attributes, start, at, sum(counts), total, counts, bounds, UNKNOWN, UNKNOWN, exemplars)


def _exponential(family: Family, row: int, attributes: Attributes, start: int, at: int) -> ExponentialHistogramDataPoint:
    counts = {} if family.exponential is None else family.exponential[row]
    total, scale, offset, merged = int(family.values[row].sum()), SCALE, 0, list[int]()
    if counts:
        while (max(counts) >> SCALE - scale) - (min(counts) >> SCALE - scale) >= WIDTH:
            scale -= 1
        offset = min(counts) >> SCALE - scale
        merged = [0] * ((max(counts) >> SCALE - scale) - offset + 1)
        for index, count in counts.items():
            merged[(index >> SCALE - scale) - offset] += count
    return ExponentialHistogramDataPoint(
        attributes, start, at, total, _sum(family, row), scale, total - sum(counts.values()), Buckets(offset, merged),
        Buckets(0, []), 0, UNKNOWN, UNKNOWN, _exemplars(family, row),
    )  # fmt: skip


def _sum(family: Family, row: int) -> float:
    if family.sums is None:
        raise ValueError("a histogram has sums")
    return float(family.sums[row])


def _exemplars(family: Family, row: int) -> list[SdkExemplar]:
    exemplars: Iterable[Exemplar] = () if family.exemplars is None else family.exemplars[row].values()
    return [
        SdkExemplar({}, of.value, int(of.at * 1e9), int.from_bytes(of.span_id), int.from_bytes(of.trace_id)) for of in exemplars
    ]


def _by_layer(family: Family) -> bool:
    return "layer" in family.spec.labels
