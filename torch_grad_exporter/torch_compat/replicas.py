"""Wrappers that reduce gradients over ranks, pipeline schedules, meshes of ranks, and the store in which ranks meet."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from torch_grad_exporter.torch_compat.lost import gone, has


def root_mesh(mesh: Any) -> Any:  # noqa: ANN401 - a DeviceMesh, which is not in every build
    """Return the mesh from which this one was sliced; `None` where that is not available. The name has moved twice."""
    ask = getattr(mesh, "_get_root_mesh", None)
    if ask is not None:
        return ask()
    resources: Any = getattr(sys.modules.get("torch.distributed.device_mesh"), "_mesh_resources", None)
    if has(resources, "get_root_mesh"):
        return resources.get_root_mesh(mesh)
    if not has(resources, "get_parent_mesh"):  # that of torch 2.4
        gone("torch.distributed.device_mesh.DeviceMesh._get_root_mesh")
        return None
    while (parent := resources.get_parent_mesh(mesh)) is not None:
        mesh = parent
    return mesh


def active_wrapper() -> Any:  # noqa: ANN401 - a wrapper
    """Return the `DistributedDataParallel` whose forward is running, if any."""
    ask = getattr(torch.nn.parallel.DistributedDataParallel, "_get_active_ddp_module", None)
    if ask is None:
        gone("torch.nn.parallel.DistributedDataParallel._get_active_ddp_module")
    return None if ask is None else ask()


def composed_wrapper(module: torch.nn.Module) -> Any:  # noqa: ANN401 - a wrapper
    """Return the wrapper by which `replicate` changed a module in place, made in the module's first forward; `None` without one."""
    # Composed in place, the module has another class; the wrapper is in its state.
    composed = sys.modules.get("torch.distributed._composable.replicate")
    if composed is None:
        return None
    state = getattr(getattr(composed, "replicate", None), "state", None)
    if not has(composed, "DDP") or state is None:
        gone("torch.distributed._composable.replicate")
        return None
    return getattr(state(module), "_ddp", None) if isinstance(module, composed.DDP) else None


def reduced_parameters(wrapper: torch.nn.parallel.DistributedDataParallel) -> Iterable[torch.nn.Parameter]:
    """Return the parameters whose gradients a wrapper reduces."""
    parameters: Iterable[torch.nn.Parameter] | None = getattr(wrapper, "_module_parameters", None)
    return (p for p in wrapper.module.parameters() if p.requires_grad) if parameters is None else parameters


def copied_buffers(wrapper: torch.nn.parallel.DistributedDataParallel) -> list[torch.Tensor]:
    """Return the buffers that a wrapper copies from its first rank before each forward with a reduction."""
    if not getattr(wrapper, "broadcast_buffers", False):
        return []
    ignored = getattr(wrapper, "parameters_to_ignore", ())
    return [buffer for name, buffer in wrapper.module.named_buffers() if name not in ignored]


def takes_the_mean(wrapper: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return whether the wrapper makes the plain mean of gradients: no hook communicates in its place, nor is it under `join`."""
    hooks, join = getattr(wrapper, "_comm_hooks", None), getattr(wrapper, "_join_config", None)
    if hooks is None or not hasattr(join, "enable"):
        gone("torch.nn.parallel.DistributedDataParallel._comm_hooks")
        return False
    return not hooks and not getattr(join, "enable", True)


def default_store() -> Any:  # noqa: ANN401 - a store
    """Return the store of the default process group, with the group's prefix; `None` where it is not shown."""
    ask = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    if ask is None:
        gone("torch.distributed.distributed_c10d._get_default_store")
    return None if ask is None else ask()


def own_connection(store: Any, timeout: timedelta) -> Any:  # noqa: ANN401 - a store
    """Another connection to a store; where PyTorch has no `clone`, as torch 2.6, without the prefixes around the store."""
    bare: Any = without_prefix(store)
    dist: Any = torch.distributed
    if not hasattr(store, "clone"):
        if isinstance(bare, dist.TCPStore):
            return dist.TCPStore(bare.host, bare.port, is_master=False, timeout=timeout)
        if isinstance(bare, dist.FileStore):
            return dist.FileStore(bare.path)
        if isinstance(bare, dist.HashStore):
            return bare
    return store.clone()


def without_prefix(store: object) -> object:
    """Return a store without the prefixes around it; itself where they cannot be taken off."""
    return getattr(store, "_underlying_non_prefix_store", store)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline schedule. `divisor`: by what it divides gradients after its last backward, 1 for nothing; `None` if not known.

    `piecewise`: it may divide some gradients before the backwards of others, or write some without a backward.
    """

    divisor: int | None
    piecewise: bool


PIPELINES = "torch.distributed.pipelining.schedules"


def calling_pipeline(frame: types.FrameType | None) -> Pipeline | None:
    """Return the pipeline schedule among the callers, if any."""
    schedules = sys.modules.get(PIPELINES)
    while frame is not None and schedules is not None:
        if frame.f_globals is vars(schedules) and hasattr(schedule := frame.f_locals.get("self"), "_step_microbatches"):
            return _pipeline(schedules, schedule)
        frame = frame.f_back
    return None


def _pipeline(schedules: types.ModuleType, schedule: object) -> Pipeline:
    kinds = getattr(schedules, "PipelineScheduleSingle", ()), getattr(schedules, "_PipelineStageBase", None)
    single, divides = isinstance(schedule, kinds[0]), getattr(schedule, "scale_grads", None)
    if divides is None and not hasattr(kinds[1], "scale_grads"):
        divides = False  # before torch 2.6 no schedule divides
    chunks = getattr(schedule, "_n_microbatches", None)
    if divides is None or chunks is None or kinds[1] is None:
        gone("torch.distributed.pipelining.schedules._PipelineSchedule")
        return Pipeline(None, not single)
    return Pipeline(chunks if divides else 1, not single)
