"""Norms of gradients before clipping: of each parameter or unit on its device, then over ranks, then over the policy's groups.

Nothing here reads a value. Where parameters are split over ranks, the squares of all norms go over the ranks as one vector, once
for each dimension of the mesh that splits them. All ranks of a mesh have the same parameters, so they send equal lengths, and do
so in each step, whatever gradients there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from torch_grad_exporter.actions.clip.policy import Measured, Scope
from torch_grad_exporter.actions.clip.table import Entry, ParameterGroups
from torch_grad_exporter.torch_compat.tensors import TensorGroup, by_device_and_dtype, can_foreach, local, norms_of

HALF = (torch.float16, torch.bfloat16)


def wide(device: torch.device) -> torch.dtype:
    """The widest type for sums and memories on a device."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(slots=True)
class Gradients:
    """This rank's parts of all gradients of a step, by the position of their parameters, and by device and type.

    `places`: the positions of those that there are. `scale`: of the loss, by which they are still multiplied.
    """

    parts: list[torch.Tensor]
    places: list[int]
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
        """Where the norms are brought together: the device of the first gradient, as by `clip_grad_norm_`."""
        return self.parts[0].device

    def norms(self, *, exact: bool) -> list[torch.Tensor]:
        """The norm of each gradient, in the order of `kinds`; `exact`: rounded as `clip_grad_norm_` does it, but for float16."""
        found: list[torch.Tensor] = []
        for (tensors, _), at_once in zip(self.kinds, self.at_once, strict=True):
            kept = tensors[0].dtype not in HALF or (exact and tensors[0].dtype == torch.bfloat16)
            found += norms_of(tensors, None if kept else torch.float32, at_once=at_once)
        device = self.device
        return found if len(self.kinds) == 1 else [norm.to(device) for norm in found]

    def order(self) -> list[int]:
        """The place in `parts` of each of `norms`."""
        return [place for _, places in self.kinds for place in places]


def gradients_of(groups: ParameterGroups, foreach: bool | None, scale: torch.Tensor | None = None) -> Gradients:
    """The gradients that there are now, multiplied by `scale` where it is given. Raises for one that is not dense."""
    every = [parameter.grad for parameter in groups.parameters]
    places = [place for place, gradient in enumerate(every) if gradient is not None]
    parts = [
        gradient if type(gradient) is torch.Tensor and gradient.layout is torch.strided else _part(groups.entries[place], gradient)
        for place, gradient in enumerate(every)
        if gradient is not None
    ]
    return Gradients(parts, places, foreach, scale)


