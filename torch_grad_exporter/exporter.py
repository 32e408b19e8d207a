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
from pathlib import Path
from typing import Any, Self, TypeVar, TypeVarTuple, overload

import torch
from torch.compiler import is_compiling
from torch.utils.data import DataLoader

from torch_grad_exporter import files
from torch_grad_exporter.actions.act.act import Handle
from torch_grad_exporter.actions.act.step_actions import StepAction
from torch_grad_exporter.actions.act.trigger import Action, Condition
from torch_grad_exporter.actions.freeze.freeze import Freeze
from torch_grad_exporter.actions.rollback.rollback import Rollback
from torch_grad_exporter.arguments import check_whole, shown
from torch_grad_exporter.build.stages import STORE_SECONDS, Stages
from torch_grad_exporter.capture.interruptions import CHECKPOINT, EVALUATION
from torch_grad_exporter.capture.observations import Number
from torch_grad_exporter.capture.torch_hooks import Removable
from torch_grad_exporter.capture.watched_loader import WatchedLoader, watched
from torch_grad_exporter.config.checked import Checked
from torch_grad_exporter.errors import Guard, leave_traceback
from torch_grad_exporter.inspection.watch import check_watched
from torch_grad_exporter.lifecycle import Ending
from torch_grad_exporter.metrics.families import Family, flat
from torch_grad_exporter.outputs.live.encoding import Json
from torch_grad_exporter.rules import Problem, Wrong
from torch_grad_exporter.torch_compat.compiler import is_tracing

