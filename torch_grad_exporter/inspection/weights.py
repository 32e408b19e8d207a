"""WeightProbe: norms and magnitudes of parameters, and what their last update changed, for a rotating few layers per sample.

An update is known only by a copy of the parameters from before it, so a sample copies a bounded part of the
model; over the samples every layer gets its turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from torch_grad_exporter.capture.armed_round import ArmedRound
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.errors import caught, warn
from torch_grad_exporter.inspection.layer_rows import LayerRows
from torch_grad_exporter.inspection.measuring import InspectionContext, LayerTurns, VectorSender
from torch_grad_exporter.metrics.buckets import WEIGHT_MAGNITUDES
from torch_grad_exporter.metrics.families import FloatArray, IntArray
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics.batches import batches, plain_local, resolved
from torch_grad_exporter.statistics.combine import root_of_squares
from torch_grad_exporter.statistics.device import wide
from torch_grad_exporter.statistics.magnitudes import WIDTH, magnitudes
from torch_grad_exporter.store.records import Inspected

SOURCE = "weights"

# Values of each parameter around a step: see `WeightMeasurement`.
CHANGES = 4


# Layers that are kept at most, or twice as many as the model has; beyond, the one measured longest ago is removed.
MOST = 2000


@dataclass(frozen=True, slots=True, eq=False)
class WeightMeasurement:
    """The data of a record of weights around one optimizer step.

    The vector has, for each of `positions`, which have `elements` on this rank: the norm before, the norm after, that of the
    difference, and how many elements changed. Then rows of `statistics.magnitudes`, of the parameters at the positions
    `spread`, shape (rows,); and, if `may_be_left_out`, a last value that is not zero if the step was left out.
    """

    table: ParameterTable
    positions: IntArray
    elements: IntArray
    spread: IntArray
    may_be_left_out: bool


class WeightProbe(Inspection):
    """The inspection of the next few layers around a sampled step. Belongs to the training thread."""

    def __init__(self, context: InspectionContext, optimizers: Optimizers) -> None:
        self._cost, self._sender, self._turns = context.cost, VectorSender(SOURCE, context), LayerTurns(optimizers)
        self._tried: dict[tuple[int, str], bool] = {}  # parameters of other classes: whether they can be measured
        # By optimizer: the positions of some parameters, and their copies from before its step.
        self._copies: dict[int, tuple[ParameterTable, list[tuple[int, torch.nn.Parameter, torch.Tensor]]]] = {}

    @torch.no_grad()
    def step_began(self, current: ArmedRound, optimizer: int) -> None:
        """Copy the parameters of the next layers that the optimizer owns."""
        table, cost = current.table, self._cost
        turns = self._turns.take(table, optimizer)
        positions = [i for layer in turns if all(self._measurable(table, i) for i in layer) for i in layer]
        chosen = ((position, table.tracked[position].parameter()) for position in positions)
        copied = [(i, p, own_part(p)) for i, p in chosen if p is not None]
        begun = cost.begin(dict.fromkeys(now.device for _, _, now in copied))
        self._copies[optimizer] = table, [(i, p, now.clone()) for i, p, now in copied]
        cost.end(begun)

    @torch.no_grad()
    def step_ended(self, current: ArmedRound, optimizer: int, left_out: torch.Tensor | None) -> None:
        """Measure the copied parameters against what the step made of them, and hand over."""
        if optimizer not in self._copies:
            return
        table, copies = self._copies.pop(optimizer)
        for device in dict.fromkeys(copy.device for _, _, copy in copies):
            begun = self._cost.begin((device,))
            here = [(i, own_part(parameter), copy) for i, parameter, copy in copies if copy.device == device]
            spread, rows = _measured(table, here)
            skipped = [] if left_out is None else [left_out.detach().reshape(1).to(device, wide(device), non_blocking=True)]
            positions = np.array([position for position, _, _ in here], dtype=np.int64)
            elements = np.array([copy.numel() for _, _, copy in here], dtype=np.int64)
            measured = WeightMeasurement(table, positions, elements, spread, left_out is not None)
            self._sender.send(current.number, [torch.cat([*rows, *skipped])], measured)
            self._cost.end(begun)

    def release(self) -> None:
        """Drop the copies; idempotent, from any thread."""
        self._copies = {}

    def _measurable(self, table: ParameterTable, position: int) -> bool:
        """Return whether a parameter can be measured; one of another class, such as a quantised one, is tried once."""
        tracked = table.tracked[position]
        parameter, place = tracked.parameter(), (tracked.model, f"{tracked.layer}.{tracked.attribute}")
        if parameter is None or type(parameter) is torch.nn.Parameter:
            return True
        if place not in self._tried:
            failure = caught(_try, table, position, parameter)
            self._tried[place] = failure is None
            if failure is not None:
                message = "weights: layer %s is left out, since its %s cannot be measured: %s: %s"
                layer = table.layers[table.layer_of[position]]
                warn(message, layer, tracked.attribute, type(failure).__name__, failure)
        return self._tried[place]


def _measured(table: ParameterTable, here: list[tuple[int, torch.Tensor, torch.Tensor]]) -> tuple[IntArray, list[torch.Tensor]]:
    """Measure parameters of one device, each with its position and its copy from before the step.

    Returns:
        The position of each row of magnitudes, of the parameters that this rank counts; and the vectors: changes, and these rows.
    """
    accumulate = wide(here[0][1].device)
    changes: list[torch.Tensor] = []
    for _, now, copy in here:
        update = now - copy
        changes += (torch.linalg.vector_norm(tensor, dtype=accumulate) for tensor in (copy, now, update))
        changes.append(torch.count_nonzero(update).to(accumulate))
    owners: list[int] = []
    vectors = [torch.stack(changes)]
    counted = [(position, now, table.tracked[position].flat) for position, now, _ in here if table.counts[position]]
    # FSDP1's padding is not part of the model.
    for batch in batches(table, ((position, now if flat is None else flat.of(now)) for position, now, flat in counted)):
        measured = magnitudes(batch, accumulate)
        owners += batch.positions * (len(measured) // len(batch.positions))
        vectors.append(measured.reshape(-1))
    return np.array(owners, dtype=np.int64), vectors


def _try(table: ParameterTable, position: int, parameter: torch.Tensor) -> None:
    """Measure a parameter as around a step, and drop the result."""
    now = own_part(parameter)
    torch.cat(_measured(table, [(position, now, now.clone())])[1])


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's own plain, real tensor of a parameter."""
    return resolved(plain_local(parameter, keep_sparse=False))


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """What is shown of a layer; NaN where it is unknown. `whole`: this rank has all of its parameters."""

    norm: float = np.nan
    update_ratio: float = np.nan
    update_rms: float = np.nan
    unchanged_ratio: float = np.nan
    whole: bool = True
    captures: int = 0
    sum: float = 0.0
    buckets: FloatArray = field(default_factory=lambda: np.zeros(len(WEIGHT_MAGNITUDES) + 1))

    def with_totals_of(self, other: LayerWeights) -> LayerWeights:
        """Return the totals of both, without a norm and a ratio."""
        captures, total = self.captures + other.captures, self.sum + other.sum
        return LayerWeights(captures=captures, sum=total, buckets=self.buckets + other.buckets)


