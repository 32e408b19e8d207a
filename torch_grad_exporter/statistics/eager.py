"""The interface: measures gradients where they are, one packed vector per device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torch_grad_exporter.metrics.families import IntArray
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics import Column, device, host
from torch_grad_exporter.statistics.batches import STACKED_ELEMENTS, Batch, Gradients, Group, Grouping
from torch_grad_exporter.statistics.device import ByTorch, Reading, joined
from torch_grad_exporter.statistics.kernels.choice import Kernels
from torch_grad_exporter.statistics.layout import NORMS, ORDINARY, Layout, Packing
from torch_grad_exporter.statistics.units import UnitState

# Zeros and extremes of a model with more elements than this are measured in every fourth sample on
# the CPU. In smaller ones they cost less than the calls.
SMALL = 1 << 18
COUNTS_EVERY = 4


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """What was measured on one device, still on that device.

    Attributes:
        positions: Of the parameters in their table, shape (n,).
        elements: Of each (local) gradient, shape (n,).
        units: Output units of each, shape (n,).
        vector: The rows, in the widest type of the device.
        packing: How the rows are packed.
    """

    positions: IntArray
    elements: IntArray
    units: IntArray
    vector: torch.Tensor
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
        self._counting = _Counting()

    def measure(self, table: ParameterTable, gradients: Gradients, sample: int) -> list[Measurement]:
        """Return full statistics, one measurement per device."""
        return self.finish(self.read(table, gradients), sample)

    @torch.no_grad()
    def read(self, table: ParameterTable, gradients: Gradients) -> list[Reading]:
        """Read gradients; those of a sample may be read in several calls."""
        readings: list[Reading] = []
        for group, parts in self._grouping.groups(table, gradients):
            if group.device.type in self._on_host:
                found = host.measure(parts, self.layout, counts=self._counting.due(table))
                readings.append(Reading(group, None, *map(torch.from_numpy, found)))
            elif self._kernels is not None:
                readings += self._kernels.read(group, parts, self._by_torch)
            else:
                readings.append(self._by_torch.read(group, parts))
        return readings

    @torch.no_grad()
    def finish(self, readings: Iterable[Reading], sample: int) -> list[Measurement]:
        """Count the sample's dead units and pack what was read, one measurement per device.

        The same `sample` again replaces what it has counted before.
        """
        self._counting.finished(sample)
        if self._kernels is not None:
            self._kernels.finished()
        groups: dict[torch.device, list[Reading]] = {}
        for reading in readings:
            groups.setdefault(reading.group.device, []).append(reading)
        return [self._packed(where, parts, sample) for where, parts in groups.items()]

    @torch.no_grad()
    def norms(self, table: ParameterTable, gradients: Gradients) -> list[Measurement]:
        """Return only the norms, with the same rounding: equal gradients give equal bits."""
        found = []
        for group, parts in self._grouping.groups(table, gradients):
            for some, vector, pieces in self._norms(group, parts):
                packing = self._packing(NORMS, pieces, group.device)
                found.append(Measurement(some.positions, some.elements, some.units, vector, packing))
        return found

    def taken_once(self) -> bool:
        """Return whether the samples since the last call did work that others will not need."""
        return self._kernels is not None and self._kernels.taken_once()

    @torch.no_grad()
    def forget(self, table: ParameterTable, positions: Iterable[int], sample: int) -> None:
        """Subtract what the sample counted of these parameters: their optimizers did not step."""
        foreign = {table.tracked[position] for position in positions}
        for state in self._units.values():
            state.forget(foreign, sample)

    def _norms(self, group: Group, parts: Sequence[Batch]) -> list[tuple[Group, torch.Tensor, IntArray | None]]:
        if group.device.type in self._on_host:
            return [(group, torch.from_numpy(host.norms(parts, wide=self.layout.float64)), None)]
        if self._kernels is not None:
            return self._kernels.norms(group, parts, self._by_torch)
        return [(group, *self._by_torch.norms(group, parts))]

    def _packed(self, where: torch.device, parts: Sequence[Reading], sample: int) -> Measurement:
        groups = [part.group for part in parts]
        if any(group.members for group in groups):
            state = self._units.get(where)
            if state is None:
                state = self._units[where] = UnitState(self._window, where)
            members = groups[0].members if len(parts) == 1 else tuple(itertools.chain(*(g.members for g in groups)))
            zero, alive = joined([part.zero for part in parts]), joined([part.alive for part in parts])
            counts = state.update(members, zero, alive, sample).t()
            for part, mine in zip(parts, torch.split(counts, [len(g.members) for g in groups]), strict=True):
                # The first row of a gradient has its counts. An index that is made on the host
                # would have to be copied to the device; views and one launch need no copy.
                if part.pieces is not None and len(mine):
                    rests = [torch.zeros_like(mine[:1]).expand(n - 1, 2) for n in part.pieces[: len(mine)].tolist()]
                    mine = torch.cat([some for pair in zip(torch.split(mine, 1), rests, strict=True) for some in pair])  # noqa: PLW2901
                part.rows[: len(mine), Column.ZERO_UNITS : Column.DEAD_UNITS + 1] = mine.to(part.rows.dtype)
        pieces = None
        if any(part.pieces is not None for part in parts):
            ones = np.ones_like
            pieces = np.concatenate([ones(p.group.positions) if p.pieces is None else p.pieces for p in parts])
        positions, elements, units, implied = (
            getattr(groups[0], name) if len(groups) == 1 else np.concatenate([getattr(group, name) for group in groups])
            for name in ("positions", "elements", "units", "implied")
        )
        packing = self._packing(self.layout, pieces, where, implied if implied.any() else None)
        return Measurement(positions, elements, units, joined([part.rows for part in parts]).reshape(-1), packing)

    def _packing(self, layout: Layout, pieces: IntArray | None, where: torch.device, implied: IntArray | None = None) -> Packing:
        scaled = where.type not in self._on_host and self._by_torch.wide(where) is torch.float32
        return Packing(layout, pieces, scaled, implied)


class _Counting:
    """Decides in which samples zeros and extremes are measured: the first, the fifth and so on.

    The number of a sample is known only when it is finished. While samples are captured several
    times, as where gradients accumulate, a reading may belong to the last sample or to a new one;
    it is measured if either is due.
    """

    def __init__(self) -> None:
        self._table: ParameterTable | None = None
        self._small = False
        self._samples = 0
        self._last: int | None = None
        self._captures, self._several = 0, True  # of the last sample; whether samples have several

    def due(self, table: ParameterTable) -> bool:
        if table is not self._table:
            self._table, self._small = table, int(table.elements.sum()) <= SMALL
        again = self._several and self._samples % COUNTS_EVERY == 1
        return self._small or again or self._samples % COUNTS_EVERY == 0

    def finished(self, sample: int) -> None:
        if sample == self._last:
            self._several = True
        elif self._last is not None:
            self._several = self._captures > 1
        self._captures = self._captures + 1 if sample == self._last else 1
        self._samples += sample != self._last
        self._last = sample
