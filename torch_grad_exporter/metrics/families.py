"""The neutral metric family, which every collector yields and every output takes.

A family is one metric (`Spec`) with its label rows and its values as arrays. It knows neither
Prometheus' text format nor OTLP; those are outputs and live in `outputs/`. The constant labels of a
process (`run`, `rank` and the user's own) are added by the outputs and appear in no family.
"""

from __future__ import annotations

import enum
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from torch_grad_exporter.metrics.exponential import Exponential

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]


_Row = TypeVar("_Row", bound=tuple[str, ...])


class Kind(enum.Enum):
    """The three metric kinds in use, by their Prometheus names."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Spec:
    """The declaration of a metric.

    Attributes:
        name: With `_total` on a counter.
        kind: Of the metric.
        help: A sentence.
        labels: Their names.
        unit: Prometheus' base unit, empty for none.
        buckets: The finite upper bounds of a histogram, ascending; the `+Inf` bucket is implied.
        opt_in: The option that enables the metric; empty for the metrics that are always there.
        older: Whether a counter or a histogram may have begun before the exporter did, with the process, the host or the device.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()
    opt_in: str = ""
    older: bool = False

    def __post_init__(self) -> None:
        if (self.kind is Kind.COUNTER) != self.name.endswith("_total"):
            raise ValueError(f"{self.name}: a counter's name ends in _total, and no other name does")
        if (self.kind is Kind.HISTOGRAM) != bool(self.buckets):
            raise ValueError(f"{self.name}: a histogram has buckets, and nothing else has")

    def __hash__(self) -> int:
        # A hash of all fields would take longer than most look-ups by it.
        return hash(self.name)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LabelRows:
    """The label values of a family's rows, one tuple per row in the order of `Spec.labels`.

    Compared by identity: a collector keeps its `LabelRows` from scrape to scrape while they do not
    change, so that an output can prepare the text of each row once.
    """

    rows: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.rows)


# The layer of the one row that the counters of all removed layers are added up into. Its values were counted before under other
# labels: sums over layers never fall, but its growth shows nothing about the training.
REMOVED = "(removed)"

# The one row of a metric without labels.
NO_LABELS = LabelRows(((),))


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One observation of a histogram and the trace that was active then; `at` is Unix time in seconds.

    `trace_id`, `span_id`: of 16 and of 8 bytes, as W3C's trace context has them.
    """

    value: float
    at: float
    trace_id: bytes
    span_id: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """A metric with its values at one moment; row `i` of every array belongs to `labels.rows[i]`.

    `values`: shape (rows,) for gauges and counters, (rows, len(buckets) + 1) for histograms, there the
    observations per bucket, not cumulated, the last one `+Inf`.
    `sums`: shape (rows,), the sum of the observations; histograms only.
    `present`: shape (rows,); a row that is False yields no series. `None` means that all are present.
    `exponential`: of a histogram, where it is counted, the same observations by exponential bucket, zeros in none.
    `exemplars`: of a histogram, a mapping for each row, by bucket.
    """

    spec: Spec
    values: FloatArray
    labels: LabelRows = NO_LABELS
    present: BoolArray | None = None
    sums: FloatArray | None = None
    exponential: Exponential | None = None
    exemplars: tuple[Mapping[int, Exemplar], ...] | None = None

    def __post_init__(self) -> None:
        # A wrong shape must cost the collector that made it, not the scrape that renders it.
        rows, histogram = len(self.labels), self.spec.kind is Kind.HISTOGRAM
        expected = (rows, len(self.spec.buckets) + 1) if histogram else (rows,)
        if self.values.shape != expected or histogram != (self.sums is not None):
            raise ValueError(
                f"{self.spec.name}: values of shape {self.values.shape}, expected {expected}; sums with a histogram only"
            )
        exponential, exemplars, present, sums = self.exponential, self.exemplars, self.present, self.sums
        if (exponential is not None and len(exponential) != rows) or (exemplars is not None and len(exemplars) != rows):
            raise ValueError(f"{self.spec.name}: one mapping per row is expected with a histogram, {rows} in all")
        if (present is not None and present.shape != (rows,)) or (sums is not None and sums.shape != (rows,)):
            raise ValueError(f"{self.spec.name}: one entry per row is expected in `present` and `sums`, {rows} in all")

    @property
    def row_numbers(self) -> Sequence[int]:
        """The numbers of the rows that yield series, ascending."""
        return range(len(self.labels)) if self.present is None else np.flatnonzero(self.present).tolist()

    @property
    def series(self) -> int:
        """The number of time series that the family yields; a histogram row has `_bucket`s, `_sum` and `_count`."""
        rows = len(self.labels) if self.present is None else int(np.count_nonzero(self.present))
        return rows * (len(self.spec.buckets) + 3 if self.spec.kind is Kind.HISTOGRAM else 1)


def by_spec(families: Iterable[Family]) -> dict[Spec, list[Family]]:
    """Return the families of each metric, in the order in which the metrics first appear.

    Outputs need all series of a metric in one place.
    """
    groups: dict[Spec, list[Family]] = {}
    for family in families:
        groups.setdefault(family.spec, []).append(family)
    return groups


def flat(families: Iterable[Family], match: str | re.Pattern[str] = "") -> dict[str, float]:
    """Return gauges and counters as one mapping, for loggers that know no labels, such as TensorBoard and MLflow.

    Each is under the name of its metric and the values of its labels, such as `torch_grad_norm/encoder.0`. Left out are
    histograms, which are not single numbers, the sums over removed layers, and metrics that are facts in labels (`..._info`),
    whose labels no logger takes as a name, unless `match` contains "_info".
    `match`: a regular expression that is searched in these names.
    """
    pattern, values = re.compile(match), {}
    for family in families:
        fact = family.spec.name.endswith("_info") and "_info" not in pattern.pattern
        if family.spec.kind is Kind.HISTOGRAM or fact:
            continue
        for row in family.row_numbers:
            labels = family.labels.rows[row]
            name = "/".join((family.spec.name, *filter(None, labels)))
            if REMOVED not in labels and pattern.search(name):
                values[name] = float(family.values[row])
    return values


def scalar(spec: Spec, value: float | None) -> Family:
    """Return a family of one row without labels; None means that there is no value, so no series."""
    present = None if value is not None else np.zeros(1, dtype=np.bool_)
    return Family(spec, np.array([value if value is not None else 0.0], dtype=np.float64), present=present)


@dataclass(slots=True)
class RowCache:
    """Keeps the `LabelRows` of a family while its rows stay the same."""

    _kept: LabelRows = field(default_factory=lambda: LabelRows(()))

    def get(self, rows: tuple[tuple[str, ...], ...]) -> LabelRows:
        """Return the kept object if it has these rows, else a new one, kept from now on."""
        kept = self._kept
        if kept.rows != rows:
            # Another scrape may do the same at this moment: each returns its own.
            kept = self._kept = LabelRows(rows)
        return kept


@dataclass(slots=True)
class LabelledRows:
    """Makes families of a few labelled rows, and keeps the `LabelRows` of each metric while its rows stay the same."""

    _kept: defaultdict[Spec, RowCache] = field(default_factory=lambda: defaultdict(RowCache))

    def by_label(self, spec: Spec, values: Mapping[str, float | None]) -> Family:
        """Return the family of a metric with one label; None means no row."""
        return self.family(spec, {(label,): float(value) for label, value in values.items() if value is not None})

    def family(self, spec: Spec, values: Mapping[_Row, float]) -> Family:
        """Return the family with these values by their labels."""
        return Family(spec, np.array(list(values.values()), dtype=np.float64), self._kept[spec].get(tuple(values)))
