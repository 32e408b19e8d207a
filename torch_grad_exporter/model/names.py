"""Names of layers: without the prefixes that wrappers add, and filtered; and where the parameters are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from torch_grad_exporter.torch_compat import parameters_in

WRAPPER_PARTS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Name parts that DataParallel and DDP, `torch.compile`, FSDP1 and checkpoint wrappers put before the user's."""


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """What was compiled to be a module; itself where that is nothing."""
    inner: torch.nn.Module = getattr(module, "_orig_mod", module)
    return inner


def clean(name: str) -> str:
    """A module's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_PARTS)


@dataclass(slots=True)
class LayerFilter:
    """Which layers are tracked: those that an `include` pattern finds and no `exclude` pattern does."""

    include: tuple[re.Pattern[str], ...] = ()
    exclude: tuple[re.Pattern[str], ...] = ()

    def accepts(self, layer: str) -> bool:
        """Whether the layer of this name is tracked; patterns are searched, not matched in full."""
        wanted = not self.include or any(pattern.search(layer) for pattern in self.include)
        return wanted and not any(pattern.search(layer) for pattern in self.exclude)


def layer_names(root: torch.nn.Module) -> dict[tuple[str, str], str]:
    """The label of each module's parameters by module name and attribute, without what wrappers add.

    Where two modules would share a label, both have their full names.
    """
    owned = {raw: parameters_in(module) for raw, module in root.named_modules()}
    names = {(raw, attribute): clean(raw) or attribute for raw, attributes in owned.items() for attribute in attributes}
    modules: dict[str, set[str]] = {}
    for (raw, _), label in names.items():
        modules.setdefault(label, set()).add(raw)
    return {(raw, attribute): label if len(modules[label]) == 1 else raw or attribute for (raw, attribute), label in names.items()}


@dataclass(frozen=True, slots=True)
class Place:
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
        labels = layer_names(root)
        for raw, module in root.named_modules():
            for attribute, parameter in parameters_in(module).items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    layer = _joined(name, labels[raw, attribute])
                    yield Place(model, _joined(name, raw, attribute), layer, module, attribute, parameter)


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)
