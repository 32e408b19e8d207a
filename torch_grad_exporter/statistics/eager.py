"""The interface: measures gradients where they are, one packed vector per device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from torch_grad_exporter.metrics.families import IntArray
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics import Column, device, host
from torch_grad_exporter.statistics.batches import STACKED_ELEMENTS, Gradients, Group, Grouping
from torch_grad_exporter.statistics.device import ByTorch, GroupReading, joined
from torch_grad_exporter.statistics.kernels.choice import Kernels
from torch_grad_exporter.statistics.layout import NORMS, ORDINARY, Layout, Packing
from torch_grad_exporter.statistics.units import UnitState

# Zeros and extremes of a model with more elements than this are measured in every fourth sample on
# the CPU. In smaller ones they cost less than the calls.
SMALL = 1 << 18
COUNTS_EVERY = 4


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """What was measured on one device, still on that device."""

    positions: IntArray  # of the parameters in their table, shape (n,)
    elements: IntArray  # of each (local) gradient
    units: IntArray  # output units of each
    vector: torch.Tensor  # the rows, in the widest type of the device
    packing: Packing


class EagerStatistics:
    """Statistics of gradients; keeps the counts of silent samples of each device's units.

    No gradient is changed or kept. The temporaries are a few blocks of 2**17 elements on the CPU,
    and `device.TEMPORARY_BYTES` elsewhere, however large the gradients are, but for sparse ones and
    those of 8 bits.

    Args:
        dead_window: Samples of zero gradient after which a unit counts as dead.
        layout: What is measured.
        on_host: Kinds of devices whose data may be branched on.
        wide: The widest type that a device computes in.
        chunk_elements: Elements that are measured at once on other devices.
        kernels: Programs that measure there once they are trusted; None: torch.
    """

    def __init__(
        self,
        dead_window: int,
        layout: Layout = ORDINARY,
        *,
        on_host: frozenset[str] = frozenset({"cpu"}),
        wide: device.Wide = device.wide,
        chunk_elements: int = device.CHUNK_ELEMENTS,
        kernels: Kernels | None = None,
    ) -> None:
        self.layout = layout
        self._window = dead_window
        self._on_host = on_host
        # Gradients that were stacked are not cut.
        self._by_torch = ByTorch(layout, wide, max(chunk_elements, STACKED_ELEMENTS // 2))
        self._kernels = kernels
        self._units: dict[torch.device, UnitState] = {}
        self._grouping = Grouping()
        # The table of the last sample, and whether its model is small.
        self._table: ParameterTable | None = None
        self._small = False
        self._samples, self._last = 0, -1  # samples that are finished, and the number of the last one
        self._captures, self._several = 2, True  # of the last sample; whether samples have several

    def measure(self, table: ParameterTable, gradients: Gradients, sample: int) -> list[Measurement]:
        """Return full statistics, one measurement per device."""
        return self.finish(self.read(table, gradients), sample)

    @torch.no_grad()
    def read(self, table: ParameterTable, gradients: Gradients) -> list[GroupReading]:
        """Read gradients; those of a sample may be read in several calls."""
        if table is not self._table:
            self._table, self._small = table, int(table.elements.sum()) <= SMALL
        # The number of a sample is known only when it is finished. Where samples have several captures,
        # this one may belong to the last sample or to a new one, and is counted if either is due.
        counts = self._small or self._samples % COUNTS_EVERY <= self._several
        readings: list[GroupReading] = []
        for group, parts in self._grouping.groups(table, gradients):
            if group.device.type in self._on_host:
                measured = host.measure(parts, self.layout, counts=counts)
                readings.append(GroupReading(group, None, *map(torch.from_numpy, measured)))
            elif self._kernels is not None:
                readings += self._kernels.read(group, parts, self._by_torch)
            else:
                readings.append(self._by_torch.read(group, parts))
        return readings

    @torch.no_grad()
    def finish(self, readings: Iterable[GroupReading], sample: int) -> list[Measurement]:
        """Count the sample's dead units and pack what was read, one measurement per device.

        The same `sample` again replaces what it has counted before.
        """
        if sample != self._last:
            self._several, self._captures = self._captures > 1, 0
            self._samples, self._last = self._samples + 1, sample
        self._captures += 1
        self._several |= self._captures > 1
        if self._kernels is not None:
            self._kernels.finished()
        by_device: dict[torch.device, list[GroupReading]] = {}
        for reading in readings:
            by_device.setdefault(reading.group.device, []).append(reading)
        measured = []
        for where, parts in by_device.items():
            group, pieces = parts[0].group, parts[0].pieces
            if len(parts) > 1:
                group = Group.joined([part.group for part in parts])
                if any(part.pieces is not None for part in parts):
                    own = (np.ones_like(part.group.positions) if part.pieces is None else part.pieces for part in parts)
                    pieces = np.concatenate([*own])
            if group.members:
                self._count_units(group, parts, sample)
            packing = self._packing(where, self.layout, pieces, group.implied if group.implied.any() else None)
            vector = joined([part.rows for part in parts]).reshape(-1)
            measured.append(Measurement(group.positions, group.elements, group.units, vector, packing))
        return measured

    @torch.no_grad()
    def norms(self, table: ParameterTable, gradients: Gradients) -> list[Measurement]:
        """Return only the norms, with the same rounding: equal gradients give equal bits."""
        measured = []
        found: list[tuple[Group, torch.Tensor, IntArray | None]]
        for group, parts in self._grouping.groups(table, gradients):
            if group.device.type in self._on_host:
                found = [(group, torch.from_numpy(host.norms(parts, wide=self.layout.float64)), None)]
            elif self._kernels is not None:
                found = self._kernels.norms(group, parts, self._by_torch)
            else:
                found = [(group, *self._by_torch.norms(group, parts))]
            for some, vector, pieces in found:
                packing = self._packing(group.device, NORMS, pieces)
                measured.append(Measurement(some.positions, some.elements, some.units, vector, packing))
        return measured

    def taken_once(self) -> bool:
        """Return whether the samples since the last call did work that others will not need."""
        return self._kernels is not None and self._kernels.taken_once()

    @torch.no_grad()
    def forget(self, table: ParameterTable, positions: Iterable[int], sample: int) -> None:
        """Subtract what the sample counted of these parameters: their optimizers did not step."""
        foreign = {table.tracked[position] for position in positions}
        for state in self._units.values():
            state.forget(foreign, sample)

    def _count_units(self, group: Group, parts: list[GroupReading], sample: int) -> None:
        """Count zero and dead units of one device, and write them into the rows of the readings."""
        state = self._units.get(group.device)
        if state is None:
            state = self._units[group.device] = UnitState(self._window, group.device)
        zero, alive = joined([part.zero for part in parts]), joined([part.alive for part in parts])
        counts = state.update(group.members, zero, alive, sample)
        if counts is None:  # as the rows say
            return
        counts = counts.to(parts[0].rows.dtype)
        for part, own in zip(parts, torch.split(counts, [len(part.group.members) for part in parts]), strict=True):
            columns = part.rows[:, Column.ZERO_UNITS : Column.DEAD_UNITS + 1]
            if part.pieces is None:
                columns[: len(own)] = own
            else:  # into the first row of each; an index would have to be copied to the device
                for row, pair in zip((np.cumsum(part.pieces) - part.pieces).tolist(), own.unbind(), strict=False):
                    columns[row] = pair

    def _packing(self, where: torch.device, layout: Layout, pieces: IntArray | None, implied: IntArray | None = None) -> Packing:
        scaled = where.type not in self._on_host and self._by_torch.wide(where) is torch.float32
        return Packing(layout, pieces, scaled, implied)
