"""The composition root: builds the stages in the order of the data, owns their handles, and gives them back with `close()`."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Self, TypeVar

import torch

from torch_grad_exporter import lifecycle, torch_compat
from torch_grad_exporter.aggregation.declared import DeclaredValues
from torch_grad_exporter.aggregation.exponential import Exponentials
from torch_grad_exporter.aggregation.gradients import GradientAggregation
from torch_grad_exporter.aggregation.totals import TrainingTotals
from torch_grad_exporter.aggregation.worker import HostSide
from torch_grad_exporter.capture.build import Capture
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.observations import Number
from torch_grad_exporter.capture.parts import Parts
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.reader import GradientReader
from torch_grad_exporter.capture.schedule import SamplingSchedule
from torch_grad_exporter.capture.torch_hooks import Hooks
from torch_grad_exporter.capture.watched_loader import WatchedLoader
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.context import CollectorContext, ScrapeSize, Snapshots
from torch_grad_exporter.collectors.gradients import dead_from
from torch_grad_exporter.collectors.process import STANDARD
from torch_grad_exporter.collectors.scrape import Scrape
from torch_grad_exporter.collectors.train_info import TrainInfo, device_kinds
from torch_grad_exporter.config.checked import Checked
from torch_grad_exporter.distributed.identity import LateGroup, hostname
from torch_grad_exporter.errors import ErrorLog, Guard, say
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.model.watched import WatchedModels
from torch_grad_exporter.outputs.announcement import Announcement
from torch_grad_exporter.outputs.live.live import Run
from torch_grad_exporter.outputs.live.view import View
from torch_grad_exporter.outputs.otlp.instruments import Instruments
from torch_grad_exporter.outputs.outputs import Outputs
from torch_grad_exporter.outputs.prometheus.registry import RegistryCollector
from torch_grad_exporter.resources.devices import DeviceMemory
from torch_grad_exporter.rules import Problem
from torch_grad_exporter.statistics.declared import chosen
from torch_grad_exporter.statistics.eager import EagerStatistics
from torch_grad_exporter.statistics.layout import Layout
from torch_grad_exporter.transfer.events import Decisions, Mailbox
from torch_grad_exporter.version import __version__

logger = logging.getLogger("torch_grad_exporter")

SOURCES = (
    "forward_hook", "backward_hook", "optimizer_hook", "capture", "reduction", "weights", "observe", "worker", "request", "close",
    "devices", "discovery", "textfile", "web_config", "otlp", "history",
)  # fmt: skip
"""Every boundary at which a failure of ours can be counted, but for the collectors."""

STORE_SECONDS = 0.4
"""How long the end waits for the job's store, at most."""

_Batch = TypeVar("_Batch")


# The stages, in the order of the data


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSide:
    """What belongs to the training thread. `decisions`: the one way back, from the host's side.

    `layout`: what is measured of a gradient.
    """

    mailbox: Mailbox
    decisions: Decisions
    hooks: Hooks
    clock: StepClock
    schedule: SamplingSchedule
    optimizers: Optimizers
    memory: DeviceMemory
    capture: Capture
    layout: Layout


def _training_side(checked: Checked, errors: ErrorLog) -> TrainingSide:
    settings, index = checked.settings, checked.index
    post, decisions = Mailbox(), Decisions()
    layout = Layout.of(chosen({field.name: getattr(settings, field.name) is True for field in fields(settings)}))
    hooks, clock = Hooks(errors), StepClock(post)
    schedule = SamplingSchedule(settings.every, settings.overhead_budget)
    optimizers = Optimizers(index, checked.optimizers)
    cost = SampleCost(clock, schedule)
    reader = GradientReader(
        index=index, optimizers=optimizers, statistics=EagerStatistics(settings.dead_window, layout), clock=clock, cost=cost,
        mailbox=post, decisions=decisions, errors=errors, scaler=checked.grad_scaler,
    )  # fmt: skip
    memory = DeviceMemory(used=lambda: reader.devices)
    guard = errors.boundary("devices")

    def look_at_devices() -> None:
        guard(memory.refresh)

    parts = Parts(
        index=index,
        optimizers=optimizers,
        cost=cost,
        reader=reader,
        schedule=schedule,
        clock=clock,
        mailbox=post,
        hooks=hooks,
        errors=errors,
        options=checked.capture,
        periodic=look_at_devices if REGISTRY.reads_devices(settings.collectors) else None,
    )
    return TrainingSide(
        mailbox=post, decisions=decisions, hooks=hooks, clock=clock, schedule=schedule, optimizers=optimizers, memory=memory,
        capture=Capture(parts), layout=layout,
    )  # fmt: skip


