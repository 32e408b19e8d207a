"""A running exporter: what a user may ask of it, and what ends it with its process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, Self, TypeVar, TypeVarTuple, overload

import torch
from torch.compiler import is_compiling
from torch.utils.data import DataLoader

from torch_grad_exporter.actions.act.act import Handle
from torch_grad_exporter.actions.act.between_steps import BetweenSteps
from torch_grad_exporter.actions.act.event import Action
from torch_grad_exporter.actions.act.trigger import Condition
from torch_grad_exporter.actions.freeze.freeze import Freeze
from torch_grad_exporter.build import STORE_SECONDS, Stages
from torch_grad_exporter.capture.observations import Number
from torch_grad_exporter.capture.watched_data_loader import watched
from torch_grad_exporter.capture.watched_loader import WatchedLoader
from torch_grad_exporter.config.checked import Checked
from torch_grad_exporter.errors import Guard
from torch_grad_exporter.inspection.watch import check
from torch_grad_exporter.lifecycle import Ending
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.flat import flat
from torch_grad_exporter.rules import Problem
from torch_grad_exporter.torch_compat.compiler import is_tracing

_Arguments = TypeVarTuple("_Arguments")
_Batch = TypeVar("_Batch")
_Loader = TypeVar("_Loader", bound=DataLoader[Any])


class Removable(Protocol):
    """Has a `remove()`, as handles of hooks do."""

    def remove(self) -> object:
        """Take back what the handle stands for."""


_Handle = TypeVar("_Handle", bound=Removable)


class Exporter:
    """A running exporter; made by `start_exporter`. A context manager: leaving it closes it.

    Attributes:
        settings: The options, checked.
        run: Name of the run, on every series.
        rank: Rank in the job, on every series.
        gives_way: Set on an exporter that the script does not know of: called with the exporter
            that takes its place, as each new one does.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module], checked: Checked) -> None:
        self.settings = checked.settings
        self.run = checked.run
        self.rank = checked.rank
        self.gives_way: Callable[[Exporter], object] | None = None
        self._adopted: list[Removable] = []
        self._ending = Ending(checked.identity.world_size)
        with contextlib.ExitStack() as failed:
            failed.callback(checked.store.close, STORE_SECONDS)
            self._stages = stages = Stages(models, checked, self._ending)
            failed.callback(stages.abort)
            stages.start(models, checked)
            failed.pop_all()
        # Calls of the user and of integrations: what may succeed the next time is never disabled.
        guarded = ("observe", "request", "close", "watch", "integration")
        self._guards = {source: stages.errors.boundary(source, limit=None) for source in guarded}
        self._guards["step"] = stages.errors.boundary("observe", "step")
        _open[self] = None
        _handle_forks_and_exit()

    @property
    def port(self) -> int | None:
        """The port in use, None if nothing is served."""
        outputs = self._stages.outputs
        return None if outputs is None or self._ending.closed else outputs.port

    @property
    def url(self) -> str | None:
        """The address of the metrics as seen from this host, None if nothing is served."""
        outputs = self._stages.outputs
        return None if outputs is None or self._ending.closed else outputs.url

    @property
    def should_stop(self) -> bool:
        """Whether `Stop()` wants the training to end, for the loop to look at; in a job after the same step on all ranks."""
        return self._stages.stop_requested.is_set()

    def on(
        self,
        what: str | Condition | Freeze,
        action: Action | BetweenSteps | None = None,
        *,
        name: str | None = None,
        for_: float = 0,
        cooldown: float = 600,
    ) -> Handle:
        """Does something when a rule or a condition holds. Returns a handle, whose `remove()` ends it.

        `what`: the name of a rule, such as "GradientExploding", or a callable of the values of now and their windows that says
        whether its condition holds, such as `lambda m: m.mean("torch_grad_global_norm", samples=100) > 2`; it has to take all its
        windows each time. `action`: a callable that takes an `Event`, which runs in the background; or one that runs between steps
        and changes the training: `Stop()`, `ScaleLearningRate(factor)` or `Freeze(...)`. Without an action `what` is a `Freeze`,
        which knows by itself when it is due. `name`: what it is called in events and in the log.
        `for_`: seconds that it has to hold. It acts again every `cooldown` seconds while it still holds. See docs/act.md.

        Raises `TypeError` or `ValueError` where an argument is wrong, and `RuntimeError` where the ranks of a job cannot agree on a
        step, or the exporter is closed. What conditions and actions raise later is logged once and counted.
        """
        return self._stages.act.on(what, action, name=name, for_=for_, cooldown=cooldown)

    def observe(
        self,
        *,
        loss: Number | None = None,
        samples: Number | None = None,
        tokens: Number | None = None,
        epoch: Number | None = None,
        grad_norm: Number | None = None,
        grad_divisor: Number | None = None,
    ) -> None:
        """Takes values of the current step; a device tensor is copied in the background and not waited for.

        `loss` and `epoch` replace the value before, `samples` and `tokens` are added up.

        `grad_norm`: the global norm before clipping, as `clip_grad_norm_` returns it; with several optimizers it is ignored, since
        it is not known whose norm it is. `grad_divisor`: by what the loop divides this round's gradients between its backwards and
        the clipping, such as the number of tokens; norms are then those after the division. Tell it before the step: after the
        step before, or any time since.

        May be called from any thread, except with `grad_norm` and `grad_divisor`, which belong to the step of the thread that
        trains: from another one they are counted as errors and change nothing.
        """
        given = {"loss": loss, "samples": samples, "tokens": tokens, "epoch": epoch}
        given |= {"grad_norm": grad_norm, "grad_divisor": grad_divisor}
        values = iter([(name, value) for name, value in given.items() if value is not None])
        for _ in given:  # a value that fails costs itself alone: those behind it are taken
            if self._ending.closed or self._guards["observe"](self._stages.capture.observe, values):
                break
        if self._stages.clip is not None:
            self._guards["observe"](self._stages.clip.observe, loss, epoch)

    def watch(self, name: str, tensor: torch.Tensor, max_norm: float | None = None) -> torch.Tensor:
        """The tensor, whose gradient is measured in sampled rounds; go on with what this returns. In the forward or the loss.

        `max_norm`: clips that gradient to this L2 norm in every backward, sampled or not, which changes the training; in units of
        the loss before a gradient scaler's, if one is known. A norm that is not finite is left alone. Several tensors of one name
        in a round count together, but each is clipped by itself. Beyond 100 names all others share one.

        A tensor that needs no gradient, and any within compiled code or after `close()`, is returned as it is. Raises `TypeError`
        or `ValueError` where an argument is wrong, as `on` does; what fails later is counted, and leaves the gradient as it is.
        """
        if is_compiling():
            return tensor
        check(name, tensor, max_norm)
        if self._ending.closed or is_tracing():
            return tensor
        measured = self._guards["watch"].result(self._stages.watch, name, tensor, max_norm)
        return tensor if measured is None else measured

    def step(self, number: int | None = None) -> None:
        """Says that an optimizer step is done, where no hook can see it: a patched, wrapped or captured one.

        Call it on the thread that trains, after the step and before the gradients are cleared. `number` numbers the step, so
        that ranks or restarted runs count alike.
        """
        if not self._ending.closed:
            self._guards["step"](self._stages.capture.manual_step, number)
            self._stages.act.step_reported()

    def step_skipped(self) -> None:
        """Says that a step was left out, as after an overflow, where gradients do not show it: see `gradients_elsewhere`.

        Call it on the thread that trains, in place of `step()`.
        """
        if not self._ending.closed:
            self._guards["step"](self._stages.capture.step_skipped)

    def gradients_elsewhere(self) -> None:
        """Says that parameters do not have the gradients that they are trained with, as where a framework keeps those in parts.

        Nothing of single layers is shown any more, and no interval of samples. Backwards, times and examples are counted on; the
        loop reports steps with `step()` and `step_skipped()`, and may tell the norm with `observe(grad_norm=)`. Call it before the
        first backward, on the thread that trains.
        """
        if not self._ending.closed:
            self._guards["step"](self._stages.capture.gradients_elsewhere)

    def backward_comes(self, loss: torch.Tensor) -> None:
        """Says that the loop is about to call `loss.backward()`, where the forward of the model itself is never run.

        Such as a loop that calls the model's submodules: without this its backwards are seen from the second step on. With several
        models it is to be a loss of the first one. On the thread that trains.
        """
        if not self._ending.closed:
            self._guards["observe"](self._stages.capture.backward_comes, loss)

    def evaluating(self, now: bool = True) -> None:
        """Says that an evaluation goes on, or that it is over, where the forward of the model itself is never run in it.

        Such as an evaluation that calls the model's submodules. Call it for each batch, on the thread that trains: it also shows
        that the loop is alive. The next step of an optimizer ends an evaluation, too.
        """
        if not self._ending.closed:
            self._guards["observe"](functools.partial(self._stages.clock.active, evaluating=now))

    @overload
    def watch_loader(self, loader: _Loader) -> _Loader: ...

    @overload
    def watch_loader(self, loader: Iterable[_Batch]) -> WatchedLoader[_Batch]: ...

    def watch_loader(self, loader: Any) -> Any:
        """The same loader, with the time that the loop waits for it counted as the phase `data`.

        Of a `torch.utils.data.DataLoader` it is one as well, of a subclass of its class, which shares its attributes; one with
        `__slots__` comes back as it is and is not timed. Where a framework makes another loader from it, as `prepare` of
        Accelerate does, watch what the framework returns.
        """
        timed = self._guards["observe"].result(watched, loader, self._stages.clock, self._stages.errors)
        return loader if timed is None else timed

    def state_dict(self) -> dict[str, Any]:
        """What the policies of `clip=` and `dry_run=` remember, by optimizer; to be saved with model and optimizer."""
        return {"clip": {} if self._stages.clip is None else self._stages.clip.state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on with what `state_dict()` returned, of an exporter with the same policies.

        An optimizer that has not stepped yet takes it over at its first step. Raises `TypeError` or `ValueError` where it does not
        fit.
        """
        if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get("clip"), Mapping):
            raise TypeError("load_state_dict(): expected what state_dict() returned")
        if self._stages.clip is not None:
            self._stages.clip.load(state_dict["clip"])
        elif state_dict["clip"]:
            raise ValueError("load_state_dict(): the state is one of clip=, which this exporter does not have")

    def resume(self, step: int) -> None:
        """Says that the training goes on after this many optimizer steps, as those of a checkpoint; call it before the next step.

        The numbers of steps count on from there: `torch_grad_sample_step`, the live page, events and messages. Counters such as
        `torch_train_steps_total` count what this process does, as Prometheus expects of a process that began anew.

        Raises `TypeError` or `ValueError` where `step` is no whole number of at least 0.
        """
        if not isinstance(step, int) or isinstance(step, bool):
            raise TypeError(f"resume(step={step!r}): expected a whole number; pass the optimizer steps done so far")
        if step < 0:
            raise ValueError(f"resume(step={step!r}): expected at least 0; pass the optimizer steps done so far")
        self._stages.clock.resume(step)

    def adopt(self, handle: _Handle) -> _Handle:
        """Takes over a handle of your own, such as one of `register_forward_hook`: the end of the exporter calls its `remove()`.

        Returns it. Where the exporter is closed already, it is removed at once. Raises `TypeError` where it has no `remove()`.
        """
        if not callable(getattr(handle, "remove", None)):
            raise TypeError(f"adopt(): {type(handle).__name__} has no remove(); pass what a register_..._hook returned")
        self._adopted.append(handle)
        if self._ending.closed:
            self._guards["close"](self._release_adopted)
        return handle

    def values(self, match: str | re.Pattern[str] = "") -> dict[str, float]:
        """The last values as a flat mapping of names to numbers, for a logger of your own; empty if that fails, or after the end.

        A name is that of the metric and the values of its labels, such as `torch_grad_global_norm` or `torch_grad_norm/encoder.0`.
        `match`: a regular expression that is searched in the names; all by default. Histograms are left out. Each call is a whole
        scrape, of milliseconds: call it when you log, not in every step. Raises `re.error` where `match` is no regular expression.
        """
        pattern = re.compile(match)
        return self._guards["request"].result(lambda: flat(self._stages.scrape(), pattern)) or {}

    def collect(self) -> list[Family]:
        """All metrics as of now, as an output gets them; for tests and outputs of one's own. Empty if that fails."""
        return self._guards["request"].result(self._stages.scrape) or []

    def problems(self) -> list[Problem]:
        """What is wrong now, the worst first, by the rules of docs/runbook.md that one process can judge. Empty if that fails."""
        return self._guards["request"].result(self._stages.view.live.problems) or []

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the history of the run to a file, for `torch-grad-exporter plot`; compressed where its name ends in `.gz`.

        A failure, such as a full disk, is logged: the training goes on.
        """
        guard = Guard(functools.partial(self._stages.errors.tell, "history"))
        guard(lambda: self._stages.view.save(os.fspath(path)))

    # For integrations, and for a new exporter that takes this one's place.

    def on_foreign_optimizer(self, callback: Callable[[torch.optim.Optimizer], object]) -> None:
        """Call `callback` in the step of an optimizer that owns nothing of the models; at least once for each."""
        self._stages.optimizers.on_foreign = callback

    def guarded(self, action: Callable[[*_Arguments], object], *arguments: *_Arguments) -> bool:
        """Run what an integration does at an event of its trainer; a failure is counted as `integration` and not raised."""
        return self._guards["integration"](action, *arguments)

    def watches(self, models: Iterable[torch.nn.Module]) -> bool:
        """Return whether this exporter watches one of the models."""
        return self._stages.models.any_of(models)

    def replaced_by(self, models: Iterable[torch.nn.Module]) -> bool:
        """Return whether it watches one of the models, or only models that are gone, as after a notebook cell ran again."""
        return self.watches(models) or self._stages.models.all_gone

    # The end

    def close(self) -> None:
        """Remove every hook, thread, socket and reference. Idempotent, from any thread, never raises."""
        if not self._ending.close():
            return
        self._guards["close"](self._release_adopted)
        self._stages.close()
        _open.pop(self, None)

    def end(self, error: BaseException | None) -> None:
        """Close at the end of the training.

        Leaving a `with` and the end of the process do so by themselves. Only the first end counts.

        Args:
            error: The exception that ended the training, which makes the run `failed`.
        """
        self._ending.by(error)
        self.close()

    def after_fork_in_child(self) -> None:
        """The forked child is another process: it serves nothing, watches nothing and frees the port."""
        self._ending.after_fork_in_child()
        self._stages.after_fork_in_child()

    def _release_adopted(self) -> None:
        while self._adopted:
            self._guards["close"](self._adopted.pop().remove)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        self.end(error)

    def __repr__(self) -> str:
        where = "closed" if self._ending.closed else self.url or "not serving"
        return f"<Exporter run={self.run!r} rank={self.rank} {where}>"

    # As an attribute of a model: its copies have the same exporter, which does not watch them, and its pickles none.

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return types.NoneType, ()


# The process

# The open exporters: like its hooks one stays until it is closed, though nothing else may hold it.
_open: dict[Exporter, None] = {}


def open_exporters() -> list[Exporter]:
    """Return all that are open, in the order of their start."""
    return list(_open)


@functools.cache
def _handle_forks_and_exit() -> None:
    # Once in a process: nothing can take these handlers back.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork_in_child)
    atexit.register(_at_exit)


def _after_fork_in_child() -> None:
    for exporter in open_exporters():
        # Nothing can be counted or logged here: a lock that a thread of the parent held at the fork
        # is never released.
        with contextlib.suppress(Exception):
            exporter.after_fork_in_child()
    _open.clear()


def _at_exit() -> None:
    # The last exception that the interpreter has reported; in a notebook it may come from an earlier
    # cell.
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    error = None if isinstance(last, KeyboardInterrupt) or hasattr(sys, "ps1") else last
    for exporter in open_exporters():
        exporter.end(error)
