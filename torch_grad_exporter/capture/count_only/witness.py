"""The witness: a parameter whose post-accumulate hook is `list.append`: each backward leaves an item, and no Python frame runs.

It is what makes skipped steps exact in counted rounds: a backward without a step shows nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_grad_exporter.capture.gradient_versions import GradientVersion
from torch_grad_exporter.capture.torch_hooks import Handle
from torch_grad_exporter.model.parameters import TrackedParameter


@dataclass(slots=True)
class Witness:
    """A parameter that reports backwards. `fired`: an item for each; `seen`: its gradient as it was after a round.

    It is one only after a trial: in a round that was followed closely it fired once for each backward.
    """

    fired: list[object]
    handle: Handle
    seen: GradientVersion
    growth: int | None = None
    """How often a round writes to the gradient, if it stays the same tensor."""

    @classmethod
    def on_trial(cls, called: TrackedParameter) -> Witness | None:
        """Makes a parameter the witness, right after a round; `None` if it is not in its place."""
        parameter, fired = called.parameter(), list[object]()
        return None if parameter is None else cls(fired, _append_at_backwards(parameter, fired), GradientVersion.of(called))

    def begin(self) -> None:
        """A round, or some of them, begin."""
        self.seen = GradientVersion.of(self.seen.tracked)
        self.fired.clear()

    def passed(self, backwards: int) -> bool:
        """Whether it has reported all backwards of the round that is over. Begins anew."""
        reported, before = len(self.fired), self.seen
        self.begin()
        self.growth = self.seen.version - before.version if self.seen.gradient == before.gradient else None
        return reported == backwards

    def added_up(self, steps: int, surplus: int) -> bool:
        """Whether `surplus` backwards more than the last of so many steps accounts for went into the same gradient.

        A gradient that is made anew in each round has then been written to more often than usual. One that stays has been
        written to once more for each, and not once more for clearing it as well.
        """
        now = GradientVersion.of(self.seen.tracked)
        if now.gradient != self.seen.gradient:
            return now.gradient is not None and now.version > self.seen.version
        return self.growth is None or now.version - self.seen.version - steps * self.growth <= surplus

    def dismiss(self) -> None:
        """Removes its hook; what it has reported stays as many items, none of which keeps the parameter."""
        self.handle.remove()
        self.fired[:] = [None] * len(self.fired)


def _append_at_backwards(parameter: torch.nn.Parameter, into: list[object]) -> Handle:
    """Appends something to `into` each time that the parameter has received a gradient; no frame of Python's runs for it."""
    handle: Handle = parameter.register_post_accumulate_grad_hook(into.append)  # type: ignore[no-untyped-call]
    return handle
