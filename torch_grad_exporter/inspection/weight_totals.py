"""WeightTotals: norms, update ratios and magnitudes of weights around sampled updates, by layer."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from torch_grad_exporter.inspection.weights import WeightMeasurement
from torch_grad_exporter.metrics.buckets import WEIGHT_MAGNITUDES
from torch_grad_exporter.metrics.families import REMOVED, FloatArray
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics.combine import root_of_squares
from torch_grad_exporter.statistics.magnitudes import WIDTH
from torch_grad_exporter.store.records import Inspected

MOST = 2000
"""Layers that are kept at most, or twice as many as the model has; beyond, the one measured longest ago is removed."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """What is shown of a layer; NaN where it is unknown. `whole`: this rank has all of its parameters."""

    norm: float = np.nan
    update_ratio: float = np.nan
    whole: bool = True
    captures: int = 0
    sum: float = 0.0
    buckets: FloatArray = field(default_factory=lambda: np.zeros(len(WEIGHT_MAGNITUDES) + 1))


NONE = LayerWeights()
"""Of a layer that was not measured yet."""


class WeightTotals:
    """From any thread. The totals of layers whose modules are gone go on in one remainder."""

    def __init__(self) -> None:
        # Reentrant: a signal's handler may close the exporter while its own thread is in here.
        self._lock = threading.RLock()
        self._table: ParameterTable | None = None
        self._layers: dict[str, LayerWeights] = {}  # the one measured last at the end
        self._modules: dict[str, set[str]] = {}  # by label, the modules that it has represented and that still exist

    def take(self, record: Inspected, values: tuple[FloatArray, ...]) -> None:
        """Take the norms of weights around one step. A step that was left out is no update."""
        measured, (vector,) = record.data, values
        assert isinstance(measured, WeightMeasurement)  # noqa: S101 - only `WeightProbe` sends records of this name
        if measured.may_be_left_out and vector[-1]:
            return
        norms, rest = np.split(vector, [3 * len(measured.positions)])
        rows = rest[: len(rest) - measured.may_be_left_out].reshape(len(measured.spread), WIDTH)
        with self._lock:
            self._use(measured.table)
            self._take_norms(measured, norms.reshape(-1, 3))
            self._take_magnitudes(measured, rows)

    def snapshot(self, layers: Iterable[str]) -> dict[str, LayerWeights]:
        """Return the values by layer: first `layers`, measured or not, then the others; that of the remainder is `REMOVED`."""
        with self._lock:
            return dict.fromkeys(layers, NONE) | self._layers

    def after_fork_in_child(self) -> None:
        """The child has none of the threads that may hold the lock."""
        self._lock = threading.RLock()

    def _take_norms(self, measured: WeightMeasurement, norms: FloatArray) -> None:
        table = measured.table
        layers, group = np.unique(table.layer_of[measured.positions], return_inverse=True)
        before, after, update = (root_of_squares(norms[:, i], group, len(layers)) for i in range(3))
        for at, layer in enumerate(layers.tolist()):
            if not table.shown[layer]:  # another rank shows it
                continue
            label, ratio = table.layers[layer], update[at] / before[at] if before[at] > 0 else np.nan
            known, whole = self._layers.pop(label, NONE), not table.sharded[layer]
            self._layers[label] = replace(
                known, norm=float(after[at]), update_ratio=float(ratio), whole=whole, captures=known.captures + 1
            )

    def _take_magnitudes(self, measured: WeightMeasurement, rows: FloatArray) -> None:
        """Add how the elements spread. What would make a sum overflow is left out with its elements."""
        for layer, row in zip(measured.table.layer_of[measured.spread].tolist(), rows, strict=True):
            label = measured.table.layers[layer]
            known = self._layers.get(label)
            if known is not None and np.isfinite(known.sum + row[-1]):
                self._layers[label] = replace(known, buckets=known.buckets + row[:-1], sum=float(known.sum + row[-1]))

    def _use(self, table: ParameterTable) -> None:
        """Remove layers whose modules are gone, and the oldest where there are too many."""
        if table is self._table:
            return
        self._table, exist = table, table.frozen.union(parameter.layer for parameter in table.tracked)
        self._modules = {label: modules & exist for label, modules in self._modules.items()}
        for parameter, layer in zip(table.tracked, table.layer_of.tolist(), strict=True):
            self._modules.setdefault(table.layers[layer], set()).add(parameter.layer)
        labels = [label for label in self._layers if label != REMOVED]
        too_many = max(0, len(labels) - max(MOST, 2 * len(table.layers)))
        gone = [label for at, label in enumerate(labels) if at < too_many or not self._modules.get(label)]
        for label in gone:
            layer, rest = self._layers.pop(label), self._layers.get(REMOVED, NONE)
            captures, total = rest.captures + layer.captures, rest.sum + layer.sum
            self._layers[REMOVED] = LayerWeights(captures=captures, sum=total, buckets=rest.buckets + layer.buckets)
        self._modules = {label: modules for label, modules in self._modules.items() if modules}
