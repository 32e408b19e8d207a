"""CountingHook: stands in the place of the hook after a step while steps are only counted, and must cost next to nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.compiler import is_compiling

from torch_grad_exporter.capture.progress import Counts
from torch_grad_exporter.capture.torch_hooks import GuardedHook
from torch_grad_exporter.torch_compat import never_compile


@dataclass(frozen=True, slots=True)
class CountedSteps:
    """What is counted: `moments` of the steps of `optimizer`, and an item for each backward. `examples`: to a backward."""

    optimizer: int
    moments: list[float]
    backwards: list[object]
    examples: float

    def counts(self, before: Counts) -> Counts:
        """All counts up to now, if there were `before` when this began."""
        backwards = len(self.backwards)
        return Counts(
            {**before.steps, self.optimizer: before.steps[self.optimizer] + len(self.moments)},
            before.backward_passes + backwards,
            before.examples + round(backwards * self.examples),
        )


class CountingHook:
    """Notes when each step of `optimizer` is over, in seconds of `clock`.

    `backwards`: has an item for each backward since; `to_a_step`: how many are expected to each step. `otherwise` is called with
    the arguments at the last of `rounds` steps, at the first after `until`, where there were more or fewer backwards, and where
    this fails; also where another optimizer has stepped, unless `concerned` says that it is a foreign one.
    """

    __slots__ = ("_clock", "_concerned", "_optimizer", "_otherwise", "_rounds", "_until", "backwards", "moments", "to_a_step")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        rounds: int,
        until: float,
        backwards: list[object],
        to_a_step: int,
        clock: Callable[[], float],
        otherwise: GuardedHook,
        concerned: Callable[[torch.optim.Optimizer], bool],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._rounds = rounds
        self._until = until
        self._clock = clock
        self._otherwise = otherwise
        self._concerned = concerned
        self.to_a_step = to_a_step
        self.moments: list[float] = []
        self.backwards = backwards

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer whose steps are counted, if it is alive."""
        return self._optimizer()

    @property
    def surplus(self) -> int:
        """How many more backwards there were than the steps account for."""
        return len(self.backwards) - self.to_a_step * len(self.moments)

    def __call__(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Notes the moment."""
        if is_compiling():
            return
        moments = self.moments
        try:
            if optimizer is self._optimizer():
                moment = self._clock()
                moments.append(moment)
                steps = len(moments)
                if steps < self._rounds and moment < self._until and len(self.backwards) == steps * self.to_a_step:
                    return
            elif not self._concerned(optimizer):
                return
        except Exception as error:  # noqa: BLE001 - the boundary, as in `GuardedHook`
            self._otherwise.failed(error)
        self._otherwise(optimizer, args, kwargs)


never_compile(CountingHook.__call__)
