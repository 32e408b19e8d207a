"""What FSDP, of either kind, keeps of parameters."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_grad_exporter.torch_compat.lost import gone, has


def follows_freezing() -> bool:
    """Return whether FSDP2 hands `requires_grad` on to the gathered parameters at each forward, as from torch 2.6 on."""
    places = ("torch.distributed.fsdp._fully_shard._fsdp_param", "torch.distributed._composable.fsdp._fsdp_param")
    return any(hasattr(sys.modules.get(place), "set_requires_grad_if_needed") for place in places)


@dataclass(frozen=True, slots=True)
class Flat:
    """The parameters of one `FullyShardedDataParallel` module, which it keeps in one flat parameter.

    `originals`: the module's own parameters, where the script sees those, else `None`. `elements`: how many of each this rank has,
    or, first and alone, how many of the flat parameter. `padding`: what follows those in the flat one. `sharded`: whether other
    ranks have the rest. `group`, `copies`: the ranks that share it, and those that have the same part, if there are more.
    """

    parameter: torch.nn.Parameter
    originals: Sequence[torch.nn.Parameter] | None
    elements: Sequence[int]
    padding: int
    sharded: bool
    group: Any
    copies: Any


def flat_wrapper() -> type[torch.nn.Module] | None:
    """Return the class `FullyShardedDataParallel`; `None` where the script has not imported it."""
    wrapper: type[torch.nn.Module] | None = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return wrapper


def flat_of(wrapper: torch.nn.Module) -> Flat | None:
    """Return what a `FullyShardedDataParallel` module itself keeps; `None` where that is nothing, or is not shown."""
    if not hasattr(wrapper, "_handle"):
        gone("torch.distributed.fsdp.FullyShardedDataParallel._handle")
        return None
    handle: Any = wrapper._handle
    if handle is None:
        return None
    flat: Any = getattr(handle, "flat_param", None)
    infos, padding = getattr(flat, "_shard_param_infos", None), getattr(flat, "_shard_numel_padded", None)
    sharded = getattr(handle, "uses_sharded_strategy", None)
    if infos is None or padding is None or sharded is None or not has(flat, "_sharded_size"):
        gone("torch.distributed.fsdp.FullyShardedDataParallel._handle")
        return None
    originals = getattr(flat, "_params", None)
    own = [info.numel_in_shard or 0 for info in infos] if originals is not None else [flat._sharded_size.numel() - padding]
    copies = getattr(wrapper, "_inter_node_pg", None) if sharded else None
    return Flat(flat, originals, own, padding, sharded, getattr(wrapper, "process_group", None), copies)


def is_flattened(tensor: torch.Tensor) -> bool:
    """Return whether `FullyShardedDataParallel` keeps a parameter in a flat one, or it is that one."""
    return bool(getattr(tensor, "_fsdp_flattened", False))


def awaits_reduction(flat: torch.Tensor) -> bool:
    """Return whether the gradient of a sharded flat parameter is still this rank's own and whole, as after `no_sync()`."""
    gradient, whole = flat.grad, getattr(flat, "_unpadded_unsharded_size", None)
    return gradient is not None and gradient.shape == whole != getattr(flat, "_sharded_size", None)
