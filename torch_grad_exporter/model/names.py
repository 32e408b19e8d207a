"""Names of layers: without the prefixes that wrappers add, and filtered; and where the parameters are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torch_grad_exporter.torch_compat.modules import Parameters, parameters_of_each

WRAPPER_PARTS = frozenset({"module", "_orig_mod", "_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Name parts that DataParallel and DDP, `torch.compile`, Opacus, FSDP1 and checkpoint wrappers put before the user's."""


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return what was compiled to be a module; itself where that is nothing."""
    inner: torch.nn.Module = getattr(module, "_orig_mod", module)
    return inner


def joined(*parts: str) -> str:
    """Return the name that these parts make, without empty ones."""
    return ".".join(part for part in parts if part)


def clean(name: str) -> str:
    """A module's name without the parts that wrappers add."""
    parts = name.split(".")
    return name if WRAPPER_PARTS.isdisjoint(parts) else ".".join(part for part in parts if part not in WRAPPER_PARTS)


@dataclass(slots=True)
class LayerFilter:
    """Which layers are tracked: those that an `include` pattern finds and no `exclude` pattern does."""

    include: tuple[re.Pattern[str], ...] = ()
    exclude: tuple[re.Pattern[str], ...] = ()

    def accepts(self, layer: str) -> bool:
        """Return whether the layer of this name is tracked; patterns are searched, not matched in full."""
        wanted = not self.include or any(pattern.search(layer) for pattern in self.include)
        return wanted and not any(pattern.search(layer) for pattern in self.exclude)


class LayerNames:
    """The label of each module's parameters, without what wrappers add. Where two modules would share one, both have full names."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._cleaned: dict[str, str] = {}
        self._shared: set[str] = set()
        first: dict[str, str] = {}
        """By label, the first module that has it."""
        for raw, _, owned in _owned_in(root):
            cleaned = self._cleaned[raw] = clean(raw)
            labels = [cleaned] if cleaned and owned else owned
            self._shared.update(label for label in labels if first.setdefault(label, raw) != raw)

    def __contains__(self, raw: str) -> bool:
        return raw in self._cleaned

    def of(self, raw: str, attribute: str) -> str:
        """Return the label of a parameter, by the module's name as `named_modules()` gives it."""
        label = self._cleaned[raw] or attribute
        return label if label not in self._shared else raw or attribute


class Place(NamedTuple):
    """Where a parameter is. `name`, `layer`: begin with the model's name where there are several; `model`: its number."""

    model: int
    name: str
    layer: str
    module: torch.nn.Module
    attribute: str
    parameter: torch.nn.Parameter


def places_of(roots: Iterable[tuple[int, str, torch.nn.Module]]) -> Iterator[Place]:
    """Every parameter once, in the order of `model.parameters()`, of models with their numbers and names."""
    seen: set[int] = set()
    for model, name, root in roots:
        labels, within = LayerNames(root), f"{name}." if name else ""
        for raw, module, owned in _owned_in(root):
            before = f"{within}{raw}." if raw else within
            for attribute, parameter in owned.items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    layer = within + labels.of(raw, attribute)
                    yield Place(model, before + attribute, layer, module, attribute, parameter)


def parameters_within(root: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Return the parameters of a model, one that is tied several times, at a fraction of the price of `root.parameters()`."""
    each = parameters_of_each([*root.modules()])
    return (parameter for owned in each for parameter in owned.values() if parameter is not None)


def _owned_in(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Parameters]]:
    """Return the modules of a model with their names and own parameters."""
    names: list[str] = []
    modules: list[torch.nn.Module] = []
    for name, module in root.named_modules():  # `zip(*...)` would make two containers for each, and the garbage collector come
        names.append(name)
        modules.append(module)
    return zip(names, modules, parameters_of_each(modules), strict=True)


def layers_of(roots: Iterable[tuple[int, str, torch.nn.Module]]) -> list[str]:
    """Return the names of all layers that have a parameter, frozen or not, before filtering and folding."""
    return list(dict.fromkeys(place.layer for place in places_of(roots)))
