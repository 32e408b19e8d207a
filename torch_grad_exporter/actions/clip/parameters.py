"""The parameters whose gradients are clipped: their layers and units, and which ranks share each.

Models are followed: a replaced, added or removed parameter, such as after `fully_shard`, is found at the next step, by comparing
the identities of all parameters.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torch_grad_exporter.model.names import Place, places_of
from torch_grad_exporter.model.optimizers import has_copies
from torch_grad_exporter.model.sharding import is_sharded, split_dims
from torch_grad_exporter.model.units import UnitLayout, unit_dims, unit_layout
from torch_grad_exporter.torch_compat.fsdp import is_flattened
from torch_grad_exporter.torch_compat.modules import children_in, parameters_in
from torch_grad_exporter.torch_compat.tensors import local

EXPECTED = "expected a module, its parameters, or pairs of names and parameters, such as model.named_parameters()"


@dataclass(frozen=True, slots=True)
class ClippedParameter:
    """A parameter, or this rank's part of it.

    Attributes:
        layout: How units lie in it, None if it is one unit.
        units: The number of units that this rank has.
        sharding: The process groups whose ranks have different parts of it.
        split_units: Whether ranks have parts of each unit, such as of a transposed weight under FSDP2. A bias is not meant.
    """

    name: str
    layer: str
    parameter: torch.Tensor
    layout: UnitLayout | None = None
    units: int = 0
    sharding: tuple[Any, ...] = ()
    split_units: bool = False

    def unit_norms(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the norm of each unit of this rank's part of the parameter, or of its gradient; at least in float32."""
        precision = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
        if self.units == 0:
            return tensor.new_zeros(0, dtype=precision or tensor.abs().dtype)
        if self.layout is None:
            whole: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=precision).reshape(1)
            return whole
        norms: torch.Tensor = torch.linalg.vector_norm(self.layout.rows(tensor), dim=1, dtype=precision)
        return norms

    def along_units(self, values: torch.Tensor) -> torch.Tensor:
        """Return one value for each unit in a shape that multiplies this rank's part of the gradient."""
        shape = local(self.parameter).shape
        if self.layout is None:
            return values.reshape(())
        if self.layout.dims == (0,) and self.layout.shape[0] == shape[0]:
            return values.reshape(-1, *(1,) * (len(shape) - 1))
        rest = math.prod(shape) // math.prod(size for size in self.layout.shape if size > 0)
        viewed = [rest if size < 0 else size for size in self.layout.shape]
        # Units lie across several dimensions, so their values are spread over the whole weight.
        marked = [size if dim in self.layout.dims else 1 for dim, size in enumerate(viewed)]
        return values.reshape(marked).expand(viewed).reshape(shape)


def clipped_parameter(name: str, layer: str, parameter: torch.Tensor, module: torch.nn.Module | None = None) -> ClippedParameter:
    """Return a parameter with its units and the ranks that share it. Raises `ValueError` if it cannot be clipped."""
    if is_flattened(parameter):
        raise ValueError(
            f"{name} belongs to FullyShardedDataParallel, which hides what ranks share;"
            " use its own clip_grad_norm_(), or fully_shard"
        )
    if is_lazy(parameter):  # without a shape until the first forward
        return ClippedParameter(name, layer, parameter)
    shape = local(parameter).shape
    layout, split_units = None, False
    if len(shape) > 1:
        module = module or torch.nn.Module()
        layout = unit_layout(module, parameter) or UnitLayout((shape[0], -1), (0,))
        # Judged by the whole parameter, so that all ranks refuse it.
        split_units = not split_dims(parameter) <= {*(unit_dims(module, parameter) or (0,))}
    sharding: list[Any] = []
    if is_sharded(parameter):
        tensor: Any = parameter  # a DTensor
        for dim, placement in enumerate(tensor.placements):
            if getattr(placement, "dim", None) is not None and tensor.device_mesh.size(dim) > 1:
                sharding.append(tensor.device_mesh.get_group(dim))
    units = 1 if layout is None else layout.count
    return ClippedParameter(name, layer, parameter, layout, units, tuple(sharding), split_units)


