"""Where versions of PyTorch differ for the tests: names that have moved since 2.4, and what only newer ones have."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""The running version, as (2, 13)."""

if VERSION >= (2, 5):
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode
else:
    from torch.distributed._tensor import DTensor, Partial, Placement, Replicate, Shard
    from torch.distributed._tensor.debug import CommDebugMode

if VERSION >= (2, 6):
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from torch.nn.utils import get_total_norm
else:
    from torch.distributed._composable.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    def get_total_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """The norm of all tensors together, as `clip_grad_norm_` takes it."""
        return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in tensors]))


__all__ = [
    "VERSION",
    "CPUOffloadPolicy",
    "CommDebugMode",
    "DTensor",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "fully_shard",
    "get_total_norm",
    "need",
]


def need(major: int, minor: int, what: str) -> None:
    """Skips the running test before the version that `what` came with."""
    if (major, minor) > VERSION:
        pytest.skip(f"{what} came with torch {major}.{minor}")
