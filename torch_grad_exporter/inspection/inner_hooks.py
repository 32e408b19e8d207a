"""The one engine of hooks around the forwards of inner modules, and the rules for which of these forwards count.

A hook is set for an armed round and removed after it. It comes behind all others of its module, so it sees what the module gets
and returns. It is never a full backward hook, with which a module that works in place would raise.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from torch_grad_exporter.capture.torch_hooks import Hooks, ModuleHooks, Removable
from torch_grad_exporter.errors import warn
from torch_grad_exporter.inspection.modules import InnerModule, InnerModules
from torch_grad_exporter.torch_compat.autograd import BACKWARDS_ARE_SEEN, capturing_graph, graph_task, within_transform
from torch_grad_exporter.torch_compat.compiler import called_from_compiled, something_is_compiled
from torch_grad_exporter.torch_compat.modules import MODULE_HOOKS

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
EMPTY: Kwargs = MappingProxyType({})


class RunningCall(NamedTuple):
    """A call of a module that runs; it may have raised, and then keeps no module alive. `of`: what the observer keeps of it."""

    inner: InnerModule
    of: Any


class ForwardObserver:
    """What `InnerHooks` calls around the forwards that count. An inspection overrides the methods that it needs."""

    def entered(self, label: str, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> object:  # noqa: ARG002
        """A module is about to run; return what to keep of the call."""
        return None

    def left(self, label: str, module: torch.nn.Module, output: object, call: Any) -> None:  # noqa: ANN401 - what was kept
        """A module has returned; not called for one that has raised. `call`: what `entered` has returned, None without it."""

    def repeated(self) -> None:
        """A module begins or returns within a backward, as in the second forward of a checkpoint."""


class InnerHooks:
    """Hooks around the forwards of some modules; failures are counted under `source`.

    Only forwards of the thread that armed them count, outside of backwards, `torch.func` transforms and CUDA graph captures. In an
    armed round only those count that train. A replica of a module does not count: it is another object with the same hooks.

    Belongs to the training thread; `disarm` may be called from any.
    """

    def __init__(self, hooks: Hooks, source: str, observer: ForwardObserver) -> None:
        self._observer = observer
        self._before, self._after = hooks.guarded(source, self._entered), hooks.guarded(source, self._left)
        self._handles: dict[int, list[Removable]] = {}  # by the `id` of the root
        self._armed: dict[int, tuple[InnerModule, ...]] = {}  # likewise
        self._modules: dict[int, InnerModule] = {}  # by the `id` of the module
        self.running: list[RunningCall] = []  # the innermost last
        self._inside = False  # whether a forward of a root is running
        self._thread = -1

    def arm(self, root: torch.nn.Module, modules: tuple[InnerModule, ...], args: Args = (), kwargs: Kwargs = EMPTY) -> None:
        """Follow the forward of a root that is about to begin, with these arguments, and those of its modules."""
        number = id(root)
        self._inside, self._thread, self.running = True, threading.get_ident(), []
        if self._armed.get(number) is not modules:
            self._set(number, modules, root)
            self._armed[number] = modules
        # Called here, since PyTorch has listed the root's own hooks for this forward before.
        if (inner := self._followed(root)) is not None:
            self.running.append(RunningCall(inner, self._observer.entered(inner.label, root, args, kwargs)))

    def follow(self, modules: tuple[InnerModule, ...]) -> None:
        """Follow every forward of these modules until `disarm`, whatever calls them."""
        self._inside, self._thread = True, threading.get_ident()
        self._set(-1, modules)

    def disarm(self) -> None:
        """Remove all hooks; idempotent, from any thread."""
        self._inside, self.running = False, []
        handles, self._handles = self._handles, {}
        self._armed, self._modules = {}, {}
        for handle in [handle for of_root in handles.values() for handle in of_root]:
            handle.remove()

    def _set(self, number: int, modules: tuple[InnerModule, ...], root: torch.nn.Module | None = None) -> None:
        """Hook these modules in the place of those that were hooked for this root, and the root itself."""
        for handle in self._handles.pop(number, ()):
            handle.remove()
        handles = self._handles[number] = []
        if root is not None:
            self._hook(root, handles)
        for inner in modules:
            module = inner.module()
            if module is not None:
                self._modules[id(module)] = inner
                if module is not root:
                    self._hook(module, handles)

    def _hook(self, module: torch.nn.Module, handles: list[Removable]) -> None:
        if MODULE_HOOKS:
            handles.append(ModuleHooks.add_to(module, self._before, self._after))
        else:
            handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            handles.append(module.register_forward_hook(self._after, with_kwargs=True))

    def _entered(self, module: torch.nn.Module, args: Args, kwargs: Kwargs = EMPTY) -> None:
        # A root was reported by `arm`. Its hook may be one of an earlier forward, which PyTorch calls without keyword arguments.
        if id(module) not in self._armed and (inner := self._followed(module)) is not None:
            self.running.append(RunningCall(inner, self._observer.entered(inner.label, module, args, kwargs)))

    def _left(self, module: torch.nn.Module, _args: object, _kwargs: object, output: object) -> None:
        if (inner := self._followed(module)) is not None:
            kept = None
            if any(call.inner is inner for call in self.running):
                while (call := self.running.pop()).inner is not inner:
                    pass  # a call that has raised within this one
                kept = call.of
            self._observer.left(inner.label, module, output, kept)
        if id(module) in self._armed and graph_task() == -1:
            self._inside = False

    def _followed(self, module: torch.nn.Module) -> InnerModule | None:
        """Return the module as it was armed, if this forward counts."""
        inner = self._modules.get(id(module))
        if inner is None or inner.module() is not module:
            return None
        if graph_task() != -1:
            self._observer.repeated()
            return None
        if threading.get_ident() != self._thread or within_transform() or capturing_graph():
            return None
        # Without gradients it is an evaluation, but for what a model runs so within its own forward, such as a checkpoint.
        return inner if self._inside or torch.is_grad_enabled() else None


class SampledHooks:
    """The hooks of sampled rounds on the modules that an option asks for, without those that are compiled.

    `warning` is logged with the number of modules that are left out, since a hook would compile them again, whenever it grows.

    Attributes:
        folded: Modules that shared their label at the last forward that was followed.
        compiled: Modules that were left out then.
    """

    def __init__(self, modules: InnerModules, hooks: Hooks, source: str, observer: ForwardObserver, warning: str) -> None:
        self._modules, self._warning = modules, warning
        self._hooks = InnerHooks(hooks, source, observer)
        # By `id`, models that had a forward before this round, and those that had their first one in it.
        self._roots: set[int] = set()
        self._new_roots: set[int] = set()
        self._reported = 0
        self.folded = 0
        self.compiled = 0

    def due(self, *, sampled: bool) -> bool:
        """Return whether the forward that is about to begin is to be followed; remove the hooks if not."""
        due = sampled and BACKWARDS_ARE_SEEN and not within_transform() and not capturing_graph()
        if not due:
            self._hooks.disarm()
        return due

    def arm(self, root: torch.nn.Module) -> bool:
        """Hook the modules of a model whose forward is about to begin; return whether this forward is followed.

        Not the first forward of a model where something is compiled: functions that it calls may be compiled in it, with the hooks
        that they then see, and again without them.
        """
        number = id(root)
        if number not in self._roots and something_is_compiled():
            self._new_roots.add(number)
            return False
        selected = self._modules.selected()
        modules, self.folded, self.compiled = selected.by_root.get(number, ()), selected.folded, selected.compiled
        if called_from_compiled(sys._getframe(1)):
            self.compiled += len(modules)
        elif modules:
            self._hooks.arm(root, modules)
        if self.compiled > self._reported:
            warn(self._warning, self.compiled)
            self._reported = self.compiled
        return True

    @property
    def running(self) -> list[RunningCall]:
        """The calls that run, the innermost last."""
        return self._hooks.running

    def round_over(self) -> None:
        """Count the models that had their first forward in this round as known."""
        self._roots |= self._new_roots

    def disarm(self) -> None:
        """Remove all hooks; idempotent, from any thread."""
        self._hooks.disarm()
