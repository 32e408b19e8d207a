"""The interface: measures gradients where they are, one packed vector per device; and counts silent samples of output units.

A unit's count starts at `window - 1`, so that "zero in each of the last `window` samples", or in
every sample so far while there are fewer, is one comparison. A unit with a NaN keeps its count: an
overflow shows neither that it is active nor that it is dead. A second capture of a sample replaces
the first, so the counts before it are kept. With them, what belongs to the step of another
optimizer can be subtracted, such as a generator's backward through a discriminator.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from torch_grad_exporter.metrics.families import IntArray
from torch_grad_exporter.model.parameters import ParameterTable, TrackedParameter
from torch_grad_exporter.statistics import device, host
from torch_grad_exporter.statistics.batches import STACKED_ELEMENTS, Gradients, Group, Grouping
from torch_grad_exporter.statistics.declared import MOMENTS
from torch_grad_exporter.statistics.device import ByTorch, GroupReading, StreamOrder, to_device
from torch_grad_exporter.statistics.kernels.choice import Kernels
from torch_grad_exporter.statistics.layout import ORDINARY, Layout, Packing

# Zeros and extremes of a model with more elements than this are measured in every fourth sample on
# the CPU. In smaller ones they cost less than the calls.
SMALL = 1 << 18
COUNTS_EVERY = 4


# Parameters with their numbers of units, in the order in which their units are concatenated.
Members = tuple[tuple[TrackedParameter, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Counts:
    """The counts of all units before and after one sample, int32; `ends`: each member's last unit."""

    members: Members
    ends: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    sample: int


