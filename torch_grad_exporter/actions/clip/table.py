"""The parameters whose gradients are clipped: their layers and units, and between which ranks each is split.

Those of a model are looked for again when it changes: a replaced, added or removed parameter, such as after `fully_shard`, is
found at the next step, by comparing the places of all parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torch_grad_exporter.model.names import places_of
from torch_grad_exporter.model.sharding import is_sharded
from torch_grad_exporter.model.units import UnitLayout, unit_layout
from torch_grad_exporter.torch_compat.fsdp import is_flattened
from torch_grad_exporter.torch_compat.modules import children_in, parameters_in
from torch_grad_exporter.torch_compat.tensors import local

EXPECTED = "expected a module, its parameters, or pairs of names and parameters, such as model.named_parameters()"


@dataclass(frozen=True, slots=True)
class Split:
    """Ranks that have different parts of a parameter. `across_units`: a part of every unit, and not other units."""

    group: Any
    across_units: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter: its name and layer, this rank's units of it, and how ranks share it.

    `layout`: how units lie in it where they are not its rows. `units`: how many this rank has.
    """

    name: str
    layer: str
    parameter: torch.Tensor
    layout: UnitLayout | None
    units: int
    splits: tuple[Split, ...]
    units_lost: bool = False
    """Whether the ranks have parts of the parameter that cross its units: a transposed weight, such as under FSDP2."""

    def unit_norms(self, tensor: torch.Tensor) -> torch.Tensor:
        """The norm of each unit of this rank's part of the parameter, or of its gradient; at least in float32."""
        precision = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
        if tensor.ndim < 2:
            whole: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=precision).reshape(1)
            return whole
        if self.units == 0:
            return tensor.new_zeros(0, dtype=precision or tensor.abs().dtype)
        rows = tensor.reshape(self.units, -1) if self.layout is None else self.layout.rows(tensor)
        norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=precision)
        return norms

    def along_units(self, values: torch.Tensor) -> torch.Tensor:
        """One value per unit, in a shape that multiplies this rank's part of the gradient."""
        shape = local(self.parameter).shape
        if len(shape) < 2:
            return values.reshape(())
        if self.layout is None:
            return values.reshape(-1, *(1,) * (len(shape) - 1))
        rest = math.prod(shape) // math.prod(size for size in self.layout.shape if size > 0)
        viewed = [rest if size < 0 else size for size in self.layout.shape]
        marked = [size if dim in self.layout.dims else 1 for dim, size in enumerate(viewed)]
        return values.reshape(marked).expand(viewed).reshape(shape)


@dataclass(frozen=True, slots=True, eq=False)
class ParameterGroups:
    """The parameters by position, the layers by index, and the layer of each parameter.

    `settled`: all parameters have their shapes; those of lazy modules get them in the first forward.
    """

    entries: tuple[Entry, ...]
    parameters: tuple[torch.Tensor, ...]
    layers: tuple[str, ...]
    layer_of: tuple[int, ...]
    settled: bool

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> ParameterGroups:
        """The groups over these parameters."""
        entries = tuple(entries)
        layers = tuple(dict.fromkeys(entry.layer for entry in entries))
        index = {layer: place for place, layer in enumerate(layers)}
        parameters = tuple(entry.parameter for entry in entries)
        settled = not any(map(is_lazy, parameters))
        return cls(entries, parameters, layers, tuple(index[entry.layer] for entry in entries), settled)

    def members(self) -> list[list[int]]:
        """The positions of each layer's parameters, filled up to equal lengths with the position after the last parameter."""
        members: list[list[int]] = [[] for _ in self.layers]
        for place, layer in enumerate(self.layer_of):
            members[layer].append(place)
        longest = max(map(len, members))
        return [one + [len(self.entries)] * (longest - len(one)) for one in members]


