"""Collector `activations`: what the outputs of inner modules looked like in sampled rounds."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.inspection.activations import ActivationTotals
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, LabelledRows, Spec, scalar

ACTIVATIONS = Section("Activations")


def _gauge(name: str, help_: str) -> Spec:
    return ACTIVATIONS.gauge(name, help_, "layer", opt_in="activations")


ACTIVATION_DEAD_RATIO = _gauge(
    "torch_activation_dead_ratio",
    "Share of the output units of a module that were exactly zero in every element of its outputs in the last sampled step; absent where the output has no units.",
)
ACTIVATION_ZERO_RATIO = _gauge(
    "torch_activation_zero_ratio", "Share of the elements of a module's outputs that were exactly zero in the last sampled step."
)
ACTIVATION_RMS = _gauge(
    "torch_activation_rms", "Root of the mean square over the elements of a module's outputs in the last sampled step."
)
ACTIVATION_MAX_MAGNITUDE = _gauge(
    "torch_activation_max_magnitude", "Largest absolute element of a module's outputs in the last sampled step."
)
ACTIVATION_GRAD_NORM = _gauge(
    "torch_activation_grad_norm",
    "L2 norm of the gradient that reached a module's outputs in the last sampled step, of this rank's own loss, unscaled; absent where none did.",
)
ACTIVATION_KURTOSIS = _gauge(
    "torch_activation_kurtosis",
    "Mean fourth power over the squared mean square of the root mean squares of a module's output units in the last sampled step: 1 where all are equal, up to the number of units where one has all; absent where the output has no units.",
)
ACTIVATION_CHANNEL_RATIO = _gauge(
    "torch_activation_channel_ratio",
    "Largest root mean square of an output unit of a module over the median of its units, in the last sampled step; absent where that is zero.",
)
ACTIVATION_NONFINITE_ELEMENTS = ACTIVATIONS.counter(
    "torch_activation_nonfinite_elements_total",
    "Elements of a module's outputs that were NaN or Inf, over sampled steps.",
    "layer",
    "kind",
    opt_in="activations",
)
ACTIVATION_CAPTURES = ACTIVATIONS.counter(
    "torch_activation_captures_total",
    "Sampled steps in which a module's outputs were measured, which torch_activation_nonfinite_elements_total covers.",
    "layer",
    opt_in="activations",
)
ACTIVATION_LAYERS_FOLDED = ACTIVATIONS.gauge(
    "torch_activation_layers_folded",
    "Modules whose activations are shown together with those of others, since there are more than max_layers.",
    opt_in="activations",
)
ACTIVATION_MODULES_LEFT_OUT = ACTIVATIONS.gauge(
    "torch_activation_modules_left_out",
    "Modules that activations= asks for and that are not shown, by reason: compiled, as hooks in compiled code would compile it again; output, as the last sampled output has no dense floating-point tensor of this rank's.",
    "reason",
    opt_in="activations",
)

_VALUES = {
    ACTIVATION_DEAD_RATIO: attrgetter("dead_ratio"),
    ACTIVATION_ZERO_RATIO: attrgetter("zero_ratio"),
    ACTIVATION_RMS: attrgetter("rms"),
    ACTIVATION_MAX_MAGNITUDE: attrgetter("max_magnitude"),
    ACTIVATION_GRAD_NORM: attrgetter("grad_norm"),
    ACTIVATION_KURTOSIS: attrgetter("kurtosis"),
    ACTIVATION_CHANNEL_RATIO: attrgetter("channel_ratio"),
}


class ActivationCollector:
    """Families of the activations, none without the option."""

    def __init__(self, totals: ActivationTotals | None) -> None:
        self._totals = totals
        self._rows = LabelledRows()

    def collect(self) -> Iterator[Family]:
        """Yield the families of the last sampled rounds."""
        if self._totals is None:
            return
        snapshot = self._totals.snapshot()
        layers = snapshot.layers
        for spec, value in _VALUES.items():
            yield self._rows.by_label(spec, {label: value(row) for label, row in layers.items()})
        kinds = {(label, "nan"): row.nans for label, row in layers.items()}
        kinds |= {(label, "inf"): row.infs for label, row in layers.items()}
        yield self._rows.family(ACTIVATION_NONFINITE_ELEMENTS, kinds)
        yield self._rows.by_label(ACTIVATION_CAPTURES, {label: row.captures for label, row in layers.items()})
        yield scalar(ACTIVATION_LAYERS_FOLDED, float(snapshot.folded))
        yield self._rows.by_label(ACTIVATION_MODULES_LEFT_OUT, snapshot.left_out)


COLLECTOR = Declaration(
    "activations", (ACTIVATIONS,), lambda context: ActivationCollector(context.activations), place=15, judged=False
)