def _host_side(checked: Checked, training: TrainingSide, errors: ErrorLog) -> HostSide:
    exponentials = Exponentials() if checked.push is not None and checked.push.exponential else None
    gradients = GradientAggregation(training.decisions, exponentials, DeclaredValues(training.layout))
    gradients.use(checked.index.table)
    return HostSide(training.mailbox, gradients, TrainingTotals(), errors, periodic=training.capture.look)


def _scrape(checked: Checked, training: TrainingSide, host: HostSide, errors: ErrorLog, ending: lifecycle.Ending) -> Scrape:
    snapshots, group = Snapshots(host.snapshot), LateGroup(checked.identity, checked.rank)

    def prepare() -> None:
        snapshots.renew()
        group.check()

    context = _collector_context(checked, training, snapshots, errors, ending)
    collectors = REGISTRY.made(checked.settings.collectors, context)
    return Scrape(collectors, errors, prepare, size=context.scrape_size)


def _collector_context(
    checked: Checked, training: TrainingSide, snapshots: Snapshots, errors: ErrorLog, ending: lifecycle.Ending
) -> CollectorContext:
    """What collectors read from."""
    capture = training.capture
    expected = device_kinds(checked.index, checked.models.values())
    return CollectorContext(
        snapshots=snapshots,
        clock=training.clock,
        optimizers=training.optimizers.names,
        capture=capture,
        schedule=training.schedule,
        memory=training.memory,
        errors=errors,
        identity=checked.identity,
        rank=checked.rank,
        store=checked.store,
        shown=checked.shown,
        scrape_size=ScrapeSize(),
        info=TrainInfo(checked.identity, lambda: capture.devices, expected),
        ended=lambda: ending.state,
        phases_timed=lambda: capture.devices <= {"cpu"},
    )


# What shows them


def _run(checked: Checked, announcement: Announcement) -> Run:
    return Run(checked.run, checked.rank, checked.identity.world_size, hostname(), __version__, targets=announcement.body)


def _view(run: Run, training: TrainingSide, host: HostSide, scrape: Scrape, errors: ErrorLog, *, dead_window: int) -> View:
    clock = training.clock
    return View(
        run,
        host,
        lambda: max(clock.counts().steps.values(), default=0),
        scrape,
        dead_from=dead_from(dead_window),
        now=time.time,
        on_error=functools.partial(errors.count, "history"),
    )


def _announcement(checked: Checked, errors: ErrorLog) -> Announcement:
    chosen = checked.settings
    return Announcement(
        checked.whose, checked.store, errors,
        addr=chosen.addr, advertise=chosen.advertise, sd_dir=chosen.sd_dir, labels=chosen.labels,
    )  # fmt: skip


def _health(run: str, rank: int, training: TrainingSide, errors: ErrorLog) -> dict[str, object]:
    return {
        "status": "ok",
        "run": run,
        "rank": rank,
        "version": __version__,
        "capture_mode": training.capture.mode.value,
        "sampling_interval_steps": training.schedule.interval,
        "sampling_interval_at_cap": training.schedule.capped,
        "errors": sum(errors.counts().values()),
    }


# The user's interface


