"""The state of Adam and its kin: how its two moments stand to the gradients of a sampled step, for a rotating few layers.

Such an optimizer divides by the root of its second moment, an average over the past. Where that is out of date the steps have
another size than the learning rate says, and the loss spikes some steps later.

The ratio to the gradients is that of Wortsman et al., "Stable and low-precision training for large-scale vision-language models"
(2023), which take the second moment after the step: with the one before it, a unit that is active for the first time in a long
while would outweigh all others.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torch_grad_exporter.capture.armed_round import ArmedRound
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.capture.rounds import RoundTracker
from torch_grad_exporter.errors import warn
from torch_grad_exporter.inspection.measuring import InspectionContext, LayerTurns, VectorSender, by_device
from torch_grad_exporter.metrics.families import FloatArray, IntArray
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.model.parameters import ParameterTable, TrackedParameter
from torch_grad_exporter.statistics.batches import plain_local, resolved
from torch_grad_exporter.statistics.device import CHUNK_ELEMENTS, wide
from torch_grad_exporter.store.records import Inspected
from torch_grad_exporter.torch_compat.autograd import capturing_graph

SOURCE = "optimizer_state"

# What Adam and its kin keep for a parameter.
KNOWN = frozenset(("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "mu_product"))

VALUES = 3  # of each parameter: see `StateMeasurement`

ABSENT = "optimizer_state: nothing is shown of %s, whose state has no exp_avg and exp_avg_sq in floating point"


@dataclass(frozen=True, slots=True, eq=False)
class StateMeasurement:
    """The data of a record of an optimizer's state right before its step.

    The vector has, for each of `positions`: the L2 norm of the gradient divided by the root of the second moment that the step will
    make, the L2 norm of the first moment, and the sum of the second moment. Moments are corrected for their bias.
    """

    table: ParameterTable
    positions: IntArray


class StateProbe(Inspection):
    """The inspection of an optimizer's state before sampled steps. Belongs to the training thread."""

    def __init__(self, context: InspectionContext, optimizers: Optimizers, rounds: RoundTracker, *, clips: bool) -> None:
        self._clips = clips  # whether `clip=` clips after a step began
        self._optimizers, self._rounds, self._cost = optimizers, rounds, context.cost
        self._sender, self._turns = VectorSender(SOURCE, context), LayerTurns(optimizers)
        self._seen: set[int] = set()  # optimizers that had their first sampled step, so that they have a state if they keep one
        self._said: set[int] = set()

    def step_began(self, current: ArmedRound, optimizer: int) -> None:
        """Measure, unless the gradients are yet to come from a closure."""
        if not self._clips and optimizer not in self._rounds.closures:
            self._measure(current, optimizer)

    def step_clipped(self, current: ArmedRound, optimizer: int) -> None:
        """Measure what `clip=` has left."""
        if optimizer not in self._rounds.closures:
            self._measure(current, optimizer)

    def gradients_read(self, current: ArmedRound) -> None:
        """Measure within a step whose closure has run a backward: before the gradients are clipped there."""
        for optimizer in self._rounds.closures - current.stepped:
            self._measure(current, optimizer)

    @torch.no_grad()
    def _measure(self, current: ArmedRound, number: int) -> None:
        if capturing_graph():
            return
        table = current.table
        mine = [optimizer for known, optimizer in self._optimizers.numbered() if known == number]
        turns = itertools.chain.from_iterable(self._turns.take(table, number))
        trained = [i for i in turns if table.tracked[i].gradient() is not None]
        measured = [
            (position, values)
            for position, optimizer in itertools.product(trained, mine)
            if (values := _values(optimizer, table.tracked[position])) is not None
        ]
        if trained:
            self._say_what_is_absent(number, mine, any_found=bool(measured))
        for device, here in by_device(measured).items():
            begun = self._cost.begin((device,))
            positions = np.array([position for position, _ in here], dtype=np.int64)
            self._sender.send(current.number, [torch.cat([values for _, values in here])], StateMeasurement(table, positions))
            self._cost.end(begun)

    def _say_what_is_absent(self, number: int, optimizers: list[torch.optim.Optimizer], *, any_found: bool) -> None:
        if number in self._seen and number not in self._said and not any_found:
            self._said.add(number)
            warn(ABSENT, ", ".join({type(optimizer).__name__ for optimizer in optimizers}))
        self._seen.add(number)
        if any_found:
            self._said.add(number)


