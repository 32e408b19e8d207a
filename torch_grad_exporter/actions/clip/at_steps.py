"""ClipAtSteps: what `start_exporter(clip=)` asks for. Clips what each optimizer is about to use, right before its step.

A hook before every optimizer's step puts one on the optimizer itself, as its last one: so it comes after all others, and after the
gradients were read as the loop has left them. Each optimizer has a memory of its own. Where the backward runs within the step, in
a closure, the closure is wrapped.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torch_grad_exporter.actions.clip.clipping import Clipping
from torch_grad_exporter.actions.clip.fixed import LeaveAlone
from torch_grad_exporter.actions.clip.known import KnownOptimizer, KnownOptimizers
from torch_grad_exporter.actions.clip.owned import NothingOwnedError
from torch_grad_exporter.actions.clip.policy import Policy, policy_name
from torch_grad_exporter.actions.clip.reporting import Reporter
from torch_grad_exporter.actions.clip.skipping import SkipAbove, is_fused, remove_gradients, tell_to_skip, untell
from torch_grad_exporter.capture.torch_hooks import HookHandle
from torch_grad_exporter.collectors.clip_reports import ClipReports
from torch_grad_exporter.errors import ErrorLog, Guard, raised_by_handler
from torch_grad_exporter.statistics.device import capturing_graph
from torch_grad_exporter.torch_compat.autograd import graph_task
from torch_grad_exporter.torch_compat.compiler import compile_again, is_tracing, stop_compiling
from torch_grad_exporter.torch_compat.optimizers import hooked_last, remove_step_hooks, stepping_around

SOURCE, TRIED, SHOWN = SOURCES = "clip", "clip_dry_run", "clip_report"
"""Of its failures: of steps that were not clipped, of policies that are only tried, and of what is told of them."""

OBSERVED = 1024
"""Losses at most that wait for the next step."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user asks for.

    `policy`: `None` where others are only tried. `raises`: a step that cannot be clipped is not to be taken.
    """

    policy: Policy | None
    dry_run: tuple[Policy, ...] = ()
    raises: bool = False

    @property
    def policies(self) -> tuple[Policy, ...]:
        """All of them."""
        return (*(() if self.policy is None else (self.policy,)), *self.dry_run)


class _Hook:
    """For PyTorch: returns what the action returns, or nothing once it is disconnected.

    In a compiled step it is a break of the graph, which has one there anyway: else nothing would be clipped.
    """

    __slots__ = ("_action", "_uncompiled")

    def __init__(self, action: Callable[..., Arguments | None]) -> None:
        self._action: Callable[..., Arguments | None] | None = action
        self._uncompiled: Callable[..., Arguments | None] | None = action

    def connect(self) -> None:
        """From here on a compiler leaves the action alone. Imports the compiler, as making an optimizer does."""
        self._uncompiled = torch.compiler.disable(self._action)  # type: ignore[no-untyped-call]

    def disconnect(self) -> None:
        """Does nothing from here on."""
        self._action = self._uncompiled = None

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if is_compiling():
            return None if self._uncompiled is None or is_tracing() else self._uncompiled(optimizer, args, kwargs)
        action = self._action
        if action is None or is_tracing():
            return None
        compiler = stop_compiling()  # where a graph is broken: at a third of the cost of what a compiler leaves alone
        try:
            return action(optimizer, args, kwargs)
        finally:
            compile_again(compiler)


class _Boundary:
    """A failure leaves the step unclipped, or is raised where the user wants that."""

    __slots__ = ("_guard", "_raises")

    def __init__(self, guard: Guard, *, raises: bool) -> None:
        self._guard, self._raises = guard, raises

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        if self._raises and not raised_by_handler(error):
            raise RuntimeError(f"the gradients of this step cannot be clipped: {error}") from error
        self._guard.failed(error)
        return True


class ClipAtSteps:
    """From `start` until `close`; hooks run on the threads that train.

    `named`: the optimizers that the user has named. `clipped`: is told of each optimizer whose gradients were clipped, and of the
    tensor by which it is told to leave its step out, if it is; raises nothing.
    """

    def __init__(
        self,
        wanted: Wanted,
        models: Mapping[str, torch.nn.Module],
        errors: ErrorLog,
        *,
        named: Mapping[str, torch.optim.Optimizer] | None = None,
        clipped: Callable[[torch.optim.Optimizer, torch.Tensor | None], object] = lambda _optimizer, _skip: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._wanted = wanted
        self._clipped = clipped
        self._guard = errors.boundary(SOURCE, "gradients are no longer clipped")
        self._guarded = _Boundary(self._guard, raises=wanted.raises)
        self._tried = [errors.boundary(TRIED, f"{policy_name(one)} is no longer tried") for one in wanted.dry_run]
        self._going_on = errors.boundary("observe", "what was saved does not fit", limit=None)
        self._showing = errors.boundary(SHOWN, "thresholds are no longer shown")
        self._known = KnownOptimizers(models, named or {}, self._gone)
        self._hook = _Hook(self._before_step)
        self._hooks = _Hook(self._step_begins), _Hook(self._step_ended)
        self._handles: list[HookHandle] = []
        self._observed: deque[tuple[float | torch.Tensor, float | None]] = deque(maxlen=OBSERVED)
        self._epoch: float | None = None
        self._observes = any(one.observes for one in wanted.policies)
        self.reports = ClipReports()
        self._reporter = Reporter(wanted.policy, wanted.dry_run, self.reports, clock)

    def start(self) -> None:
        """Sets the hooks. Those of the capture have to be there already: what they read is not clipped yet."""
        for hook in (self._hook, *self._hooks):
            hook.connect()
        began, ended = self._hooks
        self._handles = [register_optimizer_step_pre_hook(began)]
        if isinstance(self._wanted.policy, SkipAbove):  # only its optimizers are told something that has to end
            self._handles.append(register_optimizer_step_post_hook(ended))  # type: ignore[arg-type]

    def close(self) -> None:
        """Takes all hooks off: gradients are no longer clipped. What is remembered can still be saved. Idempotent."""
        self.disconnect()
        handles, self._handles = self._handles, []
        for optimizer, one in self._known.all():
            if one.handle is not None:
                handles.append(one.handle)
            one.untell(optimizer)
            if one.clipping is not None:
                self._gone(one.name, one.clipping)
        remove_step_hooks(handles)
        self._known.clear()

    def disconnect(self) -> None:
        """Makes the hooks do nothing. Takes no lock: a fork may have left it held."""
        for hook in (self._hook, *self._hooks):
            hook.disconnect()

    def after_fork_in_child(self) -> None:
        """The child clips nothing."""
        self.disconnect()
        self.reports.after_fork_in_child()

    def observe(self, loss: object, epoch: object) -> None:
        """Takes what the loop tells, for policies that follow the loss: a loss counts for the last epoch that was told."""
        if not self._observes:
            return
        if isinstance(epoch, int | float):
            self._epoch = float(epoch)
        if self._epoch is None or not isinstance(loss, int | float | torch.Tensor):
            return
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1 or loss.is_complex():
                return  # what shows the loss counts that
            loss = loss.detach().clone()  # the loop may go on writing to it
        self._observed.append((loss, self._epoch))

    def state(self) -> dict[str, Any]:
        """What the policies remember, by name of the optimizer."""
        return {**self._known.saved, **{name: clipping.state() for name, clipping in self._known.clippings().items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on with it: at once, or from the first step of an optimizer that is not known yet. What raises changes nothing."""
        if not isinstance(state, Mapping) or not all(isinstance(one, Mapping) for one in state.values()):
            raise TypeError("load_state_dict(): expected what state_dict() returned")
        known = self._known.clippings()
        for name, of_one in state.items():
            if name in known:
                known[name].check(of_one)
        for name, clipping in known.items():
            if name in state:
                clipping.load(state[name])
        self._known.saved = {name: of_one for name, of_one in state.items() if name not in known}

    # Hooks

    def _step_begins(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """Before any optimizer's step, and before its own hooks: ours becomes the last of them."""
        with self._guarded:
            one = None if self._guard.off else self._known.of(optimizer)
            if one is not None:
                if one.told and stepping_around(sys._getframe(1)) is not optimizer:
                    one.untell(optimizer)  # a step that has raised
                if not hooked_last(optimizer, self._hook):
                    if one.handle is not None:
                        one.handle.remove()
                    one.handle = optimizer.register_step_pre_hook(self._hook)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Right before the step of one that owns parameters of the models: clips, or sees to it that its closure does."""
        changed, frame = None, sys._getframe(1)
        with self._guarded:
            changed = self._prepared(optimizer, args, kwargs, stepping_around(frame))
        return changed  # noqa: RET504 - after a failure as well

    def _prepared(
        self,
        optimizer: torch.optim.Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        around: torch.optim.Optimizer | None,
    ) -> Arguments | None:
        """The arguments of the step, if they have to be others. `around`: the optimizer within whose step this one runs."""
        one = self._known.of(optimizer)
        if one is None or self._guard.off:
            return None
        outer = self._known.outer(optimizer, around)
        if self._known.clipped_elsewhere(one, optimizer, around):
            return None
        seen = optimizer if outer is None else around
        clip = functools.partial(self._clip, one, optimizer, seen)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            clip()
            return None
        wrapped = self._after(closure, clip)
        return ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})

    def _step_ended(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        with self._guarded:
            one = self._known.seen(optimizer)
            if one is not None and one.told:
                untell(optimizer, one.told.pop())

    def _after(self, closure: Callable[..., Any], clip: Callable[[], None]) -> Callable[..., Any]:
        """The closure, after whose backward gradients are clipped."""

        def clipped(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the user's own
            loss = closure(*args, **kwargs)
            with self._guarded:
                clip()
            return loss

        with contextlib.suppress(AttributeError, TypeError):
            functools.update_wrapper(clipped, closure)
        return clipped

    # One optimizer

    def _gone(self, name: str, clipping: Clipping) -> None:
        self._showing(self._keep, name, clipping)

    def _keep(self, name: str, clipping: Clipping) -> None:
        self._known.saved[name] = clipping.state(copied=False)
        self._reporter.report_last(name, clipping)

    def _clip(self, one: KnownOptimizer, optimizer: torch.optim.Optimizer, seen: torch.optim.Optimizer | None) -> None:
        """`seen`: the optimizer whose step the exporter sees; another one than `optimizer` where that works for it."""
        if graph_task() != -1:
            raise RuntimeError(
                f"{one.name} steps within the backward, before all gradients are known; step after it, or leave out clip="
            )
        clipping = one.clipping or self._made(one)
        while self._observed:
            clipping_loss, epoch = self._observed.popleft()
            for other in self._known.clippings().values():
                other.observe(clipping_loss, epoch)
        if capturing_graph() and clipping.remembers:
            raise RuntimeError("a CUDA graph is being captured, in whose replays a policy's memory would stand still")
        scale = getattr(optimizer, "grad_scale", None)
        try:
            _, decision = clipping(scale if isinstance(scale, torch.Tensor) else None)
        except NothingOwnedError:
            return
        skip = None if decision is None else decision.skip
        policy = self._wanted.policy
        if skip is not None and isinstance(policy, SkipAbove):
            if is_fused(optimizer) and not clipping.running.split:
                one.told.append(tell_to_skip(optimizer, skip))
            else:
                remove_gradients(clipping.groups, skip, synchronize=policy.synchronize)
        self._guard.succeeded()
        self._showing(self._reporter.report, one.name, clipping)
        if seen is not None:
            self._clipped(seen, getattr(optimizer, "found_inf", None) if one.told else None)

    def _made(self, one: KnownOptimizer) -> Clipping:
        """The memory of an optimizer at its first step, which goes on with what was loaded for it."""
        clipping = Clipping(one.parameters, self._wanted.policy or LeaveAlone(), self._wanted.dry_run, guards=self._tried)
        saved = self._known.saved.pop(one.name, None)
        one.clipping = clipping
        if saved is not None and self._wanted.raises:
            clipping.load(saved)
        elif saved is not None:
            self._going_on(clipping.load, saved)  # what does not fit begins anew, and the step is clipped
        return clipping
