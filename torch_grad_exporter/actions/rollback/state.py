"""TrainingState: what a training changes by itself, to be copied and to be written back in place.

These are parameters that are trained, buffers, the state of optimizers, and the scale of a gradient scaler. Tensors stay the same
objects, so that compiled code and CUDA graphs go on using them. A sharded parameter gives the part that this rank has.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_grad_exporter.actions.rollback.packing import SavedTensor, StatePacking, StateWriting
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.torch_compat.optimizers import LossScale, scaler_state

# Of a parameter group, what schedulers and scripts set: these go on with the data. Other numbers go back, since some optimizers
# keep a part of their state there.
SCHEDULED = frozenset((
    "params", "lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "weight_decay",
    "betas", "momentum", "base_momentum", "max_momentum",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackedOptimizer:
    """The state of an optimizer: its entries, by weak references to parameters or by other keys, and numbers of its groups."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    entries: Sequence[tuple[Any, Any]]
    groups: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, packing: StatePacking) -> PackedOptimizer:
        """Return the state of now. Raises `UncopiableError`."""
        what = f"the state of {type(optimizer).__name__}"
        entries = [
            (weakref.ref(key) if isinstance(key, torch.Tensor) else key, packing.packed(entry, what))
            for key, entry in optimizer.state.items()
        ]
        groups = [
            {
                name: packing.packed(value, what)
                for name, value in group.items()
                if name not in SCHEDULED and isinstance(value, int | float | torch.Tensor)
            }
            for group in optimizer.param_groups
        ]
        return cls(weakref.ref(optimizer), entries, groups)

    def add_to(self, writing: StateWriting) -> None:
        """Write it back with the others, and remove what the optimizer has kept only since then."""
        optimizer = self.optimizer()
        if optimizer is None:
            return
        resolved = [(key() if isinstance(key, weakref.ref) else key, entry) for key, entry in self.entries]
        saved = {key: entry for key, entry in resolved if key is not None}
        entries: dict[Any, Any] = {}
        for key, entry in saved.items():
            now = optimizer.state.get(key)
            if isinstance(now, dict) and isinstance(entry, dict):
                entries[key] = {name: writing.value(now.get(name), each) for name, each in entry.items()}
            else:
                entries[key] = writing.value(now, entry)
        writing.later(functools.partial(_replace_entries, optimizer.state, entries))
        for group, numbers in zip(optimizer.param_groups, self.groups, strict=False):
            values = {name: writing.value(group.get(name), number) for name, number in numbers.items()}
            writing.later(functools.partial(group.update, values))


def _replace_entries(state: dict[Any, Any], entries: Mapping[Any, Any]) -> None:
    for key in [key for key in state if key not in entries]:
        del state[key]
    for key, entry in entries.items():
        now = state.get(key)
        if isinstance(now, dict) and isinstance(entry, dict):  # it stays the same object
            now.clear()
            now.update(entry)
        else:
            state[key] = entry


@dataclass(frozen=True, slots=True)
class PackedState:
    """Where the tensors of a copy belong; holds nothing of the training strongly."""

    parameters: Sequence[tuple[weakref.ref[torch.nn.Parameter], SavedTensor]]
    buffers: Sequence[tuple[weakref.ref[torch.nn.Module], str, SavedTensor]]
    optimizers: Sequence[PackedOptimizer]
    scaler: Mapping[str, SavedTensor]


class TrainingState:
    """The state of one exporter's models and of what trains them. For the training thread.

    Args:
        index: The layers of the models.
        optimizers: Those that train the models.
        loss_scale: Knows the gradient scaler.
    """

    def __init__(self, index: LayerIndex, optimizers: Optimizers, loss_scale: LossScale) -> None:
        self._index = index
        self._optimizers = optimizers
        self._loss_scale = loss_scale

    def _trainers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for _, optimizer in self._optimizers.numbered()]

    def _parameters(self, *, frozen: bool = False) -> list[torch.nn.Parameter]:
        """Return those that optimizers own or that require a gradient; others change by nothing that goes back.

        `frozen`: those as well.
        """
        groups = [group for optimizer in self._trainers() for group in optimizer.param_groups]
        parameters = {id(parameter): parameter for group in groups for parameter in group["params"]}
        if not (self._index.fully_sharded and parameters):  # else the modules may show gathered ones, which are not theirs
            for root in self._index.roots():
                parameters |= {id(parameter): parameter for parameter in root.parameters() if frozen or parameter.requires_grad}
        return [*parameters.values()]

    def _buffers(self) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
        modules = {id(module): module for root in self._index.roots() for module in root.modules()}
        for module in modules.values():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield module, name, buffer

    def pack(self) -> tuple[PackedState, list[torch.Tensor]]:
        """Return what is there now, and its plain tensors. Raises `UncopiableError`."""
        packing = StatePacking()
        packed = PackedState(
            [(weakref.ref(parameter), packing.packed(parameter, "a parameter")) for parameter in self._parameters()],
            [(weakref.ref(module), name, packing.packed(buffer, f"the buffer {name}")) for module, name, buffer in self._buffers()],
            [PackedOptimizer.of(optimizer, packing) for optimizer in self._trainers()],
            packing.packed(scaler_state(self._loss_scale.scaler), "the loss scale"),
        )
        return packed, packing.tensors

    @torch.no_grad()
    def write(self, state: PackedState, copies: Sequence[torch.Tensor]) -> None:
        """Write a state back, in place; on CUDA without waiting.

        Args:
            state: What `pack` returned.
            copies: Those of its tensors, in its order.

        Raises:
            RuntimeError: A parameter was replaced since, or has another shape or type. Then nothing is written.
        """
        writing = StateWriting(copies)
        present = set(map(id, self._parameters(frozen=True)))
        for reference, saved in state.parameters:
            parameter = reference()
            if parameter is None or id(parameter) not in present:
                raise RuntimeError("a parameter of the copy was replaced since")
            if writing.value(parameter, saved) is not parameter:
                raise RuntimeError("a parameter has another shape or type than in the copy")
        for holder, name, saved in state.buffers:
            module = holder()
            if module is not None and module._buffers.get(name) is not None:
                value = writing.value(module._buffers[name], saved)
                writing.later(functools.partial(module._buffers.__setitem__, name, value))
        known = {packed.optimizer() for packed in state.optimizers}
        for optimizer in self._trainers():
            if optimizer not in known:  # it has stepped only since then
                writing.later(optimizer.state.clear)
        for packed in state.optimizers:
            packed.add_to(writing)
        for name, tensor in scaler_state(self._loss_scale.scaler).items():
            writing.value(tensor, state.scaler.get(name))
        writing.write()
