"""The norm of one gradient at a time, for hooks that see it while others are still computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from torch_grad_exporter.statistics import device, host
from torch_grad_exporter.statistics.batches import Batch, plain_local, slices
from torch_grad_exporter.statistics.layout import Layout

# A number if the gradient is on the CPU, else a tensor of shape (1,) on its device.
Norm = float | torch.Tensor

_NORMS = Layout(norms_only=True)


@torch.no_grad()
def norms(gradient: torch.Tensor, added_to: torch.Tensor | None = None, wide: device.Wide = device.wide) -> Iterator[Norm]:
    """Return the norms of the parts of a gradient, whose squares add up to that of the whole.

    A backward is about to add it to `added_to`, if that is given: the sum is measured piece by
    piece, so that the memory needed stays small and neither is changed. What is empty has no part.
    """
    most = host.BLOCK_ELEMENTS if gradient.device.type == "cpu" else device.CHUNK_ELEMENTS // 2
    if added_to is None:
        parts: Iterable[torch.Tensor] = (gradient,)
    elif gradient.numel() <= most or not gradient.layout is added_to.layout is torch.strided:
        parts = (gradient + added_to,)
    else:
        parts = (part + other for part, other in zip(slices(gradient, most), slices(added_to, most), strict=True))
    for part in parts:
        batch = Batch.of((0,), (plain_local(part, keep_sparse=True),))
        if batch.elements and part.device.type == "cpu":
            yield float(host.measure((batch,), _NORMS, counts=False)[0][0, 0])
        elif batch.elements:
            rows = device.norms(batch, wide(part.device))
            yield from torch.split(rows.prod(dim=1), 1)  # without float64 a norm comes with its scale
