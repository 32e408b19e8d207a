"""What a monitor is to the benchmarks, and the one that does nothing."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from benchmarks.workloads import Training


class Monitor(Protocol):
    """One way of watching; `cycle` is the number of steps after which it has done all that it ever does."""

    cycle: int

    def attach(self, training: Training) -> None:
        """Sets everything up, once."""

    def after_backward(self) -> None:
        """What a user's loop calls between the backward and the step."""

    def after_step(self, loss: Tensor) -> None:
        """What a user's loop calls after the step."""

    def close(self) -> None:
        """Ends it, once."""


class Plain:
    """No monitor; the others override what they need."""

    cycle = 1

    def attach(self, training: Training) -> None:
        """Keeps the parameters for those who do something with them by hand."""
        self.parameters = list(training.model.parameters())

    def after_backward(self) -> None:
        """Nothing."""

    def after_step(self, loss: Tensor) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
