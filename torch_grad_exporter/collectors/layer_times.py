"""Collector `layer_times`: how long the forward and the backward of each layer took in sampled rounds."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.inspection.layer_times import LayerTimeTotals
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
    "Sampled steps in which the pass of the layer was timed, which torch_layer_seconds_total covers.",
    "layer",
    "pass",
    opt_in="layer_times",
)


class LayerTimesCollector:
    """Families of the times of layers, none without the option."""

    def __init__(self, times: LayerTimeTotals | None) -> None:
        self._times = times
        self._rows = LabelledRows()

    def collect(self) -> Iterator[Family]:
        """Yield the families over the sampled steps whose times are known."""
        if self._times is None:
            return
        layers = self._times.by_layer.items()
        seconds = {(layer, name): seconds for layer, row in layers for name, seconds in row.seconds.items()}
        yield self._rows.family(LAYER_SECONDS, seconds)
        rounds = {(layer, name): float(rounds) for layer, row in layers for name, rounds in row.rounds.items()}
        yield self._rows.family(LAYER_TIMED_STEPS, rounds)


COLLECTOR = Declaration("layer_times", (METRICS,), lambda context: LayerTimesCollector(context.layer_times), place=16, judged=False)
