"""Finds what a process trains without being told: the modules whose parameters its optimizers own, and names for them."""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from torch_grad_exporter.torch_compat import children_in

_FOLDERS = [
    *(Path(path) for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))),
    Path(torch.__file__).parent,
    Path(__file__).parent.parent,
]

_LIBRARIES = tuple({str(path) for folder in _FOLDERS for path in (folder, folder.resolve())})
"""Folders whose code names no model: a library calls each one `self` or `module`."""


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
    owned = {id(parameter) for module in known for parameter in module.parameters() if parameter.requires_grad}
    for optimizer in optimizers:
        with contextlib.suppress(AttributeError, KeyError, TypeError):  # one that is only half made, or none at all
            owned |= {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    everything = {id(module): module for module in (*modules, *known)}
    inner = {id(child) for module in everything.values() for child in _children(module)}
    return [module for key, module in everything.items() if key not in inner and _has_one_of(module, owned)]


def _children(module: torch.nn.Module) -> list[torch.nn.Module]:
    with contextlib.suppress(AttributeError):  # its constructor has not called that of `Module` yet
        return [child for child in children_in(module).values() if child is not None]
    return []


def _has_one_of(module: torch.nn.Module, identities: set[int]) -> bool:
    with contextlib.suppress(AttributeError):
        return any(id(parameter) in identities for parameter in module.parameters())
    return False


def named(roots: Iterable[torch.nn.Module], frame: types.FrameType | None) -> dict[str, torch.nn.Module]:
    """The models as `start_exporter` takes them; one that is alone needs no name.

    A name is that of a variable of the script's, or of an attribute of one of its objects, where the callers of `frame` show one,
    the outermost first; else that of the class.
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
    for variables in seen:
        for value in variables.values():
            if not isinstance(value, torch.nn.Module | type | types.ModuleType) and type(value).__module__ != "builtins":
                attributes = getattr(value, "__dict__", None)
                yield from (attributes.items() if type(attributes) is dict else ())


def _locals(frame: types.FrameType | None) -> list[dict[str, object]]:
    """The local variables of the callers that belong to no library, the outermost first."""
    found: list[dict[str, object]] = []
    while frame is not None:
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and not _is_library(frame.f_code.co_filename):
            variables = frame.f_locals
            found.append(dict(variables))
            if sys.version_info < (3, 13):
                variables.clear()  # a copy that the frame would keep, and with it tensors that the function has dropped
        frame = frame.f_back
    return found[::-1]


def _is_library(filename: str) -> bool:
    return filename.startswith("<") or filename.startswith(_LIBRARIES)
