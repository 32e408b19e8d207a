"""Scales learning rates in the optimizers, and in the schedulers that would set them back otherwise."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

# What schedulers keep in the parameter groups of an optimizer and compute learning rates from, in addition to `lr`.
OF_GROUPS = ("initial_lr", "max_lr", "swa_lr")

# What they keep themselves: a list with a number for each group.
OF_SCHEDULERS = ("base_lrs", "max_lrs")

OF_ONE_CYCLE = "min_lr"  # what OneCycleLR keeps in the groups as well; others may use the name for something else
LEAST = "eta_min"  # what those that follow a cosine keep: one number for all groups, towards which learning rates go

Schedulers = Sequence[weakref.ref[Any]]


def schedulers_of(optimizers: Sequence[torch.optim.Optimizer]) -> Schedulers:
    """Return the schedulers that are attached to one of the optimizers, or to what wraps it.

    Goes through all objects of the process: an optimizer does not know its schedulers.
    """
    groups = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
    schedulers: list[weakref.ref[Any]] = []
    kinds = _with_subclasses(LRScheduler) | _with_subclasses(ReduceLROnPlateau)
    for candidate in gc.get_objects():
        # By the type: `isinstance` would ask objects of others for their class; and there are many.
        if type(candidate) in kinds:
            theirs = getattr(getattr(candidate, "optimizer", None), "param_groups", ())
            if any(id(group) in groups for group in theirs):
                schedulers.append(weakref.ref(candidate))
    return schedulers


def _with_subclasses(kind: type[Any]) -> set[type[Any]]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def scale(optimizers: Sequence[torch.optim.Optimizer], schedulers: Schedulers, factor: float, min_lr: float) -> None:
    """Multiply all learning rates, and what schedulers compute them from. Never reads a tensor.

    A rate at or below `min_lr` stays, and no other gets below it; its base is multiplied by that much less.
    """
    factors: dict[int, float] = {}
    tensors: dict[int, torch.Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if id(group) not in factors and group.get("lr") is not None:
                factors[id(group)] = _scale_group(group, factor, min_lr, tensors)
    for reference in schedulers:
        scheduler = reference()
        if scheduler is not None:
            _scale_scheduler(scheduler, factors)


def _scale_group(group: dict[str, Any], factor: float, min_lr: float, tensors: dict[int, torch.Tensor]) -> float:
    """Scale a group. Returns the factor of its bases. `tensors`: those that are scaled, which groups may share."""
    before = group["lr"]
    if id(before) not in tensors:
        group["lr"] = _scaled(before, factor, min_lr)
    if isinstance(before, torch.Tensor):
        tensors[id(before)] = before
    elif before > 0:
        factor = group["lr"] / before
    for name in OF_GROUPS:
        if group.get(name) is not None:
            group[name] = _times(group[name], factor)
    return factor


def _scale_scheduler(scheduler: Any, factors: dict[int, float]) -> None:  # noqa: ANN401 - the classes have no common attributes
    groups = scheduler.optimizer.param_groups
    theirs = [factors.get(id(group), 1.0) for group in groups]
    for name in OF_SCHEDULERS:
        kept = getattr(scheduler, name, None)
        if isinstance(kept, list) and len(kept) == len(theirs):
            setattr(scheduler, name, [_times(value, factor) for value, factor in zip(kept, theirs, strict=True)])
    if isinstance(getattr(scheduler, LEAST, None), int | float | torch.Tensor):
        setattr(scheduler, LEAST, _times(getattr(scheduler, LEAST), max(theirs, default=1.0)))
    if isinstance(scheduler, OneCycleLR):
        for group, factor in zip(groups, theirs, strict=True):
            if group.get(OF_ONE_CYCLE) is not None:
                group[OF_ONE_CYCLE] = _times(group[OF_ONE_CYCLE], factor)


def _scaled(rate: Any, factor: float, min_lr: float) -> Any:  # noqa: ANN401 - a number or a tensor, as the optimizer has it
    if not isinstance(rate, torch.Tensor):
        return max(rate * factor, min(rate, min_lr)) if factor < 1 else rate * factor
    with torch.no_grad():
        wanted = rate * factor
        if factor < 1:
            wanted = torch.maximum(wanted, rate.clamp(max=min_lr))
        return rate.copy_(wanted)  # in place: a captured or compiled step reads this tensor


def _times(value: Any, factor: float) -> Any:  # noqa: ANN401 - as above
    # Never in place: what a scheduler keeps may be the optimizer's own tensor.
    return value.detach() * factor if isinstance(value, torch.Tensor) else value * factor
