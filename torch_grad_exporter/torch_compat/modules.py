"""What modules own, their hooks, and a forward that has begun."""

from __future__ import annotations

import itertools
import operator
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_grad_exporter.torch_compat.lost import find, missing

_OWN = vars(torch.nn.Module())

MODULE_HOOKS = _OWN.keys() >= {f"_forward{pre}_hooks{kind}" for pre in ("", "_pre") for kind in ("", "_with_kwargs")}
"""Whether modules show their hooks around forwards."""
if not MODULE_HOOKS:
    missing["torch.nn.Module._forward_hooks"] = False


Parameters = Mapping[str, torch.nn.Parameter | None]
Children = Mapping[str, torch.nn.Module | None]


def parameters_in(module: torch.nn.Module) -> Parameters:
    """Return the parameters that a module owns itself, by attribute."""
    own = module.__dict__.get("_parameters")
    # A scripted or traced module has a view there that is no mapping.
    return own if isinstance(own, dict) else dict(module.named_parameters(recurse=False, remove_duplicate=False))


def children_in(module: torch.nn.Module) -> Children:
    """Return the modules that a module owns itself, by attribute."""
    own = module.__dict__.get("_modules")
    return own if isinstance(own, dict) else dict(module.named_children())


_DICTS: set[type] = {dict, OrderedDict}
_parameters: Callable[[torch.nn.Module], Parameters] = (
    operator.attrgetter("_parameters") if "_parameters" in _OWN else parameters_in
)
_children: Callable[[torch.nn.Module], Children] = operator.attrgetter("_modules") if "_modules" in _OWN else children_in


def parameters_of_each(modules: Sequence[torch.nn.Module]) -> list[Parameters]:
    """Return `parameters_in` each of thousands, mostly without a line of Python for each."""
    own = [*map(_parameters, modules)]
    return own if {*map(type, own)} <= _DICTS else [*map(parameters_in, modules)]


_MANAGED = "_is_fsdp_managed_module"


def is_managed(module: torch.nn.Module) -> bool:
    """Return whether FSDP, of either kind, gathers the parameters of a module for its forward and backward."""
    # Not by `hasattr`: a module's own look-up costs a microsecond where there is no such attribute.
    return _MANAGED in vars(module)


def in_each(modules: Sequence[torch.nn.Module]) -> tuple[list[Children], list[Parameters], list[bool]]:
    """Return `children_in`, `parameters_in` and `is_managed` of each in the same way.

    The last is empty where FSDP is not imported, as importing torch does not.
    """
    children = [*map(_children, modules)]
    if not {*map(type, children)} <= _DICTS:
        children = [*map(children_in, modules)]
    fsdp = "torch.distributed.fsdp" in sys.modules or "torch.distributed._composable.fsdp" in sys.modules
    managed = [*map(operator.contains, map(vars, modules), itertools.repeat(_MANAGED))] if fsdp else []
    return children, parameters_of_each(modules), managed


TRANSPOSED: tuple[type[torch.nn.Module], ...] = (
    find("torch.nn.modules.conv._ConvTransposeNd") or torch.nn.ConvTranspose1d,
    torch.nn.ConvTranspose2d,
    torch.nn.ConvTranspose3d,
)
"""The classes of transposed convolutions."""


@dataclass(frozen=True, slots=True)
class ForwardUnderWay:
    """A module's forward, of which only the hooks before it have begun. `known`: those that PyTorch is about to call."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    known: frozenset[Any]

    def call_new_hooks(self) -> None:
        """Call the hooks that were set since: PyTorch has made its list of them before."""
        if self.kwargs is None:
            return
        for key, hook in [*self.module._forward_pre_hooks.items()]:
            if key not in self.known:
                hook(self.module, self.args, self.kwargs)


def forward_under_way(frame: types.FrameType, module: torch.nn.Module, args: tuple[Any, ...]) -> ForwardUnderWay:
    """Return the forward whose global hooks `frame` is calling. Without its keyword arguments, its beginning is not seen."""
    # Not the variables of any other function: before Python 3.13 they are one dictionary, which the function itself may have.
    if not MODULE_HOOKS or frame.f_globals is not vars(torch.nn.modules.module):
        return ForwardUnderWay(module, args, None, frozenset())
    variables = frame.f_locals
    kwargs = variables.get("kwargs") if variables.get("self") is module else None
    if sys.version_info < (3, 13):
        variables.clear()  # a copy that the frame would keep
    return ForwardUnderWay(module, args, kwargs if isinstance(kwargs, dict) else None, frozenset(module._forward_pre_hooks))
