"""What a process holds at one moment: memory, threads, descriptors, hooks and the objects behind an exporter.

`hooks` counts those that PyTorch keeps in dictionaries: of modules, parameters, optimizers and the process. `behind` follows
every reference from an object, so that a container that grows is found wherever it is.
"""

from __future__ import annotations

import gc
import logging
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import psutil
import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from torch_grad_exporter.rules.watch import Memory

OUTSIDE = (types.ModuleType, types.FrameType, type, logging.Logger, torch.nn.Module, torch.optim.Optimizer, Memory)
"""Where `behind` does not go on: what is behind these is the process' or the training's. What rules remember of a metric grows for
as long as its window, up to an hour, and then no more: tests/rules/test_problems.py."""


@dataclass(frozen=True, slots=True)
class Census:
    """`resident`: bytes. `objects`: those behind the exporter, 0 without one."""

    resident: int
    threads: int
    descriptors: int
    hooks: int
    objects: int


def take(model: torch.nn.Module, optimizer: torch.optim.Optimizer, exporter: object | None = None) -> Census:
    """The census as of now. Memory is read first, since counting objects takes some."""
    process = psutil.Process()
    resident = process.memory_info().rss
    objects = 0 if exporter is None else sum(behind(exporter).values())
    return Census(resident, process.num_threads(), process.num_fds(), hooks(model, optimizer), objects)


def hooks(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Entries in every dictionary of hooks of the model, its parameters, its optimizer and the whole process."""
    holders: list[Mapping[str, object]] = [vars(modules), vars(optimizers), vars(optimizer)]
    holders += [vars(module) for module in model.modules()]
    of_modules = sum(len(entries) for holder in holders for entries in _hook_dicts(holder))
    of_parameters = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return of_modules + sum(len(getattr(p, name) or ()) for p in model.parameters() for name in of_parameters)


def behind(root: object) -> Counter[str]:
    """The objects that can be reached from one, by the name of their type."""
    seen: dict[int, object] = {}
    line = [root]
    while line:
        thing = line.pop()
        if id(thing) not in seen and not isinstance(thing, OUTSIDE):
            seen[id(thing)] = thing
            line.extend(_referents(thing))
    return Counter(type(thing).__name__ for thing in seen.values())


def live() -> Counter[str]:
    """All objects that Python's garbage collector knows, by the name of their type, after a collection."""
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects())


def _hook_dicts(holder: Mapping[str, object]) -> Iterator[dict[object, object]]:
    return (value for name, value in holder.items() if name.endswith("_hooks") and isinstance(value, dict))


def _referents(thing: object) -> Iterable[object]:
    # A function leads to its module's globals, and from there everywhere.
    return thing.__closure__ or () if isinstance(thing, types.FunctionType) else gc.get_referents(thing)
