"""Collector `replicas`: whether copies of the model on several ranks are equal."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.collectors.context import CollectorContext
from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, LabelledRows

REPLICAS = Section("Replicas")

REPLICAS_COMPARED = REPLICAS.counter(
    "torch_replicas_compared_total",
    "Sampled steps after which rank 0 compared the copies of at least two ranks, by what it compared: gradient, weights or buffers. Shown by rank 0 only. What is sharded or parallel has no copies and is left out.",
    "what", opt_in="replicas",
)  # fmt: skip
REPLICAS_DIFFER = REPLICAS.counter(
    "torch_replicas_differ_total",
    "Comparisons in which not all ranks had the same bits of the layer's gradient, weights or buffers. Buffers that DistributedDataParallel copies before each forward are left out, since modules write them in between.",
    "layer", "what", opt_in="replicas",
)  # fmt: skip
REPLICA_ODD = REPLICAS.counter(
    "torch_replica_odd_total",
    "Comparisons in which this replica, by its rank, had other bits than most ranks; absent for one that never had, and where two ranks differ. The first 32 such ranks, the rest under (other).",
    "replica", opt_in="replicas",
)  # fmt: skip


class ReplicaCollector:
    """The families on rank 0; none elsewhere."""

    def __init__(self, context: CollectorContext) -> None:
        self._comparison = context.replicas
        self._rows = LabelledRows()

    def collect(self) -> Iterator[Family]:
        """Yield the families of what was compared until now."""
        totals = None if self._comparison is None else self._comparison.totals
        if totals is not None:
            yield self._rows.by_label(REPLICAS_COMPARED, totals.compared)
            yield self._rows.family(REPLICAS_DIFFER, totals.differing)
            yield self._rows.by_label(REPLICA_ODD, totals.odd)


COLLECTOR = Declaration("replicas", (REPLICAS,), ReplicaCollector, place=15)
