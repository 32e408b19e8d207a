"""How an optimizer is made to skip a step.

A hook before an optimizer's step cannot cancel it, and Adam moves the weights on zero gradients too. So there are three ways,
none of them a guess. A fused optimizer has a flag on the device, which gradient scalers use as well. On the CPU the decision is
read at once and the gradients are removed, which every optimizer takes for nothing to do. On another device this waits for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from torch_grad_exporter.model.optimizers import owned_by
from torch_grad_exporter.torch_compat.optimizers import obeys_skip_flag


@dataclass(eq=False, slots=True)
class _JoinedFlag:
    """The flag of one optimizer, for which several may ask, such as two `Clipper`s.

    Attributes:
        before: That of a gradient scaler, which stays in force.
        value: The flag as it was set.
        asked: By source, whether to skip the step.
        without_momentum: Parameters of a fused SGD that had no momentum before the step.
    """

    before: torch.Tensor | None
    value: torch.Tensor | None = None
    asked: dict[SkipFlag, torch.Tensor] = field(default_factory=dict)
    without_momentum: list[torch.Tensor] = field(default_factory=list)

    def join(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the flag: the step is skipped if any of them asks for it."""
        joined = self.before
        for skip in self.asked.values():
            joined = skip if joined is None else torch.maximum(joined, skip.to(joined.device).reshape(joined.shape))
        if joined is not None:
            self.value = optimizer.found_inf = joined  # type: ignore[attr-defined]
        elif hasattr(optimizer, "found_inf"):
            del optimizer.found_inf


_joined: weakref.WeakKeyDictionary[torch.optim.Optimizer, _JoinedFlag] = weakref.WeakKeyDictionary()


class SkipFlag:
    """Sets the flag `found_inf` of a fused optimizer, which its kernel reads. It does not hold the optimizer."""

    __slots__ = ("is_set",)

    def __init__(self) -> None:
        self.is_set = False

    def set(self, optimizer: torch.optim.Optimizer, skip: torch.Tensor) -> None:
        """Let the optimizer skip the step that it is about to take, if `skip` is true."""
        flag: torch.Tensor | None = getattr(optimizer, "found_inf", None)
        joined = _joined.get(optimizer)
        if joined is None or joined.value is not flag:  # a scaler has set its own since, if a step has raised
            joined = _joined[optimizer] = _JoinedFlag(flag)
        joined.asked[self] = skip.to(torch.float32)
        joined.join(optimizer)
        joined.without_momentum = _without_momentum(optimizer)
        self.is_set = True

    def clear(self, optimizer: torch.optim.Optimizer) -> None:
        """Withdraw it, unless a gradient scaler has replaced the flag since. Idempotent."""
        was_set, self.is_set = self.is_set, False
        joined = _joined.get(optimizer) if was_set else None
        if joined is None or joined.asked.pop(self, None) is None:
            return
        if not joined.asked:
            del _joined[optimizer]
        flag: torch.Tensor | None = joined.value
        current: object = getattr(optimizer, "found_inf", None)
        if flag is None or current is not flag:
            return
        for parameter in joined.without_momentum:  # which PyTorch has allocated, and not filled if the step was skipped
            momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
            if isinstance(momentum, torch.Tensor):
                momentum.copy_(torch.where(flag.to(momentum.device) > 0, 0.0, momentum))
        joined.join(optimizer)


def _without_momentum(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    if not isinstance(optimizer, torch.optim.SGD):
        return []
    owned = [parameter for group in optimizer.param_groups if group["momentum"] for parameter in group["params"]]
    return [parameter for parameter in owned if optimizer.state.get(parameter, {}).get("momentum_buffer") is None]


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it can skip a step by a flag on the device. Capturable ones that are not fused refuse the flag."""
    fused = optimizer.defaults.get("fused") is True and all(group.get("fused") is True for group in optimizer.param_groups)
    return fused and obeys_skip_flag(optimizer)


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
