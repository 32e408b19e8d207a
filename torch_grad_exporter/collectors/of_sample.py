"""OfSample: the families of one sample, without a scrape: those of gradients and progress, for judgements by samples."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch_grad_exporter.aggregation.worker import Snapshot
from torch_grad_exporter.collectors.context import CollectorContext, Snapshots
from torch_grad_exporter.collectors.registry import Registry
from torch_grad_exporter.metrics.families import Family

NAMES = frozenset({"gradients", "training"})
"""The collectors of it: what they show comes from the snapshot, or is counted by the training thread."""


class OfSample:
    """Makes families of the snapshot of a sample. For one thread at a time. `chosen`: the collectors that are on."""

    def __init__(self, registry: Registry, chosen: Collection[str], context: CollectorContext) -> None:
        self._given = context.snapshots.latest
        self._snapshots = Snapshots(lambda: self._given, context.clock.counts)
        context = replace(context, snapshots=self._snapshots, clip=None)  # whose reports are none of samples
        self._collectors = tuple(registry.made(NAMES.intersection(chosen), context).values())

    def __call__(self, snapshot: Snapshot) -> list[Family]:
        """Its families. Raises what a collector raises."""
        self._given = snapshot
        self._snapshots.renew()
        return [family for collector in self._collectors for family in collector.collect()]
