"""Hooks of PyTorch: each behind a guard, registered, suspended while rounds are only counted, and all removed at the end.

Three rules hold for every hook of the exporter. It returns at once while `torch.compile`, `torch.export` or `torch.jit` traces it,
so it adds no graph break and is traced away; below a compiled function it runs uncompiled. It never raises into the user's code.
It holds the exporter only until `close()` disconnects it, so a hook that is still referenced elsewhere does nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.compiler import is_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torch_grad_exporter.errors import LIMIT, ErrorLog
from torch_grad_exporter.torch_compat.autograd import intercepting_modes, outside_of_modes
from torch_grad_exporter.torch_compat.compiler import compile_again, is_tracing, never_compile, stop_compiling
from torch_grad_exporter.torch_compat.modules import MODULE_HOOKS
from torch_grad_exporter.torch_compat.optimizers import STEP_HOOKS, remove_step_hooks

_keys = itertools.count()

OUTPUTS = 16
VISITED = 64
"""Tensors of an output that are hooked, and items that are visited, at most: it may be a cache of thousands."""


class Removable(Protocol):
    """What a registration returns, such as the handle of a hook; `remove` is idempotent."""

    def remove(self) -> object:
        """Take the registration back."""


@dataclass(slots=True, eq=False)
class GuardedHook:
    """A callable for PyTorch that runs `action` behind the guard and returns `None` to PyTorch.

    A deep copy or a pickle of the model must neither copy the exporter nor need this package when it is
    loaded again, so both turn the hook into a callable of the standard library that does nothing.
    """

    _source: str
    _action: Callable[..., None] | None
    _errors: ErrorLog
    _in_a_row: int = 0

    def __call__(self, *arguments: Any) -> None:  # noqa: ANN401 - PyTorch's own signatures differ per hook
        """Run the action. What it raises is counted; after `LIMIT` failures in a row it is not run again."""
        # First, and outside the `try`: under compiled autograd an exception here could not be caught.
        if is_compiling() or is_tracing():
            return
        action = self._action
        if action is None:
            return
        compiler = stop_compiling()
        try:
            if intercepting_modes():  # which are not to see our operations
                with outside_of_modes():
                    action(*arguments)
            else:
                action(*arguments)
        except Exception as error:  # noqa: BLE001 - the boundary: nothing of ours may reach the user's code
            self.failed(error)
        else:
            self._in_a_row = 0
        finally:
            compile_again(compiler)

    def failed(self, error: Exception) -> None:
        """Count a failure; after `LIMIT` in a row the action is not run again."""
        self._errors.count(self._source, error)
        self._in_a_row += 1
        if self._in_a_row == LIMIT:
            self._errors.gave_up(self._source)
            self._action = None

    def disconnect(self) -> None:
        """Make the hook do nothing and drop what it held; idempotent."""
        self._action = None

    def __deepcopy__(self, memo: dict[int, object]) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


never_compile(GuardedHook.__call__)


def _nothing(*_arguments: object) -> None:
    """Stands in the place of a hook that is suspended."""


never_compile(_nothing)


@dataclass(frozen=True, slots=True)
class ModuleHooks:
    """The hooks around one module's forward, under a key of our own in the module's dictionaries.

    PyTorch's numbers would do harm: a pickled module keeps those of hooks that take keyword arguments, and in another
    process the first hooks of other code get the same numbers.
    """

    module: weakref.ref[torch.nn.Module]
    before: GuardedHook
    after: GuardedHook
    key: Any

    @classmethod
    def add_to(cls, module: torch.nn.Module, before: GuardedHook, after: GuardedHook) -> ModuleHooks:
        """Register both, behind all others: what they see is what the module gets, and what it gives."""
        pair = cls(weakref.ref(module), before, after, f"torch_grad_exporter-{next(_keys)}")
        module._forward_pre_hooks_with_kwargs[pair.key] = module._forward_hooks_with_kwargs[pair.key] = True
        for hooks, hook in pair._places():
            hooks[pair.key] = hook
        return pair

    def _places(self) -> list[tuple[dict[Any, Any], GuardedHook]]:
        """Return the module's dictionaries with what belongs there; none of a module that is gone."""
        module = self.module()
        return [] if module is None else [(module._forward_pre_hooks, self.before), (module._forward_hooks, self.after)]

    def remove(self) -> None:
        """Take the registration back; idempotent."""
        self.take_out()
        module = self.module()
        if module is not None:
            module._forward_pre_hooks_with_kwargs.pop(self.key, None)
            module._forward_hooks_with_kwargs.pop(self.key, None)

    def alone(self) -> bool:
        """Return whether the module has both, and no other hooks."""
        places = self._places()
        return bool(places) and all([*hooks] == [self.key] for hooks, _ in places)

    def take_out(self) -> None:
        """Let the module's forward run as if there were none; nothing else is forgotten."""
        for hooks, _ in self._places():
            hooks.pop(self.key, None)

    def put_back(self, *, into_empty: bool) -> None:
        """End `take_out`, before which there were no others; those that came since stay behind ours.

        `into_empty`: only where there are no others. Then any thread may do this: no thread iterates over an empty dictionary.
        """
        if into_empty and any(hooks for hooks, _ in self._places()):
            return
        for hooks, hook in self._places():
            if self.key not in hooks:
                hooks[self.key] = hook
                self._put_first(hooks)

    def come_first(self) -> None:
        """Put the hook before the forward in front of all others."""
        for hooks, _ in self._places()[:1]:
            self._put_first(hooks)

    def _put_first(self, hooks: Any) -> None:  # noqa: ANN401 - an OrderedDict, by PyTorch's types a dict
        if self.key in hooks and len(hooks) > 1:
            hooks.move_to_end(self.key, last=False)


