"""RoundHooks: hooks around the forwards of inner modules, there in sampled rounds only, of the modules that are wanted."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torch_grad_exporter.capture.torch_hooks import Hooks
from torch_grad_exporter.inspection.inner_hooks import InnerHooks
from torch_grad_exporter.inspection.modules import Chosen, InnerModules
from torch_grad_exporter.torch_compat.autograd import graph_task


@dataclass(frozen=True, slots=True, eq=False)
class Hooked:
    """A module that is hooked, while it runs."""

    label: str
    module: torch.nn.Module


def _nothing(*_arguments: object) -> None:
    """Where there is nothing to do."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Moments:
    """What is called. `began`, `ended`: around the forward of a module.

    `again`: a module begins or returns within a backward, so in the second forward of a checkpoint.
    """

    ended: Callable[[Hooked, object], None]
    began: Callable[[Hooked], None] = _nothing
    again: Callable[[], None] = _nothing


class RoundHooks:
    """The hooks of a round: on each model whose forward began, and on its modules. `source`: under which failures count."""

    def __init__(self, modules: InnerModules, hooks: Hooks, source: str, moments: Moments) -> None:
        self._modules, self._moments = modules, moments
        self._around = InnerHooks(hooks, source, _nothing, self._root_ended)
        before = _nothing if moments.began is _nothing else self._inner_began
        self._make = functools.partial(InnerHooks, hooks, source, before, self._inner_ended)
        self._inner: dict[int, InnerHooks] = {}
        self._armed: dict[int, Chosen] = {}
        """By model, what is hooked."""
        self._labels: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}
        self._inside = False

    def arm(self, root: torch.nn.Module, *, compiled: bool) -> Chosen:
        """The forward of a model begins: hooks its modules, unless it is compiled; what is hooked, and what is left out."""
        chosen, number = self._modules.chosen(), id(root)
        mine = [one for one in chosen.inner if one.root == number]
        if compiled:
            return Chosen(chosen.inner, chosen.folded, chosen.compiled + len(mine))
        self._inside = True
        self._around.arm([root])
        if self._armed.get(number) is not chosen:
            modules = [module for one in mine if (module := one.module()) is not None]
            self._labels |= {id(one.module()): (one.module, one.label) for one in mine}
            if number not in self._inner:
                self._inner[number] = self._make()
            self._inner[number].arm(modules)
            self._armed[number] = chosen
            if any(module is root for module in modules):  # PyTorch has made its list of hooks for this forward before
                self._inner_began(root, ())
        return chosen

    def disarm(self) -> None:
        """Takes all hooks off; idempotent, from any thread."""
        self._inside = False
        self._around.disarm()
        for hooks in [*self._inner.values()]:
            hooks.disarm()
        self._armed, self._labels = {}, {}

    def _root_ended(self, _root: torch.nn.Module, _args: object, _kwargs: object, _output: object) -> None:
        if graph_task() == -1:
            self._inside = False

    def _inner_began(self, module: torch.nn.Module, _args: object, _kwargs: object = None) -> None:
        found = self._hooked(module)
        if found is not None:
            self._moments.began(found)

    def _inner_ended(self, module: torch.nn.Module, _args: object, _kwargs: object, output: object) -> None:
        found = self._hooked(module)
        if found is not None:
            self._moments.ended(found, output)

    def _hooked(self, module: torch.nn.Module) -> Hooked | None:
        """The module, if what runs is a forward of the training, and not the module of a copy, such as a replica."""
        if graph_task() != -1:
            self._moments.again()
            return None
        # Without gradients it is no training, but for what a model does so within its own forward, such as a checkpoint.
        if not (self._inside or torch.is_grad_enabled()):
            return None
        reference, label = self._labels.get(id(module), (None, ""))
        return Hooked(label, module) if reference is not None and reference() is module else None
