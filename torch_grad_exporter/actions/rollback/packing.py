"""Takes parts of a training's state apart into plain tensors that can be copied, and writes copies back into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Values of a state that never change, so that a copy may share them.
_CONSTANT = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class UncopiableError(TypeError):
    """A state holds something of which no copy can be made."""


def _flattened(tensor: Any) -> tuple[Sequence[str], Any] | None:  # noqa: ANN401 - a tensor, of which mypy says too little
    """Return the attributes that hold the tensors of which this one is made, and what else makes it; None of a plain one."""
    return tensor.__tensor_flatten__() if is_traceable_wrapper_subclass(tensor) else None


@dataclass(frozen=True, slots=True)
class TensorForm:
    """How a tensor is made of plain ones.

    Attributes:
        device: The tensor's.
        kind: Its class if that is made of other tensors, such as `DTensor`; None for a plain tensor.
        inner: By attribute the forms of those, and what else it is made of, such as a mesh of devices.
        context: What `__tensor_flatten__` gave with them, and the size and the stride of the whole.
    """

    device: torch.device
    kind: type[Any] | None = None
    inner: Mapping[str, Any] = field(default_factory=dict)
    context: tuple[Any, ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        """Return the form of a tensor."""
        flattened = _flattened(tensor)
        if flattened is None:
            return cls(tensor.device)
        names, context = flattened
        inner = {name: getattr(tensor, name) for name in names}
        inner = {name: cls.of(each) if isinstance(each, torch.Tensor) else each for name, each in inner.items()}
        return cls(tensor.device, type(tensor), inner, (context, tensor.size(), tensor.stride()))

    def new(self, copies: Iterator[torch.Tensor]) -> torch.Tensor:
        """Return a new tensor on the device, of the next copies."""
        if self.kind is None:
            return next(copies).to(self.device, non_blocking=True, copy=True)
        inner = {name: form.new(copies) if isinstance(form, TensorForm) else form for name, form in self.inner.items()}
        tensor: torch.Tensor = self.kind.__tensor_unflatten__(inner, *self.context)
        return tensor


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a copy: the places of its plain tensors among the copy's, and its form."""

    places: range
    form: TensorForm


def parts_of(tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
    """Return the plain tensors that hold the data: the tensor's own, or those within one of a subclass, such as `DTensor`.

    Raises:
        UncopiableError: One of them is sparse, quantized by the older interface, or has no data. `what` names the tensor.
    """
    if (flattened := _flattened(tensor)) is not None:
        inner = [getattr(tensor, name) for name in flattened[0]]
        return [part for each in inner if isinstance(each, torch.Tensor) for part in parts_of(each, what)]
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "without data" if tensor.is_meta else "quantized" if tensor.is_quantized else f"of the layout {tensor.layout}"
        raise UncopiableError(f"{what} is a tensor {kind}, which Rollback cannot copy")
    plain = tensor.detach()
    for dimension, stride in enumerate(plain.stride()):
        if stride == 0 and plain.size(dimension) > 1:  # all along it is the same memory
            plain = plain.narrow(dimension, 0, 1)
    return [plain]


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
            return SavedTensor(range(first, len(self.tensors)), TensorForm.of(value))
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
        """Return the value to keep: the tensor that is there, if it is one of the same form, else a new one."""
        if isinstance(saved, SavedTensor):
            copies = [self._copies[place] for place in saved.places]
            if isinstance(now, torch.Tensor):
                parts = parts_of(now, "a tensor")
                if [(part.shape, part.dtype) for part in parts] == [(copy.shape, copy.dtype) for copy in copies]:
                    self._pairs += zip(parts, copies, strict=True)
                    return now
            return saved.form.new(iter(copies))
        if isinstance(saved, dict):
            return {key: self.value(None, each) for key, each in saved.items()}
        if isinstance(saved, list | tuple):
            # Never in place: such lists are histories, in which tensors change their places.
            new = [self.value(None, each) for each in saved]
            return new if isinstance(saved, list) else tuple(new)
        return saved

    def later(self, change: Callable[[], object]) -> None:
        """Call this in `write`."""
        self._changes.append(change)

    def write(self) -> None:
        """Write; on CUDA without waiting."""
        for tensor, copy in self._pairs:
            tensor.copy_(copy, non_blocking=True)
        for change in self._changes:
            change()
