"""Attaches an exporter to a training that knows nothing of it, at its first training forward.

Until then hooks before the forwards of all modules and the steps of all optimizers wait for it; they are gone as soon as
it has come. What optimizers own by then is watched. An optimizer of something else that steps later sets the first hook again, for
one look.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_grad_exporter.errors import Guard, caught, raised_by_handler
from torch_grad_exporter.integrations.engines import FollowedEngines, followed_engines, living_engines, optimizer_of
from torch_grad_exporter.integrations.roots import living, named, parameters_of, trained_roots, wants_gradients
from torch_grad_exporter.torch_compat.autograd import graph_task
from torch_grad_exporter.torch_compat.compiler import compile_again, is_tracing, never_compile, stop_compiling
from torch_grad_exporter.torch_compat.modules import forward_under_way
from torch_grad_exporter.torch_compat.optimizers import optimizers_made, step_under_way

if TYPE_CHECKING:
    from torch_grad_exporter.exporter import Exporter

CREDIT = 2.0
"""Seconds that looks for further models may take in any case, as of the folds of a cross-validation."""

SHARE = 0.01
"""Of the time since the first attachment that they may take beyond it: a sweep over a thousand small models is not slowed down."""

LONGEST_WAIT = 1024
"""Training forwards from one look at all objects of the process to the next, at most, while no optimizer owns a model."""


_BY_HAND = ", trained by no optimizer that is known: norms are shown where one of PyTorch steps, or exporter.step() is called"


class Tells(Protocol):
    """Where lines for the user go."""

    def __call__(self, level: int, message: str, *arguments: object) -> None:
        """Logs a line."""


class Attachment:
    """Waits for a training, and has the exporter that watches it. Belongs to the training thread.

    `options`, or what it returns when a training begins, go to `start_exporter`, which is imported when it is needed, so that a
    program that never trains does not pay for it.
    `tell` takes lines for the user. `replaced` is called with an exporter that watched other models, before it ends.

    Nothing here raises into the training: what fails is told once, and then nothing is watched.
    """

    def __init__(
        self,
        options: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        *,
        tell: Tells,
        attached: Callable[[Exporter], object],
        replaced: Callable[[Exporter], object],
    ) -> None:
        self._options = options
        self._tell = tell
        self._attached, self._replaced = attached, replaced
        self._guard = Guard(self._failed)
        self._handles: list[Any] = []
        self._waiting = _Waiting()
        self._watched: list[weakref.ref[torch.nn.Module]] = []
        self._foreign: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._began = self._spent = 0.0
        self._process = os.getpid()
        self.given_up = False
        """Whether nothing is watched because something failed, which was said."""
        self._looking = threading.Lock()
        self.exporter: Exporter | None = None
        """The exporter, once there is one; also after its end."""
        self.gave_way = False
        """Whether the script has an exporter of its own."""
        self.forwards = self.steps = False
        """Whether a training forward was seen, and whether a step was."""

    def arm(self) -> None:
        """Begins to wait. Call it where no training runs yet."""
        self._arm_forwards()
        self._handles.append(register_optimizer_step_pre_hook(_never_compiled(self._step_begins)))

    def _arm_forwards(self) -> None:
        self._handles.append(register_module_forward_pre_hook(_never_compiled(self._forward_begins)))

    def why_not(self) -> str:
        """Why there is no exporter, for the user."""
        if not (self.forwards or self.steps):
            return (
                "this process never trained: there was neither a forward of a torch.nn.Module with gradients nor a step; a "
                "process that a script starts itself needs a start_exporter of its own"
            )
        if self._waiting.backward_seen or self.steps:
            return "the training ended with its first step, or no module has the parameters that it trains"
        return "there were forwards with gradients, but no optimizer and no backward"

    def disarm(self) -> None:
        """Removes all hooks; idempotent."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._waiting.end()

    # The hooks

    def _forward_begins(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Before any module's forward."""
        if is_compiling() or not torch.is_grad_enabled() or is_tracing():
            return
        self._guard(self._alone, self._look, module, args, sys._getframe(1))

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before any optimizer's step: here a training shows whose forwards run within it, as of a closure, or call no module."""
        if not is_compiling():
            self._guard(self._alone, self._look_at_step, optimizer, args, kwargs, sys._getframe(1))

    def _alone(self, look: Callable[..., None], *arguments: object) -> None:
        """One look at a time: the replicas of `DataParallel` begin their forwards on threads."""
        if self._looking.acquire(blocking=False):
            compiler = stop_compiling()
            try:
                look(*arguments)
            finally:
                compile_again(compiler)
                self._looking.release()

    def _look_at_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], frame: types.FrameType
    ) -> None:
        if os.getpid() != self._process:
            return
        self.steps = True
        self._waiting.over()
        under_way = step_under_way(self._handles[-1], optimizer, args, kwargs) if self._handles and graph_task() == -1 else None
        if under_way is not None and not self._yields() and self._find_and_attach(None, frame):
            under_way.begins_anew()

    def _look(self, module: torch.nn.Module, args: tuple[Any, ...], frame: types.FrameType) -> None:
        """A forward with gradients begins: attaches where it is one of a training."""
        if graph_task() != -1 or not wants_gradients(module):
            return
        if os.getpid() != self._process:
            self.disarm()
            self._tell(logging.WARNING, "a process that the script has forked trains: it is not watched; call start_exporter in it")
            return
        self.forwards = True
        if self._yields():
            return
        again = self.exporter is not None
        if again and self._spent > CREDIT + SHARE * (time.monotonic() - self._began):
            return
        if again or self._waiting.is_over(module):
            began, under_way = time.monotonic(), forward_under_way(frame, module, args)
            if self._find_and_attach(module if self._waiting.backward_seen else None, frame):
                under_way.begins_anew()
            elif again:
                self.disarm()
            if again:
                self._spent += time.monotonic() - began
            else:
                self._began = began

    def _yields(self) -> bool:
        """Whether the script has an exporter of its own, to which this one leaves the training."""
        module = sys.modules.get("torch_grad_exporter.exporter")  # before it is imported there is no exporter
        others = [] if module is None else [one for one in module.open_exporters() if one is not self.exporter]
        if others:
            self._give_way(others[0])
        return bool(others)

    def _give_way(self, other: Exporter) -> None:
        """The script has an exporter of its own, or starts one, for which the one here has been closed."""
        self.disarm()
        self.gave_way = True
        self._attached(other)
        self._tell(logging.INFO, "the script starts an exporter of its own, which has the models and the port: %r", other)

    # Attaching

    def _find_and_attach(self, module: torch.nn.Module | None, frame: types.FrameType) -> bool:
        """Looks for what is trained, and watches it; whether that is something else than before."""
        known = () if module is None else (module,)
        if len(_roots(*living(), known)) > 1:
            gc.collect()  # one of them may be of an earlier training, which only the garbage collector frees
        optimizers, modules = living()
        roots = _roots(optimizers, modules, known)
        watched = [model for reference in self._watched if (model := reference()) is not None]
        if not roots or {*map(id, roots)} == {*map(id, watched)}:
            return False
        # What wraps an optimizer, such as Accelerate's, is none by itself.
        own = [one for one in optimizers if not isinstance(getattr(one, "optimizer", None), torch.optim.Optimizer)]
        own = [one for one in own if trained_roots([one], roots)] + [optimizer_of(one) for one in living_engines(modules)]
        names = sorted({type(one).__name__ for one in own})
        self._attach(named(roots, frame), ", ".join(names))
        return self.exporter is not None

    def _attach(self, models: dict[str, torch.nn.Module], optimizers: str) -> None:
        from torch_grad_exporter.start import start_exporter  # noqa: PLC0415 - a program that never trains does not pay for it

        self.disarm()
        before, self._watched = self.exporter, [weakref.ref(model) for model in models.values()]
        options = dict(self._options() if callable(self._options) else self._options)
        if before is not None:
            options |= {"run": before.run} | ({"port": before.port} if before.port else {})
            self._replaced(before)
            self.exporter = None
        exporter = start_exporter(models[""] if [*models] == [""] else models, **options)
        exporter.guarded(self._follow_engines, exporter, models)
        exporter.gives_way = self._give_way
        exporter.on_foreign_optimizer(self._foreign_optimizer)
        self.exporter = exporter
        self._attached(exporter)
        shown = ", ".join(f"{name} ({type(model).__name__})" if name else type(model).__name__ for name, model in models.items())
        trained = f", trained by {optimizers}" if optimizers else _BY_HAND
        late = "" if before is None else "from now on "
        where = f"; metrics at {exporter.url}" if exporter.url else ""
        self._tell(logging.INFO, "%swatching %s%s%s", late, shown, trained, where)

    def _follow_engines(self, exporter: Exporter, models: Mapping[str, torch.nn.Module]) -> None:
        """Where DeepSpeed trains what is watched, its engine says what the parameters' gradients do not."""
        if found := followed_engines(models.values()):
            FollowedEngines(exporter, found, number_steps=True, tell=self._tell)

    def _foreign_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped that owns nothing of what is watched: at the next forward there is another look."""
        if optimizer not in self._foreign:
            self._foreign.add(optimizer)
            if not self._handles and not self.gave_way and not self.given_up:
                self._arm_forwards()

    def _failed(self, error: Exception) -> None:
        """A boundary: the hooks call this within the script's own forward. What a signal's handler raised passes."""
        if raised_by_handler(error):
            raise error
        self.given_up = True
        failure = caught(self.disarm)
        if failure is not None and raised_by_handler(failure):
            raise failure
        self._tell(logging.WARNING, "nothing is watched: %s: %s", type(error).__name__, error)


def _roots(
    optimizers: list[torch.optim.Optimizer], modules: list[torch.nn.Module], known: tuple[torch.nn.Module, ...]
) -> list[torch.nn.Module]:
    """What is trained: also the modules of DeepSpeed's engines, whose optimizers may own copies of the parameters."""
    engines = living_engines(modules)
    inner = {id(engine): engine.module for engine in engines}
    found = trained_roots(optimizers, modules, (*known, *engines))
    return [*{id(root): root for root in (inner.get(id(one), one) for one in found)}.values()]


