"""Inspections: plug-ins that measure something more in the rounds that are followed, such as activations.

They live in `inspection/`, which this folder does not import. Each has a guard of its own, so a failure of one costs
neither the others nor the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec

import torch

from torch_grad_exporter.capture.accumulate_grad import Gradients
from torch_grad_exporter.capture.armed_round import ArmedRound
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.errors import Guard, caught
from torch_grad_exporter.model.parameters import ParameterTable, TrackedParameter

P = ParamSpec("P")

CHARGED = frozenset(("forward_began", "step_began", "step_clipped", "step_ended", "step_over", "round_over"))
"""Events of hooks that do not charge their whole time to the sample themselves."""

First = tuple[TrackedParameter, Gradients]
"""The parameter whose node a backward reaches first, and the gradients that it is about to receive."""


class Inspection:
    """What a plug-in may override; like a callback, it is called only for what it does override.

    Calls come on the training thread, those of a backward on the thread of the backward. Their time is charged to the sample.
    A round that was only counted shows in `counted` alone.
    """

    def requested(self, rounds: Mapping[str, int]) -> None:
        """The worker asked for this many of the next rounds, by the name of the inspection. Comes before a forward."""

    def forward_began(self, root: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, sampled: bool) -> None:
        """A forward of a root begins, with gradients and outside of any backward.

        A round has a forward for each micro-batch. Whether this one belongs to the current round or, after a skipped step, to
        the next one shows only at its backward.

        Args:
            root: The model.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            sampled: Whether the round of the coming backward is due to be sampled.
        """

    def forward_ended(self, model: int, output: object, kwargs: Mapping[str, object]) -> None:
        """A training forward of the root with this number has returned something other than a tensor."""

    def backward_began(self, current: ArmedRound, table: ParameterTable, first: First | None, task: int) -> None:
        """A backward that writes gradients begins.

        Args:
            current: Its round.
            table: The parameters, as they are now if the round is sampled.
            first: What has shown it.
            task: Autograd's number of it.
        """

    def backward_ended(self, current: ArmedRound, at: float) -> None:
        """It is over, at this moment of the clock; its gradients are read next, if the round has no more backwards."""

    def backward_dropped(self) -> None:
        """It raised, or wrote nothing, or gradients are read at the step from now on. From any thread."""

    def gradients_read(self, current: ArmedRound) -> None:
        """The gradients of a sampled round were read; another reading of the same round replaces it."""

    def step_began(self, current: ArmedRound, optimizer: int) -> None:
        """An optimizer is about to step in a sampled round."""

    def step_clipped(self, current: ArmedRound, optimizer: int) -> None:
        """`clip=` has clipped the gradients for the step that has begun."""

    def step_ended(self, current: ArmedRound, optimizer: int, left_out: torch.Tensor | None) -> None:
        """It has. `left_out`: on a device, not zero if the optimizer had to skip its step."""

    def round_stepped(self) -> None:
        """The first step of a round is over. Called only if `forward_ended` was since the last call."""

    def step_over(self, *, sampled: bool) -> None:
        """A step is over. `sampled`: whether the next round is due to be sampled."""

    def round_over(self, number: int, *, kept: bool) -> None:
        """A sampled round is over. `kept`: its gradients are shown.

        Not called where nothing was read: then a round with a larger number follows. Forwards of the next round may have begun.
        """

    def counted(self, *, unfinished: bool) -> None:
        """Rounds were only counted. `unfinished`: the last of them had backwards and no step yet."""

    def training_over(self) -> None:
        """The exporter is being closed."""

    def release(self) -> None:
        """Release hooks, and everything that keeps a tensor alive; idempotent, from any thread."""


class Inspections:
    """All of them, in the order in which they were added. Belongs to the training thread.

    Args:
        cost: Is charged with what they take.
    """

    def __init__(self, cost: SampleCost) -> None:
        self._cost = cost
        events = (name for name in vars(Inspection) if not name.startswith("_"))
        self._handlers: dict[str, list[tuple[Guard, Callable[..., None]]]] = {name: [] for name in events}

    def add(self, inspection: Inspection, guard: Guard) -> None:
        """Add one, outside of `tell`. `guard`: its boundary."""
        for name, handlers in self._handlers.items():
            if getattr(type(inspection), name) is not getattr(Inspection, name):
                handlers.append((guard, getattr(inspection, name)))

    def tell(self, event: Callable[Concatenate[Inspection, P], None], *arguments: P.args, **named: P.kwargs) -> None:
        """Call this method of all inspections that override it, and charge the time to the sample unless a hook does so."""
        handlers = self._handlers[event.__name__]
        if not handlers:
            return
        start = self._cost.now()
        for guard, handler in handlers:
            guard(handler, *arguments, **named)
        # That of a forward in a round that is not sampled belongs to no sample.
        if event.__name__ in CHARGED and not (event.__name__ == "forward_began" and named.get("sampled") is False):
            self._cost.charge(start)

    def release(self) -> None:
        """Release what all inspections hold, also those that have failed too often; idempotent, from any thread."""
        for guard, handler in self._handlers["release"]:
            error = caught(handler)
            if error is not None:
                guard.failed(error)
