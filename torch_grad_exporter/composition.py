"""The composition root: builds the stages in the order of the data, owns their handles, and gives them back with `close()`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVarTuple

import torch

from torch_grad_exporter import lifecycle
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.gradients import dead_from
from torch_grad_exporter.collectors.process import STANDARD
from torch_grad_exporter.config.checked import Checked
from torch_grad_exporter.distributed.identity import hostname
from torch_grad_exporter.errors import ErrorLog, say
from torch_grad_exporter.inspection.watch import Watch
from torch_grad_exporter.inspection.watch_totals import WatchTotals
from torch_grad_exporter.model.watched import WatchedModels
from torch_grad_exporter.outputs.announcement import Announcement
from torch_grad_exporter.outputs.live.live import Judged, Run
from torch_grad_exporter.outputs.live.view import View
from torch_grad_exporter.outputs.otlp.instruments import Instruments
from torch_grad_exporter.outputs.outputs import Outputs
from torch_grad_exporter.outputs.prometheus.registry import RegistryCollector
from torch_grad_exporter.rules import Problem
from torch_grad_exporter.stages import (
    SOURCES,
    TrainingSide,
    acting,
    activations,
    clipping,
    host_side,
    layer_times,
    notifying,
    scrape,
)
from torch_grad_exporter.torch_compat import lost
from torch_grad_exporter.version import __version__

logger = logging.getLogger("torch_grad_exporter")

GUARDED = ("observe", "request", "close", "watch", "integration")
"""Calls of the user's and of integrations, each behind a guard that is never switched off."""

STORE_SECONDS = 0.4
"""How long the end waits for the job's store, at most."""

_Arguments = TypeVarTuple("_Arguments")

_UNUSED: Watch | None = None
"""Nothing is watched before the first `watch`."""


class Removable(Protocol):
    """What has a `remove()`, as handles of hooks do."""

    def remove(self) -> object:
        """Takes back what the handle stands for."""


class Composition:
    """The parts of a running exporter, from their start to their end; `Exporter` adds what a user may ask of them.

    `port` is the port in use and `url` the address of the metrics on this host; both `None` if nothing is served.
    `gives_way`: of an exporter that the script knows nothing of, what is told which one has taken its place, as each new one does.
    """

    gives_way: Callable[[Any], object] | None = None

    def __init__(self, checked: Checked) -> None:
        self.settings = checked.settings
        self.run = checked.run
        self.rank = checked.rank
        self._errors = errors = ErrorLog((*SOURCES, *REGISTRY.sources))
        # What may succeed the next time is never switched off.
        self._guards = {source: errors.boundary(source, limit=None) for source in GUARDED}
        self._guards["step"] = errors.boundary("observe", "step")
        self._ending = lifecycle.Ending(checked.identity.world_size)
        self._store = checked.store
        self._training = TrainingSide(checked, errors)
        self._host = host_side(checked, self._training, errors)
        self._should_stop = False
        self._act = acting(checked, self._training, self._host, errors, judge=self._judged, stop=self._stop)
        self._notify = notifying(checked, self._training, self._judged_for_both, errors)
        self._clip = clipping(checked, self._training, errors)
        self._layer_times = layer_times(checked, self._training, self._host, errors)
        self._activations = activations(checked, self._training, self._host, errors)
        self._watched, self._watch = WatchTotals(), _UNUSED
        self._host.register("watch", self._watched)
        self._adopted: list[Removable] = []
        self._scrape, self._of_sample = scrape(
            checked,
            self._training,
            self._host,
            errors,
            ended=lambda: self._ending.state,
            notified=None if self._notify is None else self._notify.totals,
            acted=self._act.totals,
            clip=None if self._clip is None else self._clip.reports,
            activations=self._activations,
            layer_times=self._layer_times,
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
        self._start_or_close(checked, announcement)
        _open[self] = None
        _handle_forks_and_exit()

    def _judged(self, last: bool) -> Judged:
        return self._view.live.judged(last=last)

    def _judged_for_both(self, last: bool) -> list[Problem]:
        """What is wrong now, for Notify; actions use the same judgement, but for the last one, which they make at their own end."""
        judged = self._judged(last)
        if not last:
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
            for_rules=self._scrape.for_rules,
            targets=announcement.body,
            happened=self._act.totals.happened.latest,
            of_sample=self._of_sample,
            dead_from=dead_from(self.settings.dead_window),
            moments=self.settings.moments,
            now=time.time,
            on_error=functools.partial(self._errors.count, "history"),
            activations=None if self._activations is None else self._activations.snapshot,
        )

    def _start_or_close(self, checked: Checked, announcement: Announcement) -> None:
        try:
            self._start(checked, announcement)
        except BaseException:
            self._drop_instruments()  # a run that has not begun has no last values
            self.close()
            raise

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
        lost.tell()
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
            "sampling_interval_steps": training.schedule.shown_interval,
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

    def on_foreign_optimizer(self, tell: Callable[[torch.optim.Optimizer], object]) -> None:
        """Calls `tell` where an optimizer steps that owns nothing of the models, in its step; of each at least once."""
        self._training.optimizers.on_foreign = tell

    def guarded(self, action: Callable[[*_Arguments], object], *arguments: *_Arguments) -> bool:
        """Runs what an integration does at an event of its trainer; a failure is counted as `integration` and goes no further."""
        return self._guards["integration"](action, *arguments)

    def watches(self, models: Iterable[torch.nn.Module]) -> bool:
        """Whether this exporter watches one of the models."""
        return self._models.any_of(models)

    def replaced_by(self, models: Iterable[torch.nn.Module]) -> bool:
        """Whether this exporter watches one of the models, or only models that are gone, as after a notebook cell ran again."""
        return self.watches(models) or self._models.all_gone

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

    def _release_adopted(self) -> None:
        while self._adopted:
            self._guards["close"](self._adopted.pop().remove)

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
        if self._layer_times is not None:
            self._layer_times.after_fork_in_child()
        self._watched.after_fork_in_child()
        self._training.weights.after_fork_in_child()
        if self._watch is not None:
            self._watch.close()
        self._scrape.after_fork_in_child()
        self._training.hooks.disconnect()
        self._training.capture.release_witness()


# The process

_open: dict[Composition, None] = {}
"""The open exporters. Like its hooks one stays until it is closed, though nothing else may hold it."""


def open_exporters() -> list[Composition]:
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
