"""WeightTotals: norms, update ratios and magnitudes of weights around sampled updates, by layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from torch_grad_exporter.inspection.layer_rows import LayerRows
from torch_grad_exporter.inspection.weights import WeightMeasurement
from torch_grad_exporter.metrics.buckets import WEIGHT_MAGNITUDES
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics.combine import root_of_squares
from torch_grad_exporter.statistics.magnitudes import WIDTH
from torch_grad_exporter.store.records import Inspected

# Layers that are kept at most, or twice as many as the model has; beyond, the one measured longest ago is removed.
MOST = 2000


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """What is shown of a layer; NaN where it is unknown. `whole`: this rank has all of its parameters."""

    norm: float = np.nan
    update_ratio: float = np.nan
    whole: bool = True
    captures: int = 0
    sum: float = 0.0
    buckets: FloatArray = field(default_factory=lambda: np.zeros(len(WEIGHT_MAGNITUDES) + 1))

    def with_totals_of(self, other: LayerWeights) -> LayerWeights:
        """Return the totals of both, without a norm and a ratio."""
        captures, total = self.captures + other.captures, self.sum + other.sum
        return LayerWeights(captures=captures, sum=total, buckets=self.buckets + other.buckets)


# The values of a layer that was not measured yet.
NONE = LayerWeights()


class WeightTotals:
    """The totals by layer. Belongs to the worker, but for `snapshot`."""

    def __init__(self) -> None:
        self._parameters: ParameterTable | None = None
        self._table = LayerRows(NONE)
        self._modules: dict[str, set[str]] = {}  # by label, the modules that it has represented and that still exist

    def take(self, record: Inspected, values: tuple[FloatArray, ...]) -> None:
        """Take the norms of weights around one step. A step that was left out is no update."""
        measured, (vector,) = record.data, values
        assert isinstance(measured, WeightMeasurement)  # noqa: S101 - only `WeightProbe` sends records of this name
        if measured.may_be_left_out and vector[-1]:
            return
        norms, rest = np.split(vector, [3 * len(measured.positions)])
        spread = rest[: len(rest) - measured.may_be_left_out].reshape(len(measured.spread), WIDTH)
        gone = self._gone(measured.table)
        rows = self._with_norms(measured, norms.reshape(-1, 3))
        for layer, row in zip(measured.table.layer_of[measured.spread].tolist(), spread, strict=True):
            label = measured.table.layers[layer]
            known = rows.get(label, self._table.rows.get(label))
            if known is not None and np.isfinite(known.sum + row[-1]):  # else the sum would overflow
                rows[label] = replace(known, buckets=known.buckets + row[:-1], sum=float(known.sum + row[-1]))
        self._table.enter(rows, most=max(MOST, 2 * len(measured.table.layers)), gone=gone)

    def snapshot(self, layers: Iterable[str]) -> dict[str, LayerWeights]:
        """Return the values by layer: first `layers`, measured or not, then the others. From any thread."""
        return {**dict.fromkeys(layers, NONE), **self._table.rows}

    def _with_norms(self, measured: WeightMeasurement, norms: FloatArray) -> dict[str, LayerWeights]:
        """Return the rows of the measured layers with their new norms."""
        table = measured.table
        layers, group = np.unique(table.layer_of[measured.positions], return_inverse=True)
        before, after, update = (root_of_squares(norms[:, i], group, len(layers)) for i in range(3))
        rows: dict[str, LayerWeights] = {}
        for at, layer in enumerate(layers.tolist()):
            if not table.shown[layer]:  # another rank shows it
                continue
            label, ratio = table.layers[layer], update[at] / before[at] if before[at] > 0 else np.nan
            known, whole = self._table.get(label), not table.sharded[layer]
            rows[label] = replace(known, norm=float(after[at]), update_ratio=float(ratio), whole=whole, captures=known.captures + 1)
        return rows

    def _gone(self, parameters: ParameterTable) -> list[str]:
        """Return the layers all of whose modules are gone, if the parameters have changed."""
        if parameters is self._parameters:
            return []
        self._parameters = parameters
        exist = parameters.frozen.union(parameter.layer for parameter in parameters.tracked)
        self._modules = {label: modules & exist for label, modules in self._modules.items()}
        for parameter, layer in zip(parameters.tracked, parameters.layer_of.tolist(), strict=True):
            self._modules.setdefault(parameters.layers[layer], set()).add(parameter.layer)
        self._modules = {label: modules for label, modules in self._modules.items() if modules}
        return [label for label in self._table.rows if label not in self._modules]
