"""Collector `watched`: the gradients of tensors that `exporter.watch` was given."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.inspection.watch import WatchTotals
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, LabelledRows, scalar

WATCHED = Section("Watched tensors")

WATCH_GRAD_NORM = WATCHED.gauge(
    "torch_watch_grad_norm",
    "L2 norm of the gradient of a tensor that exporter.watch() was given, at the last sampled step with one, of this rank's own loss, unscaled, before it is clipped; of all tensors of the name together.",
    "name",
    opt_in="watch",
)
WATCH_GRAD_ZERO_RATIO = WATCHED.gauge(
    "torch_watch_grad_zero_ratio",
    "Share of the elements of the watched tensor's gradient that were exactly zero at the last sampled step with one.",
    "name",
    opt_in="watch",
)
WATCH_GRAD_NONFINITE_ELEMENTS = WATCHED.counter(
    "torch_watch_grad_nonfinite_elements_total",
    "Elements of the watched tensor's gradient that were NaN or Inf before it was clipped, over sampled steps.",
    "name",
    "kind",
    opt_in="watch",
)
WATCH_CLIPPED = WATCHED.counter(
    "torch_watch_clipped_total",
    "Gradients of the watched tensor that were clipped to max_norm, over all backwards up to the last sampled step; absent where there is no max_norm.",
    "name",
    opt_in="watch",
)
WATCH_NAMES_FOLDED = WATCHED.gauge(
    "torch_watch_names_folded",
    "Names that are shown together under (folded), since they came after the first 100.",
    opt_in="watch",
)


_VALUES = {
    WATCH_GRAD_NORM: attrgetter("norm"),
    WATCH_GRAD_ZERO_RATIO: attrgetter("zero_ratio"),
    WATCH_CLIPPED: attrgetter("clipped"),
}


class WatchedCollector:
    """Families of the watched tensors, none before the first one."""

    def __init__(self, totals: WatchTotals) -> None:
        self._totals = totals
        self._rows = LabelledRows()

    def collect(self) -> Iterator[Family]:
        """Yield the families of the last sampled rounds."""
        watched, folded = self._totals.snapshot()
        if not watched:
            return
        for spec, value in _VALUES.items():
            yield self._rows.by_label(spec, {name: value(row) for name, row in watched.items()})
        kinds = {(name, "nan"): row.nans for name, row in watched.items()}
        kinds |= {(name, "inf"): row.infs for name, row in watched.items()}
        yield self._rows.family(WATCH_GRAD_NONFINITE_ELEMENTS, kinds)
        yield scalar(WATCH_NAMES_FOLDED, float(folded))


COLLECTOR = Declaration("watched", (WATCHED,), lambda context: WatchedCollector(context.watched), place=16, judged=False)
