"""Dead units: how long each output unit's gradient has been exactly zero.

Each unit counts the samples since it last had a gradient that was not zero. It starts at `window - 1`, so
that "zero in each of the last `window` samples", or in every sample so far while there are fewer, is one
comparison. A unit with a NaN neither counts on nor starts anew: an overflow is no sign of life and no
silence. A second capture of the same sample replaces the first, so the counts before it are kept; and so that what
belongs to another's step, as a generator's backward through a discriminator, can be taken back.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

import numpy as np
import torch

from torch_grad_exporter.layers import TrackedParameter


class UnitState:
    """The quiet counts of the units on one device, as one flat vector in the order of measuring."""

    def __init__(self, window: int, device: torch.device) -> None:
        self._window = window
        self._device = device
        self._kept: weakref.WeakKeyDictionary[TrackedParameter, torch.Tensor] = weakref.WeakKeyDictionary()
        self._members: tuple[tuple[TrackedParameter, int], ...] = ()
        self._before = self._after = torch.zeros(0, dtype=torch.int32, device=device)
        self._ends = torch.zeros(0, dtype=torch.int64, device=device)
        self._sample = -1

    def update(
        self, members: Sequence[tuple[TrackedParameter, int]], zero: torch.Tensor, alive: torch.Tensor, sample: int
    ) -> torch.Tensor:
        """Counts the sample; returns zero units and dead units of each member, shape (2, members), int64.

        `members`: parameters with their numbers of units, in the order in which `zero` and `alive`, shape
        (units,), bool, are concatenated. `sample`: a number that changes from sample to sample.
        """
        if sample != self._sample:
            self._before, self._sample = self._after, sample
        if not _same(self._members, members):
            self._arrange(tuple(members))
        self._after = (self._before + zero).mul_(~alive)
        flags = torch.stack((zero, self._after >= self._window))
        return (sums_on_host if self._device.type == "cpu" else sums)(flags, self._ends)

    def forget(self, strangers: Collection[TrackedParameter], sample: int) -> None:
        """Takes back what the last sample counted of these parameters, if it is the one that is meant."""
        meant = [tracked in strangers for tracked, _ in self._members]
        if sample != self._sample or not any(meant):
            return
        units = torch.tensor([n for _, n in self._members], device="cpu")
        mask = torch.tensor(meant, device="cpu").repeat_interleave(units)
        self._after = torch.where(self._sent(mask), self._before, self._after)

    def _sent(self, of_the_host: torch.Tensor) -> torch.Tensor:
        """The tensor on the device of the counts, without waiting."""
        if self._device.type == "cuda":
            of_the_host = of_the_host.pin_memory()
        return of_the_host.to(self._device, non_blocking=True)

    def _arrange(self, members: tuple[tuple[TrackedParameter, int], ...]) -> None:
        """Brings the counts into the order of `members`; those of other parameters are kept for later."""
        for (tracked, _), counts in zip(self._members, torch.split(self._before, [n for _, n in self._members]), strict=True):
            self._kept[tracked] = counts.clone()
        parts = []
        for tracked, units in members:
            kept = self._kept.pop(tracked, None)
            if kept is None or kept.shape[0] != units:
                kept = torch.full((units,), self._window - 1, dtype=torch.int32, device=self._device)
            parts.append(kept)
        self._members = members
        self._before = torch.cat(parts)
        self._ends = self._sent(torch.tensor([n for _, n in members], device="cpu").cumsum(0) - 1)


def sums(flags: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The sums of consecutive parts of bools, shape (2, n) to (2, parts), int64; `ends`: the index of each part's last one."""
    counts = flags.cumsum(dim=1, dtype=torch.int64)
    return counts.index_select(1, ends).diff(dim=1, prepend=counts.new_zeros((2, 1)))


def sums_on_host(flags: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The same on the CPU, in a tenth of the time."""
    starts = np.concatenate([[0], ends.numpy()[:-1] + 1])
    return torch.from_numpy(np.add.reduceat(flags.numpy().view(np.int8), starts, axis=1, dtype=np.int64))


def _same(a: Sequence[tuple[TrackedParameter, int]], b: Sequence[tuple[TrackedParameter, int]]) -> bool:
    return a is b or (len(a) == len(b) and all(x[0] is y[0] and x[1] == y[1] for x, y in zip(a, b, strict=True)))
