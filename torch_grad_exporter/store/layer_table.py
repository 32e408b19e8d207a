"""LayerTable: what samples add up to per layer.

A label keeps its row and counters while one of the modules that it has represented exists, also while none of their
parameters is tracked, as when they are frozen. What the labels of removed modules have counted goes into one
remainder, so that sums over layers never fall.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import compress, islice

import numpy as np

from torch_grad_exporter.metrics.buckets import DECADES
from torch_grad_exporter.metrics.families import REMOVED, BoolArray, FloatArray, IntArray
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.combine import root_of_squares
from torch_grad_exporter.statistics.layout import Layout
from torch_grad_exporter.store.baselines import Baselines
from torch_grad_exporter.store.clip_detection import UNTOUCHED
from torch_grad_exporter.store.cursors import Cursor, NormSums, Peaks
from torch_grad_exporter.store.histograms import Counts, ExponentialCounts, Records, enter_norms, moved
from torch_grad_exporter.store.pending_samples import CountedSample
from torch_grad_exporter.store.records import Outcome
from torch_grad_exporter.store.sample import LayerValues, Sample, Selection

RECENT_SECONDS = 60
"""Over which a layer's recent maximum is taken."""

MOST_UNTRACKED = 1000
"""Labels out of the table that keep a row, or twice as many as the largest table had; then the oldest is removed."""

SELECTIONS = 16
"""Of parameters that are remembered: from sample to sample they are the same few."""

GAUGES = (
    "norm", "max_magnitude", "zero_ratio", "zero_units_ratio", "dead_ratio", "missing", "zscore", "part", "units",
    "mean", "stddev", "minimum", "maximum", "coefficient",
)  # fmt: skip
"""What of a layer is that of its optimizer's last sample; a record begins with it."""

TOTALS = ("squared_total", "captures", "spikes", "nans", "infs", "clipped", "bucket_sum", "buckets")
"""What of a layer only grows."""

LAYER = np.dtype(
    [(name, np.float64) for name in (*GAUGES, *TOTALS[:-1])]
    + [("buckets", np.float64, (len(DECADES) + 1,)), ("recent", np.float64, (RECENT_SECONDS,))]
    + [(name, np.bool_) for name in ("read", "sized", "shown", "sharded", "summed")],
    align=True,
)
"""One layer's values; NaN where a value was never had, but for the totals.

`read`: the last sample of its optimizer gave it a gradient; `sized`: whose loss scale is known. `part`: the norm of what
counts in sums over ranks, like `squared_total`, `nans` and `infs`; `units`: of what this rank has. `shown`, `sharded`:
of the last table that had the layer; `summed`: some of it counts in sums over ranks.
"""

BOUNDS = np.array(DECADES)

COUNTED = ("minimum", "maximum", "max_magnitude", "zero_ratio")  # of large models on the CPU, every fourth sample counts them


@dataclass(frozen=True, slots=True, eq=False)
class UntrackedLayers:
    """Layers without a gradient that is tracked at present, whose totals stay; `REMOVED` at the end is the remainder."""

    labels: tuple[str, ...]
    values: Records
    exponential: tuple[Counts, ...]


