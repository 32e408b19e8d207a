"""A gradient monitor as a user writes it: hooks in one place, and a norm of each layer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.support.record import named_parameters, wide


class NaiveMonitor:
    """Computes the float64 norm of each layer's gradient at each step.

    `reads`: gradients are read in post-accumulate-grad hooks, registered at the start, or in a pre-hook of the optimizer's step.
    """

    def __init__(self, reads: Literal["accumulated", "stepping"]) -> None:
        self._reads = reads
        self._read: dict[torch.Tensor, float] = {}
        self._at_step: dict[torch.Tensor, float] = {}

    @contextlib.contextmanager
    def attached(self, models: Mapping[str, torch.nn.Module]) -> Iterator[None]:
        """Registers the hooks."""
        self._models = models
        self._at_start = [named for named in named_parameters(models) if not is_lazy(named.parameter)]
        with contextlib.ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._stepping).remove)
            for named in self._at_start if self._reads == "accumulated" else ():
                stack.callback(named.parameter.register_post_accumulate_grad_hook(self._accumulated).remove)
            yield

    def norms(self) -> dict[str, float]:
        """Return the norm of each layer that had a gradient at the last step of its optimizer."""
        squares: dict[str, float] = {}
        for each in self._at_start if self._reads == "accumulated" else named_parameters(self._models, frozen=True):
            if (square := self._at_step.get(each.parameter)) is not None:
                squares[each.layer] = squares.get(each.layer, 0.0) + square
        return {layer: math.sqrt(square) for layer, square in squares.items()}

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._read[parameter] = float(wide(parameter.grad).square().sum())

    def _stepping(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            self._at_step.pop(parameter, None)
            if self._reads == "stepping":
                self._accumulated(parameter)
            if parameter in self._read:
                self._at_step[parameter] = self._read.pop(parameter)
