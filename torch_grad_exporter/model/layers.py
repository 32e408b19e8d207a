"""LayerIndex: from the parameters of the model to layer labels, output units and groups.

A layer is the module that owns a parameter directly; its label is the module's name as
`named_modules()` gives it, without the prefixes that wrappers add. A parameter of the root itself has its
own name as layer, since an empty label value would vanish in Prometheus. Parameters that are tied count
once, under their first name. Only parameters that require a gradient are tracked; the index is refreshed
at each sample and follows freezing, unfreezing, replaced and added parameters. Two networks that are frozen in turn are both
tracked all the time: else each half step would be another model.
"""

from __future__ import annotations

import itertools
import math
import operator
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

from torch_grad_exporter.model.flat_parts import FlatParts, has_part
from torch_grad_exporter.model.names import LayerFilter, LayerNames, Place, joined, layers_of, parameters_within, places_of
from torch_grad_exporter.model.parameters import (
    ParameterTable,
    TrackedParameter,
    TrackedParameters,
    are_gathered,
    make_table,
    parameters_of,
)
from torch_grad_exporter.model.replicas import Replicas
from torch_grad_exporter.model.sharding import is_behind
from torch_grad_exporter.torch_compat.modules import in_each, is_managed, parameters_in

IN_TURN = 8
"""Scans at most for which a parameter was frozen that is taken for one which is frozen and thawed in turn."""

STRUCTURES = 4
"""Structures known to lead to the present table, at most; networks that are trained in turn have several."""

KEPT = 32
"""Scans for which such a parameter stays tracked while it is frozen."""


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
        self.models = len(self._models)
        self._filter = layer_filter or LayerFilter()
        self._max_layers = max_layers
        self.replicas = replicas or Replicas()
        self._scanned: list[weakref.ref[torch.nn.Module]] = []
        self._structures: deque[_Structure] = deque(maxlen=STRUCTURES)
        """Those of the modules under which the present table was found, the last one first."""
        self._known: dict[int, TrackedParameter] = {}
        self._frozen: dict[TrackedParameter, int] = {}
        """For how many scans parameters have been frozen that were trained before."""
        self._in_turn: set[TrackedParameter] = set()
        """Those that are frozen and thawed in turn."""
        self._flat = FlatParts()
        self.table = make_table((), max_layers, self.replicas)
        """The table of the last refresh."""
        self.fully_sharded = False
        """Whether FSDP manages a module, which then shows its sharded parameters outside of forward and backward only."""
        self._scan()

    def refresh(self, *, within_step: bool = False, in_place: bool = False) -> ParameterTable:
        """Return the present table: the same object while no module came or went and no parameter was replaced, frozen or thawed.

        `within_step`: between the forward and the end of the backward, when FSDP shows other parameters. `in_place`: only if no
        tracked parameter is out of its place, as within a call with other parameters.
        """
        if self.present() is not None or ((within_step or are_gathered(self.table.tracked)) and self._is_fully_sharded()):
            return self.table
        return self.table if in_place and self.table.parameters() is None else self._scan()

    def look_at_shapes(self) -> None:
        """Let the next refresh scan again if a tracked parameter has data of another shape, and is gathered."""
        pairs = zip(self.table.tracked, parameters_of(self.table.tracked), strict=True)
        if any(p is not None and p.shape != tracked.shape and p.numel() and math.prod(tracked.shape) for tracked, p in pairs):
            self._structures.clear()

    def changed(self) -> list[torch.nn.Parameter]:
        """Return the parameters that `refresh` would track now, if the models have changed since; else none. Changes nothing."""
        current = self.present() is not None
        return [] if current else [place.parameter for place in self._places() if _is_trained(place.parameter)]

    def present(self) -> list[torch.nn.Parameter | None] | None:
        """Return the table's parameters by position, to be dropped at once; None if the models have changed since the scans."""
        modules = [*map(operator.call, self._scanned)]
        if types.NoneType in map(type, modules):
            return None
        columns, owned = _looked_at(modules)  # type: ignore[arg-type]  # none of them is `None`
        for known in self._structures:
            if known.columns == columns:
                if known.places is None:
                    return parameters_of(self.table.tracked)
                return owned if len(known.places) == len(owned) else [*map(owned.__getitem__, known.places)]
        return None

    def _scan(self) -> ParameterTable:
        """Walk all modules; return a new table if anything changed."""
        self.fully_sharded = self._is_fully_sharded()
        modules = self._modules()
        self._scanned, (columns, owned) = [weakref.ref(module) for module in modules], _looked_at(modules)
        wanted: list[TrackedParameter] = []
        layers: set[str] = set()
        flat = self._flat.of(root for _, _, root in self._roots()) if self.fully_sharded else {}
        for place in self._places():
            parameter = place.parameter
            layers.add(place.layer)
            trained = _is_trained(parameter) and has_part(parameter, flat)
            if not trained and id(parameter) not in self._known:
                continue
            now = TrackedParameter.at(
                place.module, place.attribute, parameter, place.model, place.layer, flat=flat.get(id(parameter))
            )
            same = self._known.get(now.identity)
            now = same if same is not None and same.same_as(now) else now
            if self._is_tracked(now, trained=trained):
                wanted.append(now)
        # A parameter that is frozen now may be unfrozen later, and the counts of its units are kept.
        ever = [*dict.fromkeys((*self._known.values(), *wanted))]
        self._known = {tracked.identity: tracked for tracked, p in zip(ever, parameters_of(ever), strict=True) if p is not None}
        known = {*self._known.values()}
        self._frozen, self._in_turn = {t: n for t, n in self._frozen.items() if t in known}, self._in_turn & known
        frozen = frozenset(layers.difference(tracked.layer for tracked in wanted))
        before = self.table.tracked
        changed = len(wanted) != len(before) or any(a is not b for a, b in zip(wanted, before, strict=True))
        if changed or frozen != self.table.frozen:
            self.table = self._planned(wanted, frozen)
            self._structures.clear()
        self._structures.appendleft(_Structure(columns, _places(self.table.tracked, owned)))
        return self.table

    def _is_tracked(self, tracked: TrackedParameter, *, trained: bool) -> bool:
        """Return whether a parameter that is trained now, or was before, is tracked."""
        scans = self._frozen.pop(tracked, 0)
        if trained:
            if 0 < scans <= IN_TURN:
                self._in_turn.add(tracked)
            return True
        self._frozen[tracked] = scans + 1
        if scans >= KEPT:
            self._in_turn.discard(tracked)
        return tracked in self._in_turn

    def find_replicas(self, root: torch.nn.Module | None = None) -> None:
        """Find out whether a model is replicated, within a forward of its root; without `root`, all models that had no forward."""
        before = self.replicas.state
        for model, _, module in self._roots():
            if root is None:
                self.replicas.search(model, module)
            elif module is root:
                self.replicas.search_in_forward(model, root)
        if self.replicas.state != before:
            self.table = self._planned(self.table.tracked, self.table.frozen)

    def _planned(self, tracked: Sequence[TrackedParameter], frozen: frozenset[str]) -> ParameterTable:
        # Around sharded parameters of FSDP2 ranks have different inputs, around parallel layers the same.
        roots = [] if self.fully_sharded else self._roots()
        behind = frozenset(model for model, _, root in roots if is_behind(parameters_within(root)))
        return make_table(tracked, self._max_layers, self.replicas, behind=behind, frozen=frozen)

    def _roots(self) -> list[tuple[int, str, torch.nn.Module]]:
        """Return the models that exist, each with its number and name."""
        known = enumerate(self._models)
        return [(model, name, root) for model, (name, reference) in known if (root := reference()) is not None]

    def _modules(self) -> list[torch.nn.Module]:
        return [*{id(module): module for _, _, root in self._roots() for module in root.modules()}.values()]

    def _is_fully_sharded(self) -> bool:
        self.fully_sharded |= any(is_managed(m) or hasattr(type(m), "set_reshard_after_backward") for m in self._modules())
        return self.fully_sharded

    def all_layers(self) -> list[str]:
        """Return the names of all layers that have a parameter, frozen or not, before filtering and folding."""
        return layers_of(self._roots())

    def roots(self) -> list[torch.nn.Module]:
        """Return the models that exist."""
        return [root for _, _, root in self._roots()]

    def shared(self) -> dict[str, set[int]]:
        """Return the `id` of every parameter of each layer, before filtering and folding; one that is tied is in several layers."""
        shared: dict[str, set[int]] = {}
        for _, name, root in self._roots():
            labels = LayerNames(root)
            for raw, module in root.named_modules():
                for attribute, parameter in parameters_in(module).items():
                    if parameter is not None:
                        layer = joined(name, labels.of(raw, attribute))
                        shared.setdefault(layer, set()).add(id(parameter))
        return shared

    def _places(self) -> Iterator[Place]:
        """Return where the parameters are that are wanted."""
        return (place for place in places_of(self._roots()) if self._filter.accepts(place.layer))


