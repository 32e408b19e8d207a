"""Attaches an exporter to a training that knows nothing of it, at its first training forward.

Until then hooks before the forwards of all modules and the steps of all optimizers wait for it; they are removed as soon as it
begins. What optimizers own by then is watched. A foreign optimizer that steps later sets the first hook again, for one look.
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

from torch_grad_exporter.errors import Guard, caught, say
from torch_grad_exporter.integrations.engines import FollowedEngines, followed_engines, living_engines
from torch_grad_exporter.integrations.roots import living, named, trained_roots, wants_gradients
from torch_grad_exporter.torch_compat.autograd import graph_task
from torch_grad_exporter.torch_compat.compiler import compile_again, is_tracing, never_compile, stop_compiling
from torch_grad_exporter.torch_compat.modules import forward_under_way
from torch_grad_exporter.torch_compat.optimizers import optimizers_made, step_under_way

if TYPE_CHECKING:
    from torch_grad_exporter.exporter import Exporter

# Seconds that looks for further models may take in any case, as for the folds of a cross-validation, and the share of the time
# since the first attachment that they may take beyond it: a sweep over a thousand small models is not slowed down.
CREDIT, SHARE = 2.0, 0.01

# Training forwards from one look at all objects of the process to the next, at most, while no optimizer owns a model.
LONGEST_WAIT = 1024


class AttachmentOwner(Protocol):
    """Whoever attaches, such as the command `run`. `log`: takes the lines for the user."""

    log: logging.Logger

    def options(self) -> Mapping[str, Any]:
        """Return the options of `start_exporter`, when a training begins."""

    def attached(self, exporter: Exporter) -> None:
        """Take the exporter that watches the training from now on; it may be the script's own."""

    def replaced(self, exporter: Exporter) -> None:
        """End an exporter that watched other models."""