class Parameters:
    """Where the parameters come from: a model, which may change, or a fixed list."""

    def __init__(self, given: torch.nn.Module | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> None:
        self._model = given if isinstance(given, torch.nn.Module) else None
        self._fixed = () if isinstance(given, torch.nn.Module) else tuple(_listed(given))
        self._structure: tuple[list[int], ...] | None = None
        self._modules: list[torch.nn.Module] = []
        self._groups = self._found()

    def groups(self) -> ParameterGroups:
        """The groups now; the same object as long as nothing has changed."""
        changed = self._model is not None and self._structure != structure_of(self._modules)
        if changed or not self._groups.settled:
            self._groups = self._found()
        return self._groups

    def _found(self) -> ParameterGroups:
        if self._model is not None:
            self._modules = [*self._model.modules()]
            self._structure = structure_of(self._modules)
        groups = ParameterGroups.of(self._fixed if self._model is None else _entries(self._model))
        if not groups.entries:
            raise ValueError(f"Clipper(model_or_parameters=...): it has no parameters; {EXPECTED}")
        return groups


def _entries(model: torch.nn.Module) -> Iterator[Entry]:
    return (entry_of(one.name, one.layer, one.parameter, one.module) for one in places_of([(0, "", model)]))


def structure_of(modules: Sequence[torch.nn.Module]) -> tuple[list[int], ...]:
    """Changes when a parameter or a child of the modules comes, goes, or is replaced. Without a Python call for each."""
    owned = itertools.chain.from_iterable(parameters.values() for parameters in map(parameters_in, modules))
    children = itertools.chain.from_iterable(inner.values() for inner in map(children_in, modules))
    return [*map(id, owned)], [*map(id, children)]


def _listed(given: object) -> Iterator[Entry]:
    """The parameters of a list; each is a layer of its own."""
    seen: set[int] = set()
    named: set[str] = set()
    items: list[Any] = [given] if isinstance(given, torch.Tensor) else list(given) if isinstance(given, Iterable) else [given]
    for place, item in enumerate(items):
        pair = item if isinstance(item, tuple) and len(item) == 2 else (str(place), item)
        name, parameter = pair
        if not isinstance(name, str) or not isinstance(parameter, torch.Tensor):
            raise TypeError(f"Clipper(model_or_parameters={_short(item)}): {EXPECTED}")
        if id(parameter) not in seen:
            if name in named:
                raise ValueError(
                    f"Clipper(model_or_parameters=...): two parameters are called {name!r}; put their model's name in front"
                )
            seen.add(id(parameter))
            named.add(name)
            yield entry_of(name, name, parameter, torch.nn.Module())


def _short(item: object) -> str:
    text = repr(item)
    return text if len(text) <= 60 else f"<{type(item).__name__}>"


def entry_of(name: str, layer: str, parameter: torch.Tensor, module: torch.nn.Module) -> Entry:
    """A parameter as it is clipped. Raises `ValueError` for one that cannot be."""
    if is_flattened(parameter):
        raise ValueError(
            f"{name} belongs to FullyShardedDataParallel, which hides what ranks share;"
            " use its own clip_grad_norm_(), or fully_shard"
        )
    if is_lazy(parameter):
        return Entry(name, layer, parameter, None, 0, ())
    part = local(parameter)
    layout = unit_layout(module, parameter)
    odd = layout if _is_odd(layout, part) else None
    units = 1 if part.ndim < 2 else part.shape[0] if odd is None else odd.count
    lost = odd is None and is_sharded(parameter) and _is_odd(unit_layout(module, full := _full(parameter)), full)
    return Entry(name, layer, parameter, odd, units, tuple(_splits(parameter, odd)), lost)


def _splits(parameter: Any, layout: UnitLayout | None) -> Iterator[Split]:  # noqa: ANN401 - it may be a DTensor
    """The dimensions of the parameter's mesh along which there are several ranks with different parts."""
    if not is_sharded(parameter):
        return
    whole = parameter.ndim < 2
    for dim, placement in enumerate(parameter.placements):
        along = getattr(placement, "dim", None)
        if along is not None and parameter.device_mesh.size(dim) > 1:
            across = whole or (layout is None and along != 0)
            yield Split(parameter.device_mesh.get_group(dim), across_units=across)


def _is_odd(layout: UnitLayout | None, weight: torch.Tensor) -> bool:
    """Whether the units of a weight are not its rows."""
    return layout is not None and (layout.dims != (0,) or layout.shape[0] != weight.shape[0])


def _full(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor without data that has the shape of the whole parameter."""
    return torch.empty(parameter.shape, device="meta")
