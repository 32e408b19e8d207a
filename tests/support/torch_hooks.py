"""The hooks that are registered with PyTorch, which has no public list of them: the only place where tests read these names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer


def module_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """Return the forward and backward hooks of one module, without those of its children."""
    tables = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return [hook for table in tables for hook in table.values()]


def tensor_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """Return the gradient hooks and the post-accumulate hooks of a tensor."""
    return [hook for table in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks) for hook in (table or {}).values()]


def global_step_hooks() -> list[Callable[..., Any]]:
    """Return the hooks around the step of every optimizer of the process."""
    tables = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    return [hook for table in tables for hook in table.values()]


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks around the step of one optimizer."""
    tables = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return [hook for table in tables for hook in table.values()]


def all_hooks(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return every hook that a training with this model and these optimizers would run."""
    hooks = [hook for module in model.modules() for hook in module_hooks(module)]
    hooks += [hook for parameter in model.parameters() for hook in tensor_hooks(parameter)]
    hooks += [hook for optimizer in optimizers for hook in optimizer_hooks(optimizer)]
    return hooks + global_step_hooks()
