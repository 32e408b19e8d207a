"""The state of models, optimizers and random generators, kept before the user's function runs and given back after it."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_grad_exporter.model.optimizers import owned_by
from torch_grad_exporter.torch_compat.tensors import local


@dataclass(slots=True)
class _Tensor:
    """A tensor and a copy of what it held."""

    tensor: torch.Tensor
    held: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Tensor:
        return cls(tensor, tensor.detach().clone())

    def restore(self) -> None:
        # Only where it differs: a write would make graphs unusable that have saved the tensor.
        if not _same(self.tensor, self.held):
            with torch.no_grad():
                if (self.tensor.shape, self.tensor.device) == (self.held.shape, self.held.device):
                    self.tensor.copy_(self.held)
                else:
                    self.tensor.data = self.held


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_meta:
        return True  # it holds nothing
    if one.layout != torch.strided or (one.shape, one.device) != (other.shape, other.device):
        return False
    return bool(torch.equal(local(one.detach()), local(other)))  # of a DTensor only this rank's part: no collective


@dataclass(slots=True)
class _Parameter:
    """A parameter: its value, whether it is frozen, and the gradient tensor with what that held."""

    value: _Tensor
    trained: bool
    gradient: _Tensor | None

    @classmethod
    def of(cls, parameter: torch.Tensor) -> _Parameter:
        gradient = parameter.grad
        return cls(_Tensor.of(parameter), parameter.requires_grad, None if gradient is None else _Tensor.of(gradient))

    def restore(self) -> None:
        self.value.restore()
        parameter = self.value.tensor
        parameter.requires_grad_(self.trained)
        if self.gradient is not None:
            self.gradient.restore()
        gradient = None if self.gradient is None else self.gradient.tensor
        if parameter.grad is not gradient:
            parameter.grad = gradient


@dataclass(slots=True)
class _ModuleState:
    """What a module has itself: its parameters and buffers by name, and whether it trains."""

    module: torch.nn.Module
    training: bool
    owned: dict[str, torch.Tensor | None]

    @classmethod
    def of(cls, module: torch.nn.Module) -> _ModuleState:
        return cls(module, module.training, _owned(module))

    def restore(self) -> None:
        self.module.training = self.training
        for name, tensor in self.owned.items():
            if getattr(self.module, name, None) is not tensor:
                setattr(self.module, name, tensor)
        for name in _owned(self.module).keys() - self.owned.keys():
            setattr(self.module, name, None)  # a buffer that was `None` before


def _owned(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        **dict(module.named_parameters(recurse=False, remove_duplicate=False)),
        **dict(module.named_buffers(recurse=False, remove_duplicate=False)),
    }


class _Optimizer:
    """An optimizer's state and groups. Tensors stay the same objects."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [(group, list(group["params"]), _kept(group, "params")) for group in optimizer.param_groups]
        self._state = {parameter: (state, _kept(state)) for parameter, state in optimizer.state.items()}

    def restore(self) -> None:
        self._optimizer.param_groups[:] = [group for group, _, _ in self._groups]
        for group, parameters, kept in self._groups:
            _give_back(group, kept)
            group["params"][:] = parameters
        for parameter in self._optimizer.state.keys() - self._state.keys():
            del self._optimizer.state[parameter]
        for parameter, (state, kept) in self._state.items():
            _give_back(state, kept)
            self._optimizer.state[parameter] = state


def _kept(values: dict[str, Any], *but: str) -> dict[str, Any]:
    """A copy of a mapping; tensors as `_Tensor`, the rest copied deeply."""
    return {k: _Tensor.of(v) if isinstance(v, torch.Tensor) else copy.deepcopy(v) for k, v in values.items() if k not in but}


def _give_back(values: dict[str, Any], kept: dict[str, Any]) -> None:
    for name in values.keys() - kept.keys() - {"params"}:
        del values[name]
    for name, value in kept.items():
        if isinstance(value, _Tensor):
            value.restore()
            values[name] = value.tensor
        else:
            values[name] = value


class SavedState:
    """Takes everything at the begin of a `with` block and gives it back at its end. Holds a copy of each tensor in between.

    An optimizer that was not given is kept when it is about to step, if it owns a parameter of the models.
    """

    def __init__(self, models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._models = list(models)
        self._optimizers = list(optimizers)
        self._restores = contextlib.ExitStack()  # goes on after one that raises
        self._tensors: set[int] = set()

    def __enter__(self) -> Self:
        self._restores.callback(_random_state())
        for module in {id(one): one for root in self._models for one in root.modules()}.values():
            self._restores.callback(_ModuleState.of(module).restore)
            for parameter in module.parameters(recurse=False):
                self._keep(parameter, _Parameter.of)
            for buffer in module.buffers(recurse=False):
                self._keep(buffer, _Tensor.of)
        for optimizer in self._optimizers:
            self._keep_optimizer(optimizer, _Parameter.of)
        self._restores.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        return self

    def _keep(self, tensor: torch.Tensor, how: Callable[[torch.Tensor], _Tensor | _Parameter]) -> None:
        if id(tensor) not in self._tensors:
            self._tensors.add(id(tensor))
            self._restores.callback(how(tensor).restore)

    def _keep_optimizer(self, optimizer: torch.optim.Optimizer, how: Callable[[torch.Tensor], _Tensor | _Parameter]) -> None:
        self._restores.callback(_Optimizer(optimizer).restore)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._keep(parameter, how)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_arguments: object) -> None:
        known = any(one is optimizer for one in self._optimizers)
        if not known and not owned_by(optimizer).isdisjoint(self._tensors):
            self._optimizers.append(optimizer)
            # What it owns beyond the models has its gradient already, which is the function's own matter.
            self._keep_optimizer(optimizer, _Tensor.of)

    def __exit__(self, *error: object) -> None:
        self._restores.close()


def _random_state() -> Callable[[], None]:
    """Gives back the state of the generators of PyTorch, on the CPU and on CUDA devices in use, of NumPy and of Python."""
    cpu, python, arrays = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - the one that users seed
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def restore() -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002 - as above
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)

    return restore
