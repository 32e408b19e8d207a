"""ParameterTable: the parameters that are followed, by position, and which layers they belong to."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import types
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import torch
from torch.compiler import is_compiling

from torch_grad_exporter.metrics.families import BoolArray, IntArray
from torch_grad_exporter.model.flat_parts import FlatPart
from torch_grad_exporter.model.folding import fold
from torch_grad_exporter.model.replicas import Replicas
from torch_grad_exporter.model.sharding import is_copy, is_sharded
from torch_grad_exporter.model.units import UnitLayout, one_of_equal, unit_layout
from torch_grad_exporter.torch_compat.compiler import never_compile
from torch_grad_exporter.torch_compat.modules import parameters_in, parameters_of_each
from torch_grad_exporter.torch_compat.tensors import local

AT_ONCE = 256
"""Parameters of which all columns are taken before those of the next ones: they stay in the processor's cache."""


class BackwardListener(Protocol):
    """What parameters report to.

    Attributes:
        running: Whether a backward is known to run.
        fired: The parameters that it has reached.
        on_first: Is called with the first of them, and what that is about to receive; raises nothing.
    """

    running: bool
    fired: list[TrackedParameter]
    on_first: Callable[[TrackedParameter, tuple[torch.Tensor | None, ...]], None]


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
    flat: FlatPart | None = None
    """What this rank has of it, where `FullyShardedDataParallel` keeps it."""
    listener: BackwardListener | None = None
    """Learns that the parameter is about to receive gradients, while autograd's node for it has this object as a hook."""

    def __call__(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Report to the listener. The hook itself, since another object for each of thousands of parameters costs too much."""
        listener = self.listener
        if listener is None or is_compiling():
            return
        if not listener.running:
            listener.on_first(self, gradients)
        listener.fired.append(self)

    @classmethod
    def at(
        cls,
        module: torch.nn.Module,
        attribute: str,
        parameter: torch.nn.Parameter,
        model: int,
        layer: str,
        *,
        flat: FlatPart | None = None,
    ) -> TrackedParameter:
        """Return the parameter that stands at `module._parameters[attribute]` now."""
        cut = flat is not None and flat.sharded
        part = flat.elements if flat is not None and cut else local(parameter).numel()
        return cls(
            identity=id(parameter),
            module=weakref.ref(module),
            attribute=attribute,
            model=model,
            layer=layer,
            shape=(part,) if cut else one_of_equal(tuple(parameter.shape)),
            elements=part * (2 if parameter.is_complex() else 1),
            units=None if cut else unit_layout(module, parameter),
            sharded=is_sharded(parameter) if flat is None else flat.sharded,
            copy=is_copy(parameter) if flat is None else flat.copy,
            flat=flat,
        )

    def parameter(self) -> torch.nn.Parameter | None:
        """Return the parameter, `None` if it is not in its place: it was replaced, or FSDP2 has gathered it."""
        module = self.module()
        parameter = None if module is None else parameters_in(module).get(self.attribute)
        if parameter is not None and id(parameter) == self.identity:
            return parameter
        return self.gathered()

    def gathered(self) -> torch.nn.Parameter | None:
        """Return the parameter, if `FullyShardedDataParallel` knows it, also while it has put another tensor in its place."""
        parameter = None if self.flat is None else self.flat.parameter()
        return parameter if id(parameter) == self.identity else None

    def own(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient of the parameter without what only fills it up."""
        return gradient if self.flat is None else self.flat.of(gradient)

    def gradient(self) -> torch.Tensor | None:
        """Return the parameter's gradient, if there are both."""
        parameter = self.parameter()
        return None if parameter is None else parameter.grad

    def same_as(self, other: TrackedParameter) -> bool:
        """Return whether both are the same parameter at the same place, under the same label, with the same part on this rank."""
        return self.module() is other.module() and _about(self) == _about(other)


never_compile(TrackedParameter.__call__)

_about = operator.attrgetter(*(field.name for field in fields(TrackedParameter) if field.name not in ("module", "listener")))


_look_up: Callable[[Mapping[str, torch.nn.Parameter | None], str], torch.nn.Parameter | None] = dict.get  # type: ignore[assignment]


class TrackedParameters(tuple[TrackedParameter, ...]):  # noqa: SLOT001 - the columns are made when they are first asked for
    """Tracked parameters by position, with what they are found by in columns.

    A sample needs the parameters of the whole model several times: here no line of Python runs for each of them.
    """

    @functools.cached_property
    def columns(self) -> tuple[list[weakref.ref[torch.nn.Module]], list[str], list[int]]:
        """The module, the attribute and the identity of each."""
        return [t.module for t in self], [t.attribute for t in self], [t.identity for t in self]

    @functools.cached_property
    def flat(self) -> frozenset[int]:
        """The positions of those that `FullyShardedDataParallel` keeps."""
        return frozenset(position for position, t in enumerate(self) if t.flat is not None)

    @functools.cached_property
    def empty(self) -> frozenset[int]:
        """The positions of those without elements."""
        return frozenset(position for position, t in enumerate(self) if not t.elements)

    @functools.cached_property
    def positions(self) -> dict[int, int]:
        """The position of each by its identity."""
        return dict(zip(self.columns[2], itertools.count()))


def parameters_of(tracked: Iterable[TrackedParameter]) -> list[torch.nn.Parameter | None]:
    """`parameter()` of each, in one go."""
    if isinstance(tracked, TrackedParameters):
        modules, attributes, identities = tracked.columns
        # Of a module that is gone, or keeps its parameters in no dictionary, each is looked up by itself.
        with contextlib.suppress(AttributeError, TypeError):
            each = parameters_of_each([*map(operator.call, modules)])  # type: ignore[list-item]  # the error is met
            parameters = [*map(_look_up, each, attributes)]
            if [*map(id, parameters)] == identities:
                return parameters
    owned = parameters_in
    return [
        p
        if (m := t.module()) is not None and (p := owned(m).get(t.attribute)) is not None and id(p) == t.identity
        else (None if t.flat is None else t.parameter())
        for t in tracked
    ]


def are_gathered(tracked: TrackedParameters) -> bool:
    """Return whether `FullyShardedDataParallel` has put another tensor in the place of a parameter for a while."""
    return any(
        (module := t.module()) is not None and id(parameters_in(module).get(t.attribute)) != t.identity and t.gathered() is not None
        for t in map(tracked.__getitem__, tracked.flat)
    )


def reduced(table: ParameterTable, positions: set[int]) -> set[int]:
    """Return those of these parameters whose gradient is what the optimizer will use: FSDP without reduction leaves another one."""
    left = {i for i in table.tracked.flat & positions if (flat := table.tracked[i].flat) is not None and not flat.is_reduced()}
    return positions - left if left else positions


@dataclass(frozen=True, slots=True, eq=False)
class ParameterTable:
    """What is tracked at present: parameters by position, layers by index, and which belongs where.

    `layer_of`, `elements`, `units`, `counts`: shape (parameters,). `folded`: layers that share a label. `sharded`, `shown`:
    shape (layers,). The table is replaced, never changed.
    """

    tracked: TrackedParameters
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
        """Return the parameters by position, or `None` if one of them is not in its place."""
        parameters = parameters_of(self.tracked)
        return None if types.NoneType in map(type, parameters) else parameters  # type: ignore[return-value]


def make_table(
    tracked: Sequence[TrackedParameter],
    max_layers: int,
    replicas: Replicas | None = None,
    *,
    behind: Collection[int] = (),
    frozen: frozenset[str] = frozenset(),
) -> ParameterTable:
    """Return a table over `tracked`, with layers folded by depth where there are more than `max_layers`.

    `behind`: the models with parallel layers of which this rank is not the first.
    """
    replicas = replicas or Replicas()
    names = [*dict.fromkeys(t.layer for t in tracked)]
    label_of = dict(zip(names, fold(names, max_layers), strict=True))
    sharing = Counter(label_of.values())
    layers = tuple(sharing)
    index = {label: position for position, label in enumerate(layers)}
    layer_of = np.array([index[label_of[t.layer]] for t in tracked], dtype=np.int64)
    copies = [t.copy or (not t.sharded and (t.model in behind or replicas.is_copy(t.module(), t.model))) for t in tracked]
    counts = ~np.array(copies, dtype=np.bool_)
    cut = np.array([t.sharded for t in tracked], dtype=np.bool_)
    return ParameterTable(
        tracked=tracked if isinstance(tracked, TrackedParameters) else TrackedParameters(tracked),
        layers=layers,
        layer_of=layer_of,
        elements=np.array([t.elements for t in tracked], dtype=np.int64),
        units=np.array([0 if t.units is None else t.units.count for t in tracked], dtype=np.int64),
        folded=sum(count for count in sharing.values() if count > 1),
        sharded=_any_of(cut, layer_of, len(layers)),
        counts=counts,
        shown=_any_of(cut | counts | replicas.all_shown, layer_of, len(layers)),
        frozen=frozen,
    )


def _any_of(parameters: BoolArray, layer_of: IntArray, layers: int) -> BoolArray:
    """Return which layers have a parameter that is marked, shape (layers,)."""
    marked: BoolArray = np.bincount(layer_of, parameters, layers) > 0
    return marked