def _values(optimizer: torch.optim.Optimizer, tracked: TrackedParameter) -> torch.Tensor | None:
    """Return the `VALUES` of a parameter, or None where its gradient or the optimizer's moments are absent or of another kind."""
    parameter, gradient = tracked.parameter(), tracked.gradient()
    if parameter is None or gradient is None or gradient.layout is not torch.strided:
        return None
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), {})
    if not state.keys() <= KNOWN:  # of another optimizer, whose second moment may be something else
        return None
    m, v = (_moment(state.get(name), tracked, parameter) for name in ("exp_avg", "exp_avg_sq"))
    steps, betas, eps = state.get("step", group.get("step")), group.get("betas"), group.get("eps")
    if m is None or v is None or steps is None or betas is None or len(betas) != 2 or not isinstance(eps, float):
        return None
    accumulate, computed = wide(v.device), torch.promote_types(v.dtype, torch.float32)
    scale = getattr(optimizer, "grad_scale", None)  # by which a fused optimizer divides in its step
    scale = scale.detach().to(v.device, non_blocking=True) if isinstance(scale, torch.Tensor) else 1.0
    steps = steps.detach().to(accumulate) if isinstance(steps, torch.Tensor) else steps
    beta1, beta2 = betas
    parts = []  # so that what is made on the way stays small
    for some, past in zip(
        *(torch.split(tensor.reshape(-1), CHUNK_ELEMENTS) for tensor in (_own(gradient, tracked), v)), strict=True
    ):
        g = some.to(computed) / scale
        after = (past.to(computed) * beta2 + g * g * (1 - beta2)) / (1 - beta2 ** (steps + 1))
        parts.append(torch.linalg.vector_norm(g / after.clamp_(min=eps * eps).sqrt_(), dtype=accumulate))
    relative = torch.linalg.vector_norm(torch.stack(parts))
    first = torch.linalg.vector_norm(m, dtype=accumulate) / (1 - beta1**steps)
    return torch.stack([relative, first, v.sum(dtype=accumulate) / (1 - beta2**steps)])


def _moment(tensor: object, tracked: TrackedParameter, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of a moment, or None where there is none in floating point for each element."""
    if not isinstance(tensor, torch.Tensor) or tensor.shape != parameter.shape or tensor.layout is not torch.strided:
        return None
    moment = _own(tensor, tracked)
    return moment if tensor.element_size() > 1 and moment.is_floating_point() else None


def _own(tensor: torch.Tensor, tracked: TrackedParameter) -> torch.Tensor:
    return resolved(tracked.own(plain_local(tensor, keep_sparse=False)))


@dataclass(frozen=True, slots=True)
class LayerState:
    """What is shown of a layer."""

    rms_ratio: float
    signal_ratio: float


class StateTotals:
    """The last values of the layers that exist. Belongs to the worker, but for `rows`, which is replaced and never changed."""

    def __init__(self) -> None:
        self.rows: Mapping[str, LayerState] = {}

    def take(self, record: Inspected, values: tuple[FloatArray, ...]) -> None:
        """Take the values before one step. What is not finite, as in a step that a gradient scaler leaves out, is left out."""
        measured, (vector,) = record.data, values
        assert isinstance(measured, StateMeasurement)  # noqa: S101 - only `StateProbe` sends records of this name
        table, elements = measured.table, measured.table.elements[measured.positions]
        relative, first, second = vector.reshape(-1, VALUES).T
        layers, group = np.unique(table.layer_of[measured.positions], return_inverse=True)
        sums = [np.bincount(group, numbers, len(layers)) for numbers in (relative**2, elements, first**2, second)]
        with np.errstate(divide="ignore", invalid="ignore"):
            rms, signal = np.sqrt(sums[0] / sums[1]), sums[2] / sums[3]
        rows = {
            table.layers[layer]: LayerState(float(rms[at]), float(signal[at]))
            for at, layer in enumerate(layers.tolist())
            if table.shown[layer] and np.isfinite(rms[at]) and np.isfinite(signal[at])
        }
        self.rows = {layer: row for layer, row in {**self.rows, **rows}.items() if layer in table.layers}
