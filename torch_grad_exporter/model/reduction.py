"""Reductions: what `DistributedDataParallel` does with the gradients of the next backward. Reads attributes only.

Whether a backward reduces is decided in the forward before it: under `no_sync()` it does not, and where a module within the
wrapper is called without the wrapper nothing is reduced, either.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_grad_exporter.model import wrappers
from torch_grad_exporter.torch_compat import reduced_parameters, takes_the_mean

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

    def forward_began(self, root: torch.nn.Module) -> None:
        """A training forward of a root has begun, outside of a backward."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        around = wrappers.around(root)
        found = [wrapper for _, wrapper in wrappers.within(root)] if around is None else [around]
        self.wrapped = bool(found)
        del self._forwards[:-MOST]
        self._forwards += [(weakref.ref(wrapper), wrapper.require_backward_grad_sync) for wrapper in found]

    def coming(self) -> Reduction | None:
        """What the backward that begins now reduces; `None` if it runs through no wrapper, as far as known. To be called once."""
        forwards, self._forwards = self._forwards, []
        # The last forward through a wrapper decides.
        found = {wrapper: syncs for reference, syncs in forwards if (wrapper := reference()) is not None}
        # A wrapper that computes in another type replaces these parameters by others.
        if not found or any(wrapper.mixed_precision is not None for wrapper in found):
            return None
        reducing = [wrapper for wrapper, syncs in found.items() if syncs]
        sizes = {_ranks(wrapper) for wrapper in reducing}
        parameters = frozenset(id(parameter) for wrapper in reducing for parameter in reduced_parameters(wrapper))
        return Reduction(parameters, sizes.pop() if len(sizes) == 1 else 0)


def _ranks(wrapper: DistributedDataParallel) -> int:
    return torch.distributed.get_world_size(wrapper.process_group) if takes_the_mean(wrapper) else 0
