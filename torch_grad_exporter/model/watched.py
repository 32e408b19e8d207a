"""The models of one exporter, held weakly."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch


class WatchedModels:
    """References its models while they exist. `gone` is called when the garbage collector takes one; it must not raise."""

    def __init__(self, models: Iterable[torch.nn.Module], gone: Callable[[], None]) -> None:
        self._models = [weakref.ref(module) for module in models]
        self._finalizers = [weakref.finalize(module, gone) for reference in self._models if (module := reference()) is not None]
        for finalizer in self._finalizers:
            finalizer.atexit = False

    def any_of(self, models: Iterable[torch.nn.Module]) -> bool:
        """Return whether one of these is among them."""
        mine = {id(module) for reference in self._models if (module := reference()) is not None}
        return any(id(model) in mine for model in models)

    @property
    def all_gone(self) -> bool:
        """Whether none is left."""
        return all(reference() is None for reference in self._models)

    def close(self) -> None:
        """Stop calling `gone`. Idempotent."""
        for finalizer in self._finalizers:
            finalizer.detach()
