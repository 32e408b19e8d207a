"""Dead units: how long each output unit's gradient has been exactly zero.

Each unit counts the samples since it last had a gradient that was not zero. It starts at `window - 1`, so
that "zero in each of the last `window` samples", or in every sample so far while there are fewer, is one
comparison. A unit with a NaN neither counts on nor starts anew: an overflow shows neither that it is active nor that it is
dead. A second capture of the same sample replaces the first, so the counts before it are kept. With them, what belongs to the
step of another optimizer can be subtracted, as of a generator's backward through a discriminator.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from torch_grad_exporter.model.parameters import TrackedParameter
from torch_grad_exporter.statistics.device import StreamOrder


@dataclass(frozen=True, slots=True, eq=False)
class _Counts:
    """The counts of one sample: `before` and `after` it, shape (units of all members,), int32, in the order of `members`.

    `ends`: the index of each member's last unit.
    """

    members: tuple[tuple[TrackedParameter, int], ...]
    ends: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    sample: int


class UnitState:
    """The quiet counts of the units on one device, as one flat vector in the order of measuring.

    They change in one assignment: what a signal's handler raises in between leaves those from before.
    """

    def __init__(self, window: int, device: torch.device) -> None:
        self._window = window
        self._device = device
        self._kept: weakref.WeakKeyDictionary[TrackedParameter, torch.Tensor] = weakref.WeakKeyDictionary()
        """The counts of parameters that were members before, and may be again."""
        none = torch.zeros(0, dtype=torch.int32, device=device)
        self._counts = _Counts((), none.long(), none, none, -1)
        self._streams = StreamOrder(device)

    def update(
        self, members: Sequence[tuple[TrackedParameter, int]], zero: torch.Tensor, alive: torch.Tensor, sample: int
    ) -> torch.Tensor:
        """Counts the sample; returns zero units and dead units of each member, shape (2, members), int64.

        `members`: parameters with their numbers of units, in the order in which `zero` and `alive`, shape
        (units,), bool, are concatenated. `sample`: a number that changes from sample to sample.
        """
        last = self._counts
        self._streams.begin(last.before, last.after, last.ends, *self._kept.values())
        before, ends, known = last.before if sample == last.sample else last.after, last.ends, last.members
        if known != tuple(members):
            before, ends, known = self._arranged(before, known, members)
        after = (before + zero).mul_(~alive)
        flags = torch.stack((zero, after >= self._window))
        found = (sums_on_host if self._device.type == "cpu" else sums)(flags, ends)
        self._counts = _Counts(known, ends, before, after, sample)
        self._streams.end()
        return found

    def forget(self, foreign: Collection[TrackedParameter], sample: int) -> None:
        """Subtracts what the last sample counted of these parameters, if it is the given one."""
        last = self._counts
        meant = [tracked in foreign for tracked, _ in last.members]
        if sample != last.sample or not any(meant):
            return
        units = torch.tensor([n for _, n in last.members], device="cpu")
        mask = torch.tensor(meant, device="cpu").repeat_interleave(units)
        self._counts = replace(last, after=torch.where(self._sent(mask), last.before, last.after))

    def _sent(self, of_the_host: torch.Tensor) -> torch.Tensor:
        """The tensor on the device of the counts, without waiting."""
        if self._device.type == "cuda":
            of_the_host = of_the_host.pin_memory()
        return of_the_host.to(self._device, non_blocking=True)

    def _arranged(
        self, counts: torch.Tensor, known: Sequence[tuple[TrackedParameter, int]], members: Sequence[tuple[TrackedParameter, int]]
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[tuple[TrackedParameter, int], ...]]:
        """The counts of `known` in the order of `members`, and their ends; those of other parameters are kept for later."""
        for (tracked, _), part in zip(known, torch.split(counts, [n for _, n in known]), strict=True):
            self._kept[tracked] = part.clone()
        ends = self._sent(torch.tensor([n for _, n in members], device="cpu").cumsum(0) - 1)
        if not self._kept:  # as at the first sample
            units = sum(n for _, n in members)
            return torch.full((units,), self._window - 1, dtype=torch.int32, device=self._device), ends, tuple(members)
        parts = []
        for tracked, units in members:
            kept = self._kept.get(tracked)
            if kept is None or kept.shape[0] != units:
                kept = torch.full((units,), self._window - 1, dtype=torch.int32, device=self._device)
            parts.append(kept)
        return torch.cat(parts), ends, tuple(members)


def sums(flags: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The sums of consecutive parts of bools, shape (2, n) to (2, parts), int64; `ends`: the index of each part's last one."""
    # In one row: on a GPU only that is scanned by more than one block of threads a row.
    counts = flags.reshape(-1).cumsum(dim=0, dtype=torch.int64)
    return counts.index_select(0, torch.cat((ends, ends + flags.shape[1]))).diff(prepend=counts.new_zeros(1)).view(2, -1)


def sums_on_host(flags: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The same on the CPU, in a tenth of the time, and in less where no flag is set."""
    if not flags.numpy().any():
        return torch.zeros((2, len(ends)), dtype=torch.int64, device=ends.device)
    starts = np.concatenate([[0], ends.numpy()[:-1] + 1])
    return torch.from_numpy(np.add.reduceat(flags.numpy().view(np.int8), starts, axis=1, dtype=np.int64))
