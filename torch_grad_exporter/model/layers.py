"""LayerIndex: from the parameters of the model to layer labels, output units and groups.

A layer is the module that owns a parameter directly; its label is the module's name as
`named_modules()` gives it, without the prefixes that wrappers add. A parameter of the root itself has its
own name as layer, since an empty label value would vanish in Prometheus. Parameters that are tied count
once, under their first name. Only parameters that require a gradient are tracked; the index is refreshed
at each sample and follows freezing, unfreezing, replaced and added parameters.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from torch_grad_exporter.metrics.families import BoolArray, IntArray
from torch_grad_exporter.model.folding import fold
from torch_grad_exporter.model.replicas import Replicas
from torch_grad_exporter.model.sharding import is_behind, is_copy, is_sharded, split_dims
from torch_grad_exporter.torch_compat import TRANSPOSED, children_in, local, parameters_in

WRAPPER_PARTS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Name parts that DataParallel and DDP, `torch.compile`, FSDP1 and checkpoint wrappers put before the user's."""


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """How a weight's gradient splits into output units.

    `shape` is the view of the gradient with the unit dimensions `dims` marked; a linear layer's weight is
    `(rows, -1)` with dims `(0,)`, a transposed convolution's `(groups, inputs, outputs, -1)` with `(0, 2)`.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of output units."""
        count = 1
        for dim in self.dims:
            count *= self.shape[dim]
        return count

    def rows(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient as (units, elements of a unit); a view wherever the layout allows it."""
        viewed = gradient.reshape(self.shape)
        if self.dims != (0,):
            viewed = viewed.movedim(self.dims, tuple(range(len(self.dims))))
        return viewed.reshape(self.count, -1)


def unit_layout(module: torch.nn.Module, parameter: torch.Tensor) -> UnitLayout | None:
    """The output units of a parameter: rows of a weight, output channels of a convolution.

    `None` for what has no output units: biases and scales (fewer than two dimensions), embeddings (an
    absent token is not a dead neuron) and empty tensors; and where several ranks have a part of each unit, since a zero
    part does not show whether the unit is zero.
    """
    if not split_dims(parameter) <= {1 if isinstance(module, TRANSPOSED) else 0}:
        return None
    parameter = local(parameter)
    if parameter.dim() < 2 or parameter.numel() == 0:
        return None
    if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
        return None
    if isinstance(module, TRANSPOSED):
        inputs, outputs = parameter.shape[:2]
        groups = int(module.groups)  # type: ignore[arg-type]
        return UnitLayout((groups, inputs // groups, outputs, -1), (0, 2))
    return UnitLayout((parameter.shape[0], -1), (0,))


@dataclass(slots=True, eq=False, weakref_slot=True)
class TrackedParameter:
    """One parameter that the exporter follows; the object stays the same as long as the parameter does.

    Identified by its place and its `identity`, the parameter's `id`, and not by a weak reference: `torch.utils.swap_tensors`, and
    so `model.to()` with some kinds of parameters, raises where there is one.
    """

    identity: int
    module: weakref.ref[torch.nn.Module]
    attribute: str
    model: int
    layer: str
    shape: tuple[int, ...]
    elements: int
    units: UnitLayout | None
    sharded: bool
    copy: bool
    """Whether another rank has the same part and counts it in sums over ranks."""

    def parameter(self) -> torch.nn.Parameter | None:
        """The parameter, `None` if it is not in its place: it was replaced, or FSDP2 has gathered it."""
        module = self.module()
        parameter = None if module is None else parameters_in(module).get(self.attribute)
        return parameter if parameter is not None and id(parameter) == self.identity else None

    def gradient(self) -> torch.Tensor | None:
        """The parameter's gradient, if there are both."""
        parameter = self.parameter()
        return None if parameter is None else parameter.grad

    def stands_at(self, owner: _Owner) -> bool:
        """Whether this is the parameter of that place, under the same label."""
        place = (self.attribute, self.layer, self.shape) == (owner.attribute, owner.layer, tuple(owner.parameter.shape))
        part = (self.elements, self.sharded, self.copy)
        return place and self.module() is owner.module and part == _part(owner.parameter)


def parameters_of(tracked: Iterable[TrackedParameter]) -> list[torch.nn.Parameter | None]:
    """`parameter()` of each, in one go: a sample needs those of the whole model several times."""
    owned = parameters_in
    return [
        p if (m := t.module()) is not None and (p := owned(m).get(t.attribute)) is not None and id(p) == t.identity else None
        for t in tracked
    ]


@dataclass(frozen=True, slots=True, eq=False)
class ParameterTable:
    """What is tracked at present: parameters by position, layers by index, and which belongs where.

    `layer_of`, `elements`, `units`, `counts`: shape (parameters,). `folded`: layers that share a label. `sharded`, `shown`:
    shape (layers,). The table is replaced, never changed.
    """

    tracked: tuple[TrackedParameter, ...]
    layers: tuple[str, ...]
    layer_of: IntArray
    elements: IntArray
    units: IntArray
    folded: int
    sharded: BoolArray
    """Whether this rank has only a part of the layer's parameters."""
    counts: BoolArray
    """Whether sums over ranks take this rank's part of a parameter: of copies, one counts."""
    shown: BoolArray
    """Whether this rank reports the layer: it has a part of it, or the first of the copies."""
    frozen: frozenset[str] = frozenset()
    """The names of the layers that exist, none of whose parameters is tracked: they are frozen, or yet to be initialised."""

    def parameters(self) -> list[torch.nn.Parameter] | None:
        """The parameters by position, or `None` if one of them is not in its place."""
        parameters = parameters_of(self.tracked)
        return None if any(p is None for p in parameters) else parameters  # type: ignore[return-value]


def make_table(
    tracked: Sequence[TrackedParameter],
    max_layers: int,
    replicas: Replicas | None = None,
    *,
    behind: Collection[int] = (),
    frozen: frozenset[str] = frozenset(),
) -> ParameterTable:
    """A table over `tracked`, with layers folded by depth where there are more than `max_layers`.

    `behind`: the models with parallel layers of which this rank is not the first.
    """
    replicas = replicas or Replicas()
    labels = fold([t.layer for t in tracked], max_layers)
    layers = tuple(dict.fromkeys(labels))
    index = {label: position for position, label in enumerate(layers)}
    members: dict[str, set[str]] = {}
    for label, one in zip(labels, tracked, strict=True):
        members.setdefault(label, set()).add(one.layer)
    sharded, shown = np.zeros((2, len(layers)), dtype=np.bool_)
    copies = [
        one.copy or (not one.sharded and (one.model in behind or replicas.is_copy(one.module(), one.model))) for one in tracked
    ]
    counts = ~np.array(copies, dtype=np.bool_)
    for label, one, counted in zip(labels, tracked, counts, strict=True):
        sharded[index[label]] |= one.sharded
        shown[index[label]] |= one.sharded or counted or replicas.all_shown
    return ParameterTable(
        tracked=tuple(tracked),
        layers=layers,
        layer_of=np.array([index[label] for label in labels], dtype=np.int64),
        elements=np.array([t.elements for t in tracked], dtype=np.int64),
        units=np.array([0 if t.units is None else t.units.count for t in tracked], dtype=np.int64),
        folded=sum(len(names) for names in members.values() if len(names) > 1),
        sharded=sharded,
        counts=counts,
        shown=shown,
        frozen=frozen,
    )


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


@dataclass(slots=True)
class _Owner:
    """A parameter and the place where it stands: `module._parameters[attribute]`."""

    parameter: torch.nn.Parameter
    module: torch.nn.Module
    attribute: str
    model: int
    layer: str


def _is_trained(owner: _Owner) -> bool:
    """Whether the parameter is to be tracked: not frozen, and initialised."""
    return owner.parameter.requires_grad and not is_lazy(owner.parameter)


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
        return [] if self._is_current() else [owner.parameter for owner in self._trained()]

    def _is_current(self) -> bool:
        """Whether the models are unchanged since the last scan."""
        modules = [module for reference in self._scanned if (module := reference()) is not None]
        return len(modules) == len(self._scanned) and _structure(modules) == self._structure

    def _scan(self) -> ParameterTable:
        """Walks all modules; returns a new table if anything changed."""
        self.fully_sharded = self._is_fully_sharded()
        modules = list(self._modules())
        self._scanned, self._structure = [weakref.ref(module) for module in modules], _structure(modules)
        found: list[TrackedParameter] = []
        layers: set[str] = set()
        for owner in self._owners():
            layers.add(owner.layer)
            if not _is_trained(owner):
                continue
            same = self._known.get(id(owner.parameter))
            found.append(same if same is not None and same.stands_at(owner) else _track(owner))
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
        for model, (_, reference) in enumerate(self._models):
            module = reference()
            if module is not None and root is None:
                self.replicas.search(model, module)
            elif module is root is not None:
                self.replicas.search_in_forward(model, root)
        if self.replicas.state != before:
            self._table = self._planned(self._table.tracked, self._table.frozen)

    def _planned(self, tracked: Sequence[TrackedParameter], frozen: frozenset[str]) -> ParameterTable:
        # Around sharded parameters of FSDP2 ranks have different inputs, around parallel layers the same.
        roots = [] if self.fully_sharded else [(model, reference()) for model, (_, reference) in enumerate(self._models)]
        behind = frozenset(model for model, root in roots if root is not None and is_behind(root.parameters()))
        return make_table(tracked, self._max_layers, self.replicas, behind=behind, frozen=frozen)

    def _modules(self) -> Iterator[torch.nn.Module]:
        roots = [root for _, reference in self._models if (root := reference()) is not None]
        return iter({id(module): module for root in roots for module in root.modules()}.values())

    def _is_fully_sharded(self) -> bool:
        self.fully_sharded |= any(hasattr(type(module), "set_reshard_after_backward") for module in self._modules())
        return self.fully_sharded

    def all_layers(self) -> list[str]:
        """The names of all layers that have a parameter, frozen or not, before filtering and folding."""
        return list(dict.fromkeys(owner.layer for owner in self._owners(filtered=False)))

    def _trained(self) -> Iterator[_Owner]:
        """The places of the parameters that are to be tracked."""
        return (owner for owner in self._owners() if _is_trained(owner))

    def _owners(self, *, filtered: bool = True) -> Iterator[_Owner]:
        seen: set[int] = set()
        for model, (name, reference) in enumerate(self._models):
            root = reference()
            if root is None:
                continue
            labels = _labels(root)
            for raw, module in root.named_modules():
                for attribute, parameter in parameters_in(module).items():
                    if parameter is None or id(parameter) in seen:
                        continue
                    seen.add(id(parameter))
                    layer = ".".join(part for part in (name, labels[raw, attribute]) if part)
                    if not filtered or self._filter.accepts(layer):
                        yield _Owner(parameter, module, attribute, model, layer)


def _labels(root: torch.nn.Module) -> dict[tuple[str, str], str]:
    """The label of each module's parameters by module name and attribute, without what wrappers add.

    Where two modules would share a label, both have their full names.
    """
    owned = {raw: parameters_in(module) for raw, module in root.named_modules()}
    names = {(raw, attribute): clean(raw) or attribute for raw, attributes in owned.items() for attribute in attributes}
    modules: dict[str, set[str]] = {}
    for (raw, _), label in names.items():
        modules.setdefault(label, set()).add(raw)
    return {(raw, attribute): label if len(modules[label]) == 1 else raw or attribute for (raw, attribute), label in names.items()}


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


def _track(owner: _Owner) -> TrackedParameter:
    parameter = owner.parameter
    elements, sharded, copy = _part(parameter)
    return TrackedParameter(
        identity=id(parameter),
        module=weakref.ref(owner.module),
        attribute=owner.attribute,
        model=owner.model,
        layer=owner.layer,
        shape=tuple(parameter.shape),
        elements=elements,
        units=unit_layout(owner.module, parameter),
        sharded=sharded,
        copy=copy,
    )


def _part(parameter: torch.Tensor) -> tuple[int, bool, bool]:
    """What this rank has of a parameter: how many elements, whether others have more of it, and whether others count them."""
    return local(parameter).numel() * (2 if parameter.is_complex() else 1), is_sharded(parameter), is_copy(parameter)
