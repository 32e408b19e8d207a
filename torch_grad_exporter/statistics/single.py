"""The norm of one gradient at a time, for hooks that see it while others are still computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from torch_grad_exporter.statistics import device, host
from torch_grad_exporter.statistics.batches import Batch, is_ordinary, plain_local, slices

# A number if the gradient is on the CPU, else a tensor of shape (1,) on its device.
Norm = float | torch.Tensor


@torch.no_grad()
def norms(gradient: torch.Tensor, added_to: torch.Tensor | None = None, wide: device.Wide = device.wide) -> Iterator[Norm]:
    """Return the norms of the parts of a gradient, whose squares add up to that of the whole.

    A backward is about to add it to `added_to`, if that is given: the sum is measured piece by
    piece, so that the memory needed stays small and neither is changed. What is empty has no part.
    """
    if added_to is None:
        parts: Iterable[torch.Tensor] = (gradient,)
    else:
        most = host.BLOCK_ELEMENTS if gradient.device.type == "cpu" else device.CHUNK_ELEMENTS // 2
        if gradient.numel() <= most or not gradient.layout is added_to.layout is torch.strided:
            parts = (gradient + added_to,)
        else:
            if gradient.is_contiguous() and added_to.is_contiguous():  # many small rows are then one
                gradient, added_to = gradient.view(-1), added_to.view(-1)
            parts = (one + other for one, other in zip(slices(gradient, most), slices(added_to, most), strict=True))
    for part in parts:
        values = part.detach() if is_ordinary(part) else plain_local(part, keep_sparse=True)
        if values.numel() and values.device.type == "cpu":
            yield float(host.norms((Batch((0,), (values,), None),))[0])
        elif values.numel():
            rows = device.norms(Batch((0,), (values,), None), wide(values.device))
            yield from torch.split(rows.prod(dim=1), 1)  # without float64 a norm comes with its scale
