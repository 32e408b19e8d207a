"""SavedState: what a run of the user's function changes in models, optimizers and random generators, put back after it."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_grad_exporter.model.optimizers import owned_by
from torch_grad_exporter.torch_compat.tensors import local

Values = dict[str, Any]


class SavedState:
    """The state at the begin of a `with` block, restored at its end. Holds a copy of each tensor in between.

    Tensors stay the same objects. An optimizer that was not given is kept when it is about to step, if it owns a parameter of the
    models.
    """

    def __init__(self, models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._models = list(models)
        self._optimizers = list(optimizers)
        self._restores = contextlib.ExitStack()  # goes on after one that raises
        self._tensors: set[int] = set()

    def __enter__(self) -> Self:
        self._keep_random()
        for module in {id(module): module for root in self._models for module in root.modules()}.values():
            self._restores.callback(_restore_module, module, module.training, _owned(module))
            for parameter in module.parameters(recurse=False):
                self._keep_parameter(parameter)
            for buffer in module.buffers(recurse=False):
                self._keep_tensor(buffer)
        for optimizer in self._optimizers:
            self._keep_optimizer(optimizer)
            for owned in _parameters_of(optimizer):
                self._keep_parameter(owned)
        self._restores.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._restores.close()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_arguments: object) -> None:
        known = any(other is optimizer for other in self._optimizers)
        if not known and not owned_by(optimizer).isdisjoint(self._tensors):
            self._optimizers.append(optimizer)
            self._keep_optimizer(optimizer)
            for parameter in _parameters_of(optimizer):
                # What it owns beyond the models has its gradient already, which the function has made.
                self._keep_tensor(parameter)

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        if id(tensor) not in self._tensors:
            self._tensors.add(id(tensor))
            self._restores.callback(_restore_tensor, tensor, tensor.detach().clone())

    def _keep_parameter(self, parameter: torch.Tensor) -> None:
        """Keep its value, whether it is frozen, and the gradient tensor with its value."""
        if id(parameter) not in self._tensors:
            gradient = parameter.grad
            held = None if gradient is None else gradient.detach().clone()
            self._restores.callback(_restore_gradient, parameter, parameter.requires_grad, gradient, held)
            self._keep_tensor(parameter)

    def _keep_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        groups = [(group, self._kept(group)) for group in optimizer.param_groups]
        states = [(parameter, state, self._kept(state)) for parameter, state in optimizer.state.items()]
        self._restores.callback(_restore_optimizer, optimizer, groups, states)

    def _kept(self, values: Values) -> Values:
        """Return a copy of what an optimizer has by name. Tensors and the list of parameters are the same, and kept."""
        kept: Values = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                self._keep_tensor(value)
                kept[name] = value
            elif name == "params" and isinstance(value, list):  # the same list, to which LBFGS refers
                self._restores.callback(value.__setitem__, slice(None), [*value])
                kept[name] = value
            else:
                kept[name] = copy.deepcopy(value)
        return kept

    def _keep_random(self) -> None:
        """Keep the generators of PyTorch, on the CPU and on CUDA devices in use, of NumPy and of Python."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._restores.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        self._restores.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 - the one that users seed
        self._restores.callback(random.setstate, random.getstate())
        self._restores.callback(torch.set_rng_state, torch.get_rng_state())


def _restore_tensor(tensor: torch.Tensor, held: torch.Tensor) -> None:
    # Only where it differs: a write would make graphs unusable that have saved the tensor.
    if _same(tensor, held):
        return
    with torch.no_grad():
        if (tensor.shape, tensor.device) == (held.shape, held.device):
            tensor.copy_(held)
        else:
            tensor.data = held


def _same(tensor: torch.Tensor, held: torch.Tensor) -> bool:
    if tensor.is_meta:
        return True  # it holds nothing
    if tensor.layout != torch.strided or (tensor.shape, tensor.device) != (held.shape, held.device):
        return False
    return bool(torch.equal(local(tensor.detach()), local(held)))  # of a DTensor only this rank's part: no collective


def _restore_gradient(parameter: torch.Tensor, trained: bool, gradient: torch.Tensor | None, held: torch.Tensor | None) -> None:
    parameter.requires_grad_(trained)
    if gradient is not None and held is not None:
        _restore_tensor(gradient, held)
    if parameter.grad is not gradient:
        parameter.grad = gradient


def _owned(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        **dict(module.named_parameters(recurse=False, remove_duplicate=False)),
        **dict(module.named_buffers(recurse=False, remove_duplicate=False)),
    }


def _restore_module(module: torch.nn.Module, training: bool, owned: dict[str, torch.Tensor | None]) -> None:
    module.training = training
    for name, tensor in owned.items():
        if getattr(module, name, None) is not tensor:
            setattr(module, name, tensor)
    for name in _owned(module).keys() - owned.keys():
        setattr(module, name, None)  # a buffer that was None before


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, groups: list[tuple[Values, Values]], states: list[tuple[Any, Values, Values]]
) -> None:
    optimizer.param_groups[:] = [group for group, _ in groups]
    optimizer.state.clear()
    optimizer.state.update({parameter: state for parameter, state, _ in states})
    for values, kept in (*groups, *((state, kept) for _, state, kept in states)):
        values.clear()
        values.update(kept)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