@dataclass(frozen=True, slots=True, eq=False)
class ParameterSet:
    """Parameters by position, the names of layers by index, and the index of each parameter's layer.

    Attributes:
        lazy: Whether a parameter has no shape yet.
        sharded: Whether ranks have different parts of a parameter.
    """

    entries: tuple[ClippedParameter, ...]
    parameters: tuple[torch.Tensor, ...]
    layers: tuple[str, ...]
    layer_of: tuple[int, ...]
    lazy: bool
    sharded: bool

    @classmethod
    def of(cls, entries: Iterable[ClippedParameter]) -> ParameterSet:
        """Return the set of these parameters."""
        entries = tuple(entries)
        layers = tuple(dict.fromkeys(entry.layer for entry in entries))
        index = {layer: number for number, layer in enumerate(layers)}
        parameters = tuple(entry.parameter for entry in entries)
        lazy, sharded = any(map(is_lazy, parameters)), any(entry.sharding for entry in entries)
        return cls(entries, parameters, layers, tuple(index[entry.layer] for entry in entries), lazy, sharded)


class ParameterTracker:
    """Follows models, and an optimizer if there is one. Holds both weakly.

    An optimizer that owns copies of all parameters, such as those of a model in half precision, is clipped in the copies: they have
    its gradients.

    `fixed`: parameters that do not belong to a model.
    """

    def __init__(
        self,
        models: Mapping[str, torch.nn.Module],
        optimizer: torch.optim.Optimizer | None = None,
        fixed: Sequence[ClippedParameter] = (),
    ) -> None:
        self._models = {name: weakref.ref(model) for name, model in models.items()}
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._fixed = tuple(fixed)
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._identities: list[list[int]] | None = None
        self._current: ParameterSet | None = None

    def current(self) -> ParameterSet | None:
        """Return the parameters now, None if there are none; the same object as long as nothing has changed."""
        optimizer = None if self._optimizer is None else self._optimizer()
        owned = [] if optimizer is None else [parameter for group in optimizer.param_groups for parameter in group["params"]]
        modules = [module for reference in self._modules if (module := reference()) is not None]
        # Compared in each step, so without a Python call for each parameter.
        identities = [*_identities(modules), [*map(id, owned)]]
        if identities != self._identities or (self._current is not None and self._current.lazy):
            models = {name: model for name, reference in self._models.items() if (model := reference()) is not None}
            modules = [module for model in models.values() for module in model.modules()]
            self._modules = [weakref.ref(module) for module in modules]
            self._identities = [*_identities(modules), identities[-1]]
            places = [*places_of((number, *named) for number, named in enumerate(models.items()))]
            entries = self._entries(places, optimizer, owned)
            self._current = ParameterSet.of(entries) if entries else None
        return self._current

    def _entries(
        self, places: Sequence[Place], optimizer: torch.optim.Optimizer | None, owned: Sequence[torch.Tensor]
    ) -> list[ClippedParameter]:
        pairs: list[tuple[Place, torch.Tensor]] = [(place, place.parameter) for place in places]
        if self._optimizer is not None:
            mine = {*map(id, owned)}
            pairs = [(place, parameter) for place, parameter in pairs if id(parameter) in mine]
            if not pairs and optimizer is not None and has_copies(optimizer, [place.parameter for place in places]):
                pairs = [*zip(places, owned, strict=True)]
        return [*self._fixed, *(clipped_parameter(place.name, place.layer, its, place.module) for place, its in pairs)]


def _identities(modules: Sequence[torch.nn.Module]) -> tuple[list[int], list[int]]:
    """Return the identities of the modules' parameters and children."""
    owned = itertools.chain.from_iterable(parameters.values() for parameters in map(parameters_in, modules))
    children = itertools.chain.from_iterable(inner.values() for inner in map(children_in, modules))
    return [*map(id, owned)], [*map(id, children)]


def listed(given: object) -> Iterator[ClippedParameter]:
    """Yield the parameters of a list; each is its own layer. Raises `TypeError` or `ValueError` if it is not such a list."""
    seen: set[int] = set()
    named: set[str] = set()
    items: list[Any] = [given] if isinstance(given, torch.Tensor) else list(given) if isinstance(given, Iterable) else [given]
    for number, item in enumerate(items):
        name, parameter = item if isinstance(item, tuple) and len(item) == 2 else (str(number), item)
        if not isinstance(name, str) or not isinstance(parameter, torch.Tensor):
            text = repr(item) if len(repr(item)) <= 60 else f"<{type(item).__name__}>"
            raise TypeError(f"Clipper(model_or_parameters={text}): {EXPECTED}")
        if id(parameter) in seen:  # tied: measured and clipped once
            continue
        if name in named:
            raise ValueError(
                f"Clipper(model_or_parameters=...): two parameters are called {name!r}; put their model's name in front"
            )
        seen.add(id(parameter))
        named.add(name)
        yield clipped_parameter(name, name, parameter)
