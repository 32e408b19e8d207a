"""The values by layer of the statistics that are declared besides the package's own: each combined as its declaration says."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from torch_grad_exporter.aggregation.samples import Groups, Sample
from torch_grad_exporter.metrics.families import FloatArray, IntArray
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.statistics.layout import ORDINARY, Layout


class DeclaredValues:
    """The last value of each layer in each such column of `layout`; NaN where there was none, or where it cannot be known."""

    def __init__(self, layout: Layout = ORDINARY) -> None:
        self._places = {key: place for place, key in enumerate(layout.keys) if place >= len(Column)}
        self._values = np.zeros((len(self._places), 0))

    def grow(self, layers: int) -> None:
        """Grows to so many layers."""
        more = np.full((len(self._places), layers - self._values.shape[1]), np.nan)
        self._values = np.concatenate([self._values, more], axis=1)

    def forget(self, rows: IntArray) -> None:
        """These rows have no values any more: their layers were removed."""
        self._values[:, rows] = np.nan

    def enter(self, sample: Sample, groups: Groups, rows: IntArray) -> None:
        """Takes the values of a sample's layers, which are in these rows here."""
        sharded = sample.captured.table.sharded[groups.layers]
        for at, place in enumerate(self._places.values()):
            found = groups.combined(place)
            self._values[at, rows] = np.where(sharded, np.nan, found) if groups.layout.columns[place].whole_only else found

    def of(self, rows: IntArray) -> Mapping[str, FloatArray]:
        """The values of the layers in these rows by column, `statistic.column`, each of shape (rows,)."""
        return {key: self._values[at, rows] for at, key in enumerate(self._places)}
