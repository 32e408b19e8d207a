"""LayerIndex: from the parameters of the model to layer labels, output units and groups.

A layer is the module that owns a parameter directly; its label is the module's name as
`named_modules()` gives it, without the prefixes that wrappers add. A parameter of the root itself has its
own name as layer, since an empty label value would vanish in Prometheus. Parameters that are tied count
once, under their first name. Only parameters that require a gradient are tracked; the index is refreshed
at each sample and follows freezing, unfreezing, replaced and added parameters.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.nn.parameter import is_lazy

from torch_grad_exporter.model.names import LayerFilter, layer_names
from torch_grad_exporter.model.parameters import ParameterTable, TrackedParameter, make_table
from torch_grad_exporter.model.replicas import Replicas
from torch_grad_exporter.model.sharding import is_behind
from torch_grad_exporter.torch_compat import children_in, parameters_in


class LayerIndex:
    """Finds the parameters of the models and keeps the table up to date. Holds the models weakly.

    `models`: name to module; with a single model the name is empty, else it is the first part of every label.
    """

    def __init__(
        self,
        models: Mapping[str, torch.nn.Module],
        layer_filter: LayerFilter | None = None,
        max_layers: int = 300,
        replicas: Replicas | None = None,
    ) -> None:
        self._models = [(name, weakref.ref(module)) for name, module in models.items()]
        self._filter = layer_filter or LayerFilter()
        self._max_layers = max_layers
        self.replicas = replicas or Replicas()
        self._scanned: list[weakref.ref[torch.nn.Module]] = []
        self._structure: tuple[list[object], ...] = ()
        self._known: dict[int, TrackedParameter] = {}
        self._table = make_table((), max_layers, self.replicas)
        self.fully_sharded = False
        """Whether FSDP2 manages a module, which then shows its sharded parameters outside of forward and backward only."""
        self._scan()

    @property
    def models(self) -> int:
        """How many models there are."""
        return len(self._models)

    @property
    def table(self) -> ParameterTable:
        """The table of the last refresh."""
        return self._table

    def refresh(self, *, within_step: bool = False) -> ParameterTable:
        """The table as of now: the same object while no module came or went and no parameter was replaced, frozen or unfrozen.

        `within_step`: between the forward and the end of the backward, when FSDP2 shows other parameters.
        """
        if self._is_current() or (within_step and self._is_fully_sharded()):
            return self._table
        return self._scan()

    def changed(self) -> list[torch.nn.Parameter]:
        """The parameters that `refresh` would track now, if the models have changed since; else none. Changes nothing."""
        return [] if self._is_current() else [parameter for _, _, parameter, _, _ in self._places() if _is_trained(parameter)]

    def _is_current(self) -> bool:
        """Whether the models are unchanged since the last scan."""
        modules = [module for reference in self._scanned if (module := reference()) is not None]
        return len(modules) == len(self._scanned) and _structure(modules) == self._structure

    def _scan(self) -> ParameterTable:
        """Walks all modules; returns a new table if anything changed."""
        self.fully_sharded = self._is_fully_sharded()
        modules = self._modules()
        self._scanned, self._structure = [weakref.ref(module) for module in modules], _structure(modules)
        found: list[TrackedParameter] = []
        layers: set[str] = set()
        for module, attribute, parameter, model, layer in self._places():
            layers.add(layer)
            if _is_trained(parameter):
                now = TrackedParameter.at(module, attribute, parameter, model, layer)
                same = self._known.get(now.identity)
                found.append(same if same is not None and same.same_as(now) else now)
        # A parameter that is frozen now may be unfrozen later, and the counts of its units are kept.
        self._known = {t.identity: t for t in (*self._known.values(), *found) if t.parameter() is not None}
        frozen = frozenset(layers.difference(one.layer for one in found))
        before = self._table.tracked
        changed = len(found) != len(before) or any(a is not b for a, b in zip(found, before, strict=True))
        if changed or frozen != self._table.frozen:
            self._table = self._planned(found, frozen)
        return self._table

    def find_replicas(self, root: torch.nn.Module | None = None) -> None:
        """Finds out whether a model is replicated, within a forward of its root; without `root`, all models that had no forward."""
        before = self.replicas.state
        for model, _, module in self._roots():
            if root is None:
                self.replicas.search(model, module)
            elif module is root:
                self.replicas.search_in_forward(model, root)
        if self.replicas.state != before:
            self._table = self._planned(self._table.tracked, self._table.frozen)

    def _planned(self, tracked: Sequence[TrackedParameter], frozen: frozenset[str]) -> ParameterTable:
        # Around sharded parameters of FSDP2 ranks have different inputs, around parallel layers the same.
        roots = [] if self.fully_sharded else self._roots()
        behind = frozenset(model for model, _, root in roots if is_behind(root.parameters()))
        return make_table(tracked, self._max_layers, self.replicas, behind=behind, frozen=frozen)

    def _roots(self) -> list[tuple[int, str, torch.nn.Module]]:
        """The models that exist, each with its number and name."""
        known = enumerate(self._models)
        return [(model, name, root) for model, (name, reference) in known if (root := reference()) is not None]

    def _modules(self) -> list[torch.nn.Module]:
        return [*{id(module): module for _, _, root in self._roots() for module in root.modules()}.values()]

    def _is_fully_sharded(self) -> bool:
        self.fully_sharded |= any(hasattr(type(module), "set_reshard_after_backward") for module in self._modules())
        return self.fully_sharded

    def all_layers(self) -> list[str]:
        """The names of all layers that have a parameter, frozen or not, before filtering and folding."""
        return list(dict.fromkeys(layer for *_, layer in self._places(filtered=False)))

    def _places(self, *, filtered: bool = True) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter, int, str]]:
        """Each parameter's module, its name there, the parameter, the number of the model, and the layer."""
        seen: set[int] = set()
        for model, name, root in self._roots():
            labels = layer_names(root)
            for raw, module in root.named_modules():
                for attribute, parameter in parameters_in(module).items():
                    if parameter is None or id(parameter) in seen:
                        continue
                    seen.add(id(parameter))
                    layer = ".".join(part for part in (name, labels[raw, attribute]) if part)
                    if not filtered or self._filter.accepts(layer):
                        yield module, attribute, parameter, model, layer


def _is_trained(parameter: torch.nn.Parameter) -> bool:
    """Whether the parameter is to be tracked: not frozen, and initialised."""
    return parameter.requires_grad and not is_lazy(parameter)


def _structure(modules: Sequence[torch.nn.Module]) -> tuple[list[object], ...]:
    """What changes when a child or a parameter of the modules comes, goes or moves, is frozen, or initialised at last.

    In columns, without a Python call per module or parameter, since each sample compares it.
    """
    children = [children_in(module) for module in modules]
    owned = [parameters_in(module) for module in modules]
    parameters = [*itertools.chain.from_iterable(p.values() for p in owned)]
    return (
        [*map(len, children)],
        [*map(len, owned)],
        [*map(id, itertools.chain.from_iterable(c.values() for c in children))],
        [*map(id, parameters)],
        [*map(type, parameters)],
        [p is not None and p.requires_grad for p in parameters],
    )
