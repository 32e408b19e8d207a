"""Values that left PyTorch, as numbers or arrays, and what of them came back: told by identity and shared memory, never guessed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

VISITED = 10_000
"""Items of a function's arguments or of a list that are looked at, at most."""


class Outside:
    """Remembers numbers and arrays that tensors became, with the cuts that their values went through."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[float, int]] = {}
        """Kept, so that no other number gets the same `id`."""
        self._memory: list[tuple[int, int, object, int]] = []
        """Where the memory of arrays begins and ends, what keeps it, and the cuts."""

    def left(self, result: object, cuts: int) -> None:
        """A tensor became this."""
        if isinstance(result, np.ndarray):
            first = _address(result)
            last = sum((size - 1) * stride for size, stride in zip(result.shape, result.strides, strict=True))
            self._memory.append((first, first + last + result.itemsize, result, cuts))
        for one in _items(result):
            # Integers and booleans are shared by the whole program.
            if type(one) is float:
                self._numbers[id(one)] = one, cuts | self._numbers.get(id(one), (one, 0))[1]

    def cuts_of(self, value: object) -> int:
        """The cuts that a function's argument went through before it came back, 0 where nothing is known of it."""
        if type(value) is float:
            return self._numbers.get(id(value), (0.0, 0))[1]
        if not self._memory:
            return 0
        if isinstance(value, np.ndarray):
            return self._at(_address(value))
        if type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided and not value.requires_grad:
            return self._at(value.data_ptr())
        return 0

    def _at(self, address: int) -> int:
        found = 0
        for first, end, _, cuts in self._memory:
            if first <= address < end:
                found |= cuts
        return found


def _address(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def leaves(value: object) -> Iterator[object]:
    """What containers hold, at any depth; `VISITED` items at most."""
    stack, left = [value], VISITED
    while stack and left:
        left -= 1
        one = stack.pop()
        if isinstance(one, list | tuple):
            stack += one[:VISITED]
        elif isinstance(one, dict):
            stack += list(one.values())[:VISITED]
        else:
            yield one


def _items(result: object) -> Iterator[object]:
    return leaves(result) if isinstance(result, list | float) else iter(())
