"""ClipAtSteps: what `start_exporter(clip=)` asks for. Clips what each optimizer is about to use, right before its step.

A hook before every optimizer's step puts a hook on the optimizer itself, as its last one. So it runs after all others, and after
the gradients were read as the loop has left them. If the backward runs within the step, in a closure, the closure is wrapped.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torch_grad_exporter.actions.clip.clipped_optimizers import ClippedOptimizer, ClippedOptimizers
from torch_grad_exporter.actions.clip.clipping import Clipping
from torch_grad_exporter.actions.clip.options import ClipOptions
from torch_grad_exporter.actions.clip.policy import policy_name
from torch_grad_exporter.actions.clip.skipped_step import is_fused
from torch_grad_exporter.actions.clip.skipping import TooManySkippedSteps
from torch_grad_exporter.capture.capture import Capture
from torch_grad_exporter.capture.torch_hooks import Removable
from torch_grad_exporter.collectors.clipping import ClipReports
from torch_grad_exporter.errors import ErrorLog, raised_by_handler
from torch_grad_exporter.model.optimizers import owned_by
from torch_grad_exporter.torch_compat.autograd import capturing_graph, graph_task
from torch_grad_exporter.torch_compat.compiler import compile_again, is_tracing, stop_compiling
from torch_grad_exporter.torch_compat.optimizers import hooked_last, remove_step_hooks, stepping_around

# Of failures: steps that were not clipped, candidates, and reports.
SOURCE, TRIED, SHOWN = SOURCES = "clip", "clip_dry_run", "clip_report"

OBSERVED = 1024  # losses that wait for the next step, at most

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _StepHook:
    """A hook for PyTorch that returns what the action returns, and nothing once it is disconnected.

    In a compiled step it breaks the graph, which hooks of a step do anyway: else nothing would be clipped.
    """

    __slots__ = ("_action", "_uncompiled")

    def __init__(self, action: Callable[..., Arguments | None]) -> None:
        self._action: Callable[..., Arguments | None] | None = action
        self._uncompiled = torch.compiler.disable(action)  # type: ignore[no-untyped-call]

    def disconnect(self) -> None:
        """Do nothing from now on."""
        self._action = self._uncompiled = None

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if is_compiling():
            return None if self._uncompiled is None or is_tracing() else self._uncompiled(optimizer, args, kwargs)
        action = self._action
        if action is None or is_tracing():
            return None
        compiler = stop_compiling()  # below a broken graph; a third of the cost of `torch.compiler.disable`
        try:
            return action(optimizer, args, kwargs)
        finally:
            compile_again(compiler)


class ClipAtSteps:
    """Clips from `start` until `close`; hooks run on the threads that train.

    `named`: the optimizers that the user has named; `capture`: learns of each optimizer whose gradients were clipped.
    """

    def __init__(
        self,
        options: ClipOptions,
        models: Mapping[str, torch.nn.Module],
        errors: ErrorLog,
        *,
        named: Mapping[str, torch.optim.Optimizer] | None = None,
        capture: Capture | None = None,
    ) -> None:
        self._options, self._capture = options, capture
        self._guard = errors.boundary(SOURCE, "gradients are no longer clipped")
        self._candidate_guards = [errors.boundary(TRIED, f"{policy_name(p)} is no longer tried") for p in options.dry_run]
        self._after_clip = errors.boundary("capture", "gradients after clipping")
        self._loading = errors.boundary("observe", "what was saved does not fit", limit=None)
        self._optimizers = ClippedOptimizers(models, named or {}, errors.boundary(SHOWN, "thresholds are no longer shown"))
        self._begins, self._clips, self._ends = map(_StepHook, (self._step_begins, self._before_step, self._step_ended))
        self._handles: list[Removable] = []
        self._losses: deque[tuple[float | torch.Tensor, float | None]] = deque(maxlen=OBSERVED)
        self._epoch: float | None = None
        self._needs_loss = any(policy.needs_loss for policy in options.policies)
        self._judges_loss = any(policy.judges_loss for policy in options.policies)
        self._loss: float | torch.Tensor | None = None  # the last one that was observed
        self._late = False  # whether losses are observed after their steps

    @property
    def reports(self) -> ClipReports:
        """What the policies have come to."""
        return self._optimizers.reports

    def start(self) -> None:
        """Set the hooks. Those of the capture must be there already: what they read is not clipped yet."""
        self._handles = [register_optimizer_step_pre_hook(self._begins)]
        if any(policy.skips for policy in self._options.clip):  # only what they leave has to be undone
            self._handles.append(register_optimizer_step_post_hook(self._ends))  # type: ignore[arg-type]

    def close(self) -> None:
        """Remove all hooks, so that gradients are no longer clipped. What is remembered can still be saved. Idempotent."""
        self.disconnect()
        handles, self._handles = self._handles, []
        for optimizer, record in self._optimizers.alive():
            if record.handle is not None:
                handles.append(record.handle)
            record.flag.clear(optimizer)
        self._optimizers.end()
        remove_step_hooks(handles)

    def disconnect(self) -> None:
        """Make the hooks do nothing. Takes no lock: a fork may have left it held."""
        for hook in (self._begins, self._clips, self._ends):
            hook.disconnect()

    def after_fork_in_child(self) -> None:
        """Clip nothing in the child."""
        self.disconnect()
        self.reports.after_fork_in_child()

    def observe(self, loss: object, epoch: object) -> None:
        """Take what the loop reports, for policies that follow the loss. A loss belongs to the last epoch that was reported."""
        if not (self._needs_loss or self._judges_loss):
            return
        if isinstance(epoch, int | float):
            self._epoch = float(epoch)
        if not isinstance(loss, int | float | torch.Tensor):
            return
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1 or loss.is_complex():
                return  # the capture counts that as a failure
            loss = loss.detach().clone()  # the loop may overwrite it
        self._loss = loss
        for _, record in self._optimizers.alive():
            record.loss = loss
        if self._needs_loss and self._epoch is not None:
            self._losses.append((loss, self._epoch))

    def state(self) -> dict[str, Any]:
        """Return what the policies remember, by name of the optimizer."""
        return {**self._optimizers.saved, **{name: clipping.state() for name, clipping in self._optimizers.clippings().items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with a state, at the latest from the first step of an optimizer. What raises changes nothing."""
        if not isinstance(state, Mapping) or not all(isinstance(its, Mapping) for its in state.values()):
            raise TypeError("load_state_dict(): expected what state_dict() returned")
        known = {name: clipping for name, clipping in self._optimizers.clippings().items() if name in state}
        for name, clipping in known.items():
            clipping.check(state[name])
        for name, clipping in known.items():
            clipping.load(state[name])
        self._optimizers.saved = {name: its for name, its in state.items() if name not in known}

    # Hooks

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Let a failure leave the step unclipped, or raise it if the user wants that."""
        try:
            yield
        except TooManySkippedSteps:
            raise
        except Exception as error:
            if self._options.raises and not raised_by_handler(error):
                raise RuntimeError(f"the gradients of this step cannot be clipped: {error}") from error
            self._guard.failed(error)

    def _step_begins(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """Make our hook the last one of an optimizer that begins a step; called before its own hooks."""
        with self._guarded():
            record = None if self._guard.off else self._optimizers.of(optimizer)
            if record is not None:
                left = record.flag.is_set or record.removed.any
                if left and stepping_around(sys._getframe(1)) is not optimizer:  # by a step that raised
                    record.flag.clear(optimizer)
                    record.removed.forget()
                # The user may have added hooks since the last step, which must run before ours.
                if not hooked_last(optimizer, self._clips):
                    if record.handle is not None:
                        record.handle.remove()
                    record.handle = optimizer.register_step_pre_hook(self._clips)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Clip right before the step, or make its closure do it. Returns the arguments of the step if they change."""
        changed, around = None, stepping_around(sys._getframe(1))
        with self._guarded():
            record = None if self._guard.off else self._optimizers.of(optimizer)
            if record is None:
                return None
            if around is not None and (around is optimizer or owned_by(optimizer) <= owned_by(around)):
                return None  # the gradients were clipped when the step of that one began
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            if closure is None:
                self._clip(record, optimizer)
            else:
                wrapped = self._wrapped(closure, record, optimizer)
                in_args = len(args) > 1
                changed = ((args[0], wrapped, *args[2:]), kwargs) if in_args else (args, {**kwargs, "closure": wrapped})
        return changed

    def _wrapped(self, closure: Callable[..., Any], record: ClippedOptimizer, optimizer: torch.optim.Optimizer) -> Any:  # noqa: ANN401 - as the closure
        """Return the closure, after whose backward gradients are clipped."""

        def clipped(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the user's own
            with self._guarded():
                record.removed.restore(optimizer)  # of an earlier evaluation
            loss = closure(*args, **kwargs)
            with self._guarded():
                self._clip(record, optimizer)
            return loss

        with contextlib.suppress(AttributeError, TypeError):  # a callable without a name
            functools.update_wrapper(clipped, closure)
        return clipped

    def _step_ended(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        with self._guarded():
            record = self._optimizers.of(optimizer)
            if record is not None:
                record.flag.clear(optimizer)
                if record.removed.any and stepping_around(sys._getframe(1)) is not optimizer:
                    record.removed.restore(optimizer)

    def _clip(self, record: ClippedOptimizer, optimizer: torch.optim.Optimizer) -> None:
        """Clip what an optimizer is about to use."""
        if graph_task() != -1:
            name = type(optimizer).__name__
            raise RuntimeError(
                f"{name} steps within the backward, before all gradients are known; step after it, or leave out clip="
            )
        clipping = record.clipping or self._first_clipping(record, optimizer)
        # Here, on the thread that trains: a loss may be on a device.
        while self._losses:
            loss, epoch = self._losses.popleft()
            for each in self._optimizers.clippings().values():
                each.observe(loss, epoch)
        if capturing_graph() and clipping.remembers:
            raise RuntimeError("a CUDA graph is being captured, in whose replays a policy's memory would stand still")
        if capturing_graph() and clipping.skipping and not is_fused(optimizer):
            raise RuntimeError("a CUDA graph is being captured, in which no decision can be read; steps are skipped if fused=True")
        # A scaler leaves the division by its scale to fused optimizers.
        scale = getattr(optimizer, "grad_scale", None)
        record.flag.clear(optimizer)  # a closure may be evaluated several times
        found_inf = getattr(optimizer, "found_inf", None) if clipping.skipping else None
        _, skip = clipping(
            scale if isinstance(scale, torch.Tensor) else None,
            loss=self._loss_of(record) if self._judges_loss else None,
            left_out=found_inf > 0 if isinstance(found_inf, torch.Tensor) else None,
        )
        skipped: torch.Tensor | bool | None = None
        if skip is not None:
            if is_fused(optimizer):
                clipping.check_in_row(waits=False)
                record.flag.set(optimizer, skip)
                skipped = getattr(optimizer, "found_inf", None)
            else:
                skipped = clipping.read(skip) or None
        self._guard.succeeded()
        self._optimizers.report(record)
        if self._capture is not None:
            self._after_clip(self._capture.steps.clipped, optimizer, skipped)
        if skipped is True:
            # All of its: others, such as those of a criterion, are not watched and may be as broken.
            record.removed.remove(parameter for group in optimizer.param_groups for parameter in group["params"])

    def _loss_of(self, record: ClippedOptimizer) -> float | torch.Tensor | None:
        """Return the last loss since an optimizer's last step, None without one."""
        loss, record.loss = record.loss, None
        # A loop that observes after the step has none before its first, and would be judged by that of the step before.
        self._late |= self._loss is None
        return None if self._late else loss

    def _first_clipping(self, record: ClippedOptimizer, optimizer: torch.optim.Optimizer) -> Clipping:
        """Return the clipping of an optimizer at its first step, which goes on with what was loaded for it."""
        clipping = Clipping(record.tracker, self._options.clip, self._options.dry_run, counts=True, guards=self._candidate_guards)
        record.name, record.clipping, record.loss = self._optimizers.name_of(optimizer), clipping, self._loss
        saved = self._optimizers.saved.pop(record.name, None)
        if saved is not None and self._options.raises:
            clipping.load(saved)
        elif saved is not None:
            self._loading(clipping.load, saved)  # what does not fit is counted, and the policy begins again
        return clipping
