"""The composition root: builds the stages in the order of the data, owns their handles, and gives them back with `close()`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import re
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, Self, TypeVar, overload

import torch
from torch.compiler import is_compiling
from torch.utils.data import DataLoader

from torch_grad_exporter import lifecycle, torch_compat
from torch_grad_exporter.actions.act.act import Handle
from torch_grad_exporter.actions.act.between_steps import BetweenSteps
from torch_grad_exporter.actions.act.event import Action
from torch_grad_exporter.actions.act.trigger import Condition
from torch_grad_exporter.actions.freeze.freeze import Freeze
from torch_grad_exporter.aggregation.watched import WatchTotals
from torch_grad_exporter.capture.observations import Number
from torch_grad_exporter.capture.watched_data_loader import watched
from torch_grad_exporter.capture.watched_loader import WatchedLoader
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.gradients import dead_from
from torch_grad_exporter.collectors.process import STANDARD
from torch_grad_exporter.config.checked import Checked
from torch_grad_exporter.distributed.identity import hostname
from torch_grad_exporter.errors import ErrorLog, Guard, say
from torch_grad_exporter.inspection.watch import Watch, check
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.model.watched import WatchedModels
from torch_grad_exporter.outputs.announcement import Announcement
from torch_grad_exporter.outputs.flat import flat
from torch_grad_exporter.outputs.live.live import Judged, Run
from torch_grad_exporter.outputs.live.view import View
from torch_grad_exporter.outputs.otlp.instruments import Instruments
from torch_grad_exporter.outputs.outputs import Outputs
from torch_grad_exporter.outputs.prometheus.registry import RegistryCollector
from torch_grad_exporter.rules import Problem
from torch_grad_exporter.stages import SOURCES, TrainingSide, acting, activations, clipping, host_side, notifying, scrape, watching
from torch_grad_exporter.torch_compat import is_tracing
from torch_grad_exporter.version import __version__

logger = logging.getLogger("torch_grad_exporter")

STORE_SECONDS = 0.4
"""How long the end waits for the job's store, at most."""

_UNUSED: Watch | None = None
"""Nothing is watched before the first `watch`."""

_Batch = TypeVar("_Batch")
_Loader = TypeVar("_Loader", bound=DataLoader[Any])


class Removable(Protocol):
    """What has a `remove()`, as handles of hooks do."""

    def remove(self) -> object:
        """Takes back what the handle stands for."""


_Handle = TypeVar("_Handle", bound=Removable)


# The user's interface


