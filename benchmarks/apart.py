"""Optimizer hooks of one arm only.

PyTorch's hooks on optimizer steps are global: those of an exporter fire in the steps of every model of the process, so plain
training beside it would pay for them too. Each arm gets its own here, and sees none of the others'.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_Hooks = dict[int, Any]


@dataclass(slots=True)
class OptimizerHooks:
    """The global optimizer hooks of one arm. Inside of `with hooks.there():` they are the only ones in the process.

    What is registered inside is this arm's from then on. Before a handle of theirs is removed, `restore` puts them back.
    """

    _kept: tuple[_Hooks, _Hooks] = field(default_factory=lambda: ({}, {}))

    @contextmanager
    def there(self) -> Iterator[None]:
        """This arm's hooks instead of those that are there."""
        others = self.enter()
        try:
            yield
        finally:
            self.leave(others)

    def enter(self) -> tuple[_Hooks, _Hooks]:
        """The same without a `with`, for what is called at each step: returns what `leave` needs."""
        others = _taken()
        _put(self._kept)
        return others

    def leave(self, others: tuple[_Hooks, _Hooks]) -> None:
        """Takes this arm's hooks out again."""
        self._kept = _taken()
        _put(others)

    def restore(self) -> None:
        """Puts this arm's hooks among all the others, where their handles expect them."""
        _put(self._kept)
        self._kept = ({}, {})


def _taken() -> tuple[_Hooks, _Hooks]:
    """All global hooks, which are none afterwards."""
    before, after = dict(_global_optimizer_pre_hooks), dict(_global_optimizer_post_hooks)
    _global_optimizer_pre_hooks.clear()
    _global_optimizer_post_hooks.clear()
    return before, after


def _put(hooks: tuple[_Hooks, _Hooks]) -> None:
    _global_optimizer_pre_hooks.update(hooks[0])
    _global_optimizer_post_hooks.update(hooks[1])
