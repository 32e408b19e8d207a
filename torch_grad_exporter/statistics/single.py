"""The norm of one gradient at a time, for hooks that see it only while others are still computed.

A gradient that a backward is about to add to another one is measured as their sum, a piece at a time, so that the memory
needed stays small and neither is changed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from torch_grad_exporter.statistics import device, host, squares
from torch_grad_exporter.statistics.batches import Batch, is_ordinary, plain_local, resolved
from torch_grad_exporter.statistics.blocks import BLOCK_ELEMENTS, Scratch, slices

Norm = float | torch.Tensor
"""A norm: a number if the gradient is on the CPU, else a tensor of shape (1,) on its device."""


@torch.no_grad()
def norms(
    gradient: torch.Tensor, added_to: torch.Tensor | None, scratch: Scratch, wide: device.Wide = device.wide
) -> Iterator[Norm]:
    """The norms of the parts of a gradient, or of its sum with the one that it is added to; without synchronising.

    Their squares add up to the square of the whole. A large sum has many parts, and so has a large gradient on a device other than
    the CPU; all else has one, and what is empty none.
    """
    if added_to is None:
        yield from _norm(gradient, scratch, wide)
        return
    most = BLOCK_ELEMENTS if gradient.device.type == "cpu" else device.CHUNK_ELEMENTS // 2
    dense = gradient.layout is torch.strided and added_to.layout is torch.strided
    if gradient.numel() <= most or not dense:
        yield from _norm(gradient + added_to, scratch, wide)
        return
    if gradient.is_contiguous() and added_to.is_contiguous():  # many small rows are then one
        gradient, added_to = gradient.view(-1), added_to.view(-1)
    for part, other in zip(slices(gradient, most), slices(added_to, most), strict=True):
        yield from _norm(part + other, scratch, wide)


def _norm(gradient: torch.Tensor, scratch: Scratch, wide: device.Wide) -> Iterator[Norm]:
    values = gradient.detach() if is_ordinary(gradient) else plain_local(gradient, keep_sparse=True)
    if values.numel() == 0:
        return
    if values.device.type != "cpu":
        rows, _ = device.norms(Batch((0,), (values,), None), wide(values.device))
        found = rows[:, 0] if rows.shape[1] == 1 else rows.prod(dim=1)  # without float64, times the scale
        yield from torch.split(found, 1)
        return
    values = resolved(values)
    batch = Batch((0,), (values,), None)
    fast = _fast(values)
    yield float(host.norms((batch,), scratch, float64=False)[0]) if fast is None else fast


def _fast(values: torch.Tensor) -> float | None:
    """The norm of a small float32 gradient at a fourth of the price, `None` where it cannot be had or trusted that way."""
    if values.dtype is not torch.float32 or values.numel() > BLOCK_ELEMENTS or not values.is_contiguous():
        return None
    with np.errstate(all="ignore"):
        total = float(squares.squares(values.resolve_neg().numpy().reshape(1, -1))[0])
    return float(np.sqrt(total)) if values.numel() * squares.FAITHFUL < total < np.inf else None
