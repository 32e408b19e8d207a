"""SampleFamilies: families of gradients, routers, progress and rewards of one sample, without a scrape, for rules that judge samples."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from torch_grad_exporter.collectors.context import CollectorContext, Snapshots
from torch_grad_exporter.collectors.registry import Registry
from torch_grad_exporter.metrics.families import Family, FloatArray
from torch_grad_exporter.store.snapshots import Reading

# Their values come from the snapshot, are counted by the training thread, or were logged before the sample; those of attention are of
# the sample before.
NAMES = frozenset({"gradients", "routers", "attention", "training", "reinforcement"})


class SampleFamilies:
    """Makes families of the latest sample. For one thread at a time. `chosen`: the collectors that are on.

    A metric of the last 60 seconds, which may be hundreds of samples, is here one of the samples since the last call.
    """

    def __init__(self, registry: Registry, chosen: Collection[str], context: CollectorContext) -> None:
        self._given = context.snapshots.latest
        self._snapshots = Snapshots(lambda: self._given, context.clock.counts)
        context = replace(context, snapshots=self._snapshots, clip=None)  # its reports do not belong to samples
        self._collectors = tuple(registry.made(NAMES.intersection(chosen), context).values())
        self._layers: tuple[str, ...] = ()
        self._largest: FloatArray = np.zeros(0)

    def take(self, reading: Reading) -> None:
        """Take a sample; to be called at each."""
        layers, norms = reading.snapshot.gradients.table.layers, reading.gradients.peaks[0]
        same = self._layers == layers
        self._layers, self._largest = layers, np.fmax(self._largest, norms) if same else norms
        self._given = reading.snapshot

    def __call__(self) -> list[Family]:
        """Return its families. Raises what a collector raises."""
        self._given = replace(self._given, gradients=replace(self._given.gradients, recent_max=self._largest))
        self._layers = ()
        self._snapshots.renew()
        return [family for collector in self._collectors for family in collector.collect()]
