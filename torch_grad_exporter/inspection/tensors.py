"""The tensors in a module's output: which is measured, and along which dimension its units lie."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

import torch

from torch_grad_exporter.model.sharding import is_partial
from torch_grad_exporter.torch_compat.tensors import local

# Tensors of an input or output that are looked at, and items that are visited, at most: it may be a cache of thousands.
TENSORS, VISITED = 16, 64

# Modules whose channels come before this many dimensions of space.
_SPATIAL: dict[type[torch.nn.Module], int] = {
    kind: dims
    for dims, kinds in enumerate(
        (
            (torch.nn.Conv1d, torch.nn.ConvTranspose1d, torch.nn.MaxPool1d, torch.nn.AvgPool1d, torch.nn.AdaptiveAvgPool1d),
            (torch.nn.Conv2d, torch.nn.ConvTranspose2d, torch.nn.MaxPool2d, torch.nn.AvgPool2d, torch.nn.AdaptiveAvgPool2d),
            (torch.nn.Conv3d, torch.nn.ConvTranspose3d, torch.nn.MaxPool3d, torch.nn.AvgPool3d, torch.nn.AdaptiveAvgPool3d),
        ),
        start=1,
    )
    for kind in kinds
}

_CHANNELS_SECOND = (
    torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm, torch.nn.GroupNorm,
    torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d, torch.nn.LocalResponseNorm,
)  # fmt: skip
_FEATURES_LAST = (
    torch.nn.Linear, torch.nn.Bilinear, torch.nn.LayerNorm, torch.nn.Embedding, torch.nn.EmbeddingBag,
    torch.nn.MultiheadAttention, torch.nn.RNNBase,
)  # fmt: skip


def tensors_in(value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in what a module got or gave, with their place in it; containers are searched level by level.

    An object of the user's own is searched as well, but not those within it.
    """
    if isinstance(value, torch.Tensor):
        yield "", value
        return
    count = 0
    known = isinstance(value, dict | list | tuple)
    level: deque[tuple[str, object]] = deque([("", value if known else getattr(value, "__dict__", None))])
    for _ in range(VISITED):
        if not level or count == TENSORS:
            return
        where, item = level.popleft()
        if isinstance(item, torch.Tensor):
            count += 1
            yield where, item
        elif isinstance(item, dict | list | tuple):
            inside = item.items() if isinstance(item, dict) else enumerate(item)
            level.extend((f"{where}.{key}" if where else str(key), part) for key, part in itertools.islice(inside, VISITED))


def first_of(output: object) -> torch.Tensor | None:
    """Return the first floating-point or complex tensor in a module's output."""
    return next((tensor for _, tensor in tensors_in(output) if tensor.is_floating_point() or tensor.is_complex()), None)


def dense(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of a tensor, plain, real and without its graph; the magnitudes of a complex one.

    None if it is empty or its elements cannot be measured: sparse, quantised or nested tensors, subclasses other than a DTensor,
    and a DTensor of partial sums.
    """
    if is_partial(tensor):
        return None
    part = local(tensor).detach()
    if type(part) not in (torch.Tensor, torch.nn.Parameter) or part.layout is not torch.strided:
        return None
    if part.is_quantized or part.device.type == "meta" or part.numel() == 0:
        return None
    return part.abs() if part.is_complex() else part


class UnitDims:
    """Along which dimension the units of outputs lie. Where a module's class does not show it, the last output of that shape does.

    So the ReLU after a convolution has channels, and the one after a linear layer features, whatever their dimensions.
    """

    MOST = 256  # shapes that are remembered

    def __init__(self) -> None:
        self._known: dict[torch.Size, int] = {}

    def of(self, module: torch.nn.Module, output: torch.Tensor) -> int | None:
        """Return the dimension, None if the output has fewer than two, so that its elements may be examples."""
        dims = output.dim()
        if dims < 2:
            return None
        unit_dim = self._by_class(module, dims)
        if unit_dim is None:
            return self._known.get(output.shape, 1 if dims >= 4 else dims - 1)
        if len(self._known) >= self.MOST:
            self._known.clear()
        self._known[output.shape] = unit_dim
        return unit_dim

    def _by_class(self, module: torch.nn.Module, dims: int) -> int | None:
        for kind, spatial in _SPATIAL.items():
            if isinstance(module, kind):
                return max(0, dims - 1 - spatial)
        if isinstance(module, _CHANNELS_SECOND):
            return 1
        return dims - 1 if isinstance(module, _FEATURES_LAST) else None
