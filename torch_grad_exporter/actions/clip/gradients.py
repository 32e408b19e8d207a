"""The gradients of a step: their norms before clipping, over ranks and over a policy's groups, and the clipping itself.

Nothing here reads a value. If parameters are sharded, the squares of all norms go over the ranks as one vector, once for each
dimension of the mesh that shards them. All ranks of a mesh have the same parameters, so they send equal lengths, and they do so
in each step, whatever gradients there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from torch_grad_exporter.actions.clip.parameters import ClippedParameter, ParameterSet
from torch_grad_exporter.actions.clip.policy import Decision, GradientNorms, Policy, Scope
from torch_grad_exporter.statistics.device import to_device, wide
from torch_grad_exporter.torch_compat.tensors import TensorGroup, by_device_and_dtype, can_foreach, local, multiply_, norms_of

HALF = (torch.float16, torch.bfloat16)
DOUBLE = (torch.float64, torch.complex128)


@dataclass(slots=True)
class Gradients:
    """This rank's parts of the gradients of a step.

    Attributes:
        positions: The position of each one's parameter.
        foreach: Whether to use operations on many tensors at once, None for wherever that is possible.
        scale: The loss scale by which gradients are still multiplied, None for none.
        kinds: The parts by device and type, with their indices.
        at_once: For each kind, whether operations take all of its tensors at once.
    """

    parts: list[torch.Tensor]
    positions: list[int]
    foreach: bool | None
    scale: torch.Tensor | None = None
    kinds: list[TensorGroup] = field(init=False)
    at_once: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self.kinds = by_device_and_dtype(self.parts) if self.parts else []
        wanted = self.foreach is not False
        self.at_once = [wanted and can_foreach(tensors) for tensors, _ in self.kinds]
        if self.foreach and not all(self.at_once):
            raise ValueError(f"Clipper(foreach=True): not possible for gradients on {self.device.type}; leave it out")

    @property
    def device(self) -> torch.device:
        """The device of the first gradient, where norms are combined, as by `clip_grad_norm_`."""
        return self.parts[0].device

    def norms(self, *, exact: bool) -> list[torch.Tensor]:
        """Return the norm of each gradient in the order of `kinds`; `exact`: rounded like `clip_grad_norm_`, except float16."""
        norms: list[torch.Tensor] = []
        for (tensors, _), at_once in zip(self.kinds, self.at_once, strict=True):
            # Squares of float16 overflow, and sums of bfloat16 lose what is small.
            kept = tensors[0].dtype not in HALF or (exact and tensors[0].dtype == torch.bfloat16)
            norms += norms_of(tensors, None if kept else torch.float32, at_once=at_once)
        return norms if len(self.kinds) == 1 else [norm.to(self.device) for norm in norms]

    def norms_by_position(self, count: int, missing: torch.Tensor, *, exact: bool) -> list[torch.Tensor]:
        """Return the norm of each of `count` parameters, `missing` for one without a gradient."""
        norms = [missing] * count
        indices = [index for _, several in self.kinds for index in several]
        for index, norm in zip(indices, self.norms(exact=exact) if self.parts else (), strict=True):
            norms[self.positions[index]] = norm
        return norms

    def clip(self, decision: Decision, parameters: ParameterSet, scope: Scope) -> None:
        """Multiply the gradients in place, or limit their elements."""
        if decision.coefficients is not None:
            self._multiply(decision.coefficients, parameters, scope)
        if decision.limit is not None:
            self._limit(self.scaled(decision.limit))

    def scaled(self, limit: torch.Tensor) -> torch.Tensor:
        """Return a limit for the gradients as they are, multiplied by the loss scale."""
        return limit if self.scale is None else limit * self.scale.to(limit.device)

    def _multiply(self, coefficients: torch.Tensor, parameters: ParameterSet, scope: Scope) -> None:
        factors: Sequence[torch.Tensor] = ()
        if scope == "unit":
            factors = torch.split(coefficients, [entry.units for entry in parameters.entries])
        elif scope == "layer":
            layers = coefficients.unbind()
            factors = [layers[layer] for layer in parameters.layer_of]
        for (tensors, indices), at_once in zip(self.kinds, self.at_once, strict=True):
            # One call for all tensors of a kind: a kernel for each would cost more than the arithmetic.
            device, dtype = tensors[0].device, tensors[0].dtype
            if scope == "model":
                multiply_(tensors, _fitting(coefficients, device, dtype), at_once=at_once)
                continue
            positions = [self.positions[index] for index in indices]
            own = [factors[position] for position in positions]
            if scope == "unit":
                own = [parameters.entries[p].along_units(values) for p, values in zip(positions, own, strict=True)]
            multiply_(tensors, [_fitting(factor, device, dtype) for factor in own], at_once=at_once)

    def _limit(self, limit: torch.Tensor) -> None:
        for tensors, _ in self.kinds:
            if tensors[0].is_complex():
                raise ValueError("MaxValue: a gradient is complex, and complex numbers have no order; use MaxNorm")
            most = limit.to(tensors[0].device, tensors[0].dtype)
            least = -most
            for tensor in tensors:
                tensor.clamp_(least, most)


def _fitting(factor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return a factor on a gradient's device, not more precise than float32 unless the gradient is."""
    narrow = factor.dtype == torch.float64 and dtype not in DOUBLE
    return factor.to(device, torch.float32 if narrow else factor.dtype)


