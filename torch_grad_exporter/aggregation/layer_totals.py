"""LayerTotals: what samples add up to per layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from torch_grad_exporter.aggregation.baseline import Baselines
from torch_grad_exporter.aggregation.cursor import Cursor
from torch_grad_exporter.aggregation.declared import DeclaredValues
from torch_grad_exporter.aggregation.exponential import Counts, ExponentialCounts
from torch_grad_exporter.aggregation.layer_rows import LayerRows
from torch_grad_exporter.aggregation.peaks import Peaks
from torch_grad_exporter.aggregation.removed import RemovedLayers
from torch_grad_exporter.aggregation.samples import Groups, Sample, grouped_norms, values
from torch_grad_exporter.aggregation.settlement import Settled
from torch_grad_exporter.aggregation.tables import DECADE_BOUNDS, RECENT_SECONDS, Records, enter_norms, new_layers
from torch_grad_exporter.metrics.families import REMOVED, FloatArray, IntArray
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.transfer.events import Weights


@dataclass(frozen=True, slots=True, eq=False)
class UntrackedLayers:
    """Layers without a gradient that is tracked at present, whose totals stay; the last one, `REMOVED`, is the remainder.

    `values`: a record for each. `exponential`: as of `GradientSnapshot`.
    """

    labels: tuple[str, ...] = ()
    values: Records = field(default_factory=lambda: new_layers(0))
    exponential: tuple[Counts, ...] = ()


NONE_UNTRACKED = UntrackedLayers()


@dataclass(frozen=True, slots=True, eq=False)
class LayerValues:
    """A copy: a record for each layer of the table. `recent_max`: shape (layers,), NaN where there was no sample in the minute.

    `untracked`: layers that are not in the table and of which only the totals are shown. `declared`: as of `GradientSnapshot`.
    """

    table: ParameterTable
    values: Records
    recent_max: FloatArray
    untracked: UntrackedLayers
    exponential: tuple[Counts, ...] | None = None
    declared: Mapping[str, FloatArray] = field(default_factory=dict)


@dataclass(slots=True)
class LayerTotals:
    """One row per layer, as `LayerRows` says. `exponential`: counts the norms by exponential bucket, too, if it is given.

    `declared`: the values of the statistics that are declared besides the package's own.
    """

    exponential: ExponentialCounts | None = None
    declared: DeclaredValues = field(default_factory=DeclaredValues)
    _table: ParameterTable | None = None
    _labels: LayerRows = field(default_factory=LayerRows)
    _rows: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The rows of the table's layers."""
    _values: Records = field(default_factory=lambda: new_layers(0))
    _recent_second: IntArray = field(default_factory=lambda: np.full(RECENT_SECONDS, -1, dtype=np.int64))
    _baseline: Baselines = field(default_factory=Baselines)
    _peaks: Peaks = field(default_factory=Peaks)
    _removed: RemovedLayers = field(default_factory=RemovedLayers)

    def use(self, table: ParameterTable) -> None:
        """Shows the layers of `table` from now on; a layer that was there before, and still exists, goes on counting."""
        if table is self._table:
            return
        self._remove(self._labels.give_up(table))
        self._rows = self._labels.take(table)
        self._values = np.concatenate([self._values, new_layers(self._labels.size - len(self._values))])
        self._baseline.grow(len(self._values))
        self._peaks.grow(len(self._values))
        self.declared.grow(len(self._values))
        summed = np.zeros(len(table.layers), dtype=np.bool_)
        summed[table.layer_of[table.counts & (table.elements > 0)]] = True
        for name, flags in (("shown", table.shown), ("sharded", table.sharded), ("summed", summed)):
            self._values[name][self._rows] = flags
        self._table = table

    def _remove(self, rows: IntArray) -> None:
        """Adds the totals of rows to the remainder, and empties them."""
        if not len(rows):
            return
        self._removed.add(self._values[rows], () if self.exponential is None else self.exponential.snapshot(rows.tolist()))
        self._values[rows] = new_layers(len(rows))
        self._baseline.forget(rows)
        self._peaks.forget(rows)
        self.declared.forget(rows)
        if self.exponential is not None:
            self.exponential.forget(rows)

    def publish(self, settled: Settled) -> None:
        """Makes a sample the last one of what the stepping optimizers own, and counts what of it is new."""
        sample = settled.sample
        self._show_missing(settled)
        self._show(Groups.of(sample, settled.gradients(settled.shown)), sample)
        self._count(Groups.of(sample, settled.gradients(settled.uncounted)))
        self._judge(Groups.of(sample, settled.gradients(settled.unmeasured)), sample)

    def _show_missing(self, settled: Settled) -> None:
        """Parameters that got no gradient, in the layers that the sample covers."""
        table, sample = settled.sample.captured.table, settled.sample
        missing = np.zeros(len(table.tracked), dtype=np.bool_)
        missing[sample.captured.missing] = True
        mine = np.isin(settled.closed.owners, list(settled.shown))
        touched = np.unique(table.layer_of[mine & (sample.present | missing)])
        counts = np.bincount(table.layer_of[mine & missing], minlength=len(table.layers))
        self._values["missing"][self._rows[touched]] = counts[touched]

    def _show(self, groups: Groups, sample: Sample) -> None:
        layers, rows = self._values, self._rows[groups.layers]
        norms, elements, units = groups.norms(), groups.total(sample.elements), groups.total(sample.units)
        layers["norm"][rows], layers["sized"][rows] = norms, sample.sized
        layers["part"][rows], layers["units"][rows] = groups.counted_norms(), units
        layers["max_magnitude"][rows] = groups.largest(Column.MAX, Column.MIN)
        layers["zero_ratio"][rows] = groups.sum(Column.ZEROS) / np.maximum(elements, 1)
        share = np.where(units > 0, 1 / np.maximum(units, 1), np.nan)
        layers["zero_units_ratio"][rows] = groups.sum(Column.ZERO_UNITS) * share
        layers["dead_ratio"][rows] = groups.sum(Column.DEAD_UNITS) * share
        self._show_moments(groups, rows, norms, elements)
        self.declared.enter(sample, groups, rows)

    def _show_moments(self, groups: Groups, rows: IntArray, norms: FloatArray, elements: FloatArray) -> None:
        layers = self._values
        mean = groups.sum(Column.SUM) / np.maximum(elements, 1)
        rms = norms / np.sqrt(np.maximum(elements, 1))
        # In units of the root mean square, whose own square may be out of range.
        share = 1 - np.square(mean / np.where(rms > 0, rms, 1.0))
        layers["mean"][rows] = mean
        layers["stddev"][rows] = rms * np.sqrt(np.where(share < 0, 0.0, share))
        layers["minimum"][rows] = groups.smallest(Column.MIN)
        layers["maximum"][rows] = -groups.smallest(Column.MAX, negated=True)

    def _count(self, groups: Groups) -> None:
        layers, rows = self._values, self._rows[groups.layers]
        layers["captures"][rows] += 1
        layers["nans"][rows] += groups.counted_sum(Column.NANS)
        layers["infs"][rows] += groups.counted_sum(Column.INFS)

    def _judge(self, groups: Groups, sample: Sample) -> None:
        """Enters norms that were not known before into the sums and compares them with earlier ones."""
        layers, rows, norms = self._values, self._rows[groups.layers], groups.norms()
        finite = np.isfinite(norms)
        squares = np.square(groups.counted_norms())
        fits = np.isfinite(layers["squared_total"][rows] + squares)
        layers["squared_total"][rows[fits]] += squares[fits]
        seen = enter_norms(layers, rows[finite], norms[finite], DECADE_BOUNDS)
        if self.exponential is not None:
            self.exponential.observe(*seen)
        verdict = self._baseline.judge(rows, norms)
        layers["zscore"][rows] = verdict.zscore
        layers["spikes"][rows] += verdict.spike
        self._peaks.enter(rows, norms, verdict.zscore)
        # A finite norm of unknown size may be the largest: the largest is not known until it is no longer recent.
        recent = finite if sample.sized else groups.sum(Column.NANS) + groups.sum(Column.INFS) == 0
        self._remember(rows[recent], norms[recent] if sample.sized else np.inf, int(sample.captured.at))

    def _remember(self, rows: IntArray, norms: FloatArray | float, second: int) -> None:
        """Enters norms into the sliding minute, which has one place per second."""
        place = second % RECENT_SECONDS
        recent = self._values["recent"]
        if self._recent_second[place] != second:
            recent[:, place] = np.nan
            self._recent_second[place] = second
        recent[rows, place] = np.fmax(recent[rows, place], norms)

    def weigh(self, event: Weights) -> None:
        """Takes the norms of weights around one step."""
        self.use(event.table)
        norms = values(event.vector.ready()).reshape(-1, 3)
        layers, group = np.unique(event.table.layer_of[event.positions], return_inverse=True)
        before, after, update = (grouped_norms(norms[:, i], group, len(layers)) for i in range(3))
        rows = self._rows[layers]
        self._values["weight_norm"][rows] = after
        self._values["update_ratio"][rows] = np.where(before > 0, update / before, np.nan)

    def snapshot(self, now: float) -> LayerValues:
        """The values as of `now`, Unix time. Raises `RuntimeError` before the first table."""
        if self._table is None:
            raise RuntimeError("the layer totals have no table yet")
        found = self._values[self._rows]
        fresh = self._recent_second > int(now) - RECENT_SECONDS
        recent = np.fmax.reduce(found["recent"][:, fresh], axis=1, initial=np.nan)
        recent[np.isinf(recent)] = np.nan
        counts = None if self.exponential is None else self.exponential.snapshot(self._rows.tolist())
        return LayerValues(self._table, found, recent, self._untracked(), counts, self.declared.of(self._rows))

    def _untracked(self) -> UntrackedLayers:
        labels = self._labels.untracked
        if not labels and not self._removed.there:
            return NONE_UNTRACKED
        rows = self._labels.of(labels)
        shown = self._values["shown"][rows]
        labels, rows = tuple(compress(labels, shown.tolist())), rows[shown]
        values, counts = self._values[rows], () if self.exponential is None else self.exponential.snapshot(rows.tolist())
        if not self._removed.there or REMOVED in self._labels:  # a module may be called so: no series is there twice
            return UntrackedLayers(labels, values, counts)
        more = () if self.exponential is None else (self._removed.counts(),)
        return UntrackedLayers((*labels, REMOVED), np.concatenate([values, self._removed.record()]), counts + more)

    def follow(self, cursor: Cursor) -> None:
        """Begins with a consumer of peaks."""
        self._peaks.follow(cursor)

    def take_peaks(self, cursor: Cursor) -> FloatArray:
        """The norms and z-scores of the table's layers that were farthest from zero and are new to a consumer, (2, layers)."""
        return self._peaks.take(cursor, self._rows)
