"""Collector `whole_run`, off by default: the samples of all ranks combined, on rank 0."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from torch_grad_exporter.collectors.context import CollectorContext
from torch_grad_exporter.collectors.registry import Declaration, source_of
from torch_grad_exporter.distributed.whole_run import RunView, WholeRun
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, RowCache, scalar

METRICS = Section("The whole run")

RUN_RANKS_REPORTING = METRICS.gauge(
    "torch_run_ranks_reporting",
    "Ranks that have reported lately: within 30 seconds, longer with more than 256 ranks. The other torch_run metrics are absent while that is not all of them.",
    opt_in="whole_run",
)
RUN_FEWEST_STEPS = METRICS.gauge(
    "torch_run_fewest_steps", "Optimizer steps of the rank that had the fewest when it last reported.", opt_in="whole_run"
)
RUN_MOST_STEPS = METRICS.gauge(
    "torch_run_most_steps", "Optimizer steps of the rank that had the most when it last reported.", opt_in="whole_run"
)
RUN_GLOBAL_NORM_RMS = METRICS.gauge(
    "torch_run_grad_global_norm_rms",
    "Root mean square, over the last samples of each rank, of the norm over all layers and ranks; gradients of which a rank has only a summand are left out, here as in the norms themselves.",
    opt_in="whole_run",
)
RUN_NORM_RMS = METRICS.gauge(
    "torch_run_grad_norm_rms",
    "Root mean square, over the last samples of each rank, of the norm of the layer's whole gradient, however it is sharded.",
    "layer", opt_in="whole_run",
)  # fmt: skip
RUN_DEAD_RATIO = METRICS.gauge(
    "torch_run_grad_dead_ratio", "torch_grad_dead_ratio over the units of all ranks.", "layer", opt_in="whole_run"
)
RUN_NONFINITE_ELEMENTS = METRICS.counter(
    "torch_run_grad_nonfinite_elements_total",
    "Sum of torch_grad_nonfinite_elements over all ranks, over sampled steps.", "layer", "kind", opt_in="whole_run",
)  # fmt: skip


class WholeRunCollector:
    """Families of the combined reports; none on other ranks than 0, which only report."""

    def __init__(self, context: CollectorContext) -> None:
        self._whole_run = WholeRun(
            context.store,
            context.rank,
            context.identity.world_size,
            snapshot=context.snapshots.fresh,
            steps=lambda: sum(context.clock.counts().steps.values()),
            on_error=functools.partial(context.errors.count, source_of("whole_run")),
        )
        self._layers, self._kinds = RowCache(), RowCache()
        self.start, self.close = self._whole_run.start, self._whole_run.close

    def collect(self) -> Iterator[Family]:
        """The families as of the last reports."""
        view = self._whole_run.view
        if view is not None:
            yield scalar(RUN_RANKS_REPORTING, view.reporting)
            yield scalar(RUN_FEWEST_STEPS, view.fewest_steps)
            yield scalar(RUN_MOST_STEPS, view.most_steps)
            known = view.global_rms is not None and np.isfinite(view.global_rms)
            yield scalar(RUN_GLOBAL_NORM_RMS, view.global_rms if known else None)
            yield from self._by_layer(view)

    def _by_layer(self, view: RunView) -> Iterator[Family]:
        if view.rms is None or view.dead_ratio is None or view.nans is None or view.infs is None:
            return
        layers = self._layers.get(tuple((layer,) for layer in view.layers))
        kinds = self._kinds.get(tuple((layer, kind) for kind in ("nan", "inf") for layer in view.layers))
        yield Family(RUN_NORM_RMS, view.rms, layers, ~np.isnan(view.rms))
        yield Family(RUN_DEAD_RATIO, view.dead_ratio, layers, ~np.isnan(view.dead_ratio))
        yield Family(RUN_NONFINITE_ELEMENTS, np.concatenate([view.nans, view.infs]), kinds)


COLLECTOR = Declaration("whole_run", (METRICS,), WholeRunCollector, default=False, place=30)
