"""Which tensors are plain, the part of a DTensor, and operations on many tensors at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_grad_exporter.torch_compat.lost import find

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def is_plain(tensor: torch.Tensor | None) -> bool:
    """Return whether it is an ordinary tensor or parameter, and no object of another class that stands for one."""
    return type(tensor) in PLAIN


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, another tensor itself."""
    if type(tensor) in PLAIN:
        return tensor
    part: torch.Tensor | None = getattr(tensor, "_local_tensor", None)
    if part is not None or not hasattr(tensor, "to_local"):
        return tensor if part is None else part
    with torch.no_grad():
        part = tensor.to_local()
    return tensor if part is None else part


_norms: Any = find("torch._foreach_norm")
_multiply: Any = find("torch._foreach_mul_")
_by_kind: Any = find("torch.utils._foreach_utils._group_tensors_by_device_and_dtype")
_at_once: Any = find("torch.utils._foreach_utils._has_foreach_support")

TensorGroup = tuple[list[torch.Tensor], list[int]]
"""Tensors of one device and type, and their places in the list that they come from."""


def by_device_and_dtype(tensors: list[torch.Tensor]) -> list[TensorGroup]:
    """Return the tensors by device and type, in the order in which `clip_grad_norm_` takes them."""
    if _by_kind is not None:
        return [(lists[0], places) for lists, places in _by_kind([tensors], with_indices=True).values()]
    groups: dict[tuple[torch.device, torch.dtype], TensorGroup] = {}
    for place, tensor in enumerate(tensors):
        group = groups.setdefault((tensor.device, tensor.dtype), ([], []))
        group[0].append(tensor)
        group[1].append(place)
    return [*groups.values()]


def can_foreach(tensors: list[torch.Tensor]) -> bool:
    """Return whether PyTorch takes these tensors, which have one device, at once."""
    if tensors[0].is_complex() and any(tensor.is_conj() for tensor in tensors):
        return False  # it fails on one that is only marked as conjugate
    return None not in (_norms, _multiply, _at_once) and bool(_at_once(tensors, tensors[0].device))


def norms_of(tensors: list[torch.Tensor], dtype: torch.dtype | None = None, *, at_once: bool) -> Sequence[torch.Tensor]:
    """Return the norm of each tensor, rounded to its own type or to `dtype`; `at_once`: as `can_foreach` says."""
    if at_once:
        norms: Sequence[torch.Tensor] = _norms(tensors, 2.0) if dtype is None else _norms(tensors, 2.0, dtype=dtype)
        return norms
    return [torch.linalg.vector_norm(tensor, 2.0, dtype=dtype) for tensor in tensors]


def multiply_(tensors: list[torch.Tensor], factor: torch.Tensor | Sequence[torch.Tensor], *, at_once: bool) -> None:
    """Multiply each tensor by one factor, or by its own; `at_once`: as `can_foreach` says."""
    if at_once:
        _multiply(tensors, factor)
        return
    factors = [factor] * len(tensors) if isinstance(factor, torch.Tensor) else factor
    for tensor, own in zip(tensors, factors, strict=True):
        tensor.mul_(own)
