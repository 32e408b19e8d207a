"""What reports steps and backwards while rounds are only counted, and must cost next to nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.compiler import is_compiling

from torch_grad_exporter.capture.gradient_versions import GradientVersions
from torch_grad_exporter.capture.torch_hooks import GuardedHook, Removable
from torch_grad_exporter.model.parameters import TrackedParameter
from torch_grad_exporter.torch_compat.compiler import never_compile


@dataclass(slots=True, kw_only=True, eq=False)
class CountingHook:
    """Notes in `moments` when each step of `optimizer` is over, in seconds of `clock`.

    `backwards`: has an item for each backward since; `to_a_step`: how many are expected to each step. `otherwise` is called with
    the arguments at the last of `rounds` steps, at the first after `until`, where there were more or fewer backwards, where
    `requested` is not empty, and where this fails; also where another optimizer has stepped, unless `concerned` says that it is
    a foreign one.
    """

    optimizer: weakref.ref[torch.optim.Optimizer]
    rounds: int
    until: float
    backwards: list[object]
    to_a_step: int
    clock: Callable[[], float]
    otherwise: GuardedHook
    concerned: Callable[[torch.optim.Optimizer], bool]
    requested: Collection[object]
    moments: list[float] = field(default_factory=list)

    @property
    def surplus(self) -> int:
        """How many more backwards there were than the steps account for."""
        return len(self.backwards) - self.to_a_step * len(self.moments)

    def __call__(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Note the moment."""
        if is_compiling():
            return
        moments = self.moments
        try:
            if optimizer is self.optimizer():
                moment = self.clock()
                moments.append(moment)
                steps = len(moments)
                if (
                    steps < self.rounds
                    and moment < self.until
                    and len(self.backwards) == steps * self.to_a_step
                    and not self.requested
                ):
                    return
            elif not self.concerned(optimizer):
                return
        except Exception as error:  # noqa: BLE001 - the boundary, as in `GuardedHook`
            self.otherwise.failed(error)
        self.otherwise(optimizer, args, kwargs)


never_compile(CountingHook.__call__)


@dataclass(slots=True)
class Witness:
    """A parameter whose post-accumulate hook is `list.append`: each backward leaves an item, and no Python frame runs.

    It makes skipped steps exact: a backward without a step shows nowhere else. It is one only after a trial: in a round that was
    followed closely it fired once for each backward. `fired`: the items; `seen`: its gradient as it was after a round.
    """

    fired: list[object]
    handle: Removable
    seen: GradientVersions
    growth: int | None = None
    """How often a round writes to the gradient, if it stays the same tensor."""

    @classmethod
    def on_trial(cls, tracked: TrackedParameter) -> Witness:
        """Make a parameter that has a gradient the witness, right after a round."""
        fired = list[object]()
        parameter: Any = tracked.parameter()
        handle: Removable = parameter.register_post_accumulate_grad_hook(fired.append)
        return cls(fired, handle, GradientVersions.of([tracked]))

    def begin(self) -> None:
        """Begin one or several rounds."""
        self.seen = GradientVersions.of(self.seen.tracked)
        self.fired.clear()

    def passed(self, backwards: int) -> bool:
        """Return whether it has reported all backwards of the round that is over, and begin the next round."""
        reported, before = len(self.fired), self.seen
        self.begin()
        self.growth = self.seen.versions[0] - before.versions[0] if self.seen.numbers == before.numbers else None
        return reported == backwards

    def added_up(self, steps: int, surplus: int) -> bool:
        """Return whether `surplus` backwards more than the last of these steps accounts for went into the same gradient.

        A gradient that is a new tensor in each round has then been written to more often than usual. One that stays has been
        written to once more for each, and not once more for clearing it as well.
        """
        before, now = self.seen, GradientVersions.of(self.seen.tracked)
        more = now.versions[0] - before.versions[0]
        if now.numbers != before.numbers:
            return now.numbers != [None] and more > 0
        return self.growth is None or more - steps * self.growth <= surplus

    def dismiss(self) -> None:
        """Remove its hook; what it has reported stays as many items, none of which keeps the parameter."""
        self.handle.remove()
        self.fired[:] = [None] * len(self.fired)
