"""Steps within a backward: optimizers that step, and clear, as soon as their own gradients are complete.

When such a backward is over there is nothing left to read, and hooks of ours might run after the user's. So each optimizer's
gradients are read in its step's pre-hook, and put together to one sample at the end of the backward.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics.eager import EagerStatistics, Reading


class StepsWithinBackward:
    """What was read in the running backward, or before the steps of a round. `fired`: positions in the table of what was read."""

    def __init__(self, statistics: EagerStatistics) -> None:
        self._statistics = statistics
        self._table: ParameterTable | None = None
        self._position: dict[int, int] = {}
        self.readings: list[Reading] = []
        self.fired: set[int] = set()

    def clear(self) -> None:
        """A backward begins."""
        self.readings, self.fired = [], set()

    def read_of(self, table: ParameterTable, optimizer: torch.optim.Optimizer) -> None:
        """Reads what this optimizer is about to use."""
        if table is not self._table:
            self._table, self._position = table, {t.identity: i for i, t in enumerate(table.tracked)}
        owned = (self._position.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"])
        self.read(table, (position for position in owned if position is not None))

    def read(self, table: ParameterTable, positions: Iterable[int]) -> None:
        """Reads the gradients at these positions of the table that are there and were not read before in this backward."""
        found = ((i, table.tracked[i].gradient()) for i in positions if i not in self.fired)
        gradients = [(int(i), gradient) for i, gradient in found if gradient is not None]
        self.readings += self._statistics.read(table, gradients)
        self.fired |= {position for position, _ in gradients}
