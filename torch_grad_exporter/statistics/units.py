"""Dead units: how long each output unit's gradient has been exactly zero.

Each unit counts the samples since it last had a gradient that was not zero. It starts at `window - 1`, so
that "zero in each of the last `window` samples", or in every sample so far while there are fewer, is one
comparison. A unit with a NaN neither counts on nor starts anew: an overflow is no sign of life and no
silence. A second capture of the same sample replaces the first, so the counts before it are kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

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
        self._after = (self._before + zero).masked_fill_(alive, 0)
        counts = torch.stack((zero, self._after >= self._window)).cumsum(dim=1, dtype=torch.int64)
        return counts.index_select(1, self._ends).diff(dim=1, prepend=counts.new_zeros((2, 1)))

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
        ends = torch.tensor([n for _, n in members], device="cpu").cumsum(0) - 1
        if self._device.type == "cuda":
            ends = ends.pin_memory()
        self._ends = ends.to(self._device, non_blocking=True)


def _same(a: Sequence[tuple[TrackedParameter, int]], b: Sequence[tuple[TrackedParameter, int]]) -> bool:
    return len(a) == len(b) and all(x[0] is y[0] and x[1] == y[1] for x, y in zip(a, b, strict=True))
