"""Which inner modules are looked into, under which labels, and which are left out because they are compiled."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from torch_grad_exporter.model.folding import WHOLE, fold
from torch_grad_exporter.model.names import LayerFilter, clean
from torch_grad_exporter.torch_compat.compiler import is_compiled
from torch_grad_exporter.torch_compat.modules import children_in, parameters_in

WITHOUT_PARTS: tuple[type[torch.nn.Module], ...] = (torch.nn.MultiheadAttention,)
"""Modules that use their children without calling them, so that they count as a leaf."""


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
class Inner:
    """A module that is looked into. `root`: the `id` of the model that it is in. Holds it weakly."""

    label: str
    root: int
    module: weakref.ref[torch.nn.Module]


@dataclass(frozen=True, slots=True)
class Chosen:
    """All that are looked into. `folded`: how many of them share their label; `compiled`: how many were left out for that."""

    inner: tuple[Inner, ...] = ()
    folded: int = 0
    compiled: int = 0


Wants = Callable[[NamedModule], bool]
"""Whether a module is to be looked into."""


class InnerModules:
    """Finds the wanted modules of the models, anew whenever a module came or went. Holds the models weakly.

    `models`: name to module, as of `LayerIndex`. `wants`: which modules. `most`: labels, beyond which modules share them as layers
    do.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module], wants: Wants, most: int) -> None:
        self._roots = [(name, weakref.ref(module)) for name, module in models.items()]
        self._wants, self._most = wants, most
        self._structure: list[int] = []
        self._chosen = Chosen()

    def chosen(self) -> Chosen:
        """Those of now."""
        roots = [(name, root) for name, reference in self._roots if (root := reference()) is not None]
        structure = [one for _, root in roots for module in root.modules() for one in (id(module), is_compiled(module))]
        if structure != self._structure:
            self._chosen, self._structure = self._choose(roots), structure
        return self._chosen

    def names(self) -> list[str]:
        """The names of all modules, wanted or not."""
        return [one.name for name, reference in self._roots if (root := reference()) is not None for one in named(name, root)]

    def _choose(self, roots: Sequence[tuple[str, torch.nn.Module]]) -> Chosen:
        found = [(id(root), one) for name, root in roots for one in named(name, root) if self._wants(one)]
        open_ones = [(root, one) for root, one in found if not one.compiled]
        labels = fold([one.name for _, one in open_ones], self._most)
        sharing = Counter(labels)
        return Chosen(
            tuple(Inner(label, root, weakref.ref(one.module)) for label, (root, one) in zip(labels, open_ones, strict=True)),
            sum(sharing[label] > 1 for label in labels),
            len(found) - len(open_ones),
        )


def found_by(pattern: re.Pattern[str]) -> Wants:
    """Wants the modules in whose name a regular expression is found."""
    return lambda one: pattern.search(one.name) is not None


def without_children(layers: LayerFilter) -> Wants:
    """Wants all modules without children that the filter accepts."""
    return lambda one: one.leaf and layers.accepts(one.name)


def with_parameters(layers: LayerFilter) -> Wants:
    """Wants all modules with parameters of their own that the filter accepts; a model as a whole only if it has no children."""
    return lambda one: (
        any(parameter is not None for parameter in parameters_in(one.module).values())
        and (one.leaf or not one.whole)
        and layers.accepts(one.name)
    )


def named(name: str, root: torch.nn.Module) -> Iterator[NamedModule]:
    """Every module of a model once, under its first name; `name`: of the model, empty for a single one."""
    modules = [*_walked("", root, compiled=False, seen=set())]
    alike = Counter(clean(raw) for raw, _, _ in modules)
    for raw, module, compiled in modules:
        short = clean(raw) if alike[clean(raw)] == 1 else raw
        yield NamedModule(".".join(part for part in (name, short) if part) or WHOLE, module, compiled, not short)


def _walked(raw: str, module: torch.nn.Module, *, compiled: bool, seen: set[int]) -> Iterator[tuple[str, torch.nn.Module, bool]]:
    seen.add(id(module))
    compiled = compiled or is_compiled(module)
    yield raw, module, compiled
    children = {} if isinstance(module, WITHOUT_PARTS) else children_in(module)
    for attribute, child in children.items():
        if child is not None and id(child) not in seen:
            yield from _walked(f"{raw}.{attribute}" if raw else attribute, child, compiled=compiled, seen=seen)