_Arguments = TypeVarTuple("_Arguments")
_Batch = TypeVar("_Batch")
_Loader = TypeVar("_Loader", bound=DataLoader[Any])


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
        self._saved = False
        self._ending = Ending(checked.identity.world_size)
        with contextlib.ExitStack() as failed:
            failed.callback(checked.store.close, STORE_SECONDS)
            self._stages = stages = Stages(models, checked, self._ending)
            failed.callback(stages.abort)
            stages.start(models, checked)
            failed.pop_all()
        # Calls of the user and of integrations: what may succeed the next time is never disabled.
        guarded = ("observe", "log", "request", "close", "watch", "routers", "integration")
        self._guards = {source: stages.errors.boundary(source, limit=None) for source in guarded}
        self._guards["step"] = stages.errors.boundary("observe", "step")
        stages.at_end(self._release_adopted)
        _open[self] = None
        _handle_forks_and_exit()

    @property
    def port(self) -> int | None:
        """The port in use, None if nothing is served."""
        outputs = self._stages.outputs
        return None if outputs is None or self._ending.closed else outputs.port

    @property
    def page_url(self) -> str | None:
        """The address of the live page as seen from this host, None if nothing is served."""
        outputs = self._stages.outputs
        return None if outputs is None or self._ending.closed else outputs.page_url

    @property
    def url(self) -> str | None:
        """The address of the metrics as seen from this host, None if nothing is served."""
        page = self.page_url
        return None if page is None else f"{page}metrics"

    @property
    def should_stop(self) -> bool:
        """Whether `Stop()` asks the loop to end; in a job, after the same step on all ranks."""
        return self._stages.stop_requested.is_set()

    def on(
        self,
        what: str | Condition | Freeze | Rollback,
        action: Action | StepAction | None = None,
        *,
        name: str | None = None,
        for_: float = 0,
        cooldown: float = 600,
    ) -> Handle:
        """Do something when a rule or a condition holds. See docs/actions.md.

        What conditions and actions raise later is logged once and counted.

        Args:
            what: The name of a rule, such as "GradientExploding"; or a callable that takes the
                current values and their windows and returns whether its condition holds, such as
                `lambda m: m.mean("torch_grad_global_norm", samples=100) > 2`, which must read all
                its windows in each call; or, without an action, a `Freeze` or a `Rollback`, which
                know when they are due.
            action: A callable that takes an `Event` and runs in the background; or an action that
                runs between steps and changes the training: `Stop()`, `ScaleLearningRate(factor)`,
                `Freeze(...)` or `Rollback(...)`.
            name: The name in events and in the log.
            for_: Seconds for which it must hold before the action.
            cooldown: Seconds until the action is repeated while it still holds.

        Returns:
            A handle, whose `remove()` ends it.

        Raises:
            TypeError: An argument is of a wrong type.
            ValueError: An argument is wrong.
            RuntimeError: The ranks of a job cannot agree on a step, or the exporter is closed.
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
        """Take values of the current step; a device tensor is copied later and not waited for.

        May be called from any thread, except with `grad_norm` and `grad_divisor`, which belong to
        the step of the thread that trains: from another one they are counted as errors and ignored.

        Args:
            loss: The loss; replaces the last one.
            samples: Examples of this step; added up.
            tokens: Tokens of this step; added up.
            epoch: The epoch; replaces the last one.
            grad_norm: The global norm before clipping, as `clip_grad_norm_` returns it. Ignored
                with several optimizers, since it does not say whose norm it is.
            grad_divisor: What the loop divides this round's gradients by between its backwards and
                the clipping, such as the number of tokens. Norms are then those after the division.
                Pass it after the last step and before this one.
        """
        given = {"loss": loss, "samples": samples, "tokens": tokens, "epoch": epoch}
        given |= {"grad_norm": grad_norm, "grad_divisor": grad_divisor}
        values = iter([(name, value) for name, value in given.items() if value is not None])
        # A value that fails costs itself alone: those behind it are taken.
        for _ in given:
            if self._ending.closed or self._guards["observe"](self._stages.capture.observations.observe, values):
                break
        if self._stages.clip is not None:
            self._guards["observe"](self._stages.clip.observe, loss, epoch)

    def log(self, values: Mapping[str, Number], step: int | None = None) -> None:
        """Show numbers of your own, such as a reward or an evaluation loss, by name.

        From any thread; in compiled code it does nothing. Tensors on a device are copied in the
        background and not waited for. The first call raises errors; later ones count them, and the
        training goes on.

        Args:
            values: Numbers or tensors of one element, by names of 1 to 200 characters; at most 200
                names are shown. The live page groups names by the part before their first `/`.
            step: The number of the step that they belong to; by default that of the last step.

        Raises:
            TypeError: In the first call, for a wrong type of a name or value.
            ValueError: In the first call, for a wrong name, tensor or step.
        """
        if self._ending.closed or is_compiling() or is_tracing():
            return
        log = self._stages.log
        if log.used:
            self._guards["log"](log.log, values, step)
        else:
            log.log(values, step)

    def watch(self, name: str, tensor: torch.Tensor, max_norm: float | None = None) -> torch.Tensor:
        """Measure the gradient of a tensor in sampled rounds, in the forward or the loss.

        What fails later is counted, and leaves the gradient as it is.

        Args:
            name: The name on the series. Several tensors with one name in a round count together,
                but each is clipped alone. Beyond 100 names all others share one.
            tensor: The tensor. One that needs no gradient, and any in compiled code or after
                `close()`, is returned unchanged.
            max_norm: Clip the gradient to this L2 norm in every backward, sampled or not, which
                changes the training. In units of the loss before a gradient scaler's, if one is
                known. A norm that is not finite is left alone.

        Returns:
            The tensor with which to go on.

        Raises:
            TypeError: An argument is of a wrong type.
            ValueError: An argument is wrong.
        """
        if is_compiling():
            return tensor
        check_watched(name, tensor, max_norm)
        if self._ending.closed or is_tracing():
            return tensor
        measured = self._guards["watch"].result(self._stages.watch, name, tensor, max_norm)
        return tensor if measured is None else measured

    def router(self, name: str, counts_or_ids: torch.Tensor, experts: int | None = None) -> None:
        """Show how a mixture-of-experts router of your own spreads tokens, in sampled rounds.

        From any thread; in compiled code, and in the second forward of a checkpoint, it does nothing.
        Calls of one round add up. Tensors are not waited for. The first call raises errors; later
        ones count them, and the training goes on. See docs/routers.md.

        Args:
            name: The label `layer` on the series, 1 to 200 characters; the first 100 names are shown.
            counts_or_ids: Tokens of each expert in this forward, shape (experts,): then leave out
                `experts`. Or the indices of the chosen experts, a tensor of whole numbers of any
                shape; those outside of 0 to `experts` - 1 do not count.
            experts: The number of experts. What is given with it is read as indices.

        Raises:
            TypeError: In the first call, an argument is of a wrong type.
            ValueError: In the first call, an argument is wrong.
        """
        if is_compiling() or self._ending.closed or is_tracing():
            return
        routers = self._stages.routers
        if routers.used:
            self._guards["routers"](routers.take, name, counts_or_ids, experts)
        else:
            routers.take(name, counts_or_ids, experts)

    def step(self, number: int | None = None) -> None:
        """Report an optimizer step that no hook can see: a patched, wrapped or captured one.

        Call it on the thread that trains, after the step and before the gradients are cleared.

        Args:
            number: The number of the step, so that ranks or restarted runs count alike.
        """
        if not self._ending.closed:
            self._guards["step"](self._stages.capture.steps.manual_step, number)
            self._stages.act.step_reported()

    def step_skipped(self) -> None:
        """Report a step that was left out, as after an overflow, where gradients do not show it.

        Call it on the thread that trains, in place of `step()`; see `gradients_elsewhere`.
        """
        if not self._ending.closed:
            self._guards["step"](self._stages.capture.step_skipped)

    def gradients_elsewhere(self) -> None:
        """Report that the parameters' gradients are not those of the training.

        So it is where a framework keeps gradients in buffers of its own. Single layers are no
        longer shown, nor an interval of samples; backwards, times and examples still count. The
        loop reports steps with `step()` and `step_skipped()`, and may report the norm with
        `observe(grad_norm=)`. Call it before the first backward, on the thread that trains.
        """
        if not self._ending.closed:
            self._guards["step"](self._stages.capture.gradients_elsewhere)

    def backward_comes(self, loss: torch.Tensor) -> None:
        """Report that the loop is about to call `loss.backward()` without the model's own forward.

        For a loop that calls the model's submodules: without this, its backwards are seen from the
        second step on. On the thread that trains.

        Args:
            loss: The loss; with several models, one of the first model.
        """
        if not self._ending.closed:
            self._guards["observe"](self._stages.capture.backward.comes, loss)

    def evaluating(self, now: bool = True) -> contextlib.AbstractContextManager[object]:
        """Report that an evaluation runs, or has ended: `with exporter.evaluating():`.

        Its time is then that of evaluations, see docs/goodput.md. Without a `with`, call it for
        each batch, on the thread that trains: it also shows that the loop is alive, where an
        evaluation calls the model's submodules. The next step of an optimizer ends an evaluation,
        too.

        Returns:
            A context manager whose end is that of the evaluation, if it is used in a `with`.
        """
        return self._interrupted(EVALUATION, now)

    def checkpointing(self, now: bool = True) -> contextlib.AbstractContextManager[object]:
        """Report that the training waits for a checkpoint: `with exporter.checkpointing():`.

        Call it on the thread that trains; on another one it only shows that the loop is alive, as
        that of an asynchronous checkpoint. The next step of an optimizer ends a checkpoint, too.

        Args:
            now: Whether it begins, or has ended; for a loop that cannot use a `with`.

        Returns:
            A context manager whose end is that of the checkpoint, if it is used in a `with`.
        """
        return self._interrupted(CHECKPOINT, now)

    def _interrupted(self, cause: str, now: bool) -> contextlib.AbstractContextManager[object]:
        until_end = contextlib.ExitStack()
        if not self._ending.closed:
            begins = self._guards["observe"].result(self._stages.capture.interrupted, cause, now=now)
            if now and begins:  # else one around it ends it
                until_end.callback(self._interrupted, cause, now=False)
        return until_end

    @overload
    def watch_loader(self, loader: _Loader) -> _Loader: ...

    @overload
    def watch_loader(self, loader: Iterable[_Batch]) -> WatchedLoader[_Batch]: ...

    def watch_loader(self, loader: Any) -> Any:
        """Return the loader, with the time that the loop waits for it counted as the phase `data`.

        For a `torch.utils.data.DataLoader` the result is one, too, of a subclass of its class, and
        shares its attributes; one with `__slots__` is returned as it is and not timed. If a
        framework makes another loader from it, as `prepare` of Accelerate does, watch what the
        framework returns.
        """
        stages = self._stages
        timed = self._guards["observe"].result(watched, loader, stages.clock, stages.errors)
        return loader if timed is None else timed

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `clip=` and `dry_run=`, to be saved with the model."""
        return {"clip": {} if self._stages.clip is None else self._stages.clip.state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with what `state_dict()` of an exporter with the same policies returned.

        An optimizer that has not stepped yet takes it over at its first step.

        Raises:
            TypeError: It is not what `state_dict()` returns.
            ValueError: It is of other policies.
        """
        if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get("clip"), Mapping):
            raise TypeError("load_state_dict(): expected what state_dict() returned")
        if self._stages.clip is not None:
            self._stages.clip.load(state_dict["clip"])
        elif state_dict["clip"]:
            message = "the state is one of clip=, which this exporter does not have"
            raise ValueError(f"load_state_dict(): {message}")

    def resume(self, step: int) -> None:
        """Report that the training goes on after this many optimizer steps, as from a checkpoint.

        Call it before the next step. Step numbers count on from there: `torch_grad_sample_step`,
        the live page, events and messages. Counters such as `torch_train_steps_total` count what
        this process does, as Prometheus expects of a process that has restarted. With `state_dir=`
        it also tells which steps are computed again; so call it with 0 at a start without a
        checkpoint.

        Raises:
            TypeError: `step` is not a whole number.
            ValueError: `step` is negative.
        """
        what = "the optimizer steps done so far, a number"
        self._stages.resume(check_whole(f"resume(step={shown(step)})", step, least=0, what=what, example=1000))

    def adopt(self, handle: _Handle) -> _Handle:
        """Take over a handle, such as that of a forward hook: `close()` calls its `remove()`.

        If the exporter is closed already, the handle is removed at once.

        Returns:
            The handle.

        Raises:
            TypeError: It has no `remove()`.
        """
        if not callable(getattr(handle, "remove", None)):
            fix = "pass what a register_..._hook returned"
            raise TypeError(f"adopt(): {type(handle).__name__} has no remove(); {fix}")
        self._adopted.append(handle)
        if self._ending.closed:
            self._guards["close"](self._release_adopted)
        return handle

    def values(self, match: str | re.Pattern[str] = "") -> dict[str, float]:
        """Return the last values as a flat mapping, for a logger of your own.

        Each call is a whole scrape, which takes milliseconds: call it when you log, not in every
        step.

        Args:
            match: A regular expression, searched in the names; all by default.

        Returns:
            Numbers by the name of the metric and the values of its labels, such as
            `torch_grad_global_norm` or `torch_grad_norm/encoder.0`, without histograms, and without
            metrics called `_info` unless `match` contains that. Empty if the scrape failed, or
            after the end.

        Raises:
            re.error: `match` is not a regular expression.
        """
        pattern = re.compile(match)
        return self._guards["request"].result(lambda: flat(self._stages.scrape(), pattern)) or {}

    def collect(self) -> list[Family]:
        """Return all metrics now, for tests and outputs of your own. Empty if that failed."""
        return self._guards["request"].result(self._stages.scrape) or []

    def problems(self) -> list[Problem]:
        """Return what is wrong now, the worst first. Empty if that failed.

        Judged by the rules of docs/runbook.md that one process can judge.
        """
        return self._guards["request"].result(self._stages.view.live.problems) or []

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the history of the run to a file, for `torch-grad-exporter plot`.

        It is compressed if the name ends in `.gz`. The file is whole, or as it was before. A
        failure of the exporter is logged and counted, and nothing is written.

        Raises:
            OSError: The file cannot be written, as where its folder is missing or the disk full.
            TypeError: `path` is not a path.
        """
        file = Path(path)
        guard = Guard(functools.partial(self._stages.errors.report, "history"))
        content = guard.result(lambda: self._stages.view.saved(packed=file.suffix == ".gz"))
        if content is None:
            return
        try:
            files.replace(file, content)
        except OSError as error:
            raise OSError(error.errno, f"save() cannot write: {error.strerror}", str(file)) from None
        self._saved = True

    # For integrations, and for a new exporter that takes this one's place.

    def announce(self) -> None:
        """Log where the live page is, and who can read it; see `show`. An integration may say it in a line of its own."""
        if self._stages.outputs is not None:
            self._stages.outputs.announce()

    def warn_of_open_port(self) -> None:
        """Log once in a process that every host can read the metrics, if so."""
        if self._stages.outputs is not None:
            self._stages.outputs.warn_of_open_port()

    def on_foreign_optimizer(self, callback: Callable[[torch.optim.Optimizer], object]) -> None:
        """Call `callback` in steps of optimizers that own nothing of the models.

        It is called at least once for each.
        """
        self._stages.optimizers.on_foreign = callback

    def guarded(self, action: Callable[[*_Arguments], object], *arguments: *_Arguments) -> bool:
        """Run what an integration does at an event of its trainer.

        A failure is counted as `integration` and not raised.
        """
        return self._guards["integration"](action, *arguments)

    def conclusion(self) -> tuple[Json, list[Wrong]] | None:
        """Return the status that the live page shows, and everything that was wrong; None if that failed."""
        live = self._stages.view.live
        return self._guards["request"].result(lambda: (live.status(fresh=True), live.wrong))

    def watches(self, models: Iterable[torch.nn.Module]) -> bool:
        """Return whether this exporter watches one of the models."""
        return self._stages.models.any_of(models)

    def replaced_by(self, models: Iterable[torch.nn.Module]) -> bool:
        """Return whether a new exporter on these models takes this one's place.

        So it is if this one watches one of them, or only models that are gone, as after a notebook
        cell ran again.
        """
        return self.watches(models) or self._stages.models.all_gone

    def give_place(self) -> None:
        """Close for another exporter, which is scraped in place of this one."""
        self._ending.no_time = True
        self.close()

    # The end

    def close(self) -> None:
        """Remove every hook, thread, socket and reference.

        Idempotent, from any thread, never raises.
        """
        if not self._ending.close():
            return
        try:
            self._stages.close()
        finally:
            _open.pop(self, None)
        ended_well = self._ending.error is None and not self._ending.hurried
        # Whoever started it for a script says more.
        if ended_well and not self._saved and self.gives_way is None and self._stages.outputs is not None:
            self._stages.outputs.log_unread()

    def end(self, error: BaseException | None) -> None:
        """Close at the end of the training.

        Leaving a `with` and the end of the process do so by themselves. Only the first end counts.

        Args:
            error: The exception that ended the training, which makes the run `failed`.
        """
        self._ending.by(error)
        self.close()

    def after_fork_in_child(self) -> None:
        """Free the port, and serve and watch nothing: the forked child is another process."""
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
        if error is not None:
            leave_traceback(error)

    def __repr__(self) -> str:
        where = "closed" if self._ending.closed else self.page_url or "not serving"
        return f"<Exporter run={self.run!r} rank={self.rank} {where}>"

    # As an attribute of a model: copies of the model have the same exporter, which does not watch
    # them, and its pickles have none.

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
    # The last exception that the interpreter reported; in a notebook perhaps in an earlier cell.
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    error = None if isinstance(last, KeyboardInterrupt) or hasattr(sys, "ps1") else last
    for exporter in open_exporters():
        exporter.end(error)
