"""Tensors that go into a module, and those that come out of it and a backward can start from."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import torch


def batch_size(args: tuple[object, ...], kwargs: Mapping[str, object]) -> int | None:
    """The first dimension of the first tensor input; `None` if other tensors disagree or there is none."""
    found: list[int] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor) and (shape := value.shape):
            if type(shape[0]) is not int:
                return 0  # a tracer's symbols: this forward is no training
            found.append(shape[0])
    return found[0] if found and found.count(found[0]) == len(found) else None


OUTPUTS = 16
VISITED = 64
"""Tensors of an output that are hooked, and items that are visited, at most: it may be a cache of thousands."""


def differentiable(output: object) -> Iterable[torch.Tensor]:
    """The tensors of a module's output that a backward can start from; containers are searched level by level.

    These are `OUTPUTS` at most, and `VISITED` items at most are visited, so that an output may hold anything.
    """
    if isinstance(output, torch.Tensor):
        return (output,) if output.requires_grad and output.grad_fn is not None else ()
    return _within(output)


def _within(output: object) -> Iterator[torch.Tensor]:
    """Those of an output that is no tensor."""
    found = 0
    # An output may be an object of the user's own; its attributes are searched, but not those of what is in it.
    known = isinstance(output, dict | list | tuple) or dataclasses.is_dataclass(output)
    level = deque([output] if known else itertools.islice(getattr(output, "__dict__", {}).values(), VISITED))
    for _ in range(VISITED):
        if not level or found == OUTPUTS:
            return
        item = level.popleft()
        if isinstance(item, torch.Tensor):
            if _in_a_graph(item):
                found += 1
                yield item
        elif isinstance(item, dict):
            level.extend(itertools.islice(item.values(), VISITED))
        elif isinstance(item, list | tuple):
            level.extend(itertools.islice(item, VISITED))
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            level.extend(getattr(item, field.name, None) for field in dataclasses.fields(item))


def _in_a_graph(tensor: torch.Tensor) -> bool:
    """Whether a backward can start from the tensor; a leaf belongs to no graph, and would keep a hook permanently."""
    return tensor.requires_grad and tensor.grad_fn is not None
