"""Where versions of PyTorch differ for the tests: names that have moved since 2.4, what came later, what some warn of.

`make compat` loads this module as a plugin of pytest, which then ignores `WARNINGS`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch._dynamo import compiled_autograd

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""The running version, as (2, 13)."""

WARNINGS: dict[str, type[Warning]] = {
    "`torch.cpu.amp.autocast(args...)` is deprecated": FutureWarning,  # 2.4: where it recomputes
    "You are using `torch.load` with `weights_only=False`": FutureWarning,  # 2.4 and 2.5: where a tensor is unpickled
    "DTensor random operators may not have complete support on cpu": UserWarning,  # 2.4: parallelize_module
    "Skipping serialization of skipfiles_inline_module_allowlist value": UserWarning,  # 2.6: inductor's cache
    "Trying to prepend a node to itself": UserWarning,  # 2.6: compiled autograd
    "`torch.jit.": FutureWarning,  # 2.15: deprecated, and used by torch itself
}
"""How messages begin by which other versions warn of themselves, whatever the tests do."""

if VERSION >= (2, 5):
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode
else:
    from torch.distributed._tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
    from torch.distributed._tensor.debug import CommDebugMode

if VERSION >= (2, 6):
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm
else:
    from torch.distributed._composable.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    def get_total_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """The norm of all tensors together, as `clip_grad_norm_` takes it."""
        return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in tensors]))

    def clip_grads_with_norm_(parameters: Iterable[torch.Tensor], most: float, total: torch.Tensor) -> None:
        """Scales gradients of a known norm down to `most`, as `clip_grad_norm_` does."""
        for parameter in parameters:
            parameter.grad.mul_(torch.clamp(most / (total + 1e-6), max=1.0))


enable_compiled_autograd: Any = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable
"""Compiles the backwards within, by a function that compiles a graph."""

__all__ = [
    "VERSION", "WARNINGS", "CPUOffloadPolicy", "CommDebugMode", "DTensor", "MixedPrecisionPolicy", "OffloadPolicy",
    "Partial", "Placement", "Replicate", "Shard", "clip_grads_with_norm_", "distribute_tensor", "enable_compiled_autograd",
    "fully_shard", "get_total_norm", "let_torch_warn", "need", "recompiled",
]  # fmt: skip


def need(major: int, minor: int, what: str) -> None:
    """Skips the running test before the version that `what` came with."""
    if (major, minor) > VERSION:
        pytest.skip(f"{what} came with torch {major}.{minor}")


def recompiled(metrics: Any) -> bool:  # noqa: ANN401 - a record of dynamo
    """Return whether a compilation was of a frame that had been compiled before."""
    return metrics.recompile_reason is not None if VERSION >= (2, 9) else bool(getattr(metrics, "cache_size", 0))


def let_torch_warn() -> None:
    """Ignores, until the filters of warnings change, what other versions warn of themselves."""
    for message, category in WARNINGS.items():
        warnings.filterwarnings("ignore", re.escape(message), category)


def pytest_configure(config: pytest.Config) -> None:
    """The same for all tests of a run with this plugin."""
    for message, category in WARNINGS.items():
        config.addinivalue_line("filterwarnings", f"ignore:{re.escape(message)}:{category.__name__}")
