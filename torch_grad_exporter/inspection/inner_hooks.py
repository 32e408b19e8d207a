"""InnerHooks: hooks around the forwards of modules within the models, in single rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from torch_grad_exporter.capture.module_hooks import ModuleHooks
from torch_grad_exporter.capture.torch_hooks import HookHandle, Hooks
from torch_grad_exporter.torch_compat.modules import MODULE_HOOKS


class InnerHooks:
    """Hooks around the forwards of modules within the models, which are there in single rounds only.

    `before(module, args, kwargs)` and `after(module, args, kwargs, output)` come last, so that they see what the module gets and
    gives. Nothing is left at a module between two rounds. Belongs to the training thread, `disarm` to any.
    """

    def __init__(self, hooks: Hooks, source: str, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._before, self._after = hooks.guarded(source, before), hooks.guarded(source, after)
        self._handles: list[HookHandle] = []

    def arm(self, modules: Iterable[torch.nn.Module]) -> None:
        """Hooks these modules, in the place of those before."""
        self.disarm()
        for module in modules:
            if MODULE_HOOKS:
                self._handles.append(ModuleHooks.add_to(module, self._before, self._after))
            else:
                self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._after, with_kwargs=True))

    def disarm(self) -> None:
        """Takes all hooks off; idempotent."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
