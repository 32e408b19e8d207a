"""How many training examples go into a forward."""

from __future__ import annotations

from collections.abc import Mapping

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
