"""LayerTable: what samples add up to per layer.

A label keeps its row and counters while one of the modules that it has represented exists, also while none of their
parameters is tracked, as when they are frozen. What the labels of removed modules have counted goes into one
remainder, so that sums over layers never fall.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress, islice

import numpy as np

from torch_grad_exporter.metrics.buckets import DECADES
from torch_grad_exporter.metrics.exponential import Exponential
from torch_grad_exporter.metrics.families import REMOVED, BoolArray, FloatArray
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.combine import root_of_squares
from torch_grad_exporter.statistics.layout import Layout
from torch_grad_exporter.store.baselines import Baselines
from torch_grad_exporter.store.clip_detection import UNTOUCHED
from torch_grad_exporter.store.histograms import NormRows, Records
from torch_grad_exporter.store.pending_samples import CountedSample
from torch_grad_exporter.store.records import UNOWNED, Outcome
from torch_grad_exporter.store.sample import LayerValues, Sample, Selection

RECENT_SECONDS = 60  # over which a layer's recent maximum is taken
MOST_UNTRACKED = 1000  # labels out of the table that keep a row, or twice those of the largest table; then the oldest goes
SELECTIONS = 16  # of parameters that are remembered: from sample to sample they are the same few

# What of a layer is that of its optimizer's last sample, NaN where it is unknown.
#   part: the norm of what counts in sums over ranks, like `squared_total`, `nans` and `infs`
#   units: of what this rank has
GAUGES = (
    "norm", "max_magnitude", "zero_ratio", "zero_units_ratio", "dead_ratio", "missing", "zscore", "part", "units",
    "mean", "stddev", "minimum", "maximum", "coefficient",
)  # fmt: skip
COUNTED = ("minimum", "maximum", "max_magnitude", "zero_ratio")  # of large models on the CPU, every fourth sample counts them

# What of a layer only grows.
TOTALS = ("squared_total", "captures", "spikes", "nans", "infs", "clipped", "bucket_sum", "buckets")

# read: the last sample of its optimizer gave it a gradient
# sized: one whose loss scale is known
# shown, sharded: of the last table that had the layer
# summed: some of it counts in sums over ranks
FLAGS = ("read", "sized", "shown", "sharded", "summed")


@dataclass(frozen=True, slots=True, eq=False)
class UntrackedLayers:
    """Layers without a gradient that is tracked at present, whose totals stay; `REMOVED` at the end is the remainder."""

    labels: tuple[str, ...]
    values: Records
    exponential: Exponential


class LayerTable:
    """One row per layer: those of the parameter table in its order, then those that are not tracked, the latest last.

    Args:
        table: The parameters at the start.
        layout: Columns of samples; of statistics beyond the package's own the last value of each layer is kept.
    """

    def __init__(self, table: ParameterTable, layout: Layout) -> None:
        self._declared = {key: place for place, key in enumerate(layout.keys) if place >= len(Column)}
        columns = np.dtype(
            [(name, np.float64) for name in GAUGES]  # first, so that they can be cleared at once
            + [("declared", np.float64, (len(self._declared),))]
            + [(name, np.float64) for name in TOTALS[:-1]]
            + [("buckets", np.float64, (len(DECADES) + 1,)), ("recent", np.float64, (RECENT_SECONDS,))]
            + [(name, np.bool_) for name in FLAGS],
            align=True,
        )
        empty = np.zeros(1, dtype=columns)
        for name in (*GAUGES, "declared", "recent"):
            empty[name] = np.nan
        self.rows = NormRows(empty, DECADES)
        self.rows.arrange(np.array([-1]))  # the last row is the remainder; shown if any removed layer was
        self._modules: dict[str, set[str]] = {}  # by label, in the order of the rows: the modules that still exist
        self._recent_second = np.full(RECENT_SECONDS, -1, dtype=np.int64)  # of each place of the column `recent`
        self._baselines = Baselines()
        self._selections: dict[bytes, Selection] = {}
        self._largest = 0
        self.table = table
        self._arrange(table)

    # Rows

    def _arrange(self, table: ParameterTable) -> None:
        """Show the layers of `table` from now on; a layer that still exists goes on counting."""
        row_of = {label: row for row, label in enumerate(self._modules)}
        modules = self._kept(table)
        self._remove([row for label, row in row_of.items() if label not in modules])
        index = np.array([*(row_of.get(label, -1) for label in modules), len(row_of)], dtype=np.int64)
        baselines = self._baselines.moved(index)
        self.rows.arrange(index)
        self.table, self._modules, self._baselines, self._selections = table, modules, baselines, {}
        summed = np.zeros(len(table.layers), dtype=np.bool_)
        summed[table.layer_of[table.counts & (table.elements > 0)]] = True
        for name, flags in (("shown", table.shown), ("sharded", table.sharded), ("summed", summed)):
            self.rows.values[name][: len(flags)] = flags

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

    def _remove(self, rows: list[int]) -> None:
        """Add the totals of these rows to the remainder, but for what this rank does not show of them."""
        gone, remainder = self.rows.values[rows], self.rows.values[-1:]
        shown, whole = gone["shown"], gone["shown"] & ~gone["sharded"]
        for name in TOTALS:
            with np.errstate(over="ignore"):
                added = gone[name][whole if name in ("buckets", "bucket_sum") else shown].sum(axis=0)
                remainder[name] = np.minimum(remainder[name] + added, np.finfo(np.float64).max)
        for row in compress(rows, whole.tolist()):
            self.rows.exponential.add(row, to=-1)
        remainder["summed"] = True
        remainder["shown"] |= shown.any()

    # Samples

    def count(self, counted: CountedSample) -> None:
        """Show a sample as the last one of what the stepping optimizers own, and count what of it is new."""
        sample = counted.sample
        if sample.read.table is not self.table:
            self._arrange(sample.read.table)
        owned, layers, whole = counted.owned(counted.shown), self.rows.values, sample.present
        unowned = (counted.owners == UNOWNED) & (sample.present | sample.read.at_step)  # a step reads what optimizers own
        # As where a copy took the place of a part, but not in its optimizer: a norm of the rest means nothing.
        if UNOWNED not in counted.shown and unowned.any():
            partly = np.isin(self.table.layer_of, self.table.layer_of[unowned])
            owned, whole = owned | partly, whole & ~partly
        shown = LayerValues(sample, self._selection(owned & whole))
        before = {name: layers[name][shown.layers] for name in COUNTED}
        # A layer that this sample gave no gradient has no last values.
        cleared = self._selection(owned).layers
        width = len(GAUGES) + len(self._declared)
        np.ndarray((len(layers), width), np.float64, layers, 0, (layers.itemsize, 8))[cleared] = np.nan
        layers["read"][cleared] = layers["sized"][cleared] = False
        layers["missing"][shown.layers] = 0
        if len(sample.read.missing):
            missing = np.zeros(len(owned), dtype=np.bool_)
            missing[sample.read.missing] = True
            rows, counts = np.unique(self.table.layer_of[owned & missing], return_counts=True)
            layers["missing"][rows] = counts
        self._show(shown, sample, before)

        def of(optimizers: frozenset[int]) -> LayerValues:
            if optimizers == counted.shown:
                return shown
            return LayerValues(sample, self._selection(counted.owned(optimizers) & whole))

        new = of(counted.new)
        layers["captures"][new.layers] += 1
        layers["nans"][new.layers] += new.combined(Column.NANS, counted=True)
        layers["infs"][new.layers] += new.combined(Column.INFS, counted=True)
        self._enter_norms(of(counted.newly_sized), sample)
        if counted.clipped is not None:
            self._show_clipping(counted, *counted.clipped)

    def _selection(self, wanted: BoolArray) -> Selection:
        key = wanted.tobytes()
        if key not in self._selections:
            if len(self._selections) >= SELECTIONS:
                self._selections = {}
            self._selections[key] = Selection(self.table, wanted)
        return self._selections[key]

    def _show(self, values: LayerValues, sample: Sample, before: Mapping[str, FloatArray]) -> None:
        """Show a sample; what only some samples count stays as it was `before` if this one did not."""
        layers, rows = self.rows.values, values.layers
        norms, elements, units = values.combined(Column.NORM), values.total(sample.elements), values.total(sample.units)
        layers["norm"][rows], layers["read"][rows], layers["sized"][rows] = norms, True, sample.sized
        layers["part"][rows], layers["units"][rows] = values.combined(Column.NORM, counted=True), units
        low, high, zeros = (values.combined(column) for column in (Column.MIN, Column.MAX, Column.ZEROS))
        measured = low, high, np.maximum(np.abs(low), np.abs(high)), zeros / np.maximum(elements, 1)
        for name, counted in zip(COUNTED, measured, strict=True):
            layers[name][rows] = np.where(np.isnan(zeros), before[name], counted)
        per_unit = np.where(units > 0, 1 / np.maximum(units, 1), np.nan)
        layers["zero_units_ratio"][rows] = values.combined(Column.ZERO_UNITS) * per_unit
        layers["dead_ratio"][rows] = values.combined(Column.DEAD_UNITS) * per_unit
        mean = values.combined(Column.SUM) / np.maximum(elements, 1)
        rms = norms / np.sqrt(np.maximum(elements, 1))
        # In units of the root mean square, whose own square may be out of range.
        variance = 1 - np.square(mean / np.where(rms > 0, rms, 1.0))
        layers["mean"][rows], layers["stddev"][rows] = mean, rms * np.sqrt(np.where(variance < 0, 0.0, variance))
        for at, place in enumerate(self._declared.values()):
            unknown = self.table.sharded[rows] & values.layout.columns[place].whole_only
            layers["declared"][rows, at] = np.where(unknown, np.nan, values.combined(place))

    def _enter_norms(self, values: LayerValues, sample: Sample) -> None:
        """Enter norms that were not known before into the sums, and compare them with earlier ones."""
        layers, rows, norms = self.rows.values, values.layers, values.combined(Column.NORM)
        sums = layers["squared_total"][rows] + np.square(values.combined(Column.NORM, counted=True))
        layers["squared_total"][rows] = np.where(np.isfinite(sums), sums, layers["squared_total"][rows])
        self.rows.enter(rows, norms)
        zscore, spike = self._baselines.judge(rows, norms)
        layers["zscore"][rows] = zscore
        layers["spikes"][rows] += spike
        bad = values.combined(Column.NANS) + values.combined(Column.INFS) > 0
        known = np.isfinite(norms) if sample.sized else ~bad
        self.rows.note(rows, norms, zscore, known)
        second, recent = int(sample.read.at), layers["recent"]
        place = second % RECENT_SECONDS
        if self._recent_second[place] != second:
            recent[:, place], self._recent_second[place] = np.nan, second
        # A finite norm of unknown size may be the largest: the maximum is unknown until that is no longer recent.
        recent[rows[known], place] = np.fmax(recent[rows[known], place], norms[known] if sample.sized else np.inf)

    def _show_clipping(self, counted: CountedSample, before: FloatArray, after: FloatArray) -> None:
        """Show how `clip=` has clipped each layer, and count it once for each sample."""
        chosen = np.flatnonzero(np.isfinite(before) & np.isfinite(after) & counted.sample.present)
        rows, group = np.unique(self.table.layer_of[chosen], return_inverse=True)
        coefficients = root_of_squares(after[chosen], group, len(rows)) / root_of_squares(before[chosen], group, len(rows))
        if counted.sample.sized:
            self.rows.values["coefficient"][rows] = coefficients
        if counted.ended.outcome is not Outcome.UNKNOWN:
            new = np.zeros(len(rows), dtype=np.bool_)
            new[group[counted.owned(counted.new)[chosen]]] = True
            self.rows.values["clipped"][rows] += new & (coefficients < 1 - UNTOUCHED)

    # Reading

    def recent_max(self, now: float) -> FloatArray:
        """Return the largest norm of each of the table's layers in the minute before `now`; NaN where there was none."""
        fresh = self._recent_second > int(now) - RECENT_SECONDS
        recent = np.fmax.reduce(self.rows.values["recent"][: len(self.table.layers), fresh], axis=1, initial=np.nan)
        return np.where(np.isinf(recent), np.nan, recent)

    def declared(self, values: Records) -> Mapping[str, FloatArray]:
        """Return the columns of other statistics by name, `statistic.column`."""
        return {key: values["declared"][:, at] for at, key in enumerate(self._declared)}

    def untracked(self) -> UntrackedLayers:
        """Return the layers that are not in the table and of which only the totals are shown."""
        start = len(self.table.layers)
        shown = self.rows.values["shown"][start:].copy()
        shown[-1] &= REMOVED not in self._modules  # a module may have this name
        rows = start + np.flatnonzero(shown)
        labels = compress((*islice(self._modules, start, None), REMOVED), shown.tolist())
        return UntrackedLayers(tuple(labels), self.rows.values[rows], self.rows.exponential.of(rows))
