"""Dead units: for how many samples each output unit's gradient has been exactly zero.

A unit's count starts at `window - 1`, so that "zero in each of the last `window` samples", or in
every sample so far while there are fewer, is one comparison. A unit with a NaN keeps its count: an
overflow shows neither that it is active nor that it is dead. A second capture of a sample replaces
the first, so the counts before it are kept. With them, what belongs to the step of another
optimizer can be subtracted, such as a generator's backward through a discriminator.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch

from torch_grad_exporter.model.parameters import TrackedParameter
from torch_grad_exporter.statistics.device import StreamOrder, to_device

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
