"""What the exporter does without where PyTorch lacks a private name, and how such names are found."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch

from torch_grad_exporter.errors import say

logger = logging.getLogger("torch_grad_exporter")

_RUNG = "gradients are read when optimizers step, so norms are those after clipping"
_COUNTING = "steps are never only counted, which costs some microseconds per step"
_COMPILED = "below a compiled function PyTorch may compile the exporter's hooks, too"

LOST: Mapping[str, str] = {
    "torch._C._current_graph_task_id": _RUNG,
    "torch.autograd.Variable._execution_engine.queue_callback": _RUNG,
    "torch.Tensor._version": _RUNG,
    "torch.optim.optimizer._global_optimizer_pre_hooks": _COUNTING,
    "torch.optim.optimizer._global_optimizer_post_hooks": _COUNTING,
    "torch.nn.Module._forward_hooks": f"{_COUNTING}, and gradients of FSDP2 may be missed",
    "torch._C._dynamo.eval_frame.set_eval_frame": _COMPILED,
    "torch._C._dynamo.eval_frame.skip_code": _COMPILED,
    "torch._dynamo.callback.callback_handler": "the time of compilations is that of steps, or of the start",
    "torch._C._functorch.maybe_current_level": "backwards within torch.func count as backwards of the training",
    "torch.amp.GradScaler._scale": "the training thread waits for the device to learn the loss scale of a sample",
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh": "sums over ranks count copies on other mesh dimensions again",
    "torch.distributed._composable.replicate": "layers of a model under replicate() are shown by rank 0 only",
    "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module": "layers of a wrapped model are shown by rank 0 only",
    "torch.nn.parallel.DistributedDataParallel._comm_hooks": "the gradient noise scale is not known",
    "torch.distributed.fsdp.FullyShardedDataParallel._handle": "gradients under FullyShardedDataParallel are not shown",
    "torch.distributed.pipelining.schedules._PipelineSchedule": f"under a pipeline schedule {_RUNG}",
    "torch.distributed.distributed_c10d._get_default_store": "ranks find each other only where torchrun started them",
}
"""What the exporter does without where a private name is gone."""

missing: dict[str, bool] = {}
"""The names of `LOST` that were found to be missing, with whether that was logged."""


def warn() -> None:
    """Log for each name that is gone, once per process, what the exporter does without."""
    for name, logged in missing.items():
        if not logged:
            missing[name] = True
            message = "this version of PyTorch (%s) has no %s: %s"
            say(logger, logging.WARNING, message, torch.__version__, name, LOST[name])


def find(path: str) -> Any:  # noqa: ANN401 - whatever PyTorch keeps there
    """What is found at a path that begins with `torch`, `None` if it is missing."""
    value: Any = torch
    name, *parts = path.split(".")
    for part in parts:
        name = f"{name}.{part}"
        value = getattr(value, part, sys.modules.get(name))  # torch.optim deletes its attribute `optimizer`
    if value is None and path in LOST:
        missing[path] = False
    return value


def gone(path: str) -> None:
    """Remember and log that a name is missing that is looked up while the training runs."""
    if path not in missing:
        missing[path] = False
        warn()


def has(owner: object, *names: str) -> bool:
    """Return whether an object of PyTorch's has all of these attributes."""
    return all(getattr(owner, name, None) is not None for name in names)