# The values of a layer that was not measured yet.
UNMEASURED = LayerWeights()


class WeightTotals:
    """The totals by layer. Belongs to the worker, but for `snapshot`."""

    def __init__(self) -> None:
        self._parameters: ParameterTable | None = None
        self._table = LayerRows(UNMEASURED)
        self._modules: dict[str, set[str]] = {}  # by label, the modules that it has represented and that still exist

    def take(self, record: Inspected, values: tuple[FloatArray, ...]) -> None:
        """Take the norms of weights around one step. A step that was left out is no update."""
        measured, (vector,) = record.data, values
        assert isinstance(measured, WeightMeasurement)  # noqa: S101 - only `WeightProbe` sends records of this name
        if measured.may_be_left_out and vector[-1]:
            return
        changes, rest = np.split(vector, [CHANGES * len(measured.positions)])
        spread = rest[: len(rest) - measured.may_be_left_out].reshape(len(measured.spread), WIDTH)
        gone = self._gone(measured.table)
        rows = self._with_changes(measured, changes.reshape(-1, CHANGES))
        for layer, row in zip(measured.table.layer_of[measured.spread].tolist(), spread, strict=True):
            label = measured.table.layers[layer]
            known = rows.get(label, self._table.rows.get(label))
            if known is not None and np.isfinite(known.sum + row[-1]):  # else the sum would overflow
                rows[label] = replace(known, buckets=known.buckets + row[:-1], sum=float(known.sum + row[-1]))
        self._table.enter(rows, most=max(MOST, 2 * len(measured.table.layers)), gone=gone)

    def snapshot(self, layers: Iterable[str]) -> dict[str, LayerWeights]:
        """Return the values by layer: first `layers`, measured or not, then the others. From any thread."""
        return {**dict.fromkeys(layers, UNMEASURED), **self._table.rows}

    def _with_changes(self, measured: WeightMeasurement, changes: FloatArray) -> dict[str, LayerWeights]:
        """Return the rows of the measured layers with their new norms and what the update changed."""
        table = measured.table
        layers, group = np.unique(table.layer_of[measured.positions], return_inverse=True)
        before, after, update = (root_of_squares(changes[:, i], group, len(layers)) for i in range(3))
        elements, changed = (np.bincount(group, numbers, len(layers)) for numbers in (measured.elements, changes[:, 3]))
        with np.errstate(invalid="ignore"):  # NaN for a layer without elements on this rank
            rms, unchanged = update / np.sqrt(elements), 1.0 - changed / elements
        rows: dict[str, LayerWeights] = {}
        for at, layer in enumerate(layers.tolist()):
            if not table.shown[layer]:  # another rank shows it
                continue
            label, ratio = table.layers[layer], update[at] / before[at] if before[at] > 0 else np.nan
            known, whole = self._table.get(label), not table.sharded[layer]
            rows[label] = replace(
                known, norm=float(after[at]), update_ratio=float(ratio), update_rms=float(rms[at]),
                unchanged_ratio=float(unchanged[at]), whole=whole, captures=known.captures + 1,
            )  # fmt: skip
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