class _Waiting:
    """Whether a forward is one of a training that has begun: an optimizer is there, or a backward has been."""

    def __init__(self) -> None:
        self.backward_seen = False
        self._forwards = 0
        self._next = 1
        self._handle: Any = None

    def over(self) -> None:
        """What was waited for has come: the next forward is worth a look."""
        self._next = 0

    def is_over(self, module: torch.nn.Module) -> bool:
        """Whether it is worth to look at all objects of the process now. Each look that finds nothing doubles the wait."""
        if self.backward_seen:
            return True
        if self._handle is None:
            self._watch_backwards(module)
        if not optimizers_made():
            return False
        self._forwards += 1
        if self._forwards < self._next:
            return False
        self._forwards, self._next = 0, min(max(1, 2 * self._next), LONGEST_WAIT)
        return True

    def _watch_backwards(self, module: torch.nn.Module) -> None:
        """A loop may update its parameters by itself; its first backward shows that it trains."""
        parameter = next(one for one in parameters_of(module) if one.requires_grad)
        if parameter.is_leaf:
            this = weakref.ref(self)

            def accumulated(_parameter: torch.Tensor) -> None:
                waiting = this()
                if waiting is not None:
                    waiting.backward_seen = True

            self._handle = parameter.register_post_accumulate_grad_hook(_never_compiled(accumulated))  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Removes its hook; idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()


def _never_compiled(hook: Callable[..., None]) -> Callable[..., None]:
    never_compile(getattr(hook, "__func__", hook))
    return hook
