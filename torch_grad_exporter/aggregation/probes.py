"""Probes: which gradients are measured again before the next step, passed on through `Decisions`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from torch_grad_exporter.aggregation.settlement import Settled, norms_of
from torch_grad_exporter.metrics.families import FloatArray, IntArray
from torch_grad_exporter.statistics import Column
from torch_grad_exporter.transfer.events import Decisions


@dataclass(slots=True)
class Probes:
    """Chooses, per parameter group, the gradients of the largest norm and of the largest magnitude."""

    decisions: Decisions
    _by_group: dict[int, set[int]] = field(default_factory=dict)

    def choose(self, settled: Settled) -> None:
        """Names the probes for the next comparison; all gradients are measured where these disagreed."""
        sample, closed = settled.sample, settled.closed
        if self.decisions.table is not sample.captured.table:
            self._by_group = {}
        norms = norms_of(sample)
        magnitudes = np.fmax(np.abs(sample.columns[:, Column.MIN]), np.abs(sample.columns[:, Column.MAX]))
        for group in np.unique(closed.groups[sample.present]):
            members = np.flatnonzero((closed.groups == group) & sample.present)
            self._by_group[int(group)] = _largest(members, norms, magnitudes)
        self.decisions.tell(sample.captured.table, frozenset().union(*self._by_group.values()), full=settled.disagree)


def _largest(members: IntArray, norms: FloatArray, magnitudes: FloatArray) -> set[int]:
    best: set[int] = set()
    for column, count in ((norms, 1), (magnitudes, 1), (norms, 2)):
        # The third choice only where the first two chose the same gradient: a single probe always agrees with itself.
        if len(best) < 2:
            usable = members[np.isfinite(column[members]) & (column[members] > 0)]
            best |= set(usable[np.argsort(column[usable])[-count:]].tolist())
    return best
