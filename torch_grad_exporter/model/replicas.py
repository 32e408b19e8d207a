"""Replicas: which models are copies of those on other ranks, whose gradients are equal, and what the next backward reduces.

A rank that is not the first of its copies shows no series per layer: a thousand ranks would all show the same. Gradients are
known to be equal under `DistributedDataParallel`: around the model, within it, or around the module that holds it.
Nothing else shows it: ranks may train different stages of a pipeline, or different models. There an option says so.

The wrappers are found by reading attributes only: the class of that name, around a module, and the composable `replicate`, which
changes a module in place. Whether a backward reduces is decided in the forward before it: under `no_sync()` it does not, and where
a module within the wrapper is called without the wrapper nothing is reduced, either.
"""

from __future__ import annotations

import enum
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_grad_exporter.model.names import uncompiled
from torch_grad_exporter.torch_compat.replicas import active_wrapper, composed_wrapper, reduced_parameters, takes_the_mean


class Ranks(enum.Enum):
    """Which ranks show series per layer of gradients that are not sharded.

    `AUTO`: the first of those whose gradients are known to be equal, and all others. `ALL`: all. `FIRST`: rank 0.
    """

    AUTO = "auto"
    ALL = "all"
    FIRST = "first"


class Replicas:
    """What is known of one process' models. Before the first search nothing is known, and only rank 0 shows a model's layers.

    A wrapper that was found stays; where there was none, there may be one later, since a model may run before it is wrapped.
    """

    def __init__(self, ranks: Ranks = Ranks.AUTO, rank: int = 0, world_size: int = 1) -> None:
        self.all_shown = ranks is Ranks.ALL
        self._first = rank == 0
        self.alone = world_size == 1
        self._by_hand = ranks is Ranks.FIRST
        self.by_loop = self._by_hand and not self.alone
        """Whether an option says that the loop makes gradients of several ranks equal, and not a wrapper."""
        self._copied: dict[int, bool] = {}
        """By model that was searched: whether all of it is a copy of another rank's."""
        self._wrapped: set[int] = set()
        """The models around which there is a wrapper."""
        self._parts: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """Modules that are copies, in models that are not as a whole."""

    @property
    def state(self) -> tuple[object, ...]:
        """Changes with what is known."""
        return (*self._copied.items(), len(self._parts))

    def undecided(self, models: int) -> bool:
        """Return whether a search is still to be done."""
        return not (self.alone or self._by_hand) and len(self._wrapped) < models

    def is_copy(self, module: torch.nn.Module | None, model: int) -> bool:
        """Return whether another rank reports this module's parameters, as far as they are not DTensors."""
        if self.alone:
            return False
        if self._by_hand:
            return not self._first
        return self._copied.get(model, not self._first) or module in self._parts

    def search_in_forward(self, model: int, root: torch.nn.Module) -> None:
        """Search for a wrapper of a model whose root's forward is running, on the training thread."""
        if model not in self._wrapped and not self._found(model, around(root)):
            self._parts.update(part for module, wrapper in within(root) if _is_later(wrapper) for part in module.modules())

    def search(self, model: int, root: torch.nn.Module) -> None:
        """Search once for a wrapper of a model of which no forward was seen, because only its parts are called."""
        if model not in self._copied:
            self._found(model, wrapper_of(root) or anywhere(root))

    def _found(self, model: int, wrapper: Any) -> bool:  # noqa: ANN401 - a wrapper
        self._copied[model] = wrapper is not None and _is_later(wrapper)
        if wrapper is not None:
            self._wrapped.add(model)
        return wrapper is not None


def _is_later(wrapper: Any) -> bool:  # noqa: ANN401 - a wrapper may only resemble one
    """Return whether this rank is not the first of those that have the same gradients. No collective."""
    return torch.distributed.get_rank(wrapper.process_group) > 0


