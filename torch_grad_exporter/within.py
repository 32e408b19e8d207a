"""Steps within a backward: optimizers that step, and clear, as soon as their own gradients are there.

When such a backward is over there is nothing left to read, and hooks of ours might run after the user's. So each optimizer's
gradients are read in its step's pre-hook, and put together to one sample at the end of the backward.
"""

from __future__ import annotations

import torch

from torch_grad_exporter.layers import Plan
from torch_grad_exporter.statistics.eager import EagerStatistics, Reading


class StepsWithinBackward:
    """What was read in the running backward. `fired`: positions in the plan of what was read."""

    def __init__(self, statistics: EagerStatistics) -> None:
        self._statistics = statistics
        self._plan: Plan | None = None
        self._position: dict[int, int] = {}
        self.readings: list[Reading] = []
        self.fired: set[int] = set()

    def clear(self) -> None:
        """A backward begins."""
        self.readings, self.fired = [], set()

    def read(self, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
        """Reads what the optimizer is about to use; what was read before in this backward is left out."""
        if plan is not self._plan:
            self._plan, self._position = plan, {t.identity: i for i, t in enumerate(plan.tracked)}
        gradients = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                position = self._position.get(id(parameter))
                if position is not None and position not in self.fired and parameter.grad is not None:
                    gradients.append((position, parameter.grad))
        self.readings += self._statistics.read(plan, gradients)
        self.fired |= {position for position, _ in gradients}
