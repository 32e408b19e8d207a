"""`record`: inputs, outputs and their gradients of inner modules, for feature extraction, within a limit of memory.

Forward hooks see inputs and outputs, a hook on each tensor its gradient.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from torch_grad_exporter.arguments import check_whole, shown, some
from torch_grad_exporter.capture.torch_hooks import GuardedHook, Hooks, Removable
from torch_grad_exporter.errors import ErrorLog, warn
from torch_grad_exporter.inspection.inner_hooks import ForwardObserver, InnerHooks
from torch_grad_exporter.inspection.modules import InnerModule
from torch_grad_exporter.inspection.recorded import Call, Calls, Slot, mapped
from torch_grad_exporter.model import given
from torch_grad_exporter.model.names import clean, joined
from torch_grad_exporter.torch_compat.autograd import BACKWARDS_ARE_SEEN, version_of

# Bytes that are kept, unless another number is given.
LIMIT = 256 * 2**20

# Bytes that a call counts in addition to its tensors, so that their number is bounded as well.
CALL = 1024

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
        self._running: list[tuple[torch.nn.Module, tuple[Any, Any] | None]] = []

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

    def entered(self, label: str, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002 - of `ForwardObserver`
        """Keep the inputs of a call."""
        recorded = (mapped(args, self._slot), mapped(kwargs, self._slot)) if self._calls.has_room(CALL) else None
        self._running.append((module, recorded))

    def left(self, label: str, module: torch.nn.Module, output: object) -> None:
        """Add the call. Above it in the stack are those whose forward has raised."""
        while self._running:
            entered, recorded = self._running.pop()
            if entered is module:
                if recorded is not None:
                    self._calls.add(label, Call(label, *recorded, mapped(output, self._slot)))
                return

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
