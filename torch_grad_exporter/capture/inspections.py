"""Inspections: what the user asked to see of the inside of the models, at the moments of a round that it needs.

An inspection is of `inspection/`, which this folder does not know. Each has a guard of its own, so that a failure of one costs
neither the others nor the sample. Without any, a round costs nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.errors import Guard


class Inspection(Protocol):
    """Called on the training thread, or on that of the backward. The time of a call is charged to the sample."""

    def forward_began(self, root: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, sampled: bool) -> None:
        """A forward of a root begins, with gradients and outside of any backward. `args`, `kwargs`: what it is called with.

        `sampled`: whether its round is due to be sampled; a round has a forward for each micro-batch. Whether this one is of the
        current round or of the next one, after a step that was skipped, shows only at its backward.
        """

    def requested(self, rounds: Mapping[str, int]) -> None:
        """The worker asked for this many of the next rounds, by the name of the inspection. Comes before a forward."""

    def backward_ended(self, number: int, *, sampled: bool) -> None:
        """A backward of the round of this number has written gradients, and is over. Is not called where no backward is seen.

        What it has written has been read, if it was to be read by then.
        """

    def round_over(self, number: int, *, kept: bool) -> None:
        """A sampled round is over. `kept`: its gradients are shown, else they are not.

        Is not called where nothing was read: then a round with a larger number follows. Forwards of the next round may have begun.
        """

    def step_over(self, *, sampled: bool) -> None:
        """A step is over. `sampled`: whether the round that comes next is due to be sampled."""

    def release(self) -> None:
        """Releases hooks, and everything that keeps a tensor alive; idempotent, from any thread."""


class Inspections:
    """All of them, in the order in which they were added. Belongs to the training thread."""

    def __init__(self, cost: SampleCost) -> None:
        self._cost = cost
        self._all: list[tuple[Guard, Inspection]] = []

    @property
    def any(self) -> bool:
        """Whether there is one to be told of rounds."""
        return bool(self._all)

    def add(self, inspection: Inspection, guard: Guard) -> None:
        """Adds one before the training begins; `guard`: its boundary."""
        self._all.append((guard, inspection))

    def forward_began(self, root: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, sampled: bool) -> None:
        """As of `Inspection`."""
        self._tell(lambda one: one.forward_began(root, args, kwargs, sampled=sampled))

    def requested(self, rounds: Mapping[str, int]) -> None:
        """As of `Inspection`."""
        self._tell(lambda one: one.requested(rounds))

    def backward_ended(self, number: int, *, sampled: bool) -> None:
        """As of `Inspection`."""
        self._tell(lambda one: one.backward_ended(number, sampled=sampled))

    def round_over(self, number: int, *, kept: bool) -> None:
        """As of `Inspection`."""
        self._tell(lambda one: one.round_over(number, kept=kept))

    def step_over(self, *, sampled: bool) -> None:
        """As of `Inspection`."""
        self._tell(lambda one: one.step_over(sampled=sampled))

    def release(self) -> None:
        """As of `Inspection`; what fails leaves the others released."""
        for guard, one in self._all:
            guard(one.release)

    def _tell(self, action: Callable[[Inspection], object]) -> None:
        if self._all:
            self._cost.of(self._tell_all, action)

    def _tell_all(self, action: Callable[[Inspection], object]) -> None:
        for guard, one in self._all:
            guard(action, one)
