"""Hooks for a loop of one's own: named points of a training, and who is called there, in which order.

The points and the priorities are those of MMEngine, so that what is known from there holds here. Nothing but `GradExporterHook`
knows the exporter: a `HookList` is of use without it.

    hooks = HookList(GradExporterHook(model, port=9100))
    hooks.register(log_loss, "LOW", point="after_train_iter")
    hooks.call("before_train")
    for batch in loader:
        ...
        hooks.call("after_train_iter", loss=loss, samples=len(batch))
    hooks.call("after_train")
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from torch_grad_exporter import Exporter
from torch_grad_exporter.capture.observations import Number
from torch_grad_exporter.integrations.broke_off import TrainingBrokeOff
from torch_grad_exporter.integrations.session import MayStop, Models, Session

POINTS = (
    "before_run", "after_load_checkpoint", "before_train", "before_train_epoch", "before_train_iter", "after_train_iter",
    "after_train_epoch", "before_val", "before_val_epoch", "before_val_iter", "after_val_iter", "after_val_epoch", "after_val",
    "before_save_checkpoint", "after_train", "before_test", "before_test_epoch", "before_test_iter", "after_test_iter",
    "after_test_epoch", "after_test", "after_run",
)  # fmt: skip
"""The points of a run, in the order of a training with evaluations and a test."""

PRIORITIES = {
    "HIGHEST": 0, "VERY_HIGH": 10, "HIGH": 30, "ABOVE_NORMAL": 40, "NORMAL": 50, "BELOW_NORMAL": 60, "LOW": 70, "VERY_LOW": 90,
    "LOWEST": 100,
}  # fmt: skip
"""The lower the number, the earlier a hook is called."""


class HookHandle:
    """One registration. `Exporter.adopt` takes it, so that it ends with the exporter."""

    def __init__(self, hooks: HookList, calls: dict[str, Callable[..., object]], priority: int) -> None:
        self._hooks = hooks
        self._calls = calls
        self._priority = priority

    @property
    def priority(self) -> int:
        """From 0, which is called first, to 100."""
        return self._priority

    @property
    def calls(self) -> dict[str, Callable[..., object]]:
        """What is called, by point."""
        return dict(self._calls)

    def remove(self) -> None:
        """Takes the hook out of the list; idempotent. A call that is under way still reaches it."""
        self._hooks.discard(self)


class HookList:
    """Calls hooks at the points of a loop, by priority, those of the same one in the order of their registration.

    `hooks`: some to begin with, at "NORMAL". What a hook raises reaches the loop, and those after it are not called. Not
    thread-safe: it belongs to the thread that trains.
    """

    def __init__(self, *hooks: object) -> None:
        self._handles: list[HookHandle] = []
        self._by_point: dict[str, tuple[Callable[..., object], ...]] = dict.fromkeys(POINTS, ())
        for hook in hooks:
            self.register(hook)

    def register(self, hook: object, priority: str | int = "NORMAL", *, point: str | None = None) -> HookHandle:
        """Adds a hook: an object with methods that have the names of points, or with `point` a function that is called there.

        `priority`: one of the nine names in `PRIORITIES`, or a number from 0 to 100. A function whose own name is that of a point
        needs no `point`. Returns a handle, whose `remove()` takes it back.

        Raises `ValueError` where a point or a priority does not exist, and `TypeError` where the hook has no point; both name what
        is near.
        """
        calls = {_point(point): _function(hook, point)} if point is not None else _calls(hook)
        handle = HookHandle(self, calls, _priority(priority))
        self._handles.append(handle)
        self._arrange()
        return handle

    def discard(self, handle: HookHandle) -> None:
        """Takes back one registration, as its `remove()` does; nothing happens where it is not in the list."""
        if handle in self._handles:
            self._handles.remove(handle)
            self._arrange()

    def call(self, point: str, *arguments: Any, **named: Any) -> None:
        """Calls all hooks of a point with these arguments.

        Hooks that are added or removed meanwhile are so from the next call on. Raises `ValueError` where the point does not exist,
        and names the one that is near.
        """
        hooks = self._by_point.get(point)
        if hooks is None:
            raise ValueError(_unknown("point", point, POINTS))
        for hook in hooks:
            hook(*arguments, **named)

    def _arrange(self) -> None:
        handles = sorted(self._handles, key=lambda handle: handle.priority)  # a stable sort
        for point in POINTS:
            self._by_point[point] = tuple(handle.calls[point] for handle in handles if point in handle.calls)


def _calls(hook: object) -> dict[str, Callable[..., object]]:
    """The methods of a hook that have the names of points; of a function with such a name itself."""
    name = getattr(hook, "__name__", "")
    if callable(hook) and name in POINTS:
        return {name: hook}
    found = {point: method for point in POINTS if callable(method := getattr(hook, point, None))}
    if not found and callable(hook):
        raise TypeError(f"register({name or type(hook).__name__}): say where it is called, such as point='after_train_iter'")
    if not found:
        raise TypeError(f"register({type(hook).__name__}): it has no method with the name of a point{_near_methods(hook)}")
    return found


def _function(hook: object, point: str) -> Callable[..., object]:
    if not callable(hook):
        raise TypeError(f"register({type(hook).__name__}, point={point!r}): expected a function")
    return hook


def _near_methods(hook: object) -> str:
    for name in dir(hook):
        near = difflib.get_close_matches(name, POINTS, n=1, cutoff=0.8)
        if near and not name.startswith("_"):
            return f"; {name} is near {near[0]}"
    return f"; the points are {', '.join(POINTS)}"


def _point(point: str) -> str:
    if point not in POINTS:
        raise ValueError(_unknown("point", point, POINTS))
    return point


def _priority(priority: str | int) -> int:
    if isinstance(priority, str):
        if priority.upper() not in PRIORITIES:
            raise ValueError(_unknown("priority", priority, PRIORITIES))
        return PRIORITIES[priority.upper()]
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise TypeError(f"priority={priority!r}: expected one of {', '.join(PRIORITIES)}, or a number from 0 to 100")
    if not 0 <= priority <= 100:
        raise ValueError(f"priority={priority}: expected a number from 0, which is called first, to 100")
    return priority


def _unknown(what: str, given: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(given.upper() if what == "priority" else given, known, n=3)
    return f"there is no {what} {given!r}; " + (f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}")


class GradExporterHook(MayStop):
    """The exporter as a hook of a `HookList`: `HookList(GradExporterHook(model, port=9100))`.

    `model`, `options`: as of `start_exporter`. `exporter`: one that you have started yourself, which goes on after the training.

    It begins at `before_train`, or where that is not called at the first of the points below; it takes from each point the named
    arguments that it knows, and leaves the others alone: `before_train(step=)`, the steps that a checkpoint had done;
    `before_train_epoch(epoch=)`; `after_train_iter(loss=, samples=, tokens=, epoch=)`; `after_train(error=)`, the exception that
    has ended the training. From `before_val` to `after_val`, and from `before_test` to `after_test`, the training is evaluating.

    Raises `TypeError` or `ValueError` where an argument is wrong: here, or where it begins.
    """

    def __init__(self, model: Models, exporter: Exporter | None = None, **options: Any) -> None:
        self._model = model
        self._session = Session(type(self).__name__, exporter, options)
        self._begun = False

    def before_train(self, *_: object, step: int | None = None, **__: object) -> None:
        """Starts the exporter, unless there is one. A training that is still open by then has broken off."""
        if self._session.telling:
            self._session.end(TrainingBrokeOff())
        self._begun = True
        self._session.begin(self._model, step=step)

    def before_train_epoch(self, *_: object, epoch: Number | None = None, **__: object) -> None:
        """Tells of the epoch."""
        self._begins()
        self._session.observe(epoch=epoch)

    def before_train_iter(self, *_: object, **__: object) -> None:
        """Begins, where the loop has no earlier point."""
        self._begins()

    def after_train_iter(
        self,
        *_: object,
        loss: Number | None = None,
        samples: Number | None = None,
        tokens: Number | None = None,
        epoch: Number | None = None,
        **__: object,
    ) -> None:
        """Tells what the loop knows of the step."""
        self._begins()
        self._session.observe(loss=loss, samples=samples, tokens=tokens, epoch=epoch)

    def before_val(self, *_: object, **__: object) -> None:
        """Tells that an evaluation has begun."""
        self._session.evaluating()

    def after_val(self, *_: object, **__: object) -> None:
        """Tells that it is over."""
        self._session.evaluating(False)

    before_test, after_test = before_val, after_val

    def after_train(self, *_: object, error: BaseException | None = None, **__: object) -> None:
        """Ends the exporter that was started for this training."""
        self._begun = False
        self._session.end(error)

    after_run = after_train

    def _begins(self) -> None:
        if not self._begun:
            self.before_train()
