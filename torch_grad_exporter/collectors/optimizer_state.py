"""Collector `optimizer_state`: how an optimizer's moments stand to the gradients."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.inspection.optimizer_state import StateTotals
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, LabelledRows

OPTIMIZER_STATE = Section("Optimizer state")

OPTIMIZER_RMS_RATIO = OPTIMIZER_STATE.gauge(
    "torch_optimizer_rms_ratio",
    "Root mean square of the layer's gradient divided by the root of the optimizer's second moment with it, at the last sampled step of the layer: about 1 while the second moment is up to date; of a sharded layer, of this rank's part.",
    "layer",
    opt_in="optimizer_state",
)
OPTIMIZER_SIGNAL_RATIO = OPTIMIZER_STATE.gauge(
    "torch_optimizer_signal_ratio",
    "Sum of the squares of the layer's first moment over the sum of its second moment, before the last sampled update of the layer: 1 where all gradients agree, near 0 where they are noise; of a sharded layer, of this rank's part.",
    "layer",
    opt_in="optimizer_state",
)


class OptimizerStateCollector:
    """Families of the state of optimizers, none without the option."""

    def __init__(self, totals: StateTotals | None) -> None:
        self._totals = totals
        self._rows = LabelledRows()

    def collect(self) -> Iterator[Family]:
        """Yield the families of the last sampled steps."""
        if self._totals is None:
            return
        layers = self._totals.rows
        yield self._rows.by_label(OPTIMIZER_RMS_RATIO, {layer: row.rms_ratio for layer, row in layers.items()})
        yield self._rows.by_label(OPTIMIZER_SIGNAL_RATIO, {layer: row.signal_ratio for layer, row in layers.items()})


COLLECTOR = Declaration(
    "optimizer_state", (OPTIMIZER_STATE,), lambda context: OptimizerStateCollector(context.optimizer_state), place=14
)
