"""What `DistributedDataParallel` is around, or within, and what it does with the gradients of the next backward.

Reads attributes only. Found are the class of that name, around a module, and the composable `replicate`, which changes a module in
place: they make the gradients of ranks equal. Whether a backward reduces is decided in the forward before it: under `no_sync()`
it does not, and where a module within the wrapper is called without the wrapper nothing is reduced, either.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_grad_exporter.model.names import uncompiled
from torch_grad_exporter.torch_compat.replicas import active_wrapper, composed_wrapper, reduced_parameters, takes_the_mean

MOST = 64
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

    _forwards: list[tuple[weakref.ref[DistributedDataParallel], bool]] = field(default_factory=list)
    """Each wrapper with whether the next backward through it reduces."""
    wrapped: bool = False
    """Whether the last of these forwards ran through a wrapper."""
    coming: Reduction | None = None
    """What the backward that began last reduces; `None` if it runs through no wrapper, as far as known."""

    def forward_began(self, root: torch.nn.Module) -> None:
        """A training forward of a root has begun, outside of a backward."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        wrapper = around(root)
        wrappers = [inner for _, inner in within(root)] if wrapper is None else [wrapper]
        self.wrapped = bool(wrappers)
        del self._forwards[:-MOST]
        self._forwards += [(weakref.ref(inner), inner.require_backward_grad_sync) for inner in wrappers]

    def backward_began(self) -> None:
        """A backward of a sampled round begins."""
        forwards, self._forwards, self.coming = self._forwards, [], None
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
