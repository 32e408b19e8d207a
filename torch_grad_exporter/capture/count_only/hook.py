"""CountingHook: stands in the place of the hook after a step while steps are only counted, and must cost next to nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.compiler import is_compiling

from torch_grad_exporter.capture.torch_hooks import GuardedHook
from torch_grad_exporter.torch_compat import never_compile


@dataclass(slots=True, kw_only=True, eq=False)
class CountingHook:
    """Notes in `moments` when each step of `optimizer` is over, in seconds of `clock`.

    `backwards`: has an item for each backward since; `to_a_step`: how many are expected to each step. `otherwise` is called with
    the arguments at the last of `rounds` steps, at the first after `until`, where there were more or fewer backwards, and where
    this fails; also where another optimizer has stepped, unless `concerned` says that it is a foreign one.
    """

    optimizer: weakref.ref[torch.optim.Optimizer]
    rounds: int
    until: float
    backwards: list[object]
    to_a_step: int
    clock: Callable[[], float]
    otherwise: GuardedHook
    concerned: Callable[[torch.optim.Optimizer], bool]
    moments: list[float] = field(default_factory=list)

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
            if optimizer is self.optimizer():
                moment = self.clock()
                moments.append(moment)
                steps = len(moments)
                if steps < self.rounds and moment < self.until and len(self.backwards) == steps * self.to_a_step:
                    return
            elif not self.concerned(optimizer):
                return
        except Exception as error:  # noqa: BLE001 - the boundary, as in `GuardedHook`
            self.otherwise.failed(error)
        self.otherwise(optimizer, args, kwargs)


never_compile(CountingHook.__call__)
