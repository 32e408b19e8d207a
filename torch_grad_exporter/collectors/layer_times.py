"""Collector `layer_times`: how long the forward and the backward of each layer took in sampled rounds."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.inspection.layer_times import LayerTimes
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, LabelledRows

METRICS = Section("Times of layers")

LAYER_SECONDS = METRICS.counter(
    "torch_layer_seconds_total",
    "Time of a layer's forward and backward, by pass, over sampled steps: without other layers within it, and without what adds to gradients and communicates. On an accelerator in the device's time. Per step: over torch_layer_timed_steps_total.",
    "layer",
    "pass",
    unit="seconds",
    opt_in="layer_times",
)
LAYER_TIMED_STEPS = METRICS.counter(
    "torch_layer_timed_steps_total",
    "Sampled steps in which the pass of the layer was timed: what torch_layer_seconds_total is over.",
    "layer",
    "pass",
    opt_in="layer_times",
)


class LayerTimesCollector:
    """Families of the times of layers, none where nobody asked for them."""

    def __init__(self, times: LayerTimes | None) -> None:
        self._times = times
        self._rows = LabelledRows()

    def collect(self) -> Iterator[Family]:
        """The families as of the last sampled steps that are known."""
        if self._times is None:
            return
        found = self._times.snapshot()
        yield self._rows.family(LAYER_SECONDS, {key: one.seconds for key, one in found.items()})
        yield self._rows.family(LAYER_TIMED_STEPS, {key: float(one.rounds) for key, one in found.items()})


COLLECTOR = Declaration("layer_times", (METRICS,), lambda context: LayerTimesCollector(context.layer_times), place=16, judged=False)