class LayerTable:
    """One row per layer: those of the parameter table in its order, then those that are not tracked, the latest last.

    Args:
        table: The parameters at the start.
        cursors: Consumers of peaks.
        layout: Columns of samples; of statistics beyond the package's own the last value of each layer is kept.
        exponential: Whether norms are counted by exponential bucket as well.
    """

    def __init__(self, table: ParameterTable, cursors: Collection[Cursor], layout: Layout, *, exponential: bool) -> None:
        self._cursors = cursors
        self._exponential = ExponentialCounts(enabled=exponential)
        self._declared_places = {key: place for place, key in enumerate(layout.keys) if place >= len(Column)}
        self._declared = np.zeros((0, len(self._declared_places)))
        self._selections: dict[bytes, Selection] = {}
        self._modules: dict[str, set[str]] = {}  # by label, in the order of the rows: the modules that still exist
        self._values = _new_rows(0)
        self._removed = _new_rows(1)  # the remainder; shown if any removed layer was
        self._recent_second = np.full(RECENT_SECONDS, -1, dtype=np.int64)  # of each place of the column `recent`
        self._baselines = Baselines()
        self._largest = 0
        self._compared: tuple[int, set[int]] = -1, set()  # the last sample with `clip=`, and the rows it counted for
        self.table = table
        self._arrange(table)

    # Rows

    def use(self, table: ParameterTable) -> None:
        """Show the layers of `table` from now on; a layer that still exists goes on counting."""
        if table is not self.table:
            self._arrange(table)

    def _arrange(self, table: ParameterTable) -> None:
        row_of = {label: row for row, label in enumerate(self._modules)}
        modules = self._kept(table)
        index = np.array([row_of.get(label, -1) for label in modules], dtype=np.int64)
        values = moved(self._values, index, _new_rows(1))
        summed = np.zeros(len(table.layers), dtype=np.bool_)
        summed[table.layer_of[table.counts & (table.elements > 0)]] = True
        for name, flags in (("shown", table.shown), ("sharded", table.sharded), ("summed", summed)):
            values[name][: len(summed)] = flags
        declared = np.pad(self._declared, ((0, 1), (0, 0)), constant_values=np.nan)[index]
        baselines = self._baselines.moved(index)
        cursors = [(c, c.layers.moved(index), None if c.norms is None else c.norms.moved(index)) for c in self._cursors]
        self._remove({label: row for label, row in row_of.items() if label not in modules})
        # All at once, at the end: what raises before leaves everything as it was.
        self.table, self._modules, self._values, self._declared = table, modules, values, declared
        self._baselines, self._selections = baselines, {}
        for cursor, peaks, norms in cursors:
            cursor.layers, cursor.norms = peaks, norms

    def _kept(self, table: ParameterTable) -> dict[str, set[str]]:
        """Return the labels that have a row with this table, in the order of the rows, with their modules."""
        exist = table.frozen.union(parameter.layer for parameter in table.tracked)
        known = {label: modules & exist for label, modules in self._modules.items()}
        tracked = {label: known.get(label, set()) for label in table.layers}
        for parameter, layer in zip(table.tracked, table.layer_of.tolist(), strict=True):
            tracked[table.layers[layer]].add(parameter.layer)
        before = len(self.table.layers)
        latest_last = (*islice(known, before, None), *islice(known, before))
        untracked = {label: known[label] for label in latest_last if label not in tracked and known[label]}
        self._largest = max(self._largest, len(tracked))
        too_many = max(0, len(untracked) - max(MOST_UNTRACKED, 2 * self._largest))
        return tracked | dict(islice(untracked.items(), too_many, None))

    def _remove(self, row_of: Mapping[str, int]) -> None:
        """Add the totals of these layers to the remainder, but for what this rank does not show of them."""
        gone = self._values[list(row_of.values())]
        shown, whole = gone["shown"], gone["shown"] & ~gone["sharded"]
        for name in TOTALS:
            with np.errstate(over="ignore"):
                added = gone[name][whole if name in ("buckets", "bucket_sum") else shown].sum(axis=0)
                self._removed[name] = np.minimum(self._removed[name] + added, np.finfo(np.float64).max)
        for label, counts in zip(row_of, whole.tolist(), strict=True):
            if counts:
                self._exponential.move(label, None)
            else:
                self._exponential.drop(label)
        self._removed["summed"] = True
        self._removed["shown"] |= shown.any()

    # Samples

    def count(self, counted: CountedSample) -> None:
        """Show a sample as the last one of what the stepping optimizers own, and count what of it is new."""
        sample = counted.sample
        self.use(sample.read.table)
        owned = counted.owned(counted.shown)
        shown = LayerValues(sample, self._selected(owned & sample.present))
        before = {name: self._values[name][shown.layers] for name in COUNTED}
        self._clear(self._selected(owned).layers)
        self._values["missing"][shown.layers] = 0
        if len(sample.read.missing):
            missing = np.zeros(len(owned), dtype=np.bool_)
            missing[sample.read.missing] = True
            rows, counts = np.unique(self.table.layer_of[owned & missing], return_counts=True)
            self._values["missing"][rows] = counts
        self._show(shown, sample, before)

        def of(optimizers: frozenset[int]) -> LayerValues:
            if optimizers == counted.shown:
                return shown
            return LayerValues(sample, self._selected(counted.owned(optimizers) & sample.present))

        new = of(counted.new)
        self._values["captures"][new.layers] += 1
        self._values["nans"][new.layers] += new.combined(Column.NANS, counted=True)
        self._values["infs"][new.layers] += new.combined(Column.INFS, counted=True)
        self._enter_norms(of(counted.newly_sized), sample)
        if counted.clipped is not None:
            self._show_clipping(counted, *counted.clipped)

    def _selected(self, wanted: BoolArray) -> Selection:
        key = wanted.tobytes()
        if key not in self._selections:
            if len(self._selections) >= SELECTIONS:
                self._selections = {}
            self._selections[key] = Selection.of(self.table, wanted)
        return self._selections[key]

    def _clear(self, rows: IntArray) -> None:
        """Clear the last values of layers: one that this sample gave no gradient has none."""
        if not len(rows):
            return
        gauges = np.ndarray((len(self._values), len(GAUGES)), np.float64, self._values, 0, (self._values.itemsize, 8))
        gauges[rows] = np.nan
        self._values["read"][rows] = self._values["sized"][rows] = False
        self._declared[rows] = np.nan

    def _show(self, values: LayerValues, sample: Sample, before: Mapping[str, FloatArray]) -> None:
        """Show a sample; what only some samples count stays as it was `before` if this one did not."""
        layers, rows = self._values, values.layers
        norms, elements, units = values.combined(Column.NORM), values.total(sample.elements), values.total(sample.units)
        layers["norm"][rows], layers["read"][rows], layers["sized"][rows] = norms, True, sample.sized
        layers["part"][rows], layers["units"][rows] = values.combined(Column.NORM, counted=True), units
        low, high, zeros = (values.combined(column) for column in (Column.MIN, Column.MAX, Column.ZEROS))
        found = low, high, np.maximum(np.abs(low), np.abs(high)), zeros / np.maximum(elements, 1)
        for name, counted in zip(COUNTED, found, strict=True):
            layers[name][rows] = np.where(np.isnan(zeros), before[name], counted)
        per_unit = np.where(units > 0, 1 / np.maximum(units, 1), np.nan)
        layers["zero_units_ratio"][rows] = values.combined(Column.ZERO_UNITS) * per_unit
        layers["dead_ratio"][rows] = values.combined(Column.DEAD_UNITS) * per_unit
        mean = values.combined(Column.SUM) / np.maximum(elements, 1)
        rms = norms / np.sqrt(np.maximum(elements, 1))
        # In units of the root mean square, whose own square may be out of range.
        variance = 1 - np.square(mean / np.where(rms > 0, rms, 1.0))
        layers["mean"][rows], layers["stddev"][rows] = mean, rms * np.sqrt(np.where(variance < 0, 0.0, variance))
        for at, place in enumerate(self._declared_places.values()):
            unknown = self.table.sharded[rows] & values.layout.columns[place].whole_only
            self._declared[rows, at] = np.where(unknown, np.nan, values.combined(place))

    def _enter_norms(self, values: LayerValues, sample: Sample) -> None:
        """Enter norms that were not known before into the sums, and compare them with earlier ones."""
        layers, rows, norms = self._values, values.layers, values.combined(Column.NORM)
        sums = layers["squared_total"][rows] + np.square(values.combined(Column.NORM, counted=True))
        layers["squared_total"][rows] = np.where(np.isfinite(sums), sums, layers["squared_total"][rows])
        entered, entered_norms = enter_norms(layers, rows, norms, BOUNDS)
        self._exponential.observe((self.table.layers[row] for row in entered.tolist()), entered_norms)
        zscore, spike = self._baselines.judge(rows, norms)
        layers["zscore"][rows] = zscore
        layers["spikes"][rows] += spike
        bad = values.combined(Column.NANS) + values.combined(Column.INFS) > 0
        known = np.isfinite(norms) if sample.sized else ~bad
        for cursor in self._cursors:
            cursor.layers.enter(rows, norms, zscore)
            if cursor.norms is not None:
                cursor.norms.enter(rows, norms, ~known)
        # A finite norm of unknown size may be the largest: the maximum is unknown until that is no longer recent.
        self._enter_recent(rows[known], norms[known] if sample.sized else np.inf, int(sample.read.at))

    def _enter_recent(self, rows: IntArray, norms: FloatArray | float, second: int) -> None:
        place, recent = second % RECENT_SECONDS, self._values["recent"]
        if self._recent_second[place] != second:
            recent[:, place] = np.nan
            self._recent_second[place] = second
        recent[rows, place] = np.fmax(recent[rows, place], norms)

    def _show_clipping(self, counted: CountedSample, before: FloatArray, after: FloatArray) -> None:
        """Show how `clip=` has clipped each layer, and count it once for each sample."""
        chosen = np.flatnonzero(np.isfinite(before) & np.isfinite(after) & counted.sample.present)
        rows, group = np.unique(self.table.layer_of[chosen], return_inverse=True)
        whole = root_of_squares(before[chosen], group, len(rows))
        left = root_of_squares(after[chosen], group, len(rows))
        rows, coefficients = rows[whole > 0], left[whole > 0] / whole[whole > 0]
        if counted.sample.sized:
            self._values["coefficient"][rows] = coefficients
        if counted.number != self._compared[0]:
            self._compared = counted.number, set()
        fresh = np.array([row not in self._compared[1] for row in rows.tolist()], dtype=np.bool_)
        if counted.ended.outcome is not Outcome.UNKNOWN:
            self._values["clipped"][rows[fresh]] += coefficients[fresh] < 1 - UNTOUCHED
            self._compared[1].update(rows.tolist())

    # Reading

    def follow(self, cursor: Cursor) -> None:
        """Begin with a consumer of peaks, and of norms where it asks for them."""
        cursor.layers = Peaks(len(self._values))
        if cursor.norms is not None:
            cursor.norms = NormSums(len(self._values))

    def values(self) -> Records:
        """Return a copy of the rows of the table's layers."""
        return self._values[: len(self.table.layers)].copy()

    def recent_max(self, now: float) -> FloatArray:
        """Return the largest norm of each of the table's layers in the minute before `now`; NaN where there was none."""
        fresh = self._recent_second > int(now) - RECENT_SECONDS
        recent = np.fmax.reduce(self._values["recent"][: len(self.table.layers), fresh], axis=1, initial=np.nan)
        return np.where(np.isinf(recent), np.nan, recent)

    def exponential(self) -> tuple[Counts, ...] | None:
        """Return the norms of the table's layers by exponential bucket, if they are counted."""
        return self._exponential.of(self.table.layers)

    def declared(self) -> Mapping[str, FloatArray]:
        """Return the other statistics' values of the table's layers by column, `statistic.column`."""
        return {key: self._declared[: len(self.table.layers), at].copy() for at, key in enumerate(self._declared_places)}

    def untracked(self) -> UntrackedLayers:
        """Return the layers that are not in the table and of which only the totals are shown."""
        start = len(self.table.layers)
        rows = self._values[start:]
        labels: tuple[str | None, ...] = tuple(compress(islice(self._modules, start, None), rows["shown"].tolist()))
        rows = rows[rows["shown"]]
        if self._removed["shown"][0] and REMOVED not in self._modules:  # a module may have this name
            labels, rows = (*labels, None), np.concatenate([rows, self._removed])
        shown = tuple(REMOVED if label is None else label for label in labels)
        return UntrackedLayers(shown, rows, self._exponential.of(labels) or ())


def _new_rows(count: int) -> Records:
    """Return rows of layers that have had no sample."""
    rows = np.zeros(count, dtype=LAYER)
    for name in (*GAUGES, "recent"):
        rows[name] = np.nan
    return rows
