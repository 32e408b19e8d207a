"""The door of the statistics: measures gradients where they are, one packed vector per device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torch_grad_exporter.metrics.families import IntArray
from torch_grad_exporter.model.layers import ParameterTable, TrackedParameter
from torch_grad_exporter.statistics import COLUMNS, Column, device, host
from torch_grad_exporter.statistics.batches import Batch
from torch_grad_exporter.statistics.blocks import Scratch
from torch_grad_exporter.statistics.grouping import Gradients, Grouping
from torch_grad_exporter.statistics.units import UnitState


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """What was measured on one device, still on that device.

    `positions`, `elements`, `units`: shape (n,), known on the host: the parameters' positions in the table, and
    how many elements and output units their (local) gradients have. `vector`: shape (n * width,), float64,
    row by row, where `width` is the number of columns.
    """

    positions: IntArray
    elements: IntArray
    units: IntArray
    vector: torch.Tensor
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What was read of some gradients on one device, before the past of their units is looked at.

    `members`: the parameters with output units, and how many; they come first in all that follows. `positions`,
    `elements`, `units`: as in `Measurement`. `columns`: shape (n, columns), float64. `zero`, `alive`: shape (units of all
    members,), bool: units whose gradient is exactly zero, and those that have a nonzero element.
    """

    device: torch.device
    members: tuple[tuple[TrackedParameter, int], ...]
    positions: IntArray
    elements: IntArray
    units: IntArray
    columns: torch.Tensor
    zero: torch.Tensor
    alive: torch.Tensor


class EagerStatistics:
    """Statistics by ordinary torch operations; keeps the dead-unit counts of each device.

    `dead_window`: samples of exactly zero gradient after which a unit counts as dead. `moments`: whether to
    sum the elements too, for means and standard deviations.

    No gradient is changed or kept. On the CPU the memory to work in is a few blocks of 2**18 elements, however large the
    gradients are, but for what has to be made dense or of another type first: sparse gradients, those of 8 bits.
    """

    def __init__(self, dead_window: int, *, moments: bool = False) -> None:
        self._window = dead_window
        self._moments = moments
        self._units: dict[torch.device, UnitState] = {}
        self._to_read, self._to_compare = Grouping(), Grouping()
        self._scratch = Scratch()

    def measure(self, table: ParameterTable, gradients: Gradients, sample: int) -> list[Measurement]:
        """Full statistics, one measurement per device. The same `sample` again replaces its first capture."""
        return self.finish(self.read(table, gradients), sample)

    @torch.no_grad()
    def read(self, table: ParameterTable, gradients: Gradients) -> list[Reading]:
        """All that can be said of gradients without their past; a sample may be read in several parts."""
        found = []
        for group in self._to_read.groups(table, gradients):
            measured = (self._on_host if group.device.type == "cpu" else self._on_device)(group.batches)
            found.append(Reading(group.device, group.members, group.positions, group.elements, group.units, *measured))
        return found

    @torch.no_grad()
    def finish(self, readings: Iterable[Reading], sample: int) -> list[Measurement]:
        """Counts the sample's dead units and packs all that was read of it, one measurement per device."""
        groups: dict[torch.device, list[Reading]] = {}
        for reading in readings:
            groups.setdefault(reading.device, []).append(reading)
        return [self._packed(_together(parts), sample) for parts in groups.values()]

    @torch.no_grad()
    def norms(self, table: ParameterTable, gradients: Gradients) -> list[Measurement]:
        """Only the norms, with the same rounding as `measure`: equal gradients give equal bits."""
        found = []
        for group in self._to_compare.groups(table, gradients):
            if group.device.type == "cpu":
                vector = torch.from_numpy(host.norms(group.batches, self._scratch, moments=self._moments))
            else:
                vector = torch.cat([device.norms(batch) for batch in group.batches]).to(device.wide(group.device))
            found.append(Measurement(group.positions, group.elements, group.units, vector, 1))
        return found

    @torch.no_grad()
    def forget(self, table: ParameterTable, positions: Iterable[int], sample: int) -> None:
        """Takes back what the sample counted of the units of these parameters: it was none of theirs."""
        foreign = {table.tracked[position] for position in positions}
        for state in self._units.values():
            state.forget(foreign, sample)

    def _packed(self, reading: Reading, sample: int) -> Measurement:
        columns, members = reading.columns, reading.members
        if members:
            state = self._units.get(reading.device)
            if state is None:
                state = self._units[reading.device] = UnitState(self._window, reading.device)
            counts = state.update(members, reading.zero, reading.alive, sample)
            columns[: len(members), Column.ZERO_UNITS : Column.DEAD_UNITS + 1] = counts.t().to(columns.dtype)
        return Measurement(reading.positions, reading.elements, reading.units, columns.reshape(-1), COLUMNS)

    def _on_host(self, parts: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        columns, flags = host.measure(parts, self._scratch, moments=self._moments)
        return torch.from_numpy(columns), torch.from_numpy(flags.zero), torch.from_numpy(flags.alive)

    def _on_device(self, parts: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        measured = [(batch.units, *device.measure(batch, moments=self._moments)) for batch in parts]
        columns = torch.cat([columns for _, columns, _ in measured])
        magnitudes = [magnitude for units, _, magnitude in measured if units] or [columns.new_zeros(0)]
        together = torch.cat(magnitudes)  # in the widest of their types, which rounds none of them to zero
        return columns, together == 0, together > 0


def _together(parts: list[Reading]) -> Reading:
    """Several readings of one device as one, those with units first again."""
    if len(parts) == 1:
        return parts[0]
    ends = [len(part.members) for part in parts]

    def reordered(arrays: list[Any]) -> list[Any]:
        return [a[:n] for a, n in zip(arrays, ends, strict=True)] + [a[n:] for a, n in zip(arrays, ends, strict=True)]

    positions, elements, units = (
        np.concatenate(reordered([getattr(part, name) for part in parts])) for name in ("positions", "elements", "units")
    )
    return Reading(
        parts[0].device,
        tuple(member for part in parts for member in part.members),
        positions,
        elements,
        units,
        torch.cat(reordered([part.columns for part in parts])),
        torch.cat([part.zero for part in parts]),
        torch.cat([part.alive for part in parts]),
    )
