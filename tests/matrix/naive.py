"""A gradient monitor as a user writes it: hooks in one place, and a norm of each layer."""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Iterator, Mapping

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.support.record import named_parameters, wide


class Naive(enum.Flag):
    """The place where a naive monitor reads gradients."""

    ACCUMULATE = enum.auto()
    """In post-accumulate-grad hooks that are registered once, at the start."""
    STEP = enum.auto()
    """In a pre-hook of the optimizer's step."""


class NaiveMonitor:
    """Computes the float64 norm of each layer's gradient at each step, from what it read in the place `way`."""

    def __init__(self, models: Mapping[str, torch.nn.Module], way: Naive) -> None:
        self._models = models
        self._way = way
        self._at_start = [named for named in named_parameters(models) if not is_lazy(named.parameter)]
        self._read: dict[torch.Tensor, float] = {}
        self._at_step: dict[torch.Tensor, float] = {}

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Registers the hooks."""
        handles = [register_optimizer_step_pre_hook(self._stepping)]
        if self._way is Naive.ACCUMULATE:
            handles += [named.parameter.register_post_accumulate_grad_hook(self._accumulated) for named in self._at_start]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def norms(self) -> dict[str, float]:
        """Return the norm of each layer that had a gradient at the last step of its optimizer."""
        squares: dict[str, float] = {}
        named = self._at_start if self._way is Naive.ACCUMULATE else named_parameters(self._models, frozen=True)
        for each in named:
            if (square := self._at_step.get(each.parameter)) is not None:
                squares[each.layer] = squares.get(each.layer, 0.0) + square
        return {layer: math.sqrt(square) for layer, square in squares.items()}

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._read[parameter] = float(wide(parameter.grad).square().sum())

    def _stepping(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            if self._way is Naive.STEP:
                self._accumulated(parameter)
            square = self._read.pop(parameter, None)
            if square is None:
                self._at_step.pop(parameter, None)
            else:
                self._at_step[parameter] = square
