"""ManualReductionDetector: whether the loop makes the gradients of ranks equal itself, after the backward.

The option `ranks="first"` says that ranks have equal gradients where no wrapper shows it. Hooks of the loop may have made them so
within the backward; or the loop does it later, and what the backward has left is this rank's own. Then the gradients are written
to, or replaced, before the step. Clipping writes to them, too: which of the two it was cannot be seen, so either counts.

So the first sample waits for its step. If nothing was written, later ones are read where the backward ends, and looked at again
at each step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch_grad_exporter.capture.gradient_versions import GradientVersions
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.model.reduction import Reductions

WHY = "gradients were written after the backward, as by an all-reduce; norms are those at the step, after clipping"


class ManualReductionDetector:
    """Belongs to the training thread and that of the backward."""

    def __init__(self, index: LayerIndex, reductions: Reductions) -> None:
        self._index = index
        self._reductions = reductions
        self._left: GradientVersions | None = None
        """The gradients as the last backward has left them, in a round that is sampled."""
        self._trusted = False

    @property
    def left(self) -> GradientVersions | None:
        """The gradients as the last backward of a sampled round has left them, where that matters."""
        return self._left

    @property
    def _applies(self) -> bool:
        return self._index.replicas.by_hand and not self._reductions.wrapped and not self._index.fully_sharded

    def may_read(self, table: ParameterTable) -> bool:
        """A backward of a sampled round is over: whether its gradients may be read before the step."""
        self._left = GradientVersions.of(table.tracked) if self._applies else None
        return self._left is None or self._trusted

    def untouched(self, mine: Callable[[], Collection[int]]) -> bool | None:
        """Whether some gradients are those that the backward has left; `None` where it is no matter.

        Is asked right before a step that uses them. `mine`: their positions in the table.
        """
        if self._left is None:
            return None
        found = self._left.moved().isdisjoint(mine())
        self._trusted |= found
        return found
