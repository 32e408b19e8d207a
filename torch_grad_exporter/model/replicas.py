"""Replicas: which models are copies of those on other ranks, whose gradients are equal, so that one rank reports them.

A rank that is not the first of its copies shows no series per layer: a thousand ranks would all show the same. Gradients are
known to be equal under `DistributedDataParallel`: around the model, within it, or around the module that holds it.
Nothing else shows it: ranks may train different stages of a pipeline, or different models. There an option says so.
"""

from __future__ import annotations

import enum
import weakref
from typing import Any

import torch

from torch_grad_exporter.model import reduction


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
        self._alone = world_size == 1
        self._by_hand = ranks is Ranks.FIRST
        self.by_loop = self._by_hand and not self._alone
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
        return not (self._alone or self._by_hand) and len(self._wrapped) < models

    def is_copy(self, module: torch.nn.Module | None, model: int) -> bool:
        """Return whether another rank reports this module's parameters, as far as they are not DTensors."""
        if self._alone:
            return False
        if self._by_hand:
            return not self._first
        return self._copied.get(model, not self._first) or module in self._parts

    def search_in_forward(self, model: int, root: torch.nn.Module) -> None:
        """Search for a wrapper of a model whose root's forward is running, on the training thread."""
        if model not in self._wrapped and not self._found(model, reduction.around(root)):
            self._parts.update(
                part for module, wrapper in reduction.within(root) if _is_later(wrapper) for part in module.modules()
            )

    def search(self, model: int, root: torch.nn.Module) -> None:
        """Search once for a wrapper of a model of which no forward was seen, because only its parts are called."""
        if model not in self._copied:
            self._found(model, reduction.wrapper_of(root) or reduction.anywhere(root))

    def _found(self, model: int, wrapper: Any) -> bool:  # noqa: ANN401 - a wrapper
        self._copied[model] = wrapper is not None and _is_later(wrapper)
        if wrapper is not None:
            self._wrapped.add(model)
        return wrapper is not None


def _is_later(wrapper: Any) -> bool:  # noqa: ANN401 - a wrapper may only resemble one
    """Return whether this rank is not the first of those that have the same gradients. No collective."""
    return torch.distributed.get_rank(wrapper.process_group) > 0