def gradients_of(parameters: ParameterSet, foreach: bool | None, scale: torch.Tensor | None = None) -> Gradients:
    """Return the gradients that there are now. Raises `ValueError` for one that is not dense."""
    every = [parameter.grad for parameter in parameters.parameters]
    positions = [position for position, gradient in enumerate(every) if gradient is not None]
    parts = [
        gradient  # the usual case, without a call
        if type(gradient) is torch.Tensor and gradient.layout is torch.strided
        else _part(parameters.entries[position], gradient)
        for position, gradient in enumerate(every)
        if gradient is not None
    ]
    return Gradients(parts, positions, foreach, scale)


def _part(entry: ClippedParameter, gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient that is not an ordinary tensor."""
    if gradient.layout is not torch.strided:
        raise ValueError(
            f"the gradient of {entry.name} has the layout {gradient.layout}: only dense gradients are clipped;"
            " make its module with sparse=False, or leave its parameters out"
        )
    if not hasattr(gradient, "placements"):
        return gradient
    distributed: Any = gradient
    parameter: Any = entry.parameter
    if tuple(distributed.placements) != tuple(parameter.placements):  # such as summands, which are added up
        parameter.grad = distributed = distributed.redistribute(placements=parameter.placements)
    return local(distributed)


class NormMeter:
    """Measures the norms that a policy needs. It keeps what it needs on the device, made once.

    All values of a step are one vector: the norms of the parameters, in the scope `unit` those of the units, and those of the
    weights if the policy needs them. The parameters come first, so that all ranks meet the process groups in the same order.
    """

    def __init__(self, parameters: ParameterSet, policy: Policy, device: torch.device) -> None:
        self._entries, self._layer_of = parameters.entries, parameters.layer_of
        self._scope, self._needs_weights, self._exact, self._device = policy.scope, policy.needs_weights, policy.exact, device
        if self._scope == "unit" and (split := [entry.name for entry in self._entries if entry.split_units]):
            raise ValueError(f'scope="unit": ranks have parts of the units of {split[0]}; use scope="layer", or omit it')
        groups = norms = [entry.sharding for entry in self._entries]
        if self._scope == "unit":  # a row is on one rank, and a bias, which is one unit, may be on several
            norms = [entry.sharding if entry.layout is None else () for entry in self._entries for _ in range(entry.units)]
            groups = [*groups, *norms]
        self._reduction = _Reduction([*groups, *norms] if self._needs_weights else groups, device)
        self._zero = torch.zeros((), device=device, dtype=torch.float32)
        self._members = torch.empty(0)
        if self._scope == "layer":
            members: list[list[int]] = [[] for _ in parameters.layers]
            for position, layer in enumerate(self._layer_of):
                members[layer].append(position)
            longest = max(map(len, members))
            # Filled up to equal lengths with the position after the last parameter, which holds a zero.
            padded = [positions + [len(self._entries)] * (longest - len(positions)) for positions in members]
            self._members = to_device(torch.tensor(padded, device="cpu"), device)

    def __call__(self, gradients: Gradients) -> GradientNorms:
        """Return the norms of a step, without the loss scale."""
        measured = self._measured(gradients)
        if gradients.scale is None:
            return measured
        scale = gradients.scale.to(measured.total.device)
        return GradientNorms(measured.norms / scale, measured.total / scale, measured.weights)

    def _measured(self, gradients: Gradients) -> GradientNorms:
        if self._scope == "model" and not self._reduction.needed:  # as `clip_grad_norm_` does it, with its bits
            total = torch.linalg.vector_norm(torch.stack(gradients.norms(exact=self._exact)))
            return GradientNorms(total, total)
        count = len(self._entries)
        own = self._own_norms(gradients, count)
        norms = self._reduction(own)
        total = torch.linalg.vector_norm(norms[:count]).to(own.dtype)
        if self._scope == "model":
            # Ranks measure together in each step. Without a gradient on any rank there is no norm, and not the norm 0.
            return GradientNorms(torch.where(total > 0, total, torch.nan), total)
        if self._scope == "unit":
            ends = count + sum(entry.units for entry in self._entries)
            return GradientNorms(norms[count:ends], total, norms[ends:] if self._needs_weights else None)
        layers = self._by_layer(norms[:count])
        if len(gradients.positions) < count:
            # A layer without a gradient has no norm, and not the norm 0, which would enter a history.
            present = {self._layer_of[position] for position in gradients.positions}
            for layer in set(self._layer_of) - present:
                layers[layer] = torch.nan
        return GradientNorms(layers, total, self._by_layer(norms[count:]) if self._needs_weights else None)

    def _own_norms(self, gradients: Gradients, count: int) -> torch.Tensor:
        """Return the vector of this rank's norms."""
        sections = [torch.stack(gradients.norms_by_position(count, self._zero, exact=self._exact))]
        weights = [local(entry.parameter).detach() for entry in self._entries] if self._needs_weights else []
        if self._scope == "unit":
            present = dict(zip(gradients.positions, gradients.parts, strict=True))
            for entry, tensor in zip(self._entries, map(present.get, range(count)), strict=True):
                sections.append(self._zero.expand(entry.units) if tensor is None else entry.unit_norms(tensor).to(self._device))
            sections += [entry.unit_norms(weight).to(self._device) for entry, weight in zip(self._entries, weights, strict=False)]
        elif weights:
            of_weights = Gradients(weights, [*range(count)], gradients.foreach)
            sections.append(torch.stack(of_weights.norms_by_position(count, self._zero, exact=False)).to(self._device))
        return sections[0] if len(sections) == 1 else torch.cat(sections)

    def _by_layer(self, norms: torch.Tensor) -> torch.Tensor:
        padded = torch.cat([norms, self._zero.to(norms.dtype)[None]])
        layers: torch.Tensor = torch.linalg.vector_norm(padded[self._members], dim=1)
        return layers


class _Reduction:
    """Adds squares up over ranks. `groups`: for each position of the vector, the process groups that share it."""

    def __init__(self, groups: Sequence[Sequence[Any]], device: torch.device) -> None:
        shared: dict[int, tuple[Any, list[int]]] = {}
        for position, row in enumerate(groups):
            for group in row:
                shared.setdefault(id(group), (group, []))[1].append(position)
        # Without positions a group shares all.
        self._plan = [
            (group, None if len(positions) == len(groups) else to_device(positions, device)) for group, positions in shared.values()
        ]

    @property
    def needed(self) -> bool:
        """Whether ranks share anything."""
        return bool(self._plan)

    def __call__(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the norms over all ranks from those of this rank's parts."""
        if not self._plan:
            return norms
        squares = norms.to(wide(norms.device)).square()
        for group, positions in self._plan:
            # One collective for all norms, since each costs a round trip.
            packed = squares if positions is None else squares.index_select(0, positions)
            dist.all_reduce(packed, group=group)
            if positions is not None:
                squares.index_copy_(0, positions, packed)
        return squares.sqrt()
