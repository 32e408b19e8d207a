"""ModuleHooks: the hooks around one module's forward; and the tensors that go in, and those that come out of it."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch_grad_exporter.capture.torch_hooks import GuardedHook

_keys = itertools.count()

OUTPUTS = 16
VISITED = 64
"""Tensors of an output that are hooked, and items that are visited, at most: it may be a cache of thousands."""


@dataclasses.dataclass(frozen=True, slots=True)
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
    def set_on(cls, module: torch.nn.Module, before: GuardedHook, after: GuardedHook) -> ModuleHooks:
        """Register both."""
        pair = cls.add_to(module, before, after)
        pair.come_first()
        return pair

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
