"""Snapshots: what the collectors and other consumers see of the tables; nobody writes to their arrays."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakSet

import numpy as np

from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.store.cursors import Cursor, Losses, Single
from torch_grad_exporter.store.histograms import Counts, Records
from torch_grad_exporter.store.layer_table import LayerTable, UntrackedLayers
from torch_grad_exporter.store.optimizer_table import OptimizerTable
from torch_grad_exporter.store.pending_samples import PendingSamples
from torch_grad_exporter.store.run_table import RunTable, TotalsSnapshot


@dataclass(frozen=True, slots=True, eq=False)
class GradientSnapshot:
    """All gradient values at one moment, of one and the same sample; the same arrays as long as nothing changes."""

    table: ParameterTable
    layer_values: Records  # of the table's layers
    recent_max: FloatArray  # shape (layers,): over the last minute, NaN where unknown and in a consumer's reading
    optimizers: tuple[int, ...]  # numbers
    totals: Records  # of these optimizers
    samples: int
    undelivered: int  # samples whose vectors never arrived
    unattributed: int  # samples of which it is unknown whose they were
    norm_observed: bool  # the norms in the only record of `totals` are observed ones
    untracked: UntrackedLayers
    exponential: tuple[Counts, ...] | None  # of the layers, None if not counted
    exponential_totals: tuple[Counts, ...] | None  # of the optimizers
    declared: Mapping[str, FloatArray]  # other statistics by column, `statistic.column`, shape (layers,)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Everything that the collectors show, at one moment."""

    gradients: GradientSnapshot
    totals: TotalsSnapshot


@dataclass(frozen=True, slots=True, eq=False)
class NewGradients:
    """What is new of the gradients since a consumer's last read, in the order of the snapshot; NaN where nothing is."""

    samples: int
    peaks: FloatArray  # shape (2, layers): the norm and the z-score that were farthest from zero
    peaks_of_totals: FloatArray  # shape (2, optimizers): the largest norm, and norm after clipping
    norms: FloatArray | None = None  # shape (3, layers), if asked for: sum of norms, how many, how many not finite


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Everything at one moment, but for the last minute and the last steps, and what is new to one consumer."""

    snapshot: Snapshot
    gradients: NewGradients
    losses: Losses = field(default_factory=Losses)  # none in the reading of a single sample
    singles: Sequence[Single] = ()


class TableReader:
    """Copies the tables for consumers. For one thread at a time."""

    def __init__(
        self,
        layers: LayerTable,
        optimizers: OptimizerTable,
        run: RunTable,
        pending: PendingSamples,
        cursors: WeakSet[Cursor],
    ) -> None:
        self._layers, self._optimizers, self._run, self._pending = layers, optimizers, run, pending
        self._cursors = cursors
        self._known: tuple[int, GradientSnapshot] | None = None  # the last snapshot, and the changes up to it
        self.undelivered = 0  # samples whose vectors never arrived

    def follow(self, cursor: Cursor) -> None:
        """Begin with a consumer: what comes from now on is new to it."""
        self._layers.rows.follow(cursor)
        self._optimizers.rows.follow(cursor)
        cursor.samples = self._pending.samples
        self._cursors.add(cursor)

    def snapshot(self, changes: int, *, recent: bool) -> Snapshot:
        """Return all values after this many changes of the gradients.

        `recent`: with what is of the last minute and of the last steps, which nobody asks for who reads what is new.
        """
        if self._known is None or self._known[0] != changes:
            self._known = changes, self._gradients()
        gradients = self._known[1]
        if recent:
            gradients = replace(gradients, recent_max=self._layers.recent_max(time.time()))
        return Snapshot(gradients, self._run.snapshot(recent=recent))

    def sample(self, cursor: Cursor, snapshot: Snapshot) -> Reading:
        """Return what is new of the gradients to a consumer, with a snapshot of the same moment."""
        gradients, new = snapshot.gradients, self._pending.samples - cursor.samples
        cursor.samples, layers = self._pending.samples, len(gradients.table.layers)
        of_layers, of_optimizers = self._layers.rows.take(cursor)[:, :layers], self._optimizers.rows.take(cursor)
        of_totals = self._optimizers.take_peaks(of_optimizers, gradients.optimizers, norm_observed=gradients.norm_observed)
        return Reading(snapshot, NewGradients(new, of_layers[:2], of_totals, of_layers[2:] if cursor.norms else None))

    def _gradients(self) -> GradientSnapshot:
        optimizers, totals, norm_observed, exponential_totals = self._optimizers.values()
        table = self._layers.table
        layer_values = self._layers.rows.values[: len(table.layers)].copy()
        return GradientSnapshot(
            table=table,
            layer_values=layer_values,
            recent_max=np.full(len(table.layers), np.nan),
            optimizers=optimizers,
            totals=totals,
            samples=self._pending.samples,
            undelivered=self.undelivered,
            unattributed=self._pending.unattributed,
            norm_observed=norm_observed,
            untracked=self._layers.untracked(),
            exponential=self._layers.rows.exponential(range(len(table.layers))),
            exponential_totals=exponential_totals,
            declared=self._layers.declared(layer_values),
        )