class Exporter:
    """A running exporter; made by `start_exporter`. A context manager: leaving it closes it.

    `port` is the port in use and `url` the address of the metrics on this host; both `None` if nothing is served.
    """

    def __init__(self, checked: Checked) -> None:
        self.settings = checked.settings
        self.run = checked.run
        self.rank = checked.rank
        self._errors = errors = ErrorLog((*SOURCES, *REGISTRY.sources))
        # What may succeed the next time is never switched off.
        self._guards = {source: errors.boundary(source, limit=None) for source in ("observe", "request", "close", "watch")}
        self._guards["step"] = errors.boundary("observe", "step")
        self._ending = lifecycle.Ending(checked.identity.world_size)
        self._store = checked.store
        self._training = TrainingSide(checked, errors)
        self._host = host_side(checked, self._training, errors)
        self._should_stop = False
        self._act = acting(checked, self._training, self._host, errors, judge=self._judged, stop=self._stop)
        self._notify = notifying(checked, self._training, self._judged_for_both, errors)
        self._clip = clipping(checked, self._training, errors)
        self._activations = activations(checked, self._training, errors)
        self._watched, self._watch = WatchTotals(), _UNUSED
        self._adopted: list[Removable] = []
        self._scrape = scrape(
            checked,
            self._training,
            self._host,
            errors,
            ended=lambda: self._ending.state,
            notified=None if self._notify is None else self._notify.totals,
            acted=self._act.totals,
            clip=None if self._clip is None else self._clip.reports,
            activations=self._activations,
            watched=self._watched,
        )
        self._registry = RegistryCollector(
            self._scrape, checked.labels, REGISTRY.catalogue.values(), common=STANDARD.specs, on_error=errors.count
        )
        self._instruments: Instruments | None = None
        announcement = Announcement(
            rank=checked.whose, store=checked.store, errors=errors,
            addr=self.settings.addr, advertise=self.settings.advertise, sd_dir=self.settings.sd_dir, labels=self.settings.labels,
        )  # fmt: skip
        self._view = self._make_view(checked, announcement)
        self._outputs: Outputs | None = None
        # An armed round references parameters; a model that is dropped meanwhile must be freed.
        self._models = WatchedModels(checked.models.values(), gone=self._release)
        try:
            self._start(checked, announcement)
        except BaseException:
            self._drop_instruments()  # a run that has not begun has no last values
            self.close()
            raise
        _open[self] = None
        _handle_forks_and_exit()

    def _judged(self) -> Judged:
        return self._view.live.judged(fresh=True)

    def _judged_for_both(self) -> list[Problem]:
        """What is wrong now, for Notify; actions use the same judgement."""
        judged = self._judged()
        self._act.take(judged)
        return judged.problems

    def _stop(self) -> None:
        self._should_stop = True

    def _make_view(self, checked: Checked, announcement: Announcement) -> View:
        return View(
            Run(self.run, self.rank, checked.identity.world_size, hostname(), __version__),
            self._host,
            self._training.steps,
            self._scrape,
            targets=announcement.body,
            happened=self._act.totals.happened.latest,
            dead_from=dead_from(self.settings.dead_window),
            moments=self.settings.moments,
            now=time.time,
            on_error=functools.partial(self._errors.count, "history"),
            activations=None if self._activations is None else self._activations.snapshot,
        )

    def _start(self, checked: Checked, announcement: Announcement) -> None:
        """From here on the training is watched, and what is seen of it is shown."""
        if checked.arguments.registry is not None:
            self._registry.register(checked.arguments.registry)
        if checked.arguments.meter_provider is not None:
            on_error = functools.partial(self._errors.count, "request")
            self._instruments = Instruments(checked.arguments.meter_provider, self._scrape, checked.labels, on_error=on_error)
        self._errors.boundary("worker", limit=None)(self._host.start)  # without its thread, scrapes drain the mailbox
        self._outputs = Outputs(
            self._scrape,
            checked.whose,
            checked.outputs,
            self._errors,
            health=self._health,
            announcement=announcement,
            web_config=checked.web_config,
            push=checked.push,
            page=self._view.page,
        )
        self._scrape.start()
        self._errors.boundary("history", limit=None)(self._view.start)
        if self._notify is not None:
            self._errors.boundary("notify", limit=None)(self._notify.start)
        if REGISTRY.reads_devices(checked.settings.collectors):  # their counters are there before the first step
            self._errors.boundary("devices", limit=None)(self._training.memory.refresh_now)
        self._training.capture.watch(checked.models.values())
        if self._clip is not None:
            self._clip.start()
        torch_compat.tell()
        if self.url is not None:
            say(logger, logging.INFO, "serving metrics at %s", self.url)

    def _health(self) -> dict[str, object]:
        training = self._training
        return {
            "status": "ok",
            "run": self.run,
            "rank": self.rank,
            "version": __version__,
            "capture_mode": training.capture.mode.value,
            "sampling_interval_steps": training.schedule.interval,
            "sampling_interval_at_cap": training.schedule.capped,
            "errors": sum(self._errors.counts().values()),
        }

    @property
    def port(self) -> int | None:
        """The port in use, `None` if nothing is served."""
        return None if self._outputs is None or self._ending.closed else self._outputs.port

    @property
    def url(self) -> str | None:
        """The address of the metrics as seen from this host, `None` if nothing is served."""
        return None if self._outputs is None or self._ending.closed else self._outputs.url

    @property
    def should_stop(self) -> bool:
        """Whether `Stop()` wants the training to end, for the loop to look at; in a job after the same step on all ranks."""
        return self._should_stop

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
        return self._act.on(what, action, name=name, for_=for_, cooldown=cooldown)

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
            if self._ending.closed or self._guards["observe"](self._training.capture.observe, values):
                break
        if self._clip is not None:
            self._guards["observe"](self._clip.observe, loss, epoch)

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
        if self._watch is None:
            self._watch = watching(self._training, self._watched, self._errors)
        found = self._guards["watch"].result(self._watch.watch, name, tensor, max_norm)
        return tensor if found is None else found

    def step(self, number: int | None = None) -> None:
        """Says that an optimizer step is done, where no hook can see it: a patched, wrapped or captured one.

        Call it on the thread that trains, after the step and before the gradients are cleared. `number` numbers the step, so
        that ranks or restarted runs count alike.
        """
        if not self._ending.closed:
            self._guards["step"](self._training.capture.manual_step, number)
            self._act.step_reported()

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
        found = self._guards["observe"].result(watched, loader, self._training.clock, self._errors)
        return loader if found is None else found

    def state_dict(self) -> dict[str, Any]:
        """What the policies of `clip=` and `dry_run=` remember, by optimizer; to be saved with model and optimizer."""
        return {"clip": {} if self._clip is None else self._clip.state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on with what `state_dict()` returned, of an exporter with the same policies.

        An optimizer that has not stepped yet takes it over at its first step. Raises `TypeError` or `ValueError` where it does not
        fit.
        """
        if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get("clip"), Mapping):
            raise TypeError("load_state_dict(): expected what state_dict() returned")
        if self._clip is not None:
            self._clip.load(state_dict["clip"])
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
        self._training.clock.resume(step)

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

    def _release_adopted(self) -> None:
        while self._adopted:
            self._guards["close"](self._adopted.pop().remove)

    def values(self, match: str | re.Pattern[str] = "") -> dict[str, float]:
        """The last values as a flat mapping of names to numbers, for a logger of your own; empty if that fails, or after the end.

        A name is that of the metric and the values of its labels, such as `torch_grad_global_norm` or `torch_grad_norm/encoder.0`.
        `match`: a regular expression that is searched in the names; all by default. Histograms are left out. Each call is a whole
        scrape, of milliseconds: call it when you log, not in every step. Raises `re.error` where `match` is no regular expression.
        """
        pattern = re.compile(match)
        return self._guards["request"].result(lambda: flat(self._scrape(), pattern)) or {}

    def collect(self) -> list[Family]:
        """All metrics as of now, as an output gets them; for tests and outputs of one's own. Empty if that fails."""
        return self._guards["request"].result(self._scrape) or []

    def problems(self) -> list[Problem]:
        """What is wrong now, the worst first, by the rules of docs/runbook.md that one process can judge. Empty if that fails."""
        return self._guards["request"].result(self._view.live.problems) or []

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the history of the run to a file, for `torch-grad-exporter plot`; compressed where its name ends in `.gz`.

        A failure, such as a full disk, is logged: the training goes on.
        """
        Guard(functools.partial(self._errors.tell, "history"))(lambda: self._view.save(os.fspath(path)))

    def replaced_by(self, models: Iterable[torch.nn.Module]) -> bool:
        """Whether this exporter watches one of the models, or only models that are gone, as after a notebook cell ran again."""
        return self._models.any_of(models) or self._models.all_gone

    # The end

    def close(self) -> None:
        """Removes every hook, thread, socket and reference. Idempotent, from any thread, never raises."""
        if not self._ending.close():
            return
        for action in self._closers():
            self._guards["close"](action)
        _open.pop(self, None)

    def _closers(self) -> Iterator[Callable[[], object]]:
        """The functions that release what each part holds, in the order of the data."""
        training = self._training
        yield self._release_adopted
        if self._clip is not None:
            yield self._clip.close
        if self._watch is not None:
            yield self._watch.close
        yield training.hooks.close
        yield training.capture.settle
        yield training.capture.close
        yield self._host.close
        yield functools.partial(self._view.close, self._ending.error)
        if self._notify is not None:
            yield functools.partial(self._notify.close, hurried=self._ending.hurried)
        yield functools.partial(self._act.close, hurried=self._ending.hurried)
        if self._outputs is not None:
            yield functools.partial(self._outputs.close, failed=self._ending.error is not None, hurried=self._ending.hurried)
        yield self._registry.close
        if self._instruments is not None:
            yield self._instruments.close
        yield self._scrape.close
        yield functools.partial(self._store.close, STORE_SECONDS)
        yield self._models.close

    def end(self, error: BaseException | None) -> None:
        """Closes as `close` does, at the end of the training; `error`: the exception that has ended it, which makes it `failed`.

        Leaving a `with` and the end of the process do so by themselves. Only the first end counts.
        """
        self._ending.by(error)
        self.close()

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

    def _release(self) -> None:
        """Releases everything that keeps a parameter alive. A boundary: the garbage collector calls this."""
        capture = self._training.capture
        for action in (capture.release, capture.release_witness):
            self._guards["close"](action)

    def _drop_instruments(self) -> None:
        if self._instruments is not None:
            self._instruments.drop()

    def after_fork_in_child(self) -> None:
        """The forked child is another process: it serves nothing, watches nothing and frees the port."""
        self._ending.after_fork_in_child()
        if self._outputs is not None:
            self._outputs.after_fork_in_child()
        self._drop_instruments()
        self._store.after_fork_in_child()
        self._host.after_fork_in_child()
        if self._notify is not None:
            self._notify.after_fork_in_child()
        self._act.after_fork_in_child()
        if self._clip is not None:
            self._clip.after_fork_in_child()
        if self._activations is not None:
            self._activations.after_fork_in_child()
        self._watched.after_fork_in_child()
        if self._watch is not None:
            self._watch.close()
        self._scrape.after_fork_in_child()
        self._training.hooks.disconnect()
        self._training.capture.release_witness()


# The process

_open: dict[Exporter, None] = {}
"""The open exporters. Like its hooks one stays until it is closed, though nothing else may hold it."""


def open_exporters() -> list[Exporter]:
    """All that are open, in the order of their start."""
    return list(_open)


@functools.cache
def _handle_forks_and_exit() -> None:
    """Registers the process' one set of handlers, which nothing can take back."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork_in_child)
    atexit.register(_at_exit)


def _after_fork_in_child() -> None:
    for exporter in open_exporters():
        # Nothing can be counted or logged here: a lock that a thread of the parent held at the fork is never released.
        with contextlib.suppress(Exception):
            exporter.after_fork_in_child()
    _open.clear()


def _at_exit() -> None:
    # The last exception that the interpreter has reported; in a notebook it may come from an earlier cell.
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    error = None if isinstance(last, KeyboardInterrupt) or hasattr(sys, "ps1") else last
    for exporter in open_exporters():
        exporter.end(error)