@dataclass(frozen=True, slots=True)
class _Guards:
    """Of the calls that come through the exporter itself. A call that may succeed the next time is never switched off."""

    observe: Guard
    step: Guard
    request: Guard
    close: Guard

    @classmethod
    def of(cls, errors: ErrorLog) -> _Guards:
        return cls(
            observe=errors.boundary("observe", limit=None),
            step=errors.boundary("observe", "step"),
            request=errors.boundary("request", limit=None),
            close=errors.boundary("close", limit=None),
        )


class Exporter:
    """A running exporter; made by `start_exporter`. A context manager: leaving it closes it.

    `port` is the port in use and `url` the address of the metrics on this host; both `None` if nothing is served.
    """

    def __init__(self, checked: Checked) -> None:
        self.settings = checked.settings
        self.run = checked.run
        self.rank = checked.rank
        self._errors = ErrorLog((*SOURCES, *REGISTRY.sources))
        self._guards = _Guards.of(self._errors)
        self._ending = lifecycle.Ending(checked.identity.world_size)
        self._store = checked.store
        self._training = _training_side(checked, self._errors)
        self._host = _host_side(checked, self._training, self._errors)
        self._scrape = _scrape(checked, self._training, self._host, self._errors, self._ending)
        self._registry = RegistryCollector(
            self._scrape, checked.labels, REGISTRY.catalogue.values(), common=STANDARD.specs, on_error=self._errors.count
        )
        self._instruments: Instruments | None = None
        announcement = _announcement(checked, self._errors)
        run = _run(checked, announcement)
        self._view = _view(run, self._training, self._host, self._scrape, self._errors, dead_window=checked.settings.dead_window)
        self._outputs: Outputs | None = None
        # An armed round references parameters; a model that is dropped meanwhile must be freed.
        self._models = WatchedModels(checked.models.values(), gone=self._release)
        try:
            self._start(checked, announcement)
        except BaseException:
            self._drop_instruments()  # a run that has not begun has no last values
            self.close()
            raise

    def _start(self, checked: Checked, announcement: Announcement) -> None:
        """From here on the training is watched, and what is seen of it is shown."""
        if checked.registry is not None:
            self._registry.register(checked.registry)
        if checked.meter_provider is not None:
            on_error = functools.partial(self._errors.count, "request")
            self._instruments = Instruments(checked.meter_provider, self._scrape, checked.labels, on_error=on_error)
        self._errors.boundary("worker", limit=None)(self._host.start)  # without its thread, scrapes drain the mailbox
        self._outputs = Outputs(
            self._scrape,
            checked.whose,
            checked.outputs,
            self._errors,
            health=functools.partial(_health, checked.run, checked.rank, self._training, self._errors),
            announcement=announcement,
            web_config=checked.web_config,
            push=checked.push,
            page=self._view.page,
        )
        self._scrape.start()
        self._errors.boundary("history", limit=None)(self._view.start)
        if REGISTRY.reads_devices(checked.settings.collectors):  # their counters are there before the first step
            self._errors.boundary("devices", limit=None)(self._training.memory.refresh_now)
        self._training.capture.watch(checked.models.values())
        torch_compat.tell()
        if self.url is not None:
            say(logger, logging.INFO, "serving metrics at %s", self.url)

    @property
    def port(self) -> int | None:
        """The port in use, `None` if nothing is served."""
        return None if self._outputs is None or self._ending.closed else self._outputs.port

    @property
    def url(self) -> str | None:
        """The address of the metrics as seen from this host, `None` if nothing is served."""
        return None if self._outputs is None or self._ending.closed else self._outputs.url

    def observe(
        self,
        *,
        loss: Number | None = None,
        samples: Number | None = None,
        tokens: Number | None = None,
        epoch: Number | None = None,
        grad_norm: Number | None = None,
    ) -> None:
        """Takes values of the current step; a device tensor is copied in the background and not waited for.

        `loss` and `epoch` replace the value before, `samples` and `tokens` are added up. `grad_norm`: the global
        norm before clipping, as `clip_grad_norm_` returns it; with several optimizers it is ignored, since it is not known
        whose norm it is. May be called from any thread, except with `grad_norm`,
        which belongs to the step of the thread that trains: from another one it is counted as an error and changes nothing.
        """
        given = {"loss": loss, "samples": samples, "tokens": tokens, "epoch": epoch, "grad_norm": grad_norm}
        values = iter([(name, value) for name, value in given.items() if value is not None])
        for _ in given:  # a value that fails costs itself alone: those behind it are taken
            if self._ending.closed or self._guards.observe(self._training.capture.observe, values):
                break

    def step(self, number: int | None = None) -> None:
        """Says that an optimizer step is done, where no hook can see it: a patched, wrapped or captured one.

        Call it on the thread that trains, after the step and before the gradients are cleared. `number` numbers the step, so
        that ranks or restarted runs count alike.
        """
        if not self._ending.closed:
            self._guards.step(self._training.capture.manual_step, number)

    def watch_loader(self, loader: Iterable[_Batch]) -> WatchedLoader[_Batch]:
        """The same loader, with the time that the loop waits for it counted as the phase `data`."""
        return WatchedLoader(loader, self._training.clock, self._errors)

    def collect(self) -> list[Family]:
        """All metrics as of now, as an output gets them; for tests and outputs of one's own. Empty if that fails."""
        return self._guards.request.result(self._scrape) or []

    def problems(self) -> list[Problem]:
        """What is wrong now, the worst first, by the rules of docs/runbook.md that one process can judge. Empty if that fails."""
        return self._guards.request.result(self._view.live.problems) or []

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the history of the run to a file, for `torch-grad-exporter plot`; compressed where its name ends in `.gz`.

        A failure, such as a full disk, is logged: the training goes on.
        """
        Guard(functools.partial(self._errors.tell, "history"))(lambda: self._view.save(os.fspath(path)))

    def watches(self, models: Iterable[torch.nn.Module]) -> bool:
        """Whether this exporter watches one of the models."""
        return self._models.any_of(models)

    @property
    def orphaned(self) -> bool:
        """Whether all models that this exporter watched are gone."""
        return self._models.all_gone

    # The end

    def close(self) -> None:
        """Removes every hook, thread, socket and reference. Idempotent, from any thread, never raises."""
        if not self._ending.close():
            return
        for action in self._closers():
            self._guards.close(action)
        lifecycle.unregister(self)

    def _closers(self) -> Iterator[Callable[[], object]]:
        """The functions that release what each part holds, in the order of the data."""
        training = self._training
        yield training.hooks.close
        yield training.capture.settle
        yield training.capture.close
        yield self._host.close
        yield functools.partial(self._view.close, self._ending.error)
        if self._outputs is not None:
            yield functools.partial(self._outputs.close, failed=self._ending.failed, hurried=self._ending.hurried)
        yield self._registry.close
        if self._instruments is not None:
            yield self._instruments.close
        yield self._scrape.close
        yield functools.partial(self._store.close, STORE_SECONDS)
        yield self._models.close

    def end(self, error: BaseException | None) -> None:
        """Closes at the end of a `with` or of the process; `error`: what has ended it. Only the first end counts."""
        self._ending.by(error)
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.end(error)

    def __repr__(self) -> str:
        where = "closed" if self._ending.closed else self.url or "not serving"
        return f"<Exporter run={self.run!r} rank={self.rank} {where}>"

    def _release(self) -> None:
        """Releases everything that keeps a parameter alive. A boundary: the garbage collector calls this."""
        capture = self._training.capture
        for action in (capture.release, capture.release_witness):
            self._guards.close(action)

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
        self._scrape.after_fork_in_child()
        self._training.hooks.disconnect()
        self._training.capture.release_witness()
