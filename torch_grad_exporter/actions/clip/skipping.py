"""Leaving out a step whose gradients are too large.

A hook before an optimizer's step cannot cancel it, and Adam moves the weights on zero gradients, too. So a step is left out in
one of three ways, none of which is a guess: a fused optimizer is told so by a tensor on the device, as by a gradient scaler;
on the CPU the norm is read at once and the gradients are removed, which every optimizer takes for nothing to do; on another device
this costs a wait for the device, which has to be allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from torch_grad_exporter.actions.clip.policy import Decision, Groups, Measured, Memory, Plain, Scope, finite, flag, number
from torch_grad_exporter.actions.clip.table import ParameterGroups


@dataclass(frozen=True)
class SkipAbove(Plain):
    """A step whose gradients have a norm above `limit` is left out; gradients below it are not changed.

    No source: it is a comparison. Fused optimizers that the clipper knows (`optimizers=`) are told on the device. Otherwise all
    gradients are removed, for which the norm has to be read: at once on the CPU, elsewhere by waiting for the device in each step,
    with `synchronize=True`. A norm that is not finite leaves out nothing: that decision is a gradient scaler's, or the loop's.
    """

    limit: float
    synchronize: bool = False
    scope: ClassVar[Scope] = "model"
    derived: ClassVar[frozenset[str]] = frozenset({"threshold"})

    def __post_init__(self) -> None:
        number(self, "limit", example=10.0)
        flag(self, "synchronize")

    def start(self, groups: Groups, /) -> Memory:
        """The limit alone, to be shown."""
        return {"threshold": groups.full(float(self.limit))}

    def decide(self, measured: Measured, memory: Memory, /) -> Decision:
        """Whether the norm is above the limit."""
        return Decision(memory["threshold"], skip=(measured.total > self.limit) & finite(measured.total))


class FusedSteps:
    """Tells fused optimizers to leave out their next step, by hooks around it. Holds until `close()`.

    They read `found_inf` in their kernel. A gradient scaler sets it just before the step, so it is joined there.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer) or not is_fused(optimizer):
                raise ValueError(
                    f"Clipper(optimizers=[{type(optimizer).__name__}]): expected fused optimizers, such as AdamW(..., fused=True);"
                    " others cannot be told on the device: leave optimizers out and see SkipAbove(synchronize=True)"
                )
        self._pending: dict[int, torch.Tensor] = {}
        self._told: dict[int, Told] = {}
        self._optimizers = tuple(optimizers)
        self._handles = [
            handle
            for optimizer in optimizers
            for handle in (optimizer.register_step_pre_hook(self._begins), optimizer.register_step_post_hook(self._ended))
        ]

    def tell(self, skip: torch.Tensor) -> None:
        """Whether the next step of each optimizer is to be left out."""
        self._pending = {id(optimizer): skip for optimizer in self._optimizers}

    def forget(self) -> None:
        """What was told of a step that never came is over."""
        self._pending.clear()

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._pending.clear()
        for optimizer in self._optimizers:
            self._ended(optimizer)

    def _begins(self, optimizer: torch.optim.Optimizer, *_arguments: object) -> None:
        self._ended(optimizer)  # a step that has raised
        skip = self._pending.pop(id(optimizer), None)
        if skip is not None:
            self._told[id(optimizer)] = tell_to_skip(optimizer, skip)

    def _ended(self, optimizer: torch.optim.Optimizer, *_arguments: object) -> None:
        told = self._told.pop(id(optimizer), None)
        if told is not None:
            untell(optimizer, told)


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it can be told on the device to leave out a step."""
    return optimizer.defaults.get("fused") is True


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """What a fused optimizer was told, and what it had been told before, `None` for nothing."""

    told: torch.Tensor
    before: torch.Tensor | None


def tell_to_skip(optimizer: Any, skip: torch.Tensor) -> Told:  # noqa: ANN401 - `found_inf` is declared nowhere
    """Tells a fused optimizer whether to leave out the step that it is about to take."""
    before = getattr(optimizer, "found_inf", None)
    found = skip.to(torch.float32)
    optimizer.found_inf = found if before is None else torch.maximum(before, found.to(before.device).reshape(before.shape))
    return Told(optimizer.found_inf, before)


def untell(optimizer: Any, told: Told) -> None:  # noqa: ANN401 - as above
    """Ends `tell_to_skip`, unless the optimizer was told something else since, as by a gradient scaler."""
    if getattr(optimizer, "found_inf", None) is not told.told:
        return
    if told.before is None:
        del optimizer.found_inf
    else:
        optimizer.found_inf = told.before


def remove_gradients(groups: ParameterGroups, skip: torch.Tensor, *, synchronize: bool) -> None:
    """Removes all gradients if the step is to be left out. Reads the decision: the one place here that may wait for a device."""
    if skip.device.type != "cpu" and not synchronize:
        raise ValueError(
            f"SkipAbove: the gradients are on {skip.device}, so their norm can only be read by waiting for it; allow that by"
            " SkipAbove(..., synchronize=True), or use fused optimizers, which a Clipper has to be told of (optimizers=)"
        )
    if bool(skip):
        for entry in groups.entries:
            entry.parameter.grad = None