class Attachment:
    """Waits for a training, and has the exporter that watches it. Belongs to the training thread.

    Nothing here raises into the training: what fails is logged once, and then nothing is watched (`given_up`). `exporter`: once
    there is one; also after its end.
    """

    def __init__(self, owner: AttachmentOwner) -> None:
        self._owner = owner
        self.exporter: Exporter | None = None
        self.given_up = self._gave_way = self._trained = self._stepped = False
        self._guard = Guard(self._failed)
        self._handles: list[Any] = []
        self._forwards, self._next_look = 0, 1
        self._watched: list[weakref.ref[torch.nn.Module]] = []
        self._foreign: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._began = self._spent = 0.0
        self._process = os.getpid()
        self._looking = threading.Lock()

    def arm(self) -> None:
        """Begin to wait. Call it where no training runs yet."""
        self._arm_forwards()
        never_compile(type(self)._step_begins)
        self._handles.append(register_optimizer_step_pre_hook(self._step_begins))

    def _arm_forwards(self) -> None:
        never_compile(type(self)._forward_begins)
        self._handles.append(register_module_forward_pre_hook(self._forward_begins))

    def disarm(self) -> None:
        """Remove all hooks; idempotent."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def why_not(self) -> str:
        """Return why there is no exporter, for the user."""
        if self._stepped:
            return "the training ended with its first step, or no module has the parameters that it trains"
        if self._trained:
            return "there were forwards with gradients, but no optimizer of PyTorch; use start_exporter and exporter.step()"
        return (
            "this process never trained: there was neither a forward of a torch.nn.Module with gradients nor a step; a "
            "process that a script starts itself needs a start_exporter of its own"
        )

    def _forward_begins(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if not is_compiling() and torch.is_grad_enabled() and not is_tracing():
            self._guard(self._alone, self._look, module, args, sys._getframe(1))

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Shows a training whose forwards run within the step, as in a closure, or that calls no module.
        if not is_compiling():
            self._guard(self._alone, self._look_at_step, optimizer, args, kwargs)

    def _alone(self, look: Callable[..., None], *arguments: object) -> None:
        """Look once at a time: the replicas of `DataParallel` begin their forwards on threads."""
        if self._looking.acquire(blocking=False):
            compiler = stop_compiling()
            try:
                look(*arguments)
            finally:
                compile_again(compiler)
                self._looking.release()

    def _look_at_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if os.getpid() != self._process:
            return
        self._stepped, self._next_look = True, 0  # the next forward is worth a look
        under_way = step_under_way(self._handles[-1], optimizer, args, kwargs) if self._handles and graph_task() == -1 else None
        if under_way is not None and not self._yields() and self._attach_to_trained():
            under_way.call_new_hooks()

    def _look(self, module: torch.nn.Module, args: tuple[Any, ...], frame: types.FrameType) -> None:
        """Attach at a forward with gradients, if it is one of a training."""
        if graph_task() != -1 or not wants_gradients(module):
            return
        if os.getpid() != self._process:
            self.disarm()
            message = "a process that the script has forked trains: it is not watched; call start_exporter in it"
            say(self._owner.log, logging.WARNING, message)
            return
        self._trained = True
        again = self.exporter is not None
        if self._yields() or (again and self._spent > CREDIT + SHARE * (time.monotonic() - self._began)):
            return
        if not again:  # each look at all objects of the process in vain doubles the wait
            if not optimizers_made():
                return
            self._forwards += 1
            if self._forwards < self._next_look:
                return
            self._forwards, self._next_look = 0, min(max(1, 2 * self._next_look), LONGEST_WAIT)
        began, under_way = time.monotonic(), forward_under_way(frame, module, args)
        if self._attach_to_trained():
            under_way.call_new_hooks()
        elif again:
            self.disarm()
        if again:
            self._spent += time.monotonic() - began
        else:
            self._began = began

    def _yields(self) -> bool:
        """Leave the training to an exporter of the script's own; return whether there is one."""
        module = sys.modules.get("torch_grad_exporter.exporter")  # before it is imported there is no exporter
        others = [] if module is None else [each for each in module.open_exporters() if each is not self.exporter]
        if others:
            self._give_way(others[0])
        return bool(others)

    def _give_way(self, other: Exporter) -> None:
        self.disarm()
        self._gave_way = True
        self._owner.attached(other)
        message = "the script starts an exporter of its own, which has the models and the port: %r"
        say(self._owner.log, logging.INFO, message, other)

    def _attach_to_trained(self) -> bool:
        """Look for what is trained, and watch it; return whether that is something else than before."""
        if len(_roots(*living())) > 1:
            gc.collect()  # one of them may be of an earlier training, which only the garbage collector frees
        optimizers, modules = living()
        roots = _roots(optimizers, modules)
        watched = [model for reference in self._watched if (model := reference()) is not None]
        if not roots or {*map(id, roots)} == {*map(id, watched)}:
            return False
        # What wraps an optimizer, such as Accelerate's, is not one itself.
        bare = [each for each in optimizers if not isinstance(getattr(each, "optimizer", None), torch.optim.Optimizer)]
        own = [each for each in bare if trained_roots([each], roots)] + [each.basic_optimizer for each in living_engines(modules)]
        self._attach(named(roots), ", ".join(sorted({type(each).__name__ for each in own})))
        return True

    def _attach(self, models: dict[str, torch.nn.Module], optimizers: str) -> None:
        # A program that never trains does not pay for these.
        from torch_grad_exporter.config.checked import check  # noqa: PLC0415
        from torch_grad_exporter.start import start  # noqa: PLC0415

        self.disarm()
        before, self._watched = self.exporter, [weakref.ref(model) for model in models.values()]
        options = dict(self._owner.options())
        if before is not None:
            options |= {"run": before.run} | ({"port": before.port} if before.port else {})
            self._owner.replaced(before)
            self.exporter = None
        exporter = start(models, check(models, os.environ, **options))
        exporter.guarded(self._follow_engines, exporter, models)
        exporter.gives_way = self._give_way
        exporter.on_foreign_optimizer(self._foreign_optimizer)
        self.exporter = exporter
        self._owner.attached(exporter)
        shown = ", ".join(f"{name} ({type(model).__name__})" if name else type(model).__name__ for name, model in models.items())
        late = "" if before is None else "from now on "
        where = f"; serving {exporter.page_url} (metrics at /metrics)" if exporter.page_url else ""
        say(self._owner.log, logging.INFO, "%swatching %s, trained by %s%s", late, shown, optimizers, where)
        exporter.warn_of_open_port()

    def _follow_engines(self, exporter: Exporter, models: Mapping[str, torch.nn.Module]) -> None:
        """Follow DeepSpeed's engine if it trains what is watched."""
        if engines := followed_engines(models.values()):
            FollowedEngines(exporter, engines, number_steps=True, log=self._owner.log)

    def _foreign_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Look again at the next forward: an optimizer has stepped that owns nothing of what is watched."""
        if optimizer not in self._foreign:
            self._foreign.add(optimizer)
            if not self._handles and not self._gave_way and not self.given_up:
                self._arm_forwards()

    def _failed(self, error: Exception) -> None:
        self.given_up = True
        caught(self.disarm)
        say(self._owner.log, logging.WARNING, "nothing is watched: %s: %s", type(error).__name__, error)


def _roots(optimizers: list[torch.optim.Optimizer], modules: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return what is trained, also the modules of DeepSpeed's engines, whose optimizers may own copies of the parameters."""
    engines = living_engines(modules)
    inner = {id(engine): engine.module for engine in engines}
    roots = [inner.get(id(root), root) for root in trained_roots(optimizers, modules, engines)]
    return list({id(root): root for root in roots}.values())
