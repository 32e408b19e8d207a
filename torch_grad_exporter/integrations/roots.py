"""What a process trains: the outermost modules whose parameters its optimizers own, and names for them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar, TypeVarTuple

import torch

from torch_grad_exporter.errors import Guard
from torch_grad_exporter.torch_compat.modules import children_in

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


def _result_or(otherwise: _Result, look: Callable[[*_Arguments], _Result], *arguments: *_Arguments) -> _Result:
    """Return what a look at an object of the script finds, or `otherwise`: it may be half made or dead, and runs its own code."""
    result = Guard(lambda _error: None).result(look, *arguments)
    return otherwise if result is None else result


def wants_gradients(module: torch.nn.Module) -> bool:
    """Return whether a module has a parameter that wants a gradient."""
    return _result_or(False, lambda: any(parameter.requires_grad for parameter in torch.nn.Module.parameters(module)))


def living() -> tuple[list[torch.optim.Optimizer], list[torch.nn.Module]]:
    """Return all optimizers and all modules that the garbage collector knows; `gc.freeze` hides them from it.

    Costs tens of milliseconds in a process with a million objects.
    """
    optimizers: list[torch.optim.Optimizer] = []
    modules: list[torch.nn.Module] = []
    for each in gc.get_objects():
        # By its type alone: to ask a proxy for its class may run code of others.
        if issubclass(type(each), torch.nn.Module):
            modules.append(each)
        elif issubclass(type(each), torch.optim.Optimizer):
            optimizers.append(each)
    return optimizers, modules


def trained_roots(
    optimizers: Iterable[torch.optim.Optimizer], modules: Iterable[torch.nn.Module], known: Iterable[torch.nn.Module] = ()
) -> list[torch.nn.Module]:
    """Return the modules that are in no other and have a parameter that an optimizer owns, or that one of `known` has.

    A wrapper, such as that of DDP or of `torch.compile`, stands for what it wraps.
    """
    owned = {id(parameter) for module in known for parameter in _parameters_of(module) if parameter.requires_grad}
    for optimizer in optimizers:
        owned |= _result_or(set(), lambda each: {id(p) for group in each.param_groups for p in group["params"]}, optimizer)
    everything = {id(module): module for module in (*modules, *known)}
    nothing: Mapping[str, torch.nn.Module | None] = {}
    children = (_result_or(nothing, children_in, module) for module in everything.values())
    inner = {id(child) for own in children for child in own.values()}
    roots = [module for key, module in everything.items() if key not in inner]
    return [module for module in roots if any(id(parameter) in owned for parameter in _parameters_of(module))]


def _parameters_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    # By PyTorch's method: one of the module's own may be for something else.
    return _result_or([], lambda: [*torch.nn.Module.parameters(module)])


def named(roots: Iterable[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Return the models as `start_exporter` takes them; one that is alone needs no name.

    A name is that of a variable of the script's main module, or of an attribute of an object of its own classes, else that of the
    model's class.
    """
    models = [*roots]
    if len(models) < 2:
        return dict(zip([""], models, strict=False))
    wanted, names = {id(model) for model in models}, dict[int, str]()
    variables = dict(vars(sys.modules["__main__"]))  # at once: threads may set others
    script = {name: value for name, value in variables.items() if not name.startswith("_")}
    nothing: dict[str, object] = {}
    inside = [
        _result_or(nothing, lambda each: dict(vars(each)), value)
        for value in script.values()
        if type(value).__module__ == "__main__"
    ]
    for name, value in [pair for names_in in (script, *inside) for pair in names_in.items()]:
        if id(value) in wanted and id(value) not in names and name not in names.values():
            names[id(value)] = name
    for model in models:
        if id(model) not in names:
            kind = type(model).__name__
            later = (f"{kind}-{number}" for number in range(2, len(models) + 2))
            names[id(model)] = next(name for name in (kind, *later) if name not in names.values())
    models_of = {id(model): model for model in models}
    return {name: models_of[identity] for identity, name in names.items()}