class UnitState:
    """The counts of the units on one device, as one vector in the order of measuring.

    They change in one assignment, so that an exception of a signal handler leaves the old ones.
    """

    def __init__(self, window: int, device: torch.device) -> None:
        self._window = window
        self._device = device
        # Of parameters that were members before, and may be again.
        self._kept: weakref.WeakKeyDictionary[TrackedParameter, torch.Tensor] = weakref.WeakKeyDictionary()
        none = self._new(0)
        self._counts = _Counts((), none.long(), none, none, -1)
        self._zeros = none  # on the host, as many as there are units
        self._streams = StreamOrder(device)

    def update(self, members: Members, zero: torch.Tensor, alive: torch.Tensor, sample: int) -> torch.Tensor | None:
        """Count a sample.

        Args:
            members: Whose units they are.
            zero: Which units are zero, shape (units,), bool.
            alive: Which have a nonzero element and no NaN.
            sample: A number that changes from sample to sample.

        Returns:
            Zero units and dead units of each member, shape (members, 2), int64; None: there are none.
        """
        last, on_host = self._counts, self._device.type == "cpu"
        if not on_host:
            self._streams.begin(last.before, last.after, last.ends, *self._kept.values())
        before, ends = last.before if sample == last.sample else last.after, last.ends
        if last.members is not members and last.members != members:
            for (tracked, _), part in zip(last.members, torch.split(before, [n for _, n in last.members]), strict=True):
                self._kept[tracked] = part.clone()
            ends = to_device(np.cumsum([n for _, n in members]) - 1, self._device)
            if self._kept:
                known = [(self._kept.get(tracked), n) for tracked, n in members]
                before = torch.cat([self._new(n) if kept is None or len(kept) != n else kept for kept, n in known])
            else:  # the first sample
                before = self._new(len(zero))
        if on_host and alive.numpy().all():  # as mostly
            if len(self._zeros) != len(before):
                self._zeros = torch.zeros_like(before)
            after, totals = self._zeros, None
        else:
            after = (before + zero).mul_(~alive)
            flags = torch.stack((zero, after >= self._window))
            if on_host:  # in a tenth of the time
                starts = np.append(0, ends.numpy()[:-1] + 1)
                totals = torch.from_numpy(np.add.reduceat(flags.numpy().view(np.int8), starts, axis=1, dtype=np.int64).T)
            else:
                # In one row: on a GPU only that is scanned by more than one block of threads a row.
                sums = flags.reshape(-1).cumsum(dim=0, dtype=torch.int64)
                sums = sums.index_select(0, torch.cat((ends, ends + flags.shape[1])))
                totals = sums.diff(prepend=sums.new_zeros(1)).view(2, -1).t()
        self._counts = _Counts(members, ends, before, after, sample)
        if not on_host:
            self._streams.end()
        return totals

    def forget(self, foreign: Collection[TrackedParameter], sample: int) -> None:
        """Subtract what the last sample counted of these parameters, if it is the given one."""
        last = self._counts
        meant = [tracked in foreign for tracked, _ in last.members]
        if sample == last.sample and any(meant):
            mask = to_device(np.repeat(meant, [n for _, n in last.members]), self._device)
            self._counts = replace(last, after=torch.where(mask, last.before, last.after))

    def _new(self, units: int) -> torch.Tensor:
        return torch.full((units,), self._window - 1, dtype=torch.int32, device=self._device)


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """What was measured on one device, still on that device."""

    positions: IntArray  # of the parameters in their table, shape (n,)
    elements: IntArray  # of each (local) gradient
    units: IntArray  # output units of each
    vector: torch.Tensor  # the rows and the counts of units, in the widest type of the device
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
        self._norms_by_torch = replace(self._by_torch, layout=Layout([*layout.apart], norms_only=True))
        self._kernels = kernels if layout.apart.keys() <= {MOMENTS} else None  # the programs measure no other statistics
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
    def read(self, table: ParameterTable, gradients: Gradients, *, norms_only: bool = False) -> list[GroupReading]:
        """Read gradients; those of a sample may be read in several calls."""
        if table is not self._table:
            self._table, self._small = table, int(table.elements.sum()) <= SMALL
        # The number of a sample is known only when it is finished. Where samples have several captures,
        # this one may belong to the last sample or to a new one, and is counted if either is due.
        counts = not norms_only and (self._small or self._samples % COUNTS_EVERY <= self._several)
        by_torch = self._norms_by_torch if norms_only else self._by_torch
        readings: list[GroupReading] = []
        for group, parts in self._grouping.groups(table, gradients):
            if group.device.type in self._on_host:
                measured = map(torch.from_numpy, host.measure(parts, by_torch.layout, counts=counts))
                readings.append(GroupReading(group, [1] * len(group.positions), *measured))
            elif self._kernels is None:
                readings.append(by_torch.read(group, parts))
            else:
                readings += (self._kernels.norms if norms_only else self._kernels.read)(group, parts, by_torch)
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
        return [self._packed(parts, self.layout, sample) for parts in by_device.values()]

    def norms(self, table: ParameterTable, gradients: Gradients) -> list[Measurement]:
        """Return only the norms, with the same rounding: equal gradients give equal bits."""
        layout = self._norms_by_torch.layout
        return [self._packed([reading], layout) for reading in self.read(table, gradients, norms_only=True)]

    @torch.no_grad()
    def forget(self, table: ParameterTable, positions: Iterable[int], sample: int) -> None:
        """Subtract what the sample counted of these parameters: their optimizers did not step."""
        foreign = {table.tracked[position] for position in positions}
        for state in self._units.values():
            state.forget(foreign, sample)

    def _packed(self, parts: Sequence[GroupReading], layout: Layout, sample: int | None = None) -> Measurement:
        """Pack the readings of one device. `sample`: in which their units are counted, if they are."""
        group, rows, zero, alive = parts[0].group, parts[0].rows, parts[0].zero, parts[0].alive
        pieces: list[int] | IntArray = parts[0].pieces
        if len(parts) > 1:  # as where gradients were read before the backward was over
            group, pieces = _together([part.group for part in parts]), np.concatenate([part.pieces for part in parts])
            rows = torch.cat([part.rows for part in parts])
            zero, alive = torch.cat([part.zero for part in parts]), torch.cat([part.alive for part in parts])
        where, vector = group.device, rows.reshape(-1)
        missing = counted = None
        if sample is not None:
            missing = group.implied if group.implied.any() else None
            if group.members:
                if where not in self._units:
                    self._units[where] = UnitState(self._window, where)
                counts = self._units[where].update(group.members, zero, alive, sample)
                if counts is not None:
                    vector = torch.cat((vector, counts.reshape(-1).to(vector.dtype)))
                    counted = np.flatnonzero(group.units)
        scaled = where.type not in self._on_host and self._by_torch.wide(where) is torch.float32
        each = None if len(rows) == len(group.positions) else np.asarray(pieces, dtype=np.int64)
        packing = Packing(layout, each, scaled, missing, counted)
        return Measurement(group.positions, group.elements, group.units, vector, packing)


def _together(groups: Sequence[Group]) -> Group:
    """Return the group of all gradients of these, which are on one device."""
    columns = [(group.positions, group.elements, group.units, group.implied) for group in groups]
    positions, elements, units, implied = map(np.concatenate, zip(*columns, strict=True))
    members = tuple(itertools.chain(*(group.members for group in groups)))
    return Group(groups[0].device, members, positions, elements, units, implied, readable=False)
