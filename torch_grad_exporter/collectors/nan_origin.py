"""Collector `nan_origin`: where values have become non-finite, where `nan_origin=` looks for that."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.collectors.context import CollectorContext
from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, LabelledRows

METRICS = Section("Where a NaN began")

NONFINITE_ORIGIN_INFO = METRICS.gauge(
    "torch_nonfinite_origin_info",
    'Always 1: a place where finite values have given NaN or Inf that reached the loss or a gradient. The layer is a module, or "batch", "loss" or "unknown"; pass is forward, backward, parameter, buffer, batch, loss, reduction or unknown; kind is nan or inf. The last 32 places.',
    "layer", "pass", "kind", opt_in="nan_origin",
)  # fmt: skip
NONFINITE_ORIGIN_STEP = METRICS.gauge(
    "torch_nonfinite_origin_step",
    "Optimizer steps that had been taken when the place of torch_nonfinite_origin_info was last found.",
    "layer", "pass", "kind", opt_in="nan_origin",
)  # fmt: skip


class NanOriginCollector:
    """The two families; none before there was an origin."""

    def __init__(self, context: CollectorContext) -> None:
        self._origins = context.origins
        self._rows = LabelledRows()

    def collect(self) -> Iterator[Family]:
        """Yield the families of the places that are known now."""
        if self._origins is not None and (steps := self._origins.steps):
            yield self._rows.family(NONFINITE_ORIGIN_INFO, dict.fromkeys(steps, 1.0))
            yield self._rows.family(NONFINITE_ORIGIN_STEP, {place: float(step) for place, step in steps.items()})


COLLECTOR = Declaration("nan_origin", (METRICS,), NanOriginCollector, place=15)
