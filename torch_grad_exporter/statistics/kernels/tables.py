"""Which gradients the programs can read, and what they get of each: tables that are made on the host.

A dense gradient is read in the order of its memory, whatever that of its dimensions: but for the units no number depends on it.
In memory a unit of one dimension lies in runs of equal length, so the unit of an offset is `offset // inner % count`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torch_grad_exporter.metrics.families import IntArray
from torch_grad_exporter.model.units import UnitLayout

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The types that the programs can read, by the numbers that they know them by."""

BLOCK = 4096
"""Elements that one program of a launch reads at a time."""

BLOCKS = 64
"""Blocks of a tile at least, if the gradient has as many: with 8 of them an H100 takes more than half as long again."""

MOST_TILES = 1024
"""Tiles of a gradient at most, each read by one program: those of a larger gradient are longer. A power of 2."""

GROUP = 8
"""Neighbours that one thread loads, whose unit is given once where no run of a unit ends among them. A divisor of `BLOCK`."""

COLUMNS = 8
"""Of an entry for a gradient: elements, kind, elements of a tile, first tile, tiles, `inner`, `count`, first flag or -1."""

PARTIALS = 8
"""Numbers of float64 that each tile has room for; the last one is free, so that each begins where 16 bytes do."""

MOST_PARTIALS = (1 << 26) // (8 * PARTIALS)
"""Tiles of a launch, at most, so that what is kept of them takes 64 MiB: gradients that have more are read in several launches."""

_MOST_UNITS = 2**30
"""Of a gradient, so that the number of a unit and of the next few thousand are int32."""

Read = tuple[torch.Tensor, UnitLayout | None]
"""A gradient to read, and its units."""


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """What the programs get of the gradients of one launch, but for their addresses.

    `owners`: shape (tiles,), int32: the gradient of each tile. `entries`: shape (gradients, `COLUMNS`), int64. `flags`: units
    of all.
    """

    owners: np.ndarray[tuple[int], np.dtype[np.int32]]
    entries: IntArray
    flags: int


def runs(gradient: torch.Tensor, layout: UnitLayout | None) -> tuple[int, int] | None:
    """`inner` and `count` of the units of a dense gradient, (1, 0) if it has none; `None` where no such pair describes them."""
    if layout is None:
        return 1, 0
    if layout.count > _MOST_UNITS:
        return None
    if layout.dims == (0,):
        return _merged(gradient, layout.count)
    split = gradient.view((*layout.shape[:2], *gradient.shape[1:]))
    dims = [dim for dim in layout.dims if split.shape[dim] > 1]
    if not dims:
        return gradient.numel(), 1
    return (split.stride(dims[0]), split.shape[dims[0]]) if len(dims) == 1 else None


def _merged(gradient: torch.Tensor, count: int) -> tuple[int, int] | None:
    """Return the same, where the first dimensions together are the units: in memory they have to follow each other as well."""
    inner, left = 0, count
    for size, stride in zip(gradient.shape, gradient.stride(), strict=True):
        if left == 1:
            break
        if left % size or (size > 1 and inner not in (0, size * stride)):
            return None
        if size > 1:
            inner, left = stride, left // size
    if left > 1:
        return None
    return inner or gradient.numel(), count


def is_dense(gradient: torch.Tensor) -> bool:
    """Return whether a gradient fills its part of the memory, each element once, in whatever order."""
    if gradient.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(gradient.stride(), gradient.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def readable(gradient: torch.Tensor, layout: UnitLayout | None) -> bool:
    """Return whether the programs can read a gradient. Storage that was set free, as FSDP does, has no address."""
    return (
        type(gradient) is torch.Tensor
        and gradient.layout is torch.strided
        and gradient.dtype in KINDS
        and not gradient.is_neg()
        and gradient.data_ptr() != 0
        and gradient.data_ptr() % gradient.element_size() == 0
        and is_dense(gradient)
        and runs(gradient, layout) is not None
    )


def form(gradient: torch.Tensor, layout: UnitLayout | None) -> int:
    """Return the alignment that gradients like this need, if they are contiguous; 0: ask each if it is `readable`."""
    return gradient.element_size() if gradient.is_contiguous() and readable(gradient, layout) else 0


def tiles(elements: int) -> tuple[int, int]:
    """Return how a gradient of this many elements is cut: elements of a tile, and tiles. It follows from the size alone."""
    length = BLOCK * max(BLOCKS, math.ceil(elements / (BLOCK * MOST_TILES)))
    return length, math.ceil(elements / length)


def tables(gradients: Sequence[Read]) -> Tables:
    """Return what the programs get of readable gradients."""
    entries = np.zeros((len(gradients), COLUMNS), dtype=np.int64)
    flags = first = 0
    for entry, (gradient, layout) in zip(entries, gradients, strict=True):
        inner, count = runs(gradient, layout) or (0, 0)
        length, cut = tiles(gradient.numel())
        entry[:] = gradient.numel(), KINDS[gradient.dtype], length, first, cut, inner, max(1, count), flags if count else -1
        flags += count
        first += cut
    return Tables(np.repeat(np.arange(len(gradients), dtype=np.int32), entries[:, 4]), entries, flags)


def flights(gradients: Sequence[Read], most: int = MOST_PARTIALS) -> Iterator[slice]:
    """Return the gradients of each launch: consecutive ones with this many tiles at most; a single one may have more."""
    first, together = 0, 0
    for place, (gradient, _) in enumerate(gradients):
        _, cut = tiles(gradient.numel())
        if together and together + cut > most:
            yield slice(first, place)
            first, together = place, 0
        together += cut
    if together:
        yield slice(first, len(gradients))
