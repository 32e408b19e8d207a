"""TrainingState: what a training changes by itself, to be copied and to be written back in place.

These are parameters that are trained, buffers, the state of optimizers, and the scale of a gradient scaler. Tensors stay the same
objects, so that compiled code and CUDA graphs go on using them. A sharded parameter gives the part that this rank has.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.torch_compat.optimizers import LossScale, scaler_state

# Of a parameter group, what schedulers and scripts set: these go on with the data. Other numbers go back, since some optimizers
# keep a part of their state there.
SCHEDULED = frozenset((
    "params", "lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "weight_decay",
    "betas", "momentum", "base_momentum", "max_momentum",
))  # fmt: skip

# Values of a state that never change, so that a copy may share them.
_CONSTANT = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class UncopiableError(TypeError):
    """A state holds something of which no copy can be made."""


def parts_of(tensor: Any, what: str) -> list[torch.Tensor]:  # noqa: ANN401 - a tensor, of which mypy says too little
    """Return the plain tensors that hold the data: the tensor's own, or those within one of a subclass, such as `DTensor`.

    Raises:
        UncopiableError: One of them is sparse, quantized by the older interface, or has no data. `what` names the tensor.
    """
    if is_traceable_wrapper_subclass(tensor):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [part for each in inner if isinstance(each, torch.Tensor) for part in parts_of(each, what)]
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "without data" if tensor.is_meta else "quantized" if tensor.is_quantized else f"of the layout {tensor.layout}"
        raise UncopiableError(f"{what} is a tensor {kind}, which Rollback cannot copy")
    plain: torch.Tensor = tensor.detach()
    for dimension, stride in enumerate(plain.stride()):
        if stride == 0 and plain.size(dimension) > 1:  # all along it is the same memory
            plain = plain.narrow(dimension, 0, 1)
    return [plain]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a copy.

    Attributes:
        places: Those of its plain tensors among the copy's.
        device: The tensor's.
        plain: Whether it is a plain one itself, of which a new one can be made.
    """

    places: range
    device: torch.device
    plain: bool


class StatePacking:
    """Takes a state apart into plain tensors, and what says where they belong.

    Attributes:
        tensors: The plain tensors, in the order in which they were found.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def packed(self, value: Any, what: str) -> Any:  # noqa: ANN401 - any part of a state
        """Return the value with a `SavedTensor` for each tensor. Raises `UncopiableError`."""
        if isinstance(value, torch.Tensor):
            first = len(self.tensors)
            self.tensors += parts_of(value, what)
            return SavedTensor(range(first, len(self.tensors)), value.device, not is_traceable_wrapper_subclass(value))
        if isinstance(value, Mapping):
            return {key: self.packed(each, f"{what}[{key!r}]") for key, each in value.items()}
        if isinstance(value, list | tuple):
            packed = [self.packed(each, what) for each in value]
            return packed if isinstance(value, list) else tuple(packed)
        if not isinstance(value, _CONSTANT):
            raise UncopiableError(f"{what} is of the class {type(value).__name__}, which Rollback cannot copy")
        return value


class StateWriting:
    """Finds where each part of a copy goes, and changes the training only in `write`: what raises before leaves it as it was."""

    def __init__(self, copies: Sequence[torch.Tensor]) -> None:
        self._copies = copies
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._changes: list[Callable[[], object]] = []

    def value(self, now: object, saved: Any) -> Any:  # noqa: ANN401 - any part of a state
        """Return the value to keep: the tensor that is there, if it is one of the same form, else a new one.

        Raises:
            RuntimeError: A tensor made of others, such as a `DTensor`, is gone.
        """
        if isinstance(saved, SavedTensor):
            copies = [self._copies[place] for place in saved.places]
            if isinstance(now, torch.Tensor):
                parts = parts_of(now, "a tensor")
                if [(part.shape, part.dtype) for part in parts] == [(copy.shape, copy.dtype) for copy in copies]:
                    self._pairs += zip(parts, copies, strict=True)
                    return now
            if not saved.plain:
                raise RuntimeError("a tensor made of others, such as a DTensor, was replaced since the copy")
            return copies[0].to(saved.device, non_blocking=True, copy=True)
        if isinstance(saved, dict):
            there = now if isinstance(now, dict) else {}
            return {key: self.value(there.get(key), each) for key, each in saved.items()}
        if isinstance(saved, list | tuple):
            # Never in place: such lists are histories, in which tensors change their places.
            new = [self.value(None, each) for each in saved]
            return new if isinstance(saved, list) else tuple(new)
        return saved

    def later(self, change: Callable[..., object], *arguments: object) -> None:
        """Call this in `write`."""
        self._changes.append(functools.partial(change, *arguments))

    def write(self) -> None:
        """Write; on CUDA without waiting."""
        for tensor, copy in self._pairs:
            tensor.copy_(copy, non_blocking=True)
        for change in self._changes:
            change()


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
        entries = {key: writing.value(optimizer.state.get(key), entry) for key, entry in resolved if key is not None}
        writing.later(_replace_entries, optimizer.state, entries)
        for group, numbers in zip(optimizer.param_groups, self.groups, strict=False):
            writing.later(group.update, writing.value(group, numbers))


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
    """The state of one exporter's models and of what trains them. For the training thread."""

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
                writing.later(module._buffers.__setitem__, name, writing.value(module._buffers[name], saved))
        known = {packed.optimizer() for packed in state.optimizers}
        for optimizer in self._trainers():
            if optimizer not in known:  # it has stepped only since then
                writing.later(optimizer.state.clear)
        for packed in state.optimizers:
            packed.add_to(writing)
        for name, tensor in scaler_state(self._loss_scale.scaler).items():
            writing.value(tensor, state.scaler.get(name))
        writing.write()