class Hooks:
    """Registers guarded hooks and removes them all at `close()`.

    Attributes:
        step_numbers: Those that PyTorch gave the hooks before and after every optimizer's step.
    """

    def __init__(self, errors: ErrorLog) -> None:
        self._errors = errors
        self._handles: list[Removable] = []
        self._step_handles: list[Removable] = []
        self._hooks: list[GuardedHook] = []
        self._on_modules: list[ModuleHooks] = []
        self._around_step: tuple[GuardedHook, GuardedHook] | None = None
        self.step_numbers = -1, -1
        self._suspended = self._closed = False
        # Reentrant: a signal's handler may close the exporter while its own thread is in here.
        self._lock = threading.RLock()

    def guarded(self, source: str, action: Callable[..., None]) -> GuardedHook:
        """Return a hook around `action` that `close()` disconnects."""
        hook = GuardedHook(source, action, self._errors)
        self._hooks.append(hook)
        return hook

    def on_module(self, module: torch.nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
        """Call `before(module, args, kwargs)` and `after(module, args, kwargs, output)` at each forward."""
        before, after = self.guarded("forward_hook", before), self.guarded("forward_hook", after)
        if not MODULE_HOOKS:
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))
            return
        hooks = ModuleHooks.add_to(module, before, after)
        hooks.come_first()
        self._handles.append(hooks)
        self._on_modules.append(hooks)

    def on_optimizers(self, before: Callable[..., None], after: Callable[..., None]) -> None:
        """Call `before` and `after` with `(optimizer, args, kwargs)` around every optimizer's step."""
        self._around_step = self.guarded("optimizer_hook", before), self.guarded("optimizer_hook", after)
        # One after the other: if the second cannot be set, `close` takes off the first.
        first = register_optimizer_step_pre_hook(self._around_step[0])
        self._step_handles.append(first)
        second = register_optimizer_step_post_hook(self._around_step[1])
        self._step_handles.append(second)
        self.step_numbers = first.id, second.id

    def come_first(self) -> None:
        """Put what `on_module` set before a forward in front of all others, such as FSDP2's hook, which gathers parameters."""
        for pair in self._on_modules:
            pair.come_first()

    def suspend(self, counting: Callable[..., None]) -> bool:
        """Leave only `counting` after each step, until `resume`; return False if a module has other hooks."""
        with self._lock:
            shown = bool(STEP_HOOKS) and MODULE_HOOKS
            if not shown or self._closed or self._suspended or not all(pair.alone() for pair in self._on_modules):
                return False
            self._suspended = True
            self._set_step_hooks(_nothing, counting)
            for pair in self._on_modules:
                pair.take_out()
            return True

    def resume(self) -> None:
        """End `suspend`; idempotent."""
        with self._lock:
            if self._suspended and self._around_step is not None:
                self._set_step_hooks(*self._around_step)
                self._put_back(into_empty=False)
                self._suspended = False

    def resume_modules(self) -> None:
        """Put the hooks around forwards back, while steps are still only counted; idempotent, from any thread."""
        with self._lock:
            if self._suspended:
                self._put_back(into_empty=True)

    def _put_back(self, *, into_empty: bool) -> None:
        if not self._closed:
            for pair in self._on_modules:
                pair.put_back(into_empty=into_empty)

    def _set_step_hooks(self, before: Callable[..., None], after: Callable[..., None]) -> None:
        """Change only the values of existing keys: another thread may be iterating over the dictionaries."""
        for hooks, number, hook in zip(STEP_HOOKS, self.step_numbers, (before, after), strict=True):
            if number in hooks:
                hooks[number] = hook

    def disconnect(self) -> None:
        """Make every hook do nothing, without unregistering any; idempotent. Takes no lock: a fork may have left it held."""
        if self._suspended:
            self._set_step_hooks(_nothing, _nothing)
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.disconnect()

    def close(self) -> None:
        """Remove every hook; idempotent, from any thread."""
        self.disconnect()
        with self._lock:
            self._closed = True
            handles, self._handles = self._handles, []
            for handle in handles:
                handle.remove()
        step_handles, self._step_handles = self._step_handles, []
        remove_step_hooks(step_handles)


def batch_size(args: tuple[object, ...], kwargs: Mapping[str, object]) -> int | None:
    """Return the first dimension of the first tensor input; None if other tensors disagree or there is none."""
    sizes: list[int] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor) and (shape := value.shape):
            if type(shape[0]) is not int:
                return 0  # a tracer's symbols: this forward is not part of a training
            sizes.append(shape[0])
    return sizes[0] if sizes and sizes.count(sizes[0]) == len(sizes) else None


def differentiable(output: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a module's output that a backward can start from; containers are searched level by level.

    These are `OUTPUTS` at most, and `VISITED` items at most are visited, so that an output may hold anything.
    """
    count = 0
    # An output may be an object of the user's own; its attributes are searched, but not those of what is in it.
    known = isinstance(output, torch.Tensor | dict | list | tuple) or dataclasses.is_dataclass(output)
    level = deque([output] if known else itertools.islice(getattr(output, "__dict__", {}).values(), VISITED))
    for _ in range(VISITED):
        if not level or count == OUTPUTS:
            return
        item = level.popleft()
        if isinstance(item, torch.Tensor):
            if item.requires_grad and item.grad_fn is not None:  # a leaf belongs to no graph, and would keep a hook permanently
                count += 1
                yield item
        elif isinstance(item, dict):
            level.extend(itertools.islice(item.values(), VISITED))
        elif isinstance(item, list | tuple):
            level.extend(itertools.islice(item, VISITED))
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            level.extend(getattr(item, field.name, None) for field in dataclasses.fields(item))
