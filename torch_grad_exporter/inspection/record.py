"""`record`: inputs, outputs and their gradients of inner modules, for feature extraction, within a limit of memory.

Forward hooks see inputs and outputs, a hook on each tensor its gradient. Copies stay in the containers that the module had them in.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import operator
import re
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from torch_grad_exporter.arguments import check_whole, near, shown, some
from torch_grad_exporter.capture.torch_hooks import GuardedHook, Hooks, Removable
from torch_grad_exporter.errors import ErrorLog, warn
from torch_grad_exporter.inspection.inner_hooks import Args, ForwardObserver, InnerHooks, Kwargs
from torch_grad_exporter.inspection.modules import InnerModule
from torch_grad_exporter.model import given
from torch_grad_exporter.model.names import clean, joined
from torch_grad_exporter.torch_compat.autograd import BACKWARDS_ARE_SEEN, version_of

# Bytes that are kept, unless another number is given; and those that a call counts in addition to its tensors, so that the number
# of calls is bounded as well.
LIMIT, CALL = 256 * 2**20, 1024

# Items of the inputs or outputs of a call that are visited, at most.
VISITED = 4096

Container = TypeVar("Container")

_PLAIN = (int, float, complex, str, torch.dtype, torch.device, types.NoneType, type)

# The models of which it was logged what is not recorded.
_LOGGED: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def record(
    model: torch.nn.Module | Mapping[str, torch.nn.Module], include: str | Sequence[str] | None = None, limit: int = LIMIT
) -> AbstractContextManager[Calls]:
    """Record the inputs and outputs of a model's modules within a `with` block, and their gradients in backwards within it.

        with record(model, include=r"layer4") as calls:
            loss_function(model(inputs), targets).backward()
        calls["layer4.1"][0].outputs

    Tensors are copies without a graph, so that an operation in place changes nothing that was recorded; modules that hand on the
    same tensor share one copy. The forward that a checkpoint repeats in the backward is left out, as are forwards on other
    threads. Training is the same bit by bit, and at the end of the block all hooks are gone, also after an exception. Modules that
    run compiled show nothing; which those are is logged once.

    Args:
        model: A module, or a mapping of names to modules, whose names become the first part of those of inner modules.
        include: Regular expressions, searched in the names of modules; those are recorded in which one is found. Without it all
            are. The model itself has the name `""`.
        limit: Bytes that are kept at most. What is beyond is left out, `None` in its place, and counted in `calls.left_out`.

    Raises:
        TypeError: An argument is of a wrong type; the message names it, the value and the fix.
        ValueError: An argument is wrong; likewise.
    """
    check_whole(f"limit={shown(limit)}", limit, what="a number of bytes", example=LIMIT)
    models = given.models(model)
    return _Recorder(models.values(), _selected(models, include), limit)


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
        return mapped(self._inputs, _VALUE)

    @property
    def keyword_inputs(self) -> dict[str, Any]:
        """The keyword arguments."""
        return mapped(self._keywords, _VALUE)

    @property
    def outputs(self) -> Any:  # noqa: ANN401 - whatever the module returns
        """What the module returned."""
        return mapped(self._outputs, _VALUE)

    @property
    def input_gradients(self) -> tuple[Any, ...]:
        """The gradients of the positional arguments."""
        return mapped(self._inputs, _GRADIENT, tensors_only=True)

    @property
    def keyword_input_gradients(self) -> dict[str, Any]:
        """The gradients of the keyword arguments."""
        return mapped(self._keywords, _GRADIENT, tensors_only=True)

    @property
    def output_gradients(self) -> Any:  # noqa: ANN401 - as `outputs`
        """The gradients of what the module returned."""
        return mapped(self._outputs, _GRADIENT, tensors_only=True)


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


_VALUE, _GRADIENT = operator.attrgetter("value"), operator.attrgetter("gradient")


def mapped(value: Container, change: Callable[[Any], object], *, tensors_only: bool = False) -> Container:
    """Return copies of the containers with what `change` makes of tensors and slots.

    Of objects other than numbers and texts the type is kept; with `tensors_only` nothing. `VISITED` items are visited. A sequence
    of a class of the user's own becomes a list or a tuple.
    """
    left = VISITED

    def of(item: Any) -> Any:  # noqa: ANN401 - anything
        nonlocal left
        left -= 1
        if left < 0:
            return None
        if isinstance(item, torch.Tensor | Slot):
            return change(item)
        if isinstance(item, list | tuple):
            parts = [of(part) for part in item[:VISITED]]
            plain = parts if isinstance(item, list) else tuple(parts)
            return item._make(parts) if hasattr(item, "_make") else plain
        if isinstance(item, dict):
            return _with(item, {key: of(part) for key, part in itertools.islice(item.items(), VISITED)})
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            return _with(item, {field.name: of(getattr(item, field.name, None)) for field in dataclasses.fields(item)})
        return None if tensors_only else item if isinstance(item, _PLAIN) else type(item)

    result: Container = of(value)
    return result


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


class _Recorder(AbstractContextManager[Calls], ForwardObserver):
    """The hooks of one `with` block, and what they record."""

    def __init__(self, roots: Iterable[torch.nn.Module], wanted: Mapping[str, torch.nn.Module], limit: int) -> None:
        self._roots, self._wanted = list(roots), wanted
        self._compiled = _compiled(self._roots)
        self._calls = Calls(wanted, limit)
        self._errors = ErrorLog(())
        self._hooks = Hooks(self._errors)
        self._around = InnerHooks(self._hooks, "forward_hook", self)
        self._tensor_hooks: list[tuple[GuardedHook, Removable]] = []
        self._slots: Any = WeakTensorKeyDictionary()

    def __enter__(self) -> Calls:
        first: dict[int, InnerModule] = {}
        for name, module in self._wanted.items():
            if id(module) not in self._compiled:
                first.setdefault(id(module), InnerModule(name, weakref.ref(module)))
        self._around.follow(tuple(first.values()))
        return self._calls

    def __exit__(self, *error: object) -> None:
        self._around.disarm()
        self._hooks.close()
        for hook, handle in self._tensor_hooks:
            hook.disconnect()
            handle.remove()
        self._tensor_hooks.clear()
        self._slots.clear()
        if error[0] is None:
            self._log_absent()

    def entered(self, label: str, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> object:  # noqa: ARG002 - of `ForwardObserver`
        """Keep the inputs of a call, if there is room."""
        return (mapped(args, self._slot), mapped(dict(kwargs), self._slot)) if self._calls.has_room(CALL) else None

    def left(self, label: str, module: torch.nn.Module, output: object, call: Any) -> None:  # noqa: ANN401, ARG002 - likewise
        """Add the call."""
        if call is not None:
            inputs, keywords = call
            self._calls.add(label, Call(label, inputs, keywords, mapped(output, self._slot)))

    def _slot(self, tensor: torch.Tensor) -> Slot:
        """Return a slot with a copy; the same one for a tensor that was not written to since."""
        version = version_of(tensor) if BACKWARDS_ARE_SEEN and not tensor.is_inference() else None
        known = self._slots.get(tensor)
        if known is not None and version is not None and known[0] == version:
            slot: Slot = known[1]
        else:
            slot = Slot(self._calls.copy_of(tensor))
            self._slots[tensor] = version, slot
        if tensor.requires_grad and not slot.hooked:
            slot.hooked = True
            hook = GuardedHook("backward_hook", functools.partial(self._arrived, slot), self._errors)
            self._tensor_hooks.append((hook, tensor.register_hook(hook)))  # type: ignore[no-untyped-call]
        return slot

    def _arrived(self, slot: Slot, gradient: torch.Tensor) -> None:
        with torch.no_grad():
            if slot.gradient is None:
                slot.gradient = self._calls.copy_of(gradient)
            else:
                slot.gradient += gradient

    def _log_absent(self) -> None:
        """Log, once for each model, which modules run compiled, or that no forward was seen at all."""
        compiled = [name for name, module in self._wanted.items() if id(module) in self._compiled]
        none = not any(self._calls.values()) and not self._calls.left_out
        if not (compiled or none) or any(root in _LOGGED for root in self._roots):
            return
        _LOGGED.update(self._roots)
        text = "no forward was seen; compiled ones do not show"
        if compiled:
            text = f"{some(compiled, 3)} run compiled, so nothing of them is recorded"
        warn("record: %s", text)


def _selected(models: Mapping[str, torch.nn.Module], include: str | Sequence[str] | None) -> dict[str, torch.nn.Module]:
    """Return the modules to record by name; raise if a pattern matches none."""
    modules = {joined(model, name): module for model, root in models.items() for name, module in _named(root).items()}
    if include is None:
        return modules
    patterns = [include] if isinstance(include, str) else list(include)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"include={shown(include)}: expected a regular expression, or a list of them")
    names: set[str] = set()
    for pattern in patterns:
        try:
            matching = {name for name in modules if re.search(pattern, name)}
        except re.error as error:
            raise ValueError(f"include={shown(include)}: {error}; expected regular expressions") from error
        if not matching:
            examples = ", ".join(map(repr, [name for name in modules if name][:5]))
            raise ValueError(f"include={pattern!r}: matches none of the {len(modules)} modules, such as {examples}")
        names |= matching
    return {name: module for name, module in modules.items() if name in names}


def _named(root: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules by their names without what wrappers add; the wrapper stands for what it wraps.

    Where two others would share a name, the second has its full one.
    """
    modules: dict[str, torch.nn.Module] = {}
    owner: dict[str, str] = {}
    for raw, module in root.named_modules(remove_duplicate=False):
        name = clean(raw)
        first = owner.setdefault(name, raw)
        if first == raw:
            modules[name] = module
        elif not raw.startswith(f"{first}." if first else ""):
            modules[raw] = module
    return modules


def _compiled(roots: Iterable[torch.nn.Module]) -> set[int]:
    """Return the `id` of each module below one that `torch.compile` has made.

    It shows nothing, and a hook on it is compiled in, so that removing the hook would compile it again.
    """
    every = (pair for root in roots for pair in root.named_modules(remove_duplicate=False))
    return {id(module) for raw, module in every if "_orig_mod" in raw.split(".")}
