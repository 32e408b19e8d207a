"""Hooks of optimizers, steps among the callers, the scale of a gradient scaler."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torch_grad_exporter.torch_compat.lost import find, gone

_step_hooks = tuple(find(f"torch.optim.optimizer._global_optimizer_{when}_hooks") for when in ("pre", "post"))
STEP_HOOKS: tuple[dict[int, Any], ...] = () if None in _step_hooks else _step_hooks
"""The hooks before and after every optimizer's step by their numbers; empty where they are not shown."""


def others_follow(number: int, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether other hooks run between that of all optimizers with this number and the step; true where it cannot say."""
    own = getattr(optimizer, "_optimizer_step_pre_hooks", True)
    return bool(own) or not STEP_HOOKS or next(reversed(STEP_HOOKS[0]), None) != number


def hooked_last(optimizer: torch.optim.Optimizer, hook: Callable[..., object]) -> bool:
    """Return whether this is the last of the optimizer's own hooks before its step; false where it cannot say."""
    return next(reversed(getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()), None) is hook


def obeys_skip_flag(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it reads the flag `found_inf`, as gradient scalers ask it; false where it does not say so."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _step_code() -> types.CodeType | None:
    """Return the code of the function in which PyTorch wraps an optimizer's `step`."""
    wrap = find("torch.optim.Optimizer.profile_hook_step")
    return None if wrap is None else getattr(wrap(lambda: None), "__code__", None)


_STEP = _step_code()


def called_from_step(frame: types.FrameType | None) -> bool:
    """Return whether an optimizer's step is among the callers: else one that had begun has raised."""
    return _step_around(frame) is not None


def stepping_around(frame: types.FrameType | None) -> torch.optim.Optimizer | None:
    """Return the optimizer within whose step the nearest step among the callers runs, `None` if that one runs by itself."""
    own = _step_around(frame)
    around = None if own is None else _step_around(own.f_back)
    return None if around is None else around.f_locals.get("self")


def _step_around(frame: types.FrameType | None) -> types.FrameType | None:
    while frame is not None:
        if frame.f_code is _STEP if _STEP is not None else _is_step(frame):
            return frame
        frame = frame.f_back
    return None


def _is_step(frame: types.FrameType) -> bool:
    return frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer)


WAIT_SECONDS = 1.0
"""For steps of other threads, before their hooks are removed."""

_left: list[Any] = []  # handles that could not be removed yet


def remove_step_hooks(handles: Iterable[Any]) -> None:
    """Remove hooks of optimizers, unless a step is under way: PyTorch's iteration over them would raise into the training.

    A step of another thread is waited for. If it takes too long, or the calling thread itself is in a step, the hooks stay until
    the next call; they have to be disconnected before.
    """
    _left.extend(handles)
    give_up_at, own = time.monotonic() + WAIT_SECONDS, threading.get_ident()
    while _left:
        stepping = [thread for thread, frame in sys._current_frames().items() if called_from_step(frame)]
        if not stepping:
            with contextlib.suppress(IndexError):  # another thread is at it, too
                _left.pop().remove()
        elif own in stepping or time.monotonic() > give_up_at:
            return
        else:
            time.sleep(0.001)


def scale_of(scaler: Any) -> torch.Tensor | None:  # noqa: ANN401 - an object that may be a gradient scaler
    """Return the loss scale now, `None` before the scaler's first use, and of one that is disabled."""
    if hasattr(scaler, "_scale"):
        scale: torch.Tensor | None = scaler._scale
        return scale
    if scaler is None or not scaler.is_enabled():
        return None
    gone("torch.amp.GradScaler._scale")
    return torch.tensor(scaler.get_scale(), device=getattr(scaler, "_device", "cuda"))


def scaler_state(scaler: object) -> dict[str, torch.Tensor]:
    """Return the tensors that a gradient scaler changes, by attribute: none before its first use."""
    held = {name: getattr(scaler, name, None) for name in ("_scale", "_growth_tracker")}
    return {name: tensor for name, tensor in held.items() if isinstance(tensor, torch.Tensor)}


def has_scale(scaler: object) -> bool:
    """Return whether it is a gradient scaler, or has the interface of one."""
    # A disabled one has no scale.
    return hasattr(scaler, "_scale") or isinstance(scaler, torch.amp.GradScaler)


NEAREST = 12
"""Callers of an optimizer's step that are searched for a gradient scaler."""


class Scaler(Protocol):
    """A `torch.amp.GradScaler`: `_scale` is a tensor, `None` before its first use; a disabled one has none."""

    def is_enabled(self) -> bool:
        """Return whether it scales."""


class LossScale:
    """Finds the scaler, and holds it weakly. Belongs to the training thread.

    Args:
        scaler: One that the user has named.

    Attributes:
        is_known: Whether it is known if there is a scaler, as it is from the first step on.
    """

    def __init__(self, scaler: Scaler | None = None) -> None:
        self._scaler = None if scaler is None else weakref.ref(scaler)
        self.is_known = scaler is not None

    def search(self, frame: types.FrameType | None) -> None:
        """Search the callers of an optimizer's step for a scaler whose `step` called it."""
        self.is_known = True
        for _ in range(NEAREST):
            if frame is None:
                return
            if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
                scaler = frame.f_locals.get("self")
                if scaler is not None:
                    self._scaler = weakref.ref(scaler)
                return
            frame = frame.f_back

    @property
    def scaler(self) -> Scaler | None:
        """The scaler, if one was given or found, and is alive."""
        return None if self._scaler is None else self._scaler()

    @property
    def has_scaler(self) -> bool:
        """Whether a scaler was given or found, and is alive."""
        return self.scaler is not None

    @property
    def value(self) -> torch.Tensor | None:
        """The loss scale now, if there is a scaler that has one."""
        return None if self._scaler is None else scale_of(self._scaler())


_STEPS_ARE_MARKED = find("torch.optim.Optimizer._patch_step_function") is not None


def optimizers_made() -> bool:
    """Return whether an optimizer has ever been made in this process; true where that cannot be known. Takes microseconds."""
    kinds = [torch.optim.Optimizer]
    for kind in kinds:  # which grows meanwhile
        kinds += kind.__subclasses__()
    return not _STEPS_ARE_MARKED or any(getattr(vars(kind).get("step"), "hooked", False) for kind in kinds)


@dataclass(frozen=True, slots=True)
class StepUnderWay:
    """An optimizer's step, of which the last of the hooks before all optimizers' steps is being called. `known`: all of those."""

    arguments: tuple[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]]
    known: frozenset[int]

    def call_new_hooks(self) -> None:
        """Call the hooks that were set since: PyTorch's iteration over them is at its end."""
        for key, hook in [*STEP_HOOKS[0].items()]:
            if key not in self.known:
                hook(*self.arguments)


def step_under_way(
    handle: Any,  # noqa: ANN401 - a handle of a hook
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> StepUnderWay | None:
    """The step before which the hook of `handle` is being called; `None` where it is not the last one, or that cannot be known.

    Within the last one hooks may be set and removed; within any other one PyTorch's iteration over them would raise.
    """
    if not STEP_HOOKS or next(reversed(STEP_HOOKS[0]), None) != handle.id:
        return None
    return StepUnderWay((optimizer, args, kwargs), frozenset(STEP_HOOKS[0]))
