"""Hooks for a loop of one's own: named points of a training, and what is called there, in which order.

The points and the priorities are those of MMEngine. Only `GradExporterHook` knows the exporter: a `HookList` is of use without it.

    hooks = HookList(GradExporterHook(model, port=9100))
    hooks.register(log_loss, "LOW", point="after_train_iter")
    hooks.call("before_train")
    for batch in loader:
        ...
        hooks.call("after_train_iter", loss=loss, samples=len(batch))
    hooks.call("after_train")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch_grad_exporter import Exporter
from torch_grad_exporter.arguments import near
from torch_grad_exporter.capture.observations import Number
from torch_grad_exporter.integrations.common import TrainingInterrupted
from torch_grad_exporter.integrations.session import Models, Session, SessionOwner

# In the order of a training with evaluations and a test.
POINTS = (
    "before_run", "after_load_checkpoint", "before_train", "before_train_epoch", "before_train_iter", "after_train_iter",
    "after_train_epoch", "before_val", "before_val_epoch", "before_val_iter", "after_val_iter", "after_val_epoch", "after_val",
    "before_save_checkpoint", "after_train", "before_test", "before_test_epoch", "before_test_iter", "after_test_iter",
    "after_test_epoch", "after_test", "after_run",
)  # fmt: skip

# The lower the number, the earlier a hook is called.
PRIORITIES = {
    "HIGHEST": 0, "VERY_HIGH": 10, "HIGH": 30, "ABOVE_NORMAL": 40, "NORMAL": 50, "BELOW_NORMAL": 60, "LOW": 70, "VERY_LOW": 90,
    "LOWEST": 100,
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class HookHandle:
    """One registration: what is called, by point. `Exporter.adopt` takes it, so that it ends with the exporter."""

    _hooks: HookList
    calls: dict[str, Callable[..., object]]
    priority: int

    def remove(self) -> None:
        """Take the hook out of the list; idempotent. A call that is under way still reaches it."""
        self._hooks.discard(self)


class HookList:
    """Calls hooks at the points of a loop, by priority, those of equal priority in the order of their registration.

    What a hook raises reaches the loop, and those after it are not called. Not thread-safe: it belongs to the thread that trains.

    Args:
        hooks: Some to begin with, at "NORMAL".
    """

    def __init__(self, *hooks: object) -> None:
        self._handles: list[HookHandle] = []
        self._by_point: dict[str, tuple[Callable[..., object], ...]] = dict.fromkeys(POINTS, ())
        for hook in hooks:
            self.register(hook)

    def register(self, hook: object, priority: str | int = "NORMAL", *, point: str | None = None) -> HookHandle:
        """Add a hook, and return a handle whose `remove()` takes it back.

        Args:
            hook: An object with methods that have the names of points, or a function.
            priority: One of the nine names in `PRIORITIES`, or a number from 0 to 100.
            point: Where a function is called; not needed if its own name is that of a point.

        Raises:
            ValueError: The point or the priority does not exist; the message names similar ones.
            TypeError: The hook has no point.
        """
        calls = _calls(hook, point)
        if isinstance(priority, str):
            priority = PRIORITIES[_known("priority", priority.upper(), PRIORITIES)]
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise TypeError(f"priority={priority!r}: expected one of {', '.join(PRIORITIES)}, or a number from 0 to 100")
        if not 0 <= priority <= 100:
            raise ValueError(f"priority={priority}: expected a number from 0, which is called first, to 100")
        handle = HookHandle(self, calls, priority)
        self._handles.append(handle)
        self._arrange()
        return handle

    def discard(self, handle: HookHandle) -> None:
        """Take back one registration, as its `remove()` does; nothing happens if it is not in the list."""
        if handle in self._handles:
            self._handles.remove(handle)
            self._arrange()

    def call(self, point: str, *arguments: Any, **named: Any) -> None:
        """Call all hooks of a point with these arguments.

        Hooks that are added or removed meanwhile are so from the next call on.

        Raises:
            ValueError: The point does not exist; the message names similar ones.
        """
        for hook in self._by_point[_known("point", point, POINTS)]:
            hook(*arguments, **named)

    def _arrange(self) -> None:
        handles = sorted(self._handles, key=lambda handle: handle.priority)  # a stable sort
        for point in POINTS:
            self._by_point[point] = tuple(handle.calls[point] for handle in handles if point in handle.calls)


def _calls(hook: object, point: str | None) -> dict[str, Callable[..., object]]:
    name = getattr(hook, "__name__", type(hook).__name__)
    if point is not None or (callable(hook) and name in POINTS):
        if not callable(hook):
            raise TypeError(f"register({name}, point={point!r}): expected a function")
        return {_known("point", point or name, POINTS): hook}
    calls = {point: method for point in POINTS if callable(method := getattr(hook, point, None))}
    if not calls and callable(hook):
        raise TypeError(f"register({name}): say where it is called, such as point='after_train_iter'")
    if not calls:
        raise TypeError(f"register({name}): it has no method with the name of a point, such as after_train_iter")
    return calls


def _known(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the name. Raises `ValueError` if it is not known."""
    if name not in known:
        meant = near(name, known) or f"; there are {', '.join(known)}"
        raise ValueError(f"there is no {kind} {name!r}{meant}")
    return name