FORWARDS = 64
"""Forwards that are remembered without a backward."""


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """What one backward reduces. `parameters`: the `id` of each that is reduced; none under `no_sync()`.

    `ranks`: over how many the mean is taken; 0 where that is not known, or what comes back need not be the mean: with a hook
    that communicates in its place, under `join`, and where wrappers have groups of different sizes.
    """

    parameters: frozenset[int]
    ranks: int


@dataclass(slots=True)
class Reductions:
    """Which wrappers the forwards since the last backward ran through. Called for those of sampled rounds; holds all weakly."""

    forwards: list[tuple[weakref.ref[DistributedDataParallel], bool]] = field(default_factory=list)
    """Each wrapper with whether the next backward through it reduces."""
    wrapped: bool = False
    """Whether the last of these forwards ran through a wrapper."""
    on_wrapper: Callable[[], object] | None = None
    """Is called once, when a forward first runs through a wrapper."""
    coming: Reduction | None = None
    """What the backward that began last reduces; `None` if it runs through no wrapper, as far as known."""

    def forward_began(self, root: torch.nn.Module) -> None:
        """A training forward of a root has begun, outside of a backward."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        wrapper = around(root)
        wrappers = [inner for _, inner in within(root)] if wrapper is None else [wrapper]
        self.wrapped = bool(wrappers)
        if wrappers and self.on_wrapper is not None:
            call, self.on_wrapper = self.on_wrapper, None
            call()
        del self.forwards[:-FORWARDS]
        self.forwards += [(weakref.ref(inner), inner.require_backward_grad_sync) for inner in wrappers]

    def backward_began(self) -> None:
        """A backward of a sampled round begins."""
        forwards, self.forwards, self.coming = self.forwards, [], None
        if not forwards:
            return
        # The last forward through a wrapper decides.
        syncing = {wrapper: syncs for reference, syncs in forwards if (wrapper := reference()) is not None}
        # A wrapper that computes in another type replaces these parameters by others.
        if not syncing or any(wrapper.mixed_precision is not None for wrapper in syncing):
            return
        reducing = [wrapper for wrapper, syncs in syncing.items() if syncs]
        sizes = {_ranks(wrapper) for wrapper in reducing}
        parameters = frozenset(id(parameter) for wrapper in reducing for parameter in reduced_parameters(wrapper))
        self.coming = Reduction(parameters, sizes.pop() if len(sizes) == 1 else 0)


def _ranks(wrapper: DistributedDataParallel) -> int:
    return torch.distributed.get_world_size(wrapper.process_group) if takes_the_mean(wrapper) else 0


def around(root: torch.nn.Module) -> DistributedDataParallel | None:
    """Return the wrapper whose forward is running, or that the root, or what was compiled to be it, is itself."""
    return active_wrapper() or wrapper_of(root)


def wrapper_of(module: torch.nn.Module) -> DistributedDataParallel | None:
    """Return the wrapper that a module is, or that replicates it in place; that one is made in the module's first forward."""
    module = uncompiled(module)
    if isinstance(module, DistributedDataParallel):
        return module
    wrapper: DistributedDataParallel | None = composed_wrapper(module)
    return wrapper


def within(root: torch.nn.Module) -> list[tuple[torch.nn.Module, DistributedDataParallel]]:
    """Return the modules below the root, or the root, that a wrapper replicates, each with its wrapper."""
    return [(module, wrapper) for module in root.modules() if (wrapper := wrapper_of(module)) is not None]


def anywhere(root: torch.nn.Module) -> DistributedDataParallel | None:
    """Return a wrapper that contains the root. Visits every object of the process, which takes a tenth of a second."""
    for instance in gc.get_objects():
        # Not `isinstance`, which asks an object for its `__class__`: some answer with a side effect.
        if issubclass(type(instance), DistributedDataParallel) and any(module is root for module in instance.modules()):
            wrapper: DistributedDataParallel = instance
            return wrapper
    return None
