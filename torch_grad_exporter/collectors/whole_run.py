"""Collector `whole_run`, off by default: what the samples of all ranks say together, on rank 0."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torch_grad_exporter.distributed.whole_run import View, WholeRun
from torch_grad_exporter.metrics import catalogue as c
from torch_grad_exporter.metrics.families import Family, RowCache, scalar


class WholeRunCollector:
    """Families of the combined reports; none on other ranks than 0, which only report."""

    name = "whole_run"

    def __init__(self, whole_run: WholeRun) -> None:
        self._whole_run = whole_run
        self._layers, self._kinds = RowCache(), RowCache()

    def start(self) -> None:
        """Begins to report."""
        self._whole_run.start()

    def collect(self) -> Iterator[Family]:
        """The families as of the last reports."""
        view = self._whole_run.view
        if view is not None:
            yield scalar(c.RUN_RANKS_REPORTING, view.reporting)
            yield scalar(c.RUN_FEWEST_STEPS, view.fewest_steps)
            yield scalar(c.RUN_MOST_STEPS, view.most_steps)
            known = view.global_rms is not None and np.isfinite(view.global_rms)
            yield scalar(c.RUN_GLOBAL_NORM_RMS, view.global_rms if known else None)
            yield from self._by_layer(view)

    def close(self) -> None:
        """Reports no more."""
        self._whole_run.close()

    def _by_layer(self, view: View) -> Iterator[Family]:
        if view.rms is None or view.dead_ratio is None or view.nans is None or view.infs is None:
            return
        layers = self._layers.get(tuple((layer,) for layer in view.layers))
        kinds = self._kinds.get(tuple((layer, kind) for kind in ("nan", "inf") for layer in view.layers))
        yield Family(c.RUN_NORM_RMS, view.rms, layers, ~np.isnan(view.rms))
        yield Family(c.RUN_DEAD_RATIO, view.dead_ratio, layers, ~np.isnan(view.dead_ratio))
        yield Family(c.RUN_NONFINITE_ELEMENTS, np.concatenate([view.nans, view.infs]), kinds)
