"""ScaleLearningRate: the action that multiplies learning rates, and what schedulers compute them from."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from torch_grad_exporter.actions.act.step_actions import StepAction, Training
from torch_grad_exporter.arguments import check_number, shown

Schedulers = Sequence[weakref.ref[Any]]

# What schedulers compute learning rates from, in addition to `lr`: in the parameter groups of an optimizer, and in themselves as a
# list with a number for each group.
OF_GROUPS, OF_SCHEDULERS = ("initial_lr", "max_lr", "swa_lr"), ("base_lrs", "max_lrs")

OF_ONE_CYCLE = "min_lr"  # what OneCycleLR keeps in the groups as well; others may use the name for something else
LEAST = "eta_min"  # what those that follow a cosine keep: one number for all groups, towards which learning rates go


def schedulers_of(optimizers: Sequence[torch.optim.Optimizer]) -> Schedulers:
    """Return the schedulers that are attached to one of the optimizers, or to what wraps it.

    Goes through all objects of the process: an optimizer does not know its schedulers.
    """
    groups = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
    kinds: list[type[Any]] = [LRScheduler, ReduceLROnPlateau]
    for kind in kinds:  # which grows meanwhile
        kinds += kind.__subclasses__()
    exact = frozenset(kinds)
    # By the type: `isinstance` would ask objects of others for their class; and there are many.
    found = [candidate for candidate in gc.get_objects() if type(candidate) in exact]
    pairs = [(each, getattr(getattr(each, "optimizer", None), "param_groups", ())) for each in found]
    return [weakref.ref(scheduler) for scheduler, theirs in pairs if any(id(group) in groups for group in theirs)]


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
    if not isinstance(before, torch.Tensor):
        group["lr"] = max(before * factor, min(before, min_lr)) if factor < 1 else before * factor
        factor = group["lr"] / before if before > 0 else factor
    elif id(before) not in tensors:
        tensors[id(before)] = before
        with torch.no_grad():
            wanted = before * factor
            # In place: a captured or compiled step reads this tensor.
            before.copy_(torch.maximum(wanted, before.clamp(max=min_lr)) if factor < 1 else wanted)
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


def _times(value: Any, factor: float) -> Any:  # noqa: ANN401 - a number or a tensor, as the optimizer has it
    # Never in place: what a scheduler keeps may be the optimizer's own tensor.
    return value.detach() * factor if isinstance(value, torch.Tensor) else value * factor


class ScaleLearningRate(StepAction):
    """Multiplies the learning rates of all parameter groups of the optimizers by `factor`, down to `min_lr` at most.

    Schedulers of `torch.optim.lr_scheduler` go on from there: what they compute learning rates from is multiplied as well. A
    learning rate that is a tensor stays the same tensor, and stays on its device.
    """

    def __init__(self, factor: float, min_lr: float = 0.0) -> None:
        self.factor = check_number(f"factor={shown(factor)}", factor, above=0.0, example=0.5)
        self.min_lr = check_number(f"min_lr={shown(min_lr)}", min_lr, example=1e-6)

    def prepare(self, training: Training, _choice: object) -> Any:  # noqa: ANN401 - weak references
        """Return the schedulers, for which it goes through all objects of the process."""
        return schedulers_of([optimizer for _, optimizer in training.optimizers.numbered()])

    def act(self, training: Training, schedulers: Any) -> None:  # noqa: ANN401 - what `prepare` returned
        """See `StepAction`."""
        scale([optimizer for _, optimizer in training.optimizers.numbered()], schedulers, self.factor, self.min_lr)

    def __repr__(self) -> str:
        return f"ScaleLearningRate(factor={self.factor:g}, min_lr={self.min_lr:g})"
