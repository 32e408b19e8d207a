"""LayerTotals: what samples add up to per layer.

A label keeps its row, and its counters, as long as one of the modules that it has represented exists, also while none of their
parameters is tracked, as when they are frozen. What a label has counted whose modules have all been removed goes into one
remainder, so that sums over layers never fall.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import compress, islice

import numpy as np

from torch_grad_exporter.aggregation.baseline import Baselines
from torch_grad_exporter.aggregation.cursor import Cursor, NormSums, Peaks
from torch_grad_exporter.aggregation.edits import UNTOUCHED, Edit
from torch_grad_exporter.aggregation.exponential import Counts, ExponentialCounts
from torch_grad_exporter.aggregation.samples import Choices, Groups, Sample, values
from torch_grad_exporter.aggregation.settlement import Settled
from torch_grad_exporter.aggregation.tables import (
    DECADE_BOUNDS,
    LAYER_TOTALS,
    RECENT_SECONDS,
    Records,
    enter_norms,
    moved,
    new_layers,
    of_a_sample,
)
from torch_grad_exporter.metrics.families import REMOVED, BoolArray, FloatArray, IntArray
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.combine import root_of_squares
from torch_grad_exporter.statistics.layout import Layout
from torch_grad_exporter.statistics.magnitudes import WIDTH
from torch_grad_exporter.transfer.events import Outcome, Weights

MOST_UNTRACKED = 1000
"""Labels that keep a row though the table does not have them, or twice as many as the largest table had, if that is more.

