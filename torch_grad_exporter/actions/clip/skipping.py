"""Skipping a step whose gradients are too large.

A hook before an optimizer's step cannot cancel it, and Adam moves the weights on zero gradients too. So there are three ways,
none of them a guess. A fused optimizer has a flag on the device, which gradient scalers use as well. On the CPU the norm is read
at once and the gradients are removed, which every optimizer takes for nothing to do. On another device this waits for the device,
which the user has to allow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_grad_exporter.actions.clip.parameters import ParameterSet


class SkipFlag:
    """The flag `found_inf` of a fused optimizer, which its kernel reads. It does not hold the optimizer."""

    __slots__ = ("_before", "_ours")

    def __init__(self) -> None:
        self._ours: torch.Tensor | None = None
        self._before: torch.Tensor | None = None

    @property
    def is_set(self) -> bool:
        """Whether a step is to be skipped, or may be."""
        return self._ours is not None

    def set(self, optimizer: torch.optim.Optimizer, skip: torch.Tensor) -> None:
        """Tell the optimizer whether to skip the step that it is about to take; joins the flag of a gradient scaler."""
        self.clear(optimizer)  # a closure may be evaluated several times
        self._before = before = getattr(optimizer, "found_inf", None)
        # A scaler's flag stays in force: the step is skipped if either asks for it.
        ours = skip.to(torch.float32)
        self._ours = ours if before is None else torch.maximum(before, ours.to(before.device).reshape(before.shape))
        optimizer.found_inf = self._ours  # type: ignore[attr-defined]

    def clear(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore the flag, unless a gradient scaler has replaced it since. Idempotent."""
        ours, self._ours = self._ours, None
        if ours is None or getattr(optimizer, "found_inf", None) is not ours:
            return
        if self._before is None:
            del optimizer.found_inf  # type: ignore[attr-defined]
        else:
            optimizer.found_inf = self._before  # type: ignore[attr-defined]


class FusedSteps:
    """Makes fused optimizers skip their next step, by hooks around it, from now until `close()`.

    A gradient scaler sets the flag just before the step, so it is joined there.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer) or not is_fused(optimizer):
                raise ValueError(
                    f"Clipper(optimizers=[{type(optimizer).__name__}]): expected fused optimizers, such as AdamW(..., fused=True);"
                    " others have no flag on the device: leave optimizers out and see SkipAbove(synchronize=True)"
                )
        self._optimizers = tuple(optimizers)
        self._flags = {id(optimizer): SkipFlag() for optimizer in optimizers}
        self._pending: dict[int, torch.Tensor] = {}
        self._handles = [
            handle
            for optimizer in optimizers
            for handle in (optimizer.register_step_pre_hook(self._begins), optimizer.register_step_post_hook(self._ended))
        ]

    def skip_next(self, skip: torch.Tensor | None) -> None:
        """Decide about the next step of each optimizer; None withdraws the last decision."""
        self._pending = {} if skip is None else {id(optimizer): skip for optimizer in self._optimizers}

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._pending.clear()
        for optimizer in self._optimizers:
            self._ended(optimizer)

    def _begins(self, optimizer: torch.optim.Optimizer, *_arguments: object) -> None:
        skip = self._pending.pop(id(optimizer), None)
        if skip is None:
            self._ended(optimizer)  # a step that raised has left the flag
        else:
            self._flags[id(optimizer)].set(optimizer, skip)

    def _ended(self, optimizer: torch.optim.Optimizer, *_arguments: object) -> None:
        self._flags[id(optimizer)].clear(optimizer)


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it can skip a step by a flag on the device."""
    return optimizer.defaults.get("fused") is True


def remove_gradients(parameters: ParameterSet, skip: torch.Tensor, *, synchronize: bool) -> None:
    """Remove all gradients if the step is to be skipped. Reads the decision, the only place here that may wait for a device."""
    if skip.device.type != "cpu" and not synchronize:
        raise ValueError(
            f"SkipAbove: the gradients are on {skip.device}, so their norm can only be read by waiting for it; allow that by"
            " SkipAbove(..., synchronize=True), or use fused optimizers, which a Clipper has to know (optimizers=)"
        )
    if bool(skip):
        for parameter in parameters.parameters:
            parameter.grad = None
