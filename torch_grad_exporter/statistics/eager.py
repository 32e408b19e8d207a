"""The door of the statistics: measures gradients where they are, one packed vector per device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torch_grad_exporter.metrics.families import IntArray
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics import Column, device, host
from torch_grad_exporter.statistics.batches import STACKED_ELEMENTS, Batch
from torch_grad_exporter.statistics.blocks import Scratch
from torch_grad_exporter.statistics.device import joined
from torch_grad_exporter.statistics.grouping import Gradients, Group, Grouping
from torch_grad_exporter.statistics.kernels.choice import Kernels, Norms
from torch_grad_exporter.statistics.layout import NORMS, ORDINARY, Layout, Packing
from torch_grad_exporter.statistics.reading import ByTorch, Reading
from torch_grad_exporter.statistics.units import UnitState


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """What was measured on one device, still on that device.

    `positions`, `elements`, `units`: shape (n,), known on the host: the parameters' positions in the table, and
    how many elements and output units their (local) gradients have. `vector`: the rows as `packing` says, in the widest type
    of the device.
    """

    positions: IntArray
    elements: IntArray
    units: IntArray
    vector: torch.Tensor
    packing: Packing


class EagerStatistics:
    """Statistics by ordinary torch operations; keeps the dead-unit counts of each device.

    `dead_window`: samples of exactly zero gradient after which a unit counts as dead. `layout`: what is measured, and where in a
    row it stands. `on_host`: kinds of devices whose data may be branched on. `wide`: the widest type that a device computes in.
    `chunk_elements`: elements that are measured at once on other devices. `kernels`: decides what measures there; `None`: torch.

    No gradient is changed or kept. On the CPU the memory to work in is a few blocks of 2**17 elements, however large the
    gradients are, but for what has to be made dense or of another type first: sparse gradients, those of 8 bits. On other devices
    no temporary is larger than `device.TEMPORARY_BYTES`, but for sparse gradients.
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
        self._wide = wide
        # Gradients that were put together are not cut.
        self._by_torch = ByTorch(layout, wide, max(chunk_elements, STACKED_ELEMENTS // 2))
        self._kernels = kernels
        self._units: dict[torch.device, UnitState] = {}
        self._grouping = Grouping()
        self._scratch = Scratch()

    def measure(self, table: ParameterTable, gradients: Gradients, sample: int) -> list[Measurement]:
        """Full statistics, one measurement per device. The same `sample` again replaces its first capture."""
        return self.finish(self.read(table, gradients), sample)

    @torch.no_grad()
    def read(self, table: ParameterTable, gradients: Gradients) -> list[Reading]:
        """All that can be said of gradients without their past; a sample may be read in several parts."""
        groups = self._grouping.groups(table, gradients)
        return [reading for group, parts in groups for reading in self._read(group, parts)]

    @torch.no_grad()
    def finish(self, readings: Iterable[Reading], sample: int) -> list[Measurement]:
        """Counts the sample's dead units and packs all that was read of it, one measurement per device."""
        if self._kernels is not None:
            self._kernels.finished()
        groups: dict[torch.device, list[Reading]] = {}
        for reading in readings:
            groups.setdefault(reading.group.device, []).append(reading)
        return [self._packed(where, parts, sample) for where, parts in groups.items()]

    @torch.no_grad()
    def norms(self, table: ParameterTable, gradients: Gradients) -> list[Measurement]:
        """Only the norms, with the same rounding as `measure`: equal gradients give equal bits."""
        found = []
        for group, parts in self._grouping.groups(table, gradients):
            if group.device.type in self._on_host:
                vector = torch.from_numpy(host.norms(parts, self._scratch, float64=self.layout.float64))
                packing = Packing(NORMS)
                found.append(Measurement(group.positions, group.elements, group.units, vector, packing))
            else:
                for part, vector, pieces in self._norms_on_device(group, parts):
                    packing = self._packing(NORMS, pieces, group.device)
                    found.append(Measurement(part.positions, part.elements, part.units, vector, packing))
        return found

    def taken_once(self) -> bool:
        """Whether the samples since the last call have cost what others will not, such as a compilation."""
        return self._kernels is not None and self._kernels.taken_once()

    @torch.no_grad()
    def forget(self, table: ParameterTable, positions: Iterable[int], sample: int) -> None:
        """Subtracts what the sample counted of the units of these parameters: their optimizers did not step."""
        foreign = {table.tracked[position] for position in positions}
        for state in self._units.values():
            state.forget(foreign, sample)

    def _packed(self, where: torch.device, parts: Sequence[Reading], sample: int) -> Measurement:
        groups = [part.group for part in parts]
        members = [part.group.members for part in parts]
        if any(members):
            state = self._units.get(where)
            if state is None:
                state = self._units[where] = UnitState(self._window, where)
            together = members[0] if len(parts) == 1 else tuple(itertools.chain.from_iterable(members))
            zero, alive = joined([part.zero for part in parts]), joined([part.alive for part in parts])
            counts = state.update(together, zero, alive, sample).t()
            for part, own, mine in zip(parts, members, torch.split(counts, [len(own) for own in members]), strict=True):
                if own:
                    rows = mine if part.pieces is None else _spread(mine, part.pieces[: len(own)])
                    part.rows[: len(rows), Column.ZERO_UNITS : Column.DEAD_UNITS + 1] = rows.to(part.rows.dtype)
        pieces = None
        if any(part.pieces is not None for part in parts):
            pieces = np.concatenate([np.ones_like(part.group.positions) if part.pieces is None else part.pieces for part in parts])
        positions, elements, units = (
            np.concatenate([getattr(group, name) for group in groups]) for name in ("positions", "elements", "units")
        )
        implied = np.concatenate([group.implied for group in groups])
        packing = self._packing(self.layout, pieces, where, implied if implied.any() else None)
        return Measurement(positions, elements, units, joined([part.rows for part in parts]).reshape(-1), packing)

    def _packing(self, layout: Layout, pieces: IntArray | None, where: torch.device, implied: IntArray | None = None) -> Packing:
        scaled = where.type not in self._on_host and self._wide(where) is torch.float32
        return Packing(layout, pieces, scaled, implied)

    def _read(self, group: Group, parts: Sequence[Batch]) -> list[Reading]:
        if group.device.type in self._on_host:
            columns, zero, alive = host.measure(parts, self._scratch, self.layout)
            return [Reading(group, None, *map(torch.from_numpy, (columns, zero, alive)))]
        if self._kernels is None:
            return [self._by_torch.read(group, parts)]
        return self._kernels.read(group, parts, self._by_torch)

    def _norms_on_device(self, group: Group, parts: Sequence[Batch]) -> list[Norms]:
        if self._kernels is None:
            return [(group, *self._by_torch.norms(group, parts))]
        return self._kernels.norms(group, parts, self._by_torch)


def _spread(counts: torch.Tensor, pieces: IntArray) -> torch.Tensor:
    """The counts of each gradient, shape (n, 2), as those of its first piece, shape (all pieces, 2); of the other ones they are 0.

    By views and one launch: an index made on the host would have to be copied to the device.
    """
    nothing = torch.zeros_like(counts[:1])
    parts = ([one] + [nothing] * (count - 1) for one, count in zip(torch.split(counts, 1), pieces.tolist(), strict=True))
    return torch.cat([part for one in parts for part in one])
