"""Tensors that go into a module, and those that come out of it and a backward can start from."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import torch


def batch_size(args: tuple[object, ...], kwargs: Mapping[str, object]) -> int | None:
    """Return the first dimension of the first tensor input; None if other tensors disagree or there is none."""
    sizes: list[int] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor) and (shape := value.shape):
            if type(shape[0]) is not int:
                return 0  # a tracer's symbols: this forward is not part of a training
            sizes.append(shape[0])
    return sizes[0] if sizes and sizes.count(sizes[0]) == len(sizes) else None


OUTPUTS = 16
VISITED = 64
"""Tensors of an output that are hooked, and items that are visited, at most: it may be a cache of thousands."""


def differentiable(output: object) -> Iterable[torch.Tensor]:
    """Return the tensors of a module's output that a backward can start from; containers are searched level by level.

    These are `OUTPUTS` at most, and `VISITED` items at most are visited, so that an output may hold anything.
    """
    if isinstance(output, torch.Tensor):
        return (output,) if output.requires_grad and output.grad_fn is not None else ()
    return _within(output)


def _within(output: object) -> Iterator[torch.Tensor]:
    """Return those of an output that is not a tensor."""
    count = 0
    # An output may be an object of the user's own; its attributes are searched, but not those of what is in it.
    known = isinstance(output, dict | list | tuple) or dataclasses.is_dataclass(output)
    level = deque([output] if known else itertools.islice(getattr(output, "__dict__", {}).values(), VISITED))
    for _ in range(VISITED):
        if not level or count == OUTPUTS:
            return
        item = level.popleft()
        if isinstance(item, torch.Tensor):
            if _in_a_graph(item):
                count += 1
                yield item
        elif isinstance(item, dict):
            level.extend(itertools.islice(item.values(), VISITED))
        elif isinstance(item, list | tuple):
            level.extend(itertools.islice(item, VISITED))
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            level.extend(getattr(item, field.name, None) for field in dataclasses.fields(item))


def _in_a_graph(tensor: torch.Tensor) -> bool:
    """Return whether a backward can start from the tensor; a leaf belongs to no graph, and would keep a hook permanently."""
    return tensor.requires_grad and tensor.grad_fn is not None