class GradExporterHook(SessionOwner):
    """The exporter as a hook of a `HookList`: `HookList(GradExporterHook(model, port=9100))`.

    It begins at `before_train`, or if that is not called at the first of the points below. It takes from each point the named
    arguments that it knows, and ignores the others: `before_train(step=)`, the steps that a checkpoint had done;
    `before_train_epoch(epoch=)`; `after_train_iter(loss=, samples=, tokens=, epoch=)`; `after_train(error=)`, the exception that
    ended the training. From `before_val` to `after_val`, and from `before_test` to `after_test`, the training is evaluating.
    From `before_save_checkpoint` to the next step or evaluation it writes a checkpoint.

    See `SessionOwner` for `exporter`, the options and what is raised; there is no `log` and no `log_values`. `model`: as for
    `start_exporter`.
    """

    def __init__(self, model: Models, exporter: Exporter | None = None, **options: Any) -> None:
        # Not by `SessionOwner`: a loop of one's own has no logger, so `log` and `log_values` are refused like any unknown option.
        self._session = Session(type(self).__name__, exporter, options)
        self._model, self._begun = model, False

    def before_train(self, *_: object, step: int | None = None, **__: object) -> None:
        """Start the exporter, unless there is one. A training that is still open by then was interrupted."""
        if self._session.active:
            self._session.end(TrainingInterrupted())
        self._begun = True
        self._session.begin(self._model, step=step)

    def before_train_epoch(self, *_: object, epoch: Number | None = None, **__: object) -> None:
        """Report the epoch."""
        self._begin()
        self._session.observe(epoch=epoch)

    def before_train_iter(self, *_: object, **__: object) -> None:
        """Begin, if the loop has no earlier point."""
        self._begin()

    def after_train_iter(
        self,
        *_: object,
        loss: Number | None = None,
        samples: Number | None = None,
        tokens: Number | None = None,
        epoch: Number | None = None,
        **__: object,
    ) -> None:
        """Report what the loop knows of the step."""
        self._begin()
        self._session.observe(loss=loss, samples=samples, tokens=tokens, epoch=epoch)

    def before_save_checkpoint(self, *_: object, **__: object) -> None:
        """Report that a checkpoint is being written."""
        self._session.checkpointing()

    def before_val(self, *_: object, **__: object) -> None:
        """Report that an evaluation has begun."""
        self._session.evaluating()

    def after_val(self, *_: object, **__: object) -> None:
        """Report that it is over."""
        self._session.evaluating(False)

    before_test, after_test = before_val, after_val

    def after_train(self, *_: object, error: BaseException | None = None, **__: object) -> None:
        """End the exporter that was started for this training."""
        self._begun = False
        self._session.end(error)

    after_run = after_train

    def _begin(self) -> None:
        if not self._begun:
            self.before_train()