def _part(entry: Entry, gradient: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient that is no ordinary tensor."""
    if gradient.layout is not torch.strided:
        raise ValueError(
            f"the gradient of {entry.name} has the layout {gradient.layout}: only dense gradients are clipped;"
            " make its module with sparse=False, or leave its parameters out"
        )
    return local(_as_placed(entry.parameter, gradient)) if hasattr(gradient, "placements") else gradient


def _as_placed(parameter: Any, gradient: Any) -> torch.Tensor:  # noqa: ANN401 - DTensors
    """A distributed gradient that is placed as its parameter is. One of which ranks have summands is added up first."""
    if tuple(gradient.placements) != tuple(parameter.placements):
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    placed: torch.Tensor = gradient
    return placed


class Measuring:
    """Measures the gradients of one table for one scope. It keeps what it needs on the device, made once.

    All values of a step are one vector: the parameters', in the scope `unit` the units', and those of the weights if asked for.
    Those of the parameters come first, so that all ranks meet the process groups in the same order.
    """

    def __init__(self, groups: ParameterGroups, scope: Scope, device: torch.device, *, weighs: bool) -> None:
        self._entries, self._scope, self._device, self._weighs = groups.entries, scope, device, weighs
        if scope == "unit" and (lost := [entry.name for entry in groups.entries if entry.units_lost]):
            raise ValueError(f'scope="unit": ranks have parts of {lost[0]} that cross its units; use scope="layer", or omit it')
        whole = [[split.group for split in entry.splits] for entry in groups.entries]
        units = [[s.group for s in entry.splits if s.across_units] for entry in groups.entries for _ in range(entry.units)]
        measured = units if scope == "unit" else whole
        rows = [*whole, *(units if scope == "unit" else []), *(measured if weighs else [])]
        self._reduction = _Reduction(rows, device)
        self._members = on_device(groups.members(), device) if scope == "layer" else None
        self._layer_of = groups.layer_of
        self._zero = torch.zeros((), device=device, dtype=torch.float32)

    @property
    def split(self) -> bool:
        """Whether ranks have different parts, so that each step has a collective."""
        return self._reduction.needed

    def __call__(self, gradients: Gradients, *, exact: bool) -> Measured:
        """The norms of a step, without the scale of the loss."""
        measured = self._scaled(gradients, exact=exact)
        if gradients.scale is None:
            return measured
        scale = gradients.scale.to(measured.total.device)
        return Measured(measured.norms / scale, measured.total / scale, measured.weights)

    def _scaled(self, gradients: Gradients, *, exact: bool) -> Measured:
        if self._scope == "model" and not self.split:
            total = torch.linalg.vector_norm(torch.stack(gradients.norms(exact=exact)))
            return Measured(total, total)
        own = self._own(gradients, exact=exact)
        count = len(self._entries)
        norms = self._reduction(own)
        total = torch.linalg.vector_norm(norms[:count]).to(own.dtype)
        if self._scope == "model":
            # Ranks measure together in each step. Where none has a gradient there is no norm, and not the norm 0.
            return Measured(torch.where(total > 0, total, torch.nan), total)
        if self._scope == "unit":
            ends = count + sum(entry.units for entry in self._entries)
            return Measured(norms[count:ends], total, norms[ends:] if self._weighs else None)
        layers = self._by_layer(norms[:count])
        self._forget_missing(layers, gradients.places)
        return Measured(layers, total, self._by_layer(norms[count:]) if self._weighs else None)

    def _own(self, gradients: Gradients, *, exact: bool) -> torch.Tensor:
        """The vector of this rank's norms."""
        by_parameter: list[torch.Tensor] = [self._zero] * len(self._entries)
        for place, norm in zip(gradients.order(), gradients.norms(exact=exact) if gradients.parts else (), strict=True):
            by_parameter[gradients.places[place]] = norm
        sections = [torch.stack(by_parameter)]
        weights = [local(entry.parameter).detach() for entry in self._entries] if self._weighs else []
        if self._scope == "unit":
            present: dict[int, torch.Tensor] = dict(zip(gradients.places, gradients.parts, strict=True))
            sections += [self._unit_norms(place, present.get(place)) for place in range(len(self._entries))]
            sections += [self._unit_norms(place, weight) for place, weight in enumerate(weights)]
        elif weights:
            kinds = Gradients(weights, [], gradients.foreach)
            found = dict(zip(kinds.order(), kinds.norms(exact=False), strict=True))
            sections.append(torch.stack([found[place] for place in range(len(weights))]).to(self._device))
        return sections[0] if len(sections) == 1 else torch.cat(sections)

    def _unit_norms(self, place: int, tensor: torch.Tensor | None) -> torch.Tensor:
        entry = self._entries[place]
        return self._zero.expand(entry.units) if tensor is None else entry.unit_norms(tensor).to(self._device)

    def _by_layer(self, norms: torch.Tensor) -> torch.Tensor:
        """The norm of each layer from those of its parameters; the place after the last one holds a zero."""
        padded = torch.cat([norms, self._zero.to(norms.dtype)[None]])
        layers: torch.Tensor = torch.linalg.vector_norm(padded[self._members], dim=1)
        return layers

    def _forget_missing(self, layers: torch.Tensor, places: Sequence[int]) -> None:
        """A layer without a gradient in this step has no norm, and not the norm 0, which would enter a history."""
        if len(places) < len(self._entries):
            present = {self._layer_of[place] for place in places}
            for layer in set(self._layer_of) - present:
                layers[layer] = torch.nan


class _Reduction:
    """Adds squares up over ranks: by process group, the positions of the vector that it shares, `None` for all."""

    def __init__(self, groups: Sequence[Sequence[Any]], device: torch.device) -> None:
        shared: dict[int, tuple[Any, list[int]]] = {}
        for position, row in enumerate(groups):
            for group in row:
                shared.setdefault(id(group), (group, []))[1].append(position)
        self._plan = [
            (group, None if len(positions) == len(groups) else on_device(positions, device)) for group, positions in shared.values()
        ]

    @property
    def needed(self) -> bool:
        """Whether anything is split over ranks."""
        return bool(self._plan)

    def __call__(self, norms: torch.Tensor) -> torch.Tensor:
        """The norms over all ranks, from those of this rank's parts."""
        if not self._plan:
            return norms
        squares = norms.to(wide(norms.device)).square()
        for group, positions in self._plan:
            packed = squares if positions is None else squares.index_select(0, positions)
            dist.all_reduce(packed, group=group)
            if positions is not None:
                squares.index_copy_(0, positions, packed)
        return squares.sqrt()


def on_device(values: Sequence[object], device: torch.device) -> torch.Tensor:
    """Whole numbers on a device. They are pinned on the way to a GPU, so that nothing waits for the copy."""
    numbers = torch.tensor(values, device="cpu")
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)
