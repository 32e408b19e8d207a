"""Captures that read gradients in a naive place: the exporter with that one thing changed."""

from __future__ import annotations

import torch
from torch_grad_exporter.capture.capture import GradientCapture, Mode


class AtStep(GradientCapture):
    """Reads in the optimizer's pre-hook, in its post-hook where there is a closure."""

    def __init__(self, **stages: object) -> None:
        super().__init__(**stages)
        self.mode = Mode.OPTIMIZER


class AtAccumulation(AtStep):
    """Copies each gradient in a post-accumulate-grad hook that was registered at the start; shows the last copy."""

    def __init__(self, **stages: object) -> None:
        super().__init__(**stages)
        self._copies: dict[int, torch.Tensor] = {}
        self._registered = [p.register_post_accumulate_grad_hook(self._copy) for p in self._index.table.parameters() or ()]

    def _copy(self, parameter: torch.Tensor) -> None:
        self._copies[id(parameter)] = parameter.grad.detach().clone()

    def _capture_at_step(self, optimizer: int) -> None:
        table = self._index.refresh()
        owners, _ = self._optimizers.owners(table, {optimizer})
        parameters = table.parameters() or []
        kept = [p.grad for p in parameters]
        try:
            for parameter in parameters:
                parameter.grad = self._copies.get(id(parameter))
            super()._capture_at_step(optimizer)
        finally:
            for parameter, gradient, owner in zip(parameters, kept, owners, strict=True):
                parameter.grad = gradient
                if owner == optimizer:
                    self._copies.pop(id(parameter), None)

    def close(self) -> None:
        """Removes the hooks too."""
        super().close()
        for handle in self._registered:
            handle.remove()
