"""Finds what a process trains without being told: the modules whose parameters its optimizers own, and names for them."""

from __future__ import annotations

import gc
import inspect
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import torch

from torch_grad_exporter.errors import Guard, raised_by_handler
from torch_grad_exporter.torch_compat.modules import children_in

_Arguments = TypeVarTuple("_Arguments")
_Found = TypeVar("_Found")

_FOLDERS = [
    *(Path(path) for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))),
    Path(torch.__file__).parent,
    Path(__file__).parent.parent,
]

_LIBRARIES = tuple({str(path) for folder in _FOLDERS for path in (folder, folder.resolve())})
"""Folders whose code names no model: a library calls each one `self` or `module`."""


_HANDS_OUT = frozenset({"locals", "vars", "eval", "exec", "f_locals"})
"""Names by which a function may get the dictionary of its own local variables."""


def _or(otherwise: _Found, look: Callable[[*_Arguments], _Found], *arguments: *_Arguments) -> _Found:
    """What a look at one object of the script's finds, or `otherwise`: it may be half made or dead, and runs code of its own."""
    found = Guard(_passes).result(look, *arguments)
    return otherwise if found is None else found


def _passes(error: Exception) -> None:
    """Raises what a signal's handler has raised meanwhile."""
    if raised_by_handler(error):
        raise error


def parameters_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """A module's parameters, as PyTorch finds them: a method `parameters` of its own may be for something else."""
    return _or([], lambda: [*torch.nn.Module.parameters(module)])


def wants_gradients(module: torch.nn.Module) -> bool:
    """Whether a module has a parameter that wants a gradient."""
    return _or(False, lambda: any(parameter.requires_grad for parameter in torch.nn.Module.parameters(module)))


def living() -> tuple[list[torch.optim.Optimizer], list[torch.nn.Module]]:
    """All optimizers and all modules that the garbage collector knows; it does not know what `gc.freeze` has hidden from it.

    Costs tens of milliseconds in a process with a million objects.
    """
    optimizers: list[torch.optim.Optimizer] = []
    modules: list[torch.nn.Module] = []
    for one in gc.get_objects():
        # By its type alone: to ask a proxy for its class may run code of others.
        if issubclass(type(one), torch.nn.Module):
            modules.append(one)
        elif issubclass(type(one), torch.optim.Optimizer):
            optimizers.append(one)
    return optimizers, modules


def trained_roots(
    optimizers: Iterable[torch.optim.Optimizer], modules: Iterable[torch.nn.Module], known: Iterable[torch.nn.Module] = ()
) -> list[torch.nn.Module]:
    """The modules that are within no other and have a parameter that one of the optimizers owns, or that one of `known` has.

    A wrapper, such as that of DDP or of `torch.compile`, stands for what it wraps.
    """
    owned = {id(parameter) for module in known for parameter in parameters_of(module) if parameter.requires_grad}
    for optimizer in optimizers:
        owned |= _or(set(), _owned_by, optimizer)
    everything = {id(module): module for module in (*modules, *known)}
    inner = {id(child) for module in everything.values() for child in _children(module)}
    return [module for key, module in everything.items() if key not in inner and _has_one_of(module, owned)]


def _owned_by(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _children(module: torch.nn.Module) -> list[torch.nn.Module]:
    return _or([], lambda: [child for child in children_in(module).values() if child is not None])


def _has_one_of(module: torch.nn.Module, identities: set[int]) -> bool:
    return _or(False, lambda: any(id(parameter) in identities for parameter in torch.nn.Module.parameters(module)))


def named(roots: Iterable[torch.nn.Module], frame: types.FrameType | None) -> dict[str, torch.nn.Module]:
    """The models as `start_exporter` takes them; one that is alone needs no name.

    A name is that of a variable of the script's, or of an attribute of one of its objects, where the callers of `frame` show one,
    the outermost first; else that of the class. Before Python 3.13 a function that calls `locals()` is not looked at: a look would
    change what that has returned.
    """
    models = [*roots]
    if len(models) < 2:
        return dict(zip([""], models, strict=False))
    wanted, names = {id(model) for model in models}, dict[int, str]()
    for name, value in _variables(frame):
        if id(value) in wanted and id(value) not in names and name not in names.values():
            names[id(value)] = name
    for model in models:
        if id(model) not in names:
            kind = type(model).__name__
            later = (f"{kind}-{number}" for number in range(2, len(models) + 2))
            names[id(model)] = next(name for name in (kind, *later) if name not in names.values())
    models_of = {id(model): model for model in models}
    return {name: models_of[identity] for identity, name in names.items()}


def _variables(frame: types.FrameType | None) -> Iterator[tuple[str, object]]:
    """What variables of the script hold, and then what attributes of the objects in them do."""
    script = vars(sys.modules["__main__"])
    seen: list[Mapping[str, object]] = [dict(script), *_locals(frame)]
    for variables in seen:
        yield from ((name, value) for name, value in variables.items() if not name.startswith("_"))
    nothing: list[tuple[str, object]] = []
    for variables in seen:
        for value in variables.values():
            yield from _or(nothing, _attributes, value)


def _attributes(value: object) -> list[tuple[str, object]]:
    """What an object of the script's has as its own attributes. A proxy has none: to ask it may run code of others."""
    kind = type(value)
    if issubclass(kind, torch.nn.Module | type | types.ModuleType) or kind.__module__ == "builtins":
        return []
    slot = next((vars(one)["__dict__"] for one in kind.__mro__ if "__dict__" in vars(one)), None)
    attributes = slot.__get__(value) if type(slot) is types.GetSetDescriptorType else {}
    return [(name, one) for name, one in attributes.copy().items() if type(name) is str] if type(attributes) is dict else []


def _locals(frame: types.FrameType | None) -> list[dict[str, object]]:
    """The local variables of the callers that belong to no library, the outermost first."""
    found: list[dict[str, object]] = []
    while frame is not None:
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and not _is_library(frame.f_code.co_filename):
            found.append(_local(frame))
        frame = frame.f_back
    return found[::-1]


def _local(frame: types.FrameType) -> dict[str, object]:
    """The local variables of a function that runs; empty where it may have their dictionary itself.

    Before Python 3.13 a frame has one dictionary for all who ask, and each that asks brings it up to date.
    """
    if sys.version_info >= (3, 13):
        return dict(frame.f_locals)
    if not _HANDS_OUT.isdisjoint(frame.f_code.co_names):
        return {}
    variables = frame.f_locals
    found = dict(variables)
    if sys.getrefcount(variables) <= _OF_THE_FRAME:
        variables.clear()  # the frame would keep it, and with it tensors that the function has dropped
    return found


_OF_THE_FRAME = 3
"""References to a frame's dictionary that nobody else has: the frame's, a variable's and that of the call that counts them."""


def _is_library(filename: str) -> bool:
    return filename.startswith("<") or filename.startswith(_LIBRARIES)
