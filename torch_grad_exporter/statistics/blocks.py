"""The gradients of a batch on the CPU as numpy blocks that stay in a core's cache, views of the gradients wherever possible.

What cannot be a view is converted or copied block by block into the same scratch memory, so that the memory needed does
not grow with the gradients.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch

from torch_grad_exporter.metrics.families import BoolArray, FloatArray
from torch_grad_exporter.model.units import UnitLayout
from torch_grad_exporter.statistics.batches import STACKED_ELEMENTS, Batch

BLOCK_ELEMENTS = 1 << 17
"""Elements of a block, and never twice as many: larger ones leave the cache, smaller ones cost more in calls than they save.

512 KiB of float32; a core's own second cache is 1 or 2 MiB in most servers, and a mask of the block has to stay in it, too.
"""

_ALIGNED = 64
"""Bytes of a cache line: vectors that begin in one are read faster."""

_Array = TypeVar("_Array", torch.Tensor, FloatArray)


class Scratch(threading.local):
    """Scratch memory of each thread: for each type as much as the largest block that was requested.

    Made by numpy: a tensor that is made in inference mode could not be written to after it.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.dtype, bool], np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}
        self._mask: BoolArray = np.zeros(0, dtype=np.bool_)

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], *, aside: bool = False) -> torch.Tensor:
        """A contiguous tensor of this shape. The next one of the same type overwrites it; those `aside` are apart from others."""
        return torch.from_numpy(self._bytes(dtype, math.prod(shape) * dtype.itemsize, aside=aside)).view(dtype).view(shape)

    def mask(self, shape: tuple[int, ...]) -> BoolArray:
        """Such an array of booleans; it is mostly of the same shape as the last one."""
        if self._mask.shape != shape:
            self._mask = self._bytes(torch.bool, math.prod(shape)).view(np.bool_).reshape(shape)
        return self._mask

    def _bytes(self, dtype: torch.dtype, size: int, *, aside: bool = False) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        memory = self._memory.get((dtype, aside))
        if memory is None or memory.size < size:
            memory = np.empty(size + _ALIGNED, dtype=np.uint8)
            memory = self._memory[dtype, aside] = memory[-memory.ctypes.data % _ALIGNED :]
        return memory[:size]


def blocks(batch: Batch, scratch: Scratch, *, wide: bool) -> Iterator[FloatArray]:
    """The batch as contiguous arrays of shape (tensors, elements), float32 or float64; `wide`: float64 in any case.

    Elements of an output unit follow each other; a block of one tensor has whole units, or a part of one, as many for each unit.
    An array may be the gradient itself, and lasts only until the next one.
    """
    first = batch.tensors[0]
    dtype = torch.float64 if wide or first.dtype is torch.float64 else torch.float32
    if batch.elements <= STACKED_ELEMENTS // 2:
        yield _stacked(batch, scratch, dtype).reshape(len(batch.tensors), -1)
        return
    memory = arranged(first.detach().resolve_neg(), batch.layout)
    if memory.dtype is dtype and memory.is_contiguous():
        for block in slices(memory.numpy()):
            yield block.reshape(1, -1)
        return
    copy: _Copy | None = None
    for part in slices(memory):
        if copy is None or copy.shape != part.shape:
            copy = _Copy(part, scratch, dtype)
        yield copy.of(part)


class _Copy:
    """Memory that parts of this shape are copied to, in two steps if in another order: jumps within the cache cost a fourth.

    Not to be kept for a later sample: its tensors may have been made in inference mode.
    """

    def __init__(self, part: torch.Tensor, scratch: Scratch, dtype: torch.dtype) -> None:
        self.shape = part.shape
        self._order = sorted(range(part.dim()), key=part.stride, reverse=True)
        self._aside: torch.Tensor | None = None
        if self._order != sorted(self._order) and part.shape[self._order[-1]] > 1:
            self._aside = scratch.tensor(part.dtype, [part.shape[dim] for dim in self._order], aside=True)
            self._aside_in_order = self._aside.permute(sorted(self._order, key=self._order.__getitem__))
        self._copy = scratch.tensor(dtype, part.shape)
        self._flat: FloatArray = self._copy.numpy().reshape(1, -1)

    def of(self, part: torch.Tensor) -> FloatArray:
        """A copy of this one, contiguous, shape (1, elements)."""
        if self._aside is not None:
            self._aside.copy_(part.permute(self._order))
            part = self._aside_in_order
        self._copy.copy_(part)
        return self._flat


def _stacked(batch: Batch, scratch: Scratch, dtype: torch.dtype) -> FloatArray:
    """Small gradients as one array in the order of their units, whatever the order in memory: in any company the same numbers."""
    tensors = batch.in_order_of_units()
    if len(tensors) == 1 and tensors[0].dtype is dtype and tensors[0].is_contiguous():
        return tensors[0].detach().resolve_neg().numpy()
    shape = (len(tensors), *tensors[0].shape)
    stack = torch.stack(tensors, out=scratch.tensor(tensors[0].dtype, shape))
    return (stack if stack.dtype is dtype else scratch.tensor(dtype, shape).copy_(stack)).numpy()


def arranged(gradient: torch.Tensor, layout: UnitLayout | None) -> torch.Tensor:
    """A large gradient with the dimensions of its units first, and else in the order of its memory if that has no gaps."""
    if layout is not None and layout.dims != (0,):
        # Not a view of `layout.shape`: where the last dimensions are not together in memory, that would be a copy of all.
        split = gradient.view((*layout.shape[:2], *gradient.shape[1:]))
        return split.movedim(layout.dims, tuple(range(len(layout.dims))))
    if gradient.is_contiguous():
        return gradient.view(-1 if layout is None else (layout.count, -1))
    order = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
    in_memory = gradient.permute(order)
    if not in_memory.is_contiguous() or (layout is not None and order[0] != 0):
        return gradient
    return in_memory.view(-1 if layout is None else (layout.count, -1))


def slices(array: _Array, most: int = BLOCK_ELEMENTS) -> Iterator[_Array]:
    """Consecutive parts of an array, cut along its first dimensions, of about so many elements, and never twice as many."""
    rows, width = array.shape[0], math.prod(array.shape[1:])
    if width > most:
        for part in array:
            yield from slices(part, most)
        return
    step = math.ceil(rows / max(1, round(rows * width / most)))
    for start in range(0, rows, step):
        yield array[start : start + step]
