"""How an optimizer is made to skip a step.

A hook before an optimizer's step cannot cancel it, and Adam moves the weights on zero gradients too. So there are three ways,
none of them a guess. A fused optimizer has a flag on the device, which gradient scalers use as well. On the CPU the decision is
read at once and the gradients are removed, which every optimizer takes for nothing to do. On another device this waits for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from torch_grad_exporter.model.optimizers import owned_by
from torch_grad_exporter.torch_compat.optimizers import obeys_skip_flag


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it can skip a step by a flag on the device. Capturable ones that are not fused refuse the flag."""
    fused = optimizer.defaults.get("fused") is True and all(group.get("fused") is True for group in optimizer.param_groups)
    return fused and obeys_skip_flag(optimizer)


@dataclass(eq=False, slots=True)
class _JoinedFlag:
    """The flag of one optimizer, for which several may ask, such as two `Clipper`s.

    Attributes:
        before: That of a gradient scaler, which stays in force.
        asked: By source, whether to skip the step.
        value: The flag as it was set.
        without_momentum: Parameters of a fused SGD that had no momentum before the step.
    """

    before: torch.Tensor | None
    asked: dict[SkipFlag, torch.Tensor] = field(default_factory=dict)
    value: torch.Tensor | None = None
    without_momentum: list[torch.Tensor] = field(default_factory=list)

    def join(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the flag: the step is skipped if any of them asks for it."""
        self.value = self.before
        for skip in self.asked.values():
            joined = self.value
            self.value = skip if joined is None else torch.maximum(joined, skip.to(joined.device).reshape(joined.shape))
        if self.value is None:
            del optimizer.found_inf  # type: ignore[attr-defined]
        else:
            optimizer.found_inf = self.value  # type: ignore[attr-defined]


_joined_flags: weakref.WeakKeyDictionary[torch.optim.Optimizer, _JoinedFlag] = weakref.WeakKeyDictionary()


class SkipFlag:
    """Sets the flag `found_inf` of a fused optimizer, which its kernel reads. It does not hold the optimizer."""

    __slots__ = ("is_set",)

    def __init__(self) -> None:
        self.is_set = False  # and not cleared since

    def set(self, optimizer: torch.optim.Optimizer, skip: torch.Tensor) -> None:
        """Let the optimizer skip the step that it is about to take, if `skip` is true."""
        flag: torch.Tensor | None = getattr(optimizer, "found_inf", None)
        joined = _joined_flags.get(optimizer)
        if joined is None or joined.value is not flag:  # after a step that raised, a scaler has set its own
            joined = _joined_flags[optimizer] = _JoinedFlag(flag)
        joined.asked[self] = skip.to(torch.float32)
        joined.join(optimizer)
        if isinstance(optimizer, torch.optim.SGD):
            owned = [parameter for group in optimizer.param_groups if group["momentum"] for parameter in group["params"]]
            joined.without_momentum = [p for p in owned if optimizer.state.get(p, {}).get("momentum_buffer") is None]
        self.is_set = True

    def clear(self, optimizer: torch.optim.Optimizer) -> None:
        """Withdraw it, unless a gradient scaler has replaced the flag since. Idempotent."""
        was_set, self.is_set = self.is_set, False
        joined = _joined_flags.get(optimizer) if was_set else None
        if joined is None or joined.asked.pop(self, None) is None:
            return
        if not joined.asked:
            del _joined_flags[optimizer]
        flag: torch.Tensor | None = joined.value
        current: object = getattr(optimizer, "found_inf", None)
        if flag is None or current is not flag:
            return
        for parameter in joined.without_momentum:  # which PyTorch has allocated, and not filled if the step was skipped
            momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
            if isinstance(momentum, torch.Tensor):
                momentum.copy_(torch.where(flag.to(momentum.device) > 0, 0.0, momentum))
        joined.join(optimizer)


class FusedSteps:
    """Makes fused optimizers skip their next step, by hooks around it, from now until `close()`.

    A gradient scaler sets the flag just before the step, so it is joined there.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer) or not is_fused(optimizer):
                raise ValueError(
                    f"Clipper(optimizers=[{type(optimizer).__name__}]): expected fused optimizers, such as AdamW(..., fused=True);"
                    " others have no flag on the device: leave optimizers out; on a GPU SkipAbove needs synchronize=True then"
                )
        self._flags = {optimizer: SkipFlag() for optimizer in optimizers}
        self._pending: dict[torch.optim.Optimizer, torch.Tensor] = {}
        self._handles = [optimizer.register_step_pre_hook(self._begins) for optimizer in optimizers]
        self._handles += [optimizer.register_step_post_hook(self._ended) for optimizer in optimizers]

    def skip_next(self, skip: torch.Tensor | None) -> None:
        """Decide about the next step of each optimizer; None withdraws the last decision."""
        self._pending = {} if skip is None else dict.fromkeys(self._flags, skip)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._pending.clear()
        for optimizer in self._flags:
            self._ended(optimizer)

    def _begins(self, optimizer: torch.optim.Optimizer, *_arguments: object) -> None:
        skip = self._pending.pop(optimizer, None)
        if skip is None:
            self._ended(optimizer)  # a step that raised has left the flag
        else:
            self._flags[optimizer].set(optimizer, skip)

    def _ended(self, optimizer: torch.optim.Optimizer, *_arguments: object) -> None:
        self._flags[optimizer].clear(optimizer)


class RemovedGradients:
    """Gradients that are removed for one step, and put back after it: a CUDA graph, or a loop, may go on writing to them."""

    __slots__ = ("__weakref__", "_removed")

    def __init__(self) -> None:
        self._removed: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def any(self) -> bool:
        """Whether some are still removed."""
        return bool(self._removed)

    def remove(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remove all gradients, which optimizers take for nothing to do."""
        self._removed = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        for parameter, _ in self._removed:
            parameter.grad = None

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Put back those of an optimizer, as zeros: if its step itself ends by removing them, NaN would be added to for ever."""
        if not self._removed:
            return
        removed, owned = self._removed, owned_by(optimizer)
        self._removed = [(parameter, gradient) for parameter, gradient in removed if id(parameter) not in owned]
        with torch.no_grad():
            for parameter, gradient in removed:
                if id(parameter) in owned and parameter.grad is None:
                    parameter.grad = gradient.zero_()

    def forget(self) -> None:
        """Restore nothing any more."""
        self._removed = []
