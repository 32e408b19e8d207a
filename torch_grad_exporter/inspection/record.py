"""`record`: inputs, outputs and their gradients of inner modules, for feature extraction, within a limit of memory.

Forward hooks see inputs and outputs, a hook on each tensor its gradient. Full backward hooks of modules would be no way: they put
a view around inputs and outputs, on which an in-place ReLU raises.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import logging
import re
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from torch_grad_exporter.capture.torch_hooks import GuardedHook, Handle, Hooks
from torch_grad_exporter.errors import ErrorLog, say
from torch_grad_exporter.model import given
from torch_grad_exporter.model.names import WRAPPER_PARTS, clean
from torch_grad_exporter.torch_compat import BACKWARDS_ARE_SEEN, graph_task, version_of, within_transform

logger = logging.getLogger("torch_grad_exporter")

LIMIT = 256 * 2**20
"""Bytes that are kept, unless another number is given."""

CALL = 1024
"""Bytes that a call counts in addition to its tensors, so that their number is bounded as well."""

VISITED = 4096
"""Items of the inputs or outputs of a call that are visited, at most."""

_PLAIN = (int, float, complex, str, torch.dtype, torch.device, types.NoneType)


def record(
    model: torch.nn.Module | Mapping[str, torch.nn.Module], include: str | Sequence[str] | None = None, limit: int = LIMIT
) -> AbstractContextManager[Calls]:
    """Records the inputs and outputs of a model's modules within a `with` block, and their gradients in backwards within it.

        with record(model, include=r"layer4") as calls:
            loss_function(model(inputs), targets).backward()
        calls["layer4.1"][0].outputs

    - `model`: a module, or a mapping of names to modules, whose names become the first part of those of inner modules.
    - `include`: regular expressions, searched in the names of modules; those are recorded in which one is found. Without it all
      are. The model itself has the name `""`.
    - `limit`: bytes that are kept at most. What is beyond is left out, `None` in its place, and counted in `calls.left_out`.

    Tensors are copies without a graph, so that an operation in place changes nothing that was recorded; modules that hand on the
    same tensor share one copy. The forward that a checkpoint repeats in the backward is left out. Training is the same bit by bit,
    and at the end of the block all hooks are gone, also after an exception. Modules that run compiled show nothing; which those
    are is logged. Raises `TypeError` or `ValueError` if an argument is wrong.
    """
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise TypeError(f"limit={limit!r}: expected a number of bytes")
    if limit <= 0:
        raise ValueError(f"limit={limit}: expected a number of bytes above 0")
    models = given.models(model)
    return _Recording(_selected(models, include), _compiled(models), limit)


class Slot:
    """A copy of a tensor, and of its gradient; `None` where there is none, or was no room."""

    __slots__ = ("gradient", "hooked", "value")

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None
        self.gradient: torch.Tensor | None = None
        self.hooked = False


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a module. Tensors are copies, in containers as the module had them; of other objects only the type is kept.

    Gradients have the form of what they are gradients of, with `None` where none has come. They are those of the whole loss with
    respect to a tensor, through all that used it; several backwards are added up.
    """

    module: str
    _inputs: Any
    _keywords: Any
    _outputs: Any

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The positional arguments, as the caller gave them."""
        found: tuple[Any, ...] = _filled(self._inputs, _value)
        return found

    @property
    def keyword_inputs(self) -> dict[str, Any]:
        """The keyword arguments."""
        found: dict[str, Any] = _filled(self._keywords, _value)
        return found

    @property
    def outputs(self) -> Any:  # noqa: ANN401 - whatever the module returns
        """What the module returned."""
        return _filled(self._outputs, _value)

    @property
    def input_gradients(self) -> tuple[Any, ...]:
        """The gradients of the positional arguments."""
        found: tuple[Any, ...] = _filled(self._inputs, _gradient)
        return found

    @property
    def keyword_input_gradients(self) -> dict[str, Any]:
        """The gradients of the keyword arguments."""
        found: dict[str, Any] = _filled(self._keywords, _gradient)
        return found

    @property
    def output_gradients(self) -> Any:  # noqa: ANN401 - as `outputs`
        """The gradients of what the module returned."""
        return _filled(self._outputs, _gradient)


class Calls(Mapping[str, Sequence[Call]]):
    """The calls of each module that is recorded, by its name and in order; an empty list where there was none.

    `left_out`: tensors and calls for which there was no room. `bytes`: of what is kept.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module], limit: int) -> None:
        by_module: dict[int, list[Call]] = {id(module): [] for module in modules.values()}
        self._calls = {name: by_module[id(module)] for name, module in modules.items()}
        self._limit = limit
        self._lock = threading.Lock()
        self.left_out = 0
        self.bytes = 0

    def __getitem__(self, name: str) -> Sequence[Call]:
        if name not in self._calls:
            close = difflib.get_close_matches(name, self._calls, 3)
            raise KeyError(f"{name!r} is not recorded" + (f"; there is {', '.join(map(repr, close))}" if close else ""))
        return self._calls[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def __repr__(self) -> str:
        calls = sum(len(found) for found in self._calls.values())
        return f"<{calls} calls of {len(self)} modules, {self.bytes} bytes, {self.left_out} left out>"

    def add(self, name: str, call: Call) -> None:
        """A call has ended."""
        self._calls[name].append(call)

    def has_room(self, size: int) -> bool:
        """Takes so many bytes, if they are there; else counts that something is left out."""
        with self._lock:
            if self.bytes + size > self._limit:
                self.left_out += 1
                return False
            self.bytes += size
            return True

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A copy without a graph, if there is room for it. Sparse tensors are left out."""
        size = tensor.numel() * tensor.element_size() if tensor.layout is torch.strided else self._limit + 1
        return tensor.detach().clone() if self.has_room(size) else None


class _Recording(AbstractContextManager[Calls]):
    """The hooks of one `with` block, which it owns."""

    def __init__(self, modules: Mapping[str, torch.nn.Module], compiled: set[int], limit: int) -> None:
        self._modules = {id(module): (name, module) for name, module in reversed(modules.items()) if id(module) not in compiled}
        self._calls = Calls(modules, limit)
        self._errors = ErrorLog(())
        self._hooks = Hooks(self._errors)
        self._tensor_hooks: list[tuple[GuardedHook, Handle]] = []
        self._slots: Any = WeakTensorKeyDictionary()
        self._running = threading.local()

    def __enter__(self) -> Calls:
        for name, module in self._modules.values():
            self._hooks.on_module(module, self._before, functools.partial(self._after, name))
        return self._calls

    def __exit__(self, *error: object) -> None:
        self._hooks.close()
        for hook, handle in self._tensor_hooks:
            hook.disconnect()
            handle.remove()
        self._tensor_hooks.clear()
        self._slots.clear()
        if error[0] is None:
            self._tell_absent()

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if graph_task() != -1 or within_transform():  # a checkpoint's second forward; tensors of a transform are none of their own
            return
        recorded = (self._kept(args), self._kept(kwargs)) if self._calls.has_room(CALL) else None
        self._stack.append((module, recorded))

    def _after(self, name: str, module: torch.nn.Module, _args: object, _kwargs: object, output: object) -> None:
        if graph_task() != -1 or within_transform():
            return
        # Above it are those whose forward has raised.
        while self._stack:
            entered, recorded = self._stack.pop()
            if entered is module:
                if recorded is not None:
                    self._calls.add(name, Call(name, *recorded, self._kept(output)))
                return

    @property
    def _stack(self) -> list[tuple[torch.nn.Module, tuple[Any, Any] | None]]:
        """The forwards that the calling thread is in."""
        if not hasattr(self._running, "stack"):
            self._running.stack = []
        stack: list[tuple[torch.nn.Module, tuple[Any, Any] | None]] = self._running.stack
        return stack

    def _kept(self, value: object) -> Any:  # noqa: ANN401 - the same with a slot in the place of each tensor
        return _mapped(value, self._slot, [VISITED])

    def _slot(self, tensor: torch.Tensor) -> Slot:
        """A slot with a copy; the same one for a tensor that was not written to since."""
        version = version_of(tensor) if BACKWARDS_ARE_SEEN and not tensor.is_inference() else None
        known = self._slots.get(tensor)
        if known is not None and version is not None and known[0] == version:
            slot: Slot = known[1]
        else:
            slot = Slot()
            slot.value = self._calls.copy_of(tensor)
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

    def _tell_absent(self) -> None:
        """Logs which modules had no call: those that run compiled call no hook."""
        absent = [name or "the model" for name in self._calls if not self._calls[name]]
        if absent and not self._calls.left_out:
            some = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
            message = "record: no forward of %s was seen; modules that run compiled show none, nor do those that are not called"
            say(logger, logging.WARNING, message, some)


def _selected(models: Mapping[str, torch.nn.Module], include: str | Sequence[str] | None) -> dict[str, torch.nn.Module]:
    """The modules to record by name; raises where a pattern finds none."""
    modules = {_joined(model, name): module for model, root in models.items() for name, module in _named(root).items()}
    if include is None:
        return modules
    found: dict[str, torch.nn.Module] = {}
    for pattern in _patterns(include):
        matching = {name: module for name, module in modules.items() if pattern.search(name)}
        if not matching:
            some = ", ".join(map(repr, [name for name in modules if name][:5]))
            raise ValueError(f"include={pattern.pattern!r}: matches none of the {len(modules)} modules, such as {some}")
        found.update(matching)
    return {name: module for name, module in modules.items() if name in found}


def _patterns(include: str | Sequence[str]) -> list[re.Pattern[str]]:
    patterns = [include] if isinstance(include, str) else list(include)
    if not patterns or not all(isinstance(one, str) for one in patterns):
        raise TypeError(f"include={include!r}: expected a regular expression, or a list of them")
    try:
        return [re.compile(one) for one in patterns]
    except re.error as error:
        raise ValueError(f"include={include!r}: {error}; expected regular expressions") from error


def _named(root: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules by their names without what wrappers add; the wrapper stands for what it wraps.

    Where two others would share a name, the second has its full one.
    """
    found: dict[str, torch.nn.Module] = {}
    owner: dict[str, str] = {}
    for raw, module in root.named_modules(remove_duplicate=False):
        name = clean(raw)
        first = owner.setdefault(name, raw)
        if first == raw:
            found[name] = module
        elif not _wraps(first, raw):
            found[raw] = module
    return found


def _compiled(models: Mapping[str, torch.nn.Module]) -> set[int]:
    """The `id` of each module below one that `torch.compile` has made: it shows nothing, and a hook on it is compiled in.

    Removing the hook would then compile it anew.
    """
    every = (pair for root in models.values() for pair in root.named_modules(remove_duplicate=False))
    return {id(module) for raw, module in every if "_orig_mod" in raw.split(".")}


def _wraps(outer: str, inner: str) -> bool:
    """Whether only wrappers stand between the first name and the second one."""
    rest = inner[len(outer) :].strip(".").split(".")
    return inner.startswith(f"{outer}." if outer else "") and all(part in WRAPPER_PARTS for part in rest)


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


# Containers


def _mapped(value: object, change: Callable[[Any], object], left: list[int]) -> Any:  # noqa: ANN401 - a container like `value`
    """The same containers with what `change` makes of tensors and slots; after `left` items `None`. Changes no container."""
    left[0] -= 1
    if left[0] < 0:
        return None
    if isinstance(value, torch.Tensor | Slot):
        return change(value)
    if isinstance(value, list | tuple):
        return _like(value, [_mapped(item, change, left) for item in value])
    if isinstance(value, dict):
        return _with(value, {key: _mapped(item, change, left) for key, item in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        return _with(value, {name: _mapped(item, change, left) for name, item in fields.items()})
    return value if isinstance(value, (*_PLAIN, type)) else type(value)


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


def _filled(kept: object, pick: Callable[[Any], object]) -> Any:  # noqa: ANN401 - what was kept, with tensors
    return _mapped(kept, pick, [4 * VISITED])


def _value(slot: Slot) -> torch.Tensor | None:
    return slot.value


def _gradient(slot: Slot) -> torch.Tensor | None:
    return slot.gradient