Beyond that, the label that has been out of the table for longest loses its row as if its modules had been removed: a model whose
thousands of layers are trained a few at a time, or that is folded anew again and again, must stay bounded, too."""


@dataclass(frozen=True, slots=True, eq=False)
class UntrackedLayers:
    """Layers without a gradient that is tracked at present, whose totals stay; the last one, `REMOVED`, is the remainder.

    `values`: a record for each. `exponential`: as of `GradientSnapshot`.
    """

    labels: tuple[str, ...]
    values: Records
    exponential: tuple[Counts, ...]


class LayerTotals:
    """One row per layer: those of the table in its order, then those that are not tracked at present, the latest last.

    `cursors`: the consumers of peaks. `layout`: has the columns of other statistics than the package's own, of which the last value
    of each layer is kept; NaN where there was none, or where it cannot be known.
    """

    def __init__(self, cursors: Collection[Cursor], exponential: ExponentialCounts, layout: Layout) -> None:
        self._cursors = cursors
        self._exponential = exponential
        self._declared_places = {key: place for place, key in enumerate(layout.keys) if place >= len(Column)}
        self._declared = np.zeros((0, len(self._declared_places)))
        self._choices = Choices()
        self._table: ParameterTable | None = None
        self._modules: dict[str, set[str]] = {}
        """By label, in the order of the rows, the names of the modules that it has represented, as far as they exist."""
        self._values = new_layers(0)
        self._recent_second = np.full(RECENT_SECONDS, -1, dtype=np.int64)
        self._baseline = Baselines()
        self._removed: Records = new_layers(1)
        """The remainder; shown if any removed layer was."""
        self._largest = 0
        self._compared: tuple[int, set[int]] = -1, set()
        """The last sample of which it was counted how it was clipped, and in which rows."""

    @property
    def table(self) -> ParameterTable:
        """The table in use. Raises `RuntimeError` before the first one."""
        if self._table is None:
            raise RuntimeError("the layer totals have no table yet")
        return self._table

    def use(self, table: ParameterTable) -> None:
        """Shows the layers of `table` from now on; a layer that was there before, and still exists, goes on counting."""
        if table is self._table:
            return
        row_of = {label: row for row, label in enumerate(self._modules)}
        modules = self._kept(table)
        index = np.array([row_of.get(label, -1) for label in modules], dtype=np.int64)
        found = moved(self._values, index, new_layers(1))
        summed = np.zeros(len(table.layers), dtype=np.bool_)
        summed[table.layer_of[table.counts & (table.elements > 0)]] = True
        for name, flags in (("shown", table.shown), ("sharded", table.sharded), ("summed", summed)):
            found[name][: len(summed)] = flags
        declared = np.pad(self._declared, ((0, 1), (0, 0)), constant_values=np.nan)[index]
        baseline = self._baseline.moved(index)
        cursors = [(one, one.layers.moved(index), None if one.norms is None else one.norms.moved(index)) for one in self._cursors]
        self._remove({label: row for label, row in row_of.items() if label not in modules})
        # All at once, at the end: what raises before leaves everything as it was.
        self._table, self._modules, self._values, self._declared, self._baseline = table, modules, found, declared, baseline
        for cursor, of_layers, norms in cursors:
            cursor.layers, cursor.norms = of_layers, norms

    def _kept(self, table: ParameterTable) -> dict[str, set[str]]:
        """The labels that have a row with this table, with their modules, in the order of the rows."""
        exist = table.frozen.union(one.layer for one in table.tracked)
        known = {label: modules & exist for label, modules in self._modules.items()}
        tracked = {label: known.get(label, set()) for label in table.layers}
        for one, layer in zip(table.tracked, table.layer_of.tolist(), strict=True):
            tracked[table.layers[layer]].add(one.layer)
        before = 0 if self._table is None else len(self._table.layers)
        in_order = (*islice(known, before, None), *islice(known, before))
        untracked = {label: known[label] for label in in_order if label not in tracked and known[label]}
        self._largest = max(self._largest, len(tracked))
        too_many = max(0, len(untracked) - max(MOST_UNTRACKED, 2 * self._largest))
        return tracked | dict(islice(untracked.items(), too_many, None))

    def _remove(self, row_of: Mapping[str, int]) -> None:
        """Adds the totals of these layers to the remainder.

        A layer that this rank does not show is left out, and so is the histogram of a sharded one, which is not shown.
        """
        gone = self._values[list(row_of.values())]
        shown, whole = gone["shown"], gone["shown"] & ~gone["sharded"]
        for name in LAYER_TOTALS:
            with np.errstate(over="ignore"):
                added = gone[name][whole if name in ("buckets", "bucket_sum") else shown].sum(axis=0)
                self._removed[name] = np.minimum(self._removed[name] + added, np.finfo(np.float64).max)
        for label, counts in zip(row_of, whole.tolist(), strict=True):
            if counts:
                self._exponential.move(label, None)
            else:
                self._exponential.forget(label)
        self._removed["summed"] = True
        self._removed["shown"] |= shown.any()

    def publish(self, settled: Settled) -> None:
        """Makes a sample the last one of what the stepping optimizers own, and counts what of it is new."""
        sample = settled.sample
        self.use(sample.captured.table)
        owned = settled.owned(settled.shown)
        shown = self._groups(settled, settled.shown)
        self._clear(self._choices.of(self.table, owned).layers)
        self._show_missing(sample, shown, owned)
        self._show(shown, sample)
        self._count(shown if settled.uncounted == settled.shown else self._groups(settled, settled.uncounted))
        self._judge(shown if settled.unmeasured == settled.shown else self._groups(settled, settled.unmeasured), sample)
        if settled.edited is not None:
            self._compare(settled, settled.edited)

    def _groups(self, settled: Settled, optimizers: frozenset[int]) -> Groups:
        """The gradients of the sample that these optimizers own, by layer."""
        return Groups(settled.sample, self._choices.of(self.table, settled.gradients(optimizers)))

    def _clear(self, rows: IntArray) -> None:
        """What the stepping optimizers own has no values but those of this sample: a layer that it gave no gradient has none."""
        of_a_sample(self._values)[rows] = np.nan
        self._values["read"][rows] = self._values["sized"][rows] = False
        self._declared[rows] = np.nan

    def _show_missing(self, sample: Sample, shown: Groups, owned: BoolArray) -> None:
        """Parameters that got no gradient, in the layers that the sample covers."""
        self._values["missing"][shown.layers] = 0
        if len(sample.captured.missing):
            missing = np.zeros(len(owned), dtype=np.bool_)
            missing[sample.captured.missing] = True
            rows, counts = np.unique(self.table.layer_of[owned & missing], return_counts=True)
            self._values["missing"][rows] = counts

    def _show(self, groups: Groups, sample: Sample) -> None:
        layers, rows = self._values, groups.layers
        norms, elements, units = groups.combined(Column.NORM), groups.total(sample.elements), groups.total(sample.units)
        layers["norm"][rows], layers["read"][rows], layers["sized"][rows] = norms, True, sample.sized
        layers["part"][rows], layers["units"][rows] = groups.combined(Column.NORM, counted=True), units
        low, high = groups.combined(Column.MIN), groups.combined(Column.MAX)
        layers["minimum"][rows], layers["maximum"][rows] = low, high
        layers["max_magnitude"][rows] = np.maximum(np.abs(low), np.abs(high))
        layers["zero_ratio"][rows] = groups.combined(Column.ZEROS) / np.maximum(elements, 1)
        share = np.where(units > 0, 1 / np.maximum(units, 1), np.nan)
        layers["zero_units_ratio"][rows] = groups.combined(Column.ZERO_UNITS) * share
        layers["dead_ratio"][rows] = groups.combined(Column.DEAD_UNITS) * share
        mean = groups.combined(Column.SUM) / np.maximum(elements, 1)
        rms = norms / np.sqrt(np.maximum(elements, 1))
        # In units of the root mean square, whose own square may be out of range.
        share = 1 - np.square(mean / np.where(rms > 0, rms, 1.0))
        layers["mean"][rows], layers["stddev"][rows] = mean, rms * np.sqrt(np.where(share < 0, 0.0, share))
        sharded = sample.captured.table.sharded[rows]
        for at, place in enumerate(self._declared_places.values()):
            unknown = sharded & groups.layout.columns[place].whole_only
            self._declared[rows, at] = np.where(unknown, np.nan, groups.combined(place))

    def _count(self, groups: Groups) -> None:
        self._values["captures"][groups.layers] += 1
        self._values["nans"][groups.layers] += groups.combined(Column.NANS, counted=True)
        self._values["infs"][groups.layers] += groups.combined(Column.INFS, counted=True)

    def _judge(self, groups: Groups, sample: Sample) -> None:
        """Enters norms that were not known before into the sums and compares them with earlier ones."""
        layers, rows, norms = self._values, groups.layers, groups.combined(Column.NORM)
        finite = np.isfinite(norms)
        squares = np.square(groups.combined(Column.NORM, counted=True))
        sums = layers["squared_total"][rows] + squares
        layers["squared_total"][rows] = np.where(np.isfinite(sums), sums, layers["squared_total"][rows])
        entered, entered_norms = enter_norms(layers, rows, norms, DECADE_BOUNDS)
        self._exponential.observe((self.table.layers[row] for row in entered.tolist()), entered_norms)
        zscore, spike = self._baseline.judge(rows, norms)
        layers["zscore"][rows] = zscore
        layers["spikes"][rows] += spike
        known = finite if sample.sized else groups.combined(Column.NANS) + groups.combined(Column.INFS) == 0
        for cursor in self._cursors:
            cursor.layers.enter(rows, norms, zscore)
            if cursor.norms is not None:
                cursor.norms.enter(rows, norms, ~known)
        # A finite norm of unknown size may be the largest: the largest is not known until it is no longer recent.
        self._remember(rows[known], norms[known] if sample.sized else np.inf, int(sample.captured.at))

    def _compare(self, settled: Settled, edited: Edit) -> None:
        """How gradients were clipped, by layer; a sample that is published again counts once."""
        known = np.isfinite(edited.before) & np.isfinite(edited.after) & settled.sample.present
        chosen = np.flatnonzero(known)
        rows, group = np.unique(self.table.layer_of[chosen], return_inverse=True)
        before = root_of_squares(edited.before[chosen], group, len(rows))
        after = root_of_squares(edited.after[chosen], group, len(rows))
        rows, coefficients = rows[before > 0], after[before > 0] / before[before > 0]
        if settled.sample.sized:
            self._values["coefficient"][rows] = coefficients
        if settled.number != self._compared[0]:
            self._compared = settled.number, set()
        fresh = np.array([row not in self._compared[1] for row in rows.tolist()], dtype=np.bool_)
        if settled.closed.outcome is not Outcome.UNKNOWN:
            self._values["clipped"][rows[fresh]] += coefficients[fresh] < 1 - UNTOUCHED
            self._compared[1].update(rows.tolist())

    def _remember(self, rows: IntArray, norms: FloatArray | float, second: int) -> None:
        """Enters norms into the sliding minute, which has one place per second."""
        place = second % RECENT_SECONDS
        recent = self._values["recent"]
        if self._recent_second[place] != second:
            recent[:, place] = np.nan
            self._recent_second[place] = second
        recent[rows, place] = np.fmax(recent[rows, place], norms)

    def weigh(self, event: Weights) -> None:
        """Takes the norms of weights around one step. With a closure it began before the table of its sample was known.

        A step that was left out is no update, so it is as if nobody had looked.
        """
        vector = values(event.vector.ready())
        if event.told and vector[-1]:
            return
        norms, rest = np.split(vector, [3 * len(event.positions)])
        norms = norms.reshape(-1, 3)
        layers, group = np.unique(event.table.layer_of[event.positions], return_inverse=True)
        before, after, update = (root_of_squares(norms[:, i], group, len(layers)) for i in range(3))
        row_of = {label: row for row, label in enumerate(self.table.layers)}
        rows = np.array([row_of.get(event.table.layers[layer], -1) for layer in layers.tolist()], dtype=np.int64)
        here = rows >= 0
        self._values["weight_norm"][rows[here]] = after[here]
        self._values["update_ratio"][rows[here]] = np.where(before > 0, update / before, np.nan)[here]
        self._values["weight_captures"][rows[here]] += 1
        self._spread(event, rest[: len(rest) - event.told].reshape(len(event.spread), WIDTH))

    def _spread(self, event: Weights, found: FloatArray) -> None:
        """Adds how the elements of weights spread. What would make a sum overflow is left out with its elements."""
        row_of = {label: row for row, label in enumerate(self.table.layers)}
        layers, group = np.unique(event.table.layer_of[event.spread], return_inverse=True)
        added = np.zeros((len(layers), WIDTH))
        np.add.at(added, group, found)
        for layer, numbers in zip(layers.tolist(), added, strict=True):
            row = row_of.get(event.table.layers[layer], -1)
            if row >= 0 and np.isfinite(self._values["weight_sum"][row] + numbers[-1]):
                self._values["weight_buckets"][row] += numbers[:-1]
                self._values["weight_sum"][row] += numbers[-1]

    def follow(self, cursor: Cursor) -> None:
        """Begins with a consumer of peaks, and of norms where it asks for them."""
        cursor.layers = Peaks(len(self._values))
        if cursor.norms is not None:
            cursor.norms = NormSums(len(self._values))

    def values(self) -> Records:
        """A copy of the table's layers."""
        return self._values[: len(self.table.layers)].copy()

    def recent_max(self, now: float) -> FloatArray:
        """The largest norm of each of the table's layers in the minute before `now`, Unix time; NaN where there was none."""
        fresh = self._recent_second > int(now) - RECENT_SECONDS
        recent = np.fmax.reduce(self._values["recent"][: len(self.table.layers), fresh], axis=1, initial=np.nan)
        return np.where(np.isinf(recent), np.nan, recent)

    def exponential(self) -> tuple[Counts, ...] | None:
        """The norms of the table's layers by exponential bucket, if they are counted."""
        return self._exponential.of(self.table.layers)

    def declared(self) -> Mapping[str, FloatArray]:
        """The other statistics' values of the table's layers by column, `statistic.column`."""
        return {key: self._declared[: len(self.table.layers), at].copy() for at, key in enumerate(self._declared_places)}

    def untracked(self) -> UntrackedLayers:
        """Layers that are not in the table and of which only the totals are shown."""
        start = len(self.table.layers)
        found = self._values[start:]
        labels = tuple(compress(islice(self._modules, start, None), found["shown"].tolist()))
        found, keys = found[found["shown"]], [*labels]
        if self._removed["shown"][0] and REMOVED not in self._modules:  # a module may be called so: no series is there twice
            labels, found = (*labels, REMOVED), np.concatenate([found, self._removed])
            return UntrackedLayers(labels, found, self._exponential.of([*keys, None]) or ())
        return UntrackedLayers(labels, found, self._exponential.of(keys) or ())