def device_kinds(index: LayerIndex, models: Iterable[torch.nn.Module]) -> frozenset[str]:
    """Kinds of devices that gradients will be on; none where a parameter is yet to be made, or to get a device."""
    if any(is_lazy(parameter) or parameter.is_meta for module in models for parameter in parameters_within(module)):
        return frozenset()
    return frozenset(parameter.device.type for parameter in index.table.parameters() or ())


def _is_trained(parameter: torch.nn.Parameter) -> bool:
    """Return whether the parameter is to be tracked: not frozen, and initialised."""
    return parameter.requires_grad and not is_lazy(parameter)


_Columns = tuple[Sequence[object], ...]

_values = operator.methodcaller("values")

_requires_grad = operator.attrgetter("requires_grad")


@dataclass(frozen=True, slots=True, eq=False)
class _Structure:
    """What modules were like when the table was found. `columns`: see `_looked_at`.

    `places`: where the table's parameters are among all that the modules own, rising; `None` where one is not among them.
    """

    columns: _Columns
    places: Sequence[int] | None


def _looked_at(modules: Sequence[torch.nn.Module]) -> tuple[_Columns, list[torch.nn.Parameter | None]]:
    """Return what changes when a child or a parameter of the modules comes, goes or moves, is frozen, or initialised at last.

    In columns, without a Python call per module or parameter, since each sample compares it. Besides, the parameters.
    """
    children, owned, managed = in_each(modules)
    parameters: list[torch.nn.Parameter | None] = [*itertools.chain.from_iterable(map(_values, owned))]
    kinds: list[object] = [*map(type, parameters)]
    trained = [p for p in parameters if p is not None] if types.NoneType in kinds else parameters
    columns: _Columns = (
        [*map(len, children)],
        [*map(len, owned)],
        [*map(id, itertools.chain.from_iterable(map(_values, children)))],
        [*map(id, parameters)],
        kinds,
        [*map(_requires_grad, trained)],
        managed,
    )
    return columns, parameters


def _places(tracked: TrackedParameters, owned: Sequence[torch.nn.Parameter | None]) -> list[int] | None:
    place: dict[int, int] = {}
    for number, parameter in enumerate(owned):
        place.setdefault(id(parameter), number)  # the first of tied ones
    places = [place.get(parameter.identity, -1) for parameter in tracked]
    return None if -1 in places or sorted(places) != places else places
