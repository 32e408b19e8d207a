"""Which inner modules are followed, under which labels, without those that are compiled."""

from __future__ import annotations

import enum
import re
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from torch_grad_exporter.model.folding import WHOLE, fold
from torch_grad_exporter.model.names import LayerFilter, clean, joined, uncompiled
from torch_grad_exporter.torch_compat.compiler import compiles_its_call, is_compiled
from torch_grad_exporter.torch_compat.modules import children_in, parameters_in

# Modules that use their children without calling them, so that they count as a leaf.
WITHOUT_PARTS: tuple[type[torch.nn.Module], ...] = (torch.nn.MultiheadAttention,)

_ROUTER = re.compile("(Router|Gate|Gating)$")


@dataclass(frozen=True, slots=True)
class NamedModule:
    """A module and its name in the script, without what wrappers add.

    `compiled`: it is part of compiled code. `whole`: it is a model as a whole.
    """

    name: str
    module: torch.nn.Module
    compiled: bool = False
    whole: bool = False

    @property
    def leaf(self) -> bool:
        """Whether no other module does its work."""
        return not any(child is not None for child in children_in(self.module).values()) or isinstance(self.module, WITHOUT_PARTS)


@dataclass(frozen=True, slots=True)
class InnerModule:
    """A module that is followed, held weakly."""

    label: str
    module: weakref.ref[torch.nn.Module]


@dataclass(frozen=True, slots=True)
class SelectedModules:
    """All that are followed, by the `id` of their model.

    `folded`: how many of them share their label; `compiled`: how many more are left out since they are compiled.
    """

    by_root: Mapping[int, tuple[InnerModule, ...]] = field(default_factory=dict)
    folded: int = 0
    compiled: int = 0


class ModuleKind(enum.Enum):
    """Which modules are wanted, of those whose names a filter accepts. A leaf is one without children."""

    ANY = enum.auto()
    LEAVES = enum.auto()
    OWNERS = enum.auto()  # of parameters; a whole model only if it is a leaf
    ROUTERS = enum.auto()  # of a mixture of experts, by the name of the class and of what it has

    def includes(self, named: NamedModule) -> bool:
        """Return whether a module is of this kind."""
        if self is ModuleKind.ROUTERS:
            names = {*vars(named.module), *parameters_in(named.module)}
            return _ROUTER.search(type(named.module).__name__) is not None and any("expert" in name for name in names)
        if self is not ModuleKind.OWNERS:
            return self is ModuleKind.ANY or named.leaf
        owns = any(parameter is not None for parameter in parameters_in(named.module).values())
        return owns and (named.leaf or not named.whole)


class InnerModules:
    """The wanted modules of the models, found again whenever a module came or went. Holds the models weakly.

    Beyond `most` labels modules share them like layers do.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module], layers: LayerFilter, kind: ModuleKind, most: int) -> None:
        self._models = [(name, weakref.ref(module)) for name, module in models.items()]
        self._layers, self._kind, self._most = layers, kind, most
        self._structure: list[int] = []
        self._selected = SelectedModules()

    def selected(self) -> SelectedModules:
        """Return the modules that exist now."""
        modules = (module for _, root in self._roots() for module in root.modules())
        structure = [number for module in modules for number in (id(module), is_compiled(module))]
        if structure != self._structure:
            self._selected, self._structure = self._select(), structure
        return self._selected

    def names(self) -> list[str]:
        """Return the names of all modules, wanted or not."""
        return [named.name for name, root in self._roots() for named in named_modules(name, root)]

    def _roots(self) -> list[tuple[str, torch.nn.Module]]:
        return [(name, root) for name, reference in self._models if (root := reference()) is not None]

    def _select(self) -> SelectedModules:
        wanted = [
            (id(root), named)
            for name, root in self._roots()
            for named in named_modules(name, root)
            if self._kind.includes(named) and self._layers.accepts(named.name)
        ]
        hooked = [(root, named) for root, named in wanted if not named.compiled]
        labels = fold([named.name for _, named in hooked], self._most)
        sharing = Counter(labels)
        by_root: dict[int, list[InnerModule]] = {}
        for label, (root, named) in zip(labels, hooked, strict=True):
            by_root.setdefault(root, []).append(InnerModule(label, weakref.ref(named.module)))
        folded = sum(sharing[label] > 1 for label in labels)
        return SelectedModules({root: tuple(inner) for root, inner in by_root.items()}, folded, len(wanted) - len(hooked))


def named_modules(name: str, root: torch.nn.Module) -> Iterator[NamedModule]:
    """Yield every module of a model once, under its first name; `name`: of the model, empty for a single one."""
    modules = [*_walked("", root, compiled=False, seen=set())]
    alike = Counter(clean(raw) for raw, _, _ in modules)
    for raw, module, compiled in modules:
        short = clean(raw) if alike[clean(raw)] == 1 else raw
        yield NamedModule(joined(name, short) or WHOLE, module, compiled, not short)


def _walked(raw: str, module: torch.nn.Module, *, compiled: bool, seen: set[int]) -> Iterator[tuple[str, torch.nn.Module, bool]]:
    seen.add(id(module))
    compiled = compiled or is_compiled(module)
    yield raw, module, compiled
    children = {} if isinstance(module, WITHOUT_PARTS) else children_in(module)
    for attribute, child in children.items():
        if child is not None and id(child) not in seen:
            yield from _walked(joined(raw, attribute), child, compiled=compiled, seen=seen)


@dataclass(slots=True)
class VisibleModules:
    """The modules of a root that can be hooked, by `id`, under their first names; `hidden`: compiled ones in each, which cannot.

    `name`: of the model, empty for a single one.
    """

    root: torch.nn.Module
    name: str
    modules: dict[int, InnerModule] = field(default_factory=dict)
    hidden: dict[int, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._add(self.root, self.name, self.name or type(self.root).__name__)

    def _add(self, module: torch.nn.Module, path: str, label: str) -> None:
        self.modules[id(module)] = InnerModule(label, weakref.ref(module))
        for attribute, child in children_in(module).items() if not hides_its_inside(module) else ():
            if child is None or id(child) in self.modules:
                continue
            below = joined(path, attribute)
            if compiles_its_call(child):
                self.hidden.setdefault(id(module), []).append(clean(below))
            else:
                self._add(child, below, clean(below) or label)


def hides_its_inside(module: torch.nn.Module) -> bool:
    """Return whether modules below it are compiled or scripted with it, so their hooks are not called."""
    return uncompiled(module) is not module or compiles_its_call(module)
