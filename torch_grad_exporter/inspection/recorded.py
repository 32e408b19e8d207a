"""What `record` gives: the calls of each module, with copies of tensors in the containers that the module had them in."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from torch_grad_exporter.arguments import near

# Items of the inputs or outputs of a call that are visited, at most.
VISITED = 4096

Container = TypeVar("Container")

_PLAIN = (int, float, complex, str, torch.dtype, torch.device, types.NoneType)


@dataclass(slots=True, eq=False)
class Slot:
    """A copy of a tensor, and of its gradient; None where there is none, or was no room."""

    value: torch.Tensor | None
    gradient: torch.Tensor | None = None
    hooked: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a module. Tensors are copies, in containers as the module had them; of other objects only the type is kept.

    Gradients have the form of what they are gradients of, with `None` where none has come. They are those of the whole loss with
    respect to a tensor, through all that used it; several backwards are added up.
    """

    module: str
    _inputs: tuple[Any, ...]
    _keywords: dict[str, Any]
    _outputs: Any

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The positional arguments, as the caller gave them."""
        return _values(self._inputs)

    @property
    def keyword_inputs(self) -> dict[str, Any]:
        """The keyword arguments."""
        return _values(self._keywords)

    @property
    def outputs(self) -> Any:  # noqa: ANN401 - whatever the module returns
        """What the module returned."""
        return _values(self._outputs)

    @property
    def input_gradients(self) -> tuple[Any, ...]:
        """The gradients of the positional arguments."""
        return _gradients(self._inputs)

    @property
    def keyword_input_gradients(self) -> dict[str, Any]:
        """The gradients of the keyword arguments."""
        return _gradients(self._keywords)

    @property
    def output_gradients(self) -> Any:  # noqa: ANN401 - as `outputs`
        """The gradients of what the module returned."""
        return _gradients(self._outputs)


class Calls(Mapping[str, Sequence[Call]]):
    """The calls of each module that is recorded, by its name and in order; an empty list where there was none.

    `left_out`: tensors and calls for which there was no room. `bytes`: of what is kept.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module], limit: int) -> None:
        by_module: dict[int, list[Call]] = {id(module): [] for module in modules.values()}
        self._calls = {name: by_module[id(module)] for name, module in modules.items()}
        self._limit = limit
        self._lock = threading.Lock()  # gradients arrive on a thread of each device
        self.left_out = 0
        self.bytes = 0

    def __getitem__(self, name: str) -> Sequence[Call]:
        if name not in self._calls:
            raise KeyError(f"{name!r} is not recorded{near(name, self._calls)}")
        return self._calls[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def __repr__(self) -> str:
        calls = sum(map(len, self._calls.values()))
        return f"<{calls} calls of {len(self)} modules, {self.bytes} bytes, {self.left_out} left out>"

    def add(self, name: str, call: Call) -> None:
        """Add a call that has ended."""
        self._calls[name].append(call)

    def has_room(self, size: int) -> bool:
        """Take this many bytes and return True if they are available; otherwise count that something is left out."""
        with self._lock:
            if self.bytes + size > self._limit:
                self.left_out += 1
                return False
            self.bytes += size
            return True

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a copy without a graph, if there is room for it. Sparse tensors are left out."""
        size = tensor.numel() * tensor.element_size() if tensor.layout is torch.strided else self._limit + 1
        return tensor.detach().clone() if self.has_room(size) else None


def mapped(value: Container, change: Callable[[Any], object], *, tensors_only: bool = False) -> Container:
    """Return copies of the containers with what `change` makes of tensors and slots.

    Of objects other than numbers and texts the type is kept; with `tensors_only` nothing. `VISITED` items are visited.
    """
    left = VISITED

    def of(item: Any) -> Any:  # noqa: ANN401 - anything
        nonlocal left
        left -= 1
        if isinstance(item, torch.Tensor | Slot):
            return change(item) if left >= 0 else None
        if isinstance(item, list | tuple) and left >= 0:
            return _like(item, [of(part) for part in item[:VISITED]])
        if isinstance(item, dict) and left >= 0:
            return _with(item, {key: of(part) for key, part in itertools.islice(item.items(), VISITED)})
        if dataclasses.is_dataclass(item) and not isinstance(item, type) and left >= 0:
            return _with(item, {field.name: of(getattr(item, field.name, None)) for field in dataclasses.fields(item)})
        if tensors_only or left < 0:
            return None
        return item if isinstance(item, (*_PLAIN, type)) else type(item)

    result: Container = of(value)
    return result


def _like(value: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:  # noqa: ANN401 - a sequence of the same class
    kind: Any = type(value)
    if hasattr(kind, "_make"):
        return kind._make(items)
    try:
        return items if kind is list else kind(items)
    except Exception:  # noqa: BLE001 - a class of the user's that is made otherwise
        return items if isinstance(value, list) else tuple(items)


def _with(value: Any, items: dict[Any, Any]) -> Any:  # noqa: ANN401 - an object of the same class, or a plain dictionary
    if type(value) is dict:
        return items
    try:
        made = copy.copy(value)
        for key, item in items.items():
            if isinstance(made, dict):
                made[key] = item
            else:
                object.__setattr__(made, key, item)
    except Exception:  # noqa: BLE001 - a class of the user's that cannot be copied or set
        return items
    return made


def _values(kept: Container) -> Container:
    """Return what was kept, with tensors in the place of slots."""
    return mapped(kept, operator.attrgetter("value"))


def _gradients(kept: Container) -> Container:
    """Return what was kept, with gradients in the place of slots."""
    return mapped(kept, operator.attrgetter("gradient"), tensors_only=True)
