"""The composition root: `Exporter` builds the stages, wires them together and owns every handle; `close()` gives them back."""

from __future__ import annotations

import functools
import logging
import os
import platform
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import prometheus_client
import torch
from opentelemetry.metrics import MeterProvider
from torch.nn.parameter import is_lazy

from torch_grad_exporter import lifecycle as living
from torch_grad_exporter.aggregation.exponential import Exponentials
from torch_grad_exporter.aggregation.ledger import GradientLedger
from torch_grad_exporter.aggregation.totals import TrainingTotals
from torch_grad_exporter.aggregation.worker import HostSide
from torch_grad_exporter.capture.capture import GradientCapture
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.loop import Number, TrainingLoop, WatchedLoader
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.reader import GradientReader, Scaler
from torch_grad_exporter.capture.schedule import SamplingSchedule
from torch_grad_exporter.capture.torch_hooks import Hooks
from torch_grad_exporter.capture.weights import WeightProbe
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.context import CollectorContext, ScrapeSize, Shown, Snapshots
from torch_grad_exporter.collectors.gradients import dead_from
from torch_grad_exporter.collectors.process import STANDARD
from torch_grad_exporter.collectors.scrape import Scrape
from torch_grad_exporter.config.settings import Settings
from torch_grad_exporter.distributed import identity as distributed
from torch_grad_exporter.distributed.store import JobStore
from torch_grad_exporter.errors import ErrorLog, say
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.outputs.http.web_config import WebConfigFile
from torch_grad_exporter.outputs.live.live import Run
from torch_grad_exporter.outputs.live.view import View
from torch_grad_exporter.outputs.otlp.instruments import Instruments
from torch_grad_exporter.outputs.otlp.push_settings import PushSettings
from torch_grad_exporter.outputs.outputs import Outputs, Rank
from torch_grad_exporter.outputs.prometheus.registry import RegistryCollector
from torch_grad_exporter.resources.devices import DeviceMemory
from torch_grad_exporter.statistics.eager import EagerStatistics
from torch_grad_exporter.transfer.events import Hints, mailbox
from torch_grad_exporter.version import __version__

logger = logging.getLogger("torch_grad_exporter")

SOURCES = (
    "forward_hook", "backward_hook", "optimizer_hook", "capture", "reduction", "weights", "observe", "worker", "request", "close",
    "devices", "discovery", "textfile", "web_config", "otlp", "history",
)  # fmt: skip
"""Every boundary at which a failure of ours can be counted, but for the collectors."""

LATE_GROUP = (
    "the process group came after the exporter: this rank's series carry rank %d, as those of the others may, and all show "
    "their layers; start the exporter after init_process_group, or with torchrun"
)

STORE_SECONDS = 0.4
"""That the end waits for the job's store, at most."""

_Batch = TypeVar("_Batch")


@dataclass(frozen=True, slots=True)
class _Ending:
    """How the run ended, for `torch_train_state` and the page.

    `error`: the type of the exception that has ended it; no more of that, since a message may hold anything.
    `interrupted`: by somebody who is at the keyboard.
    """

    state: str | None = None
    error: str | None = None
    interrupted: bool = False

    @classmethod
    def by(cls, error: BaseException | None) -> _Ending:
        """Ctrl-C is an end, as somebody wants it, and so is `sys.exit` with a status of success."""
        success = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is None or success or isinstance(error, KeyboardInterrupt):
            return cls("finished", interrupted=isinstance(error, KeyboardInterrupt))
        return cls("failed", type(error).__name__)


class Exporter:
    """A running exporter; made by `start_exporter`. A context manager: leaving it closes it.

    `port` is the port in use and `url` the address of the metrics on this host; both `None` if nothing is served.
    """

    def __init__(
        self,
        models: Mapping[str, torch.nn.Module],
        index: LayerIndex,
        settings: Settings,
        identity: distributed.Identity,
        *,
        optimizers: Mapping[str, torch.optim.Optimizer],
        grad_scaler: Scaler | None,
        registry: prometheus_client.CollectorRegistry | None,
        web_config: WebConfigFile | None,
        run: str,
        store: JobStore,
        push: PushSettings | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        self.settings = settings
        self.run = run
        self.rank = identity.rank if settings.rank is None else settings.rank
        self._identity = identity
        self._models = [weakref.ref(module) for module in models.values()]
        self._index = index
        self._errors = ErrorLog((*SOURCES, *REGISTRY.sources))
        self._store = store
        self._told_of_group = False
        self._closed = False
        # Reentrant: a signal's handler may close while its own thread is at it.
        self._closing = threading.RLock()
        self._ending = _Ending()
        self._finalizers: list[weakref.finalize[[], torch.nn.Module]] = []
        self._build(optimizers, grad_scaler, exponential=push is not None and push.exponential)
        self._labels = {"run": self.run, "rank": str(self.rank), **settings.labels}
        self._registry = RegistryCollector(
            self._scrape, self._labels, REGISTRY.catalogue.values(), common=STANDARD.specs, on_error=self._errors.count
        )
        self._outputs: Outputs | None = None
        self._instruments: Instruments | None = None
        self._view = self._viewed()
        try:
            self._appear(registry, meter_provider)
            self._errors.guard("worker", self._host.start)  # without its thread, scrapes drain the mailbox
            self._outputs = self._served(store, web_config, push)
            self._scrape.start()
            self._errors.guard("history", self._view.start)
            self._install(models)
        except BaseException:
            self._drop_instruments()  # a run that has not begun has no last values
            self.close()
            raise

    # Building

    def _build(self, optimizers: Mapping[str, torch.optim.Optimizer], grad_scaler: Scaler | None, *, exponential: bool) -> None:
        """The stages from left to right."""
        settings, index = self.settings, self._index
        post = mailbox()
        hints = Hints()
        self._hooks = Hooks(self._errors)
        self._clock = StepClock(post)
        self._memory = DeviceMemory(used=lambda: self._loop.devices)
        self._schedule = SamplingSchedule(settings.every, settings.overhead_budget)
        self._optimizers = Optimizers(index, optimizers)
        reader = GradientReader(
            optimizers=self._optimizers,
            statistics=EagerStatistics(settings.dead_window, moments=settings.moments),
            mailbox=post,
            hints=hints,
            scaler=grad_scaler,
        )
        cost = SampleCost(self._clock, self._schedule, reader.timer)
        self._capture = GradientCapture(
            index=index,
            models=len(self._models),
            optimizers=self._optimizers,
            reader=reader,
            schedule=self._schedule,
            clock=self._clock,
            cost=cost,
            mailbox=post,
            hooks=self._hooks,
            errors=self._errors,
            local_norm=settings.local_norm,
        )
        self._loop = TrainingLoop(
            clock=self._clock,
            cost=cost,
            capture=self._capture,
            reader=reader,
            optimizers=self._optimizers,
            schedule=self._schedule,
            mailbox=post,
            hooks=self._hooks,
            errors=self._errors,
            models=len(self._models),
            weights=WeightProbe(post) if settings.weights else None,
            periodic=self._look_at_devices if REGISTRY.reads_devices(settings.collectors) else None,
        )
        ledger = GradientLedger(settings.dead_window, hints, Exponentials() if exponential else None)
        ledger.use(index.table)
        self._host = HostSide(post, ledger, TrainingTotals(), self._errors, periodic=self._loop.count_only.look)
        self._snapshots = Snapshots(self._host.snapshot)
        self._scrape = self._scraped(ScrapeSize())

    def _scraped(self, size: ScrapeSize) -> Scrape:
        """The collectors that are switched on."""
        collectors = REGISTRY.made(self.settings.collectors, self._context(size))
        return Scrape(collectors, self._errors, self._take_snapshot, size=size)

    def _context(self, size: ScrapeSize) -> CollectorContext:
        """What collectors read from."""
        settings = self.settings
        return CollectorContext(
            snapshots=self._snapshots,
            clock=self._clock,
            optimizers=self._optimizers.names,
            capture=self._capture,
            schedule=self._schedule,
            memory=self._memory,
            errors=self._errors,
            identity=self._identity,
            rank=self.rank,
            store=self._store,
            shown=Shown(settings.dead_window, moments=settings.moments, weights=settings.weights),
            scrape_size=size,
            info=functools.partial(_info, self._identity, self._loop, _kinds(self._index, self._models)),
            ended=lambda: self._ending.state,
            phases_timed=lambda: self._loop.devices <= {"cpu"},
        )

    def _look_at_devices(self) -> None:
        self._errors.guard("devices", self._memory.look)

    def _take_snapshot(self) -> None:
        self._snapshots.renew()
        if not self._told_of_group and distributed.came_late(self._identity):
            self._told_of_group = True
            say(logger, logging.WARNING, LATE_GROUP, self.rank)

    def _served(self, store: JobStore, web_config: WebConfigFile | None, push: PushSettings | None) -> Outputs:
        rank = Rank(self.run, self.rank, self._identity, self._labels)
        return Outputs(
            self._scrape,
            rank,
            self.settings,
            self._errors,
            health=self._health,
            store=store,
            web_config=web_config,
            push=push,
            page=self._view.page,
        )

    def _appear(self, registry: prometheus_client.CollectorRegistry | None, provider: MeterProvider | None) -> None:
        """In what the user has already."""
        if registry is not None:
            self._registry.register(registry)
        if provider is not None:
            on_error = functools.partial(self._errors.count, "request")
            self._instruments = Instruments(provider, self._scrape, self._labels, on_error=on_error)

    def _viewed(self) -> View:
        run = Run(
            self.run,
            self.rank,
            self._identity.world_size,
            distributed.hostname(),
            __version__,
            targets=lambda: b"[]" if self._outputs is None else self._outputs.targets(),
        )
        return View(
            run,
            self._host.snapshot,
            lambda: max(self._clock.counts().steps.values(), default=0),
            self._scrape,
            dead_from=dead_from(self.settings.dead_window),
            now=time.time,
            on_error=functools.partial(self._errors.count, "history"),
        )

    def _install(self, models: Mapping[str, torch.nn.Module]) -> None:
        """Registers the hooks; from here on the training is watched."""
        if REGISTRY.reads_devices(self.settings.collectors):
            self._errors.guard("devices", self._memory.look_at_once)  # their counters are there before the first step
        for number, module in enumerate(models.values()):
            self._hooks.on_module(module, self._loop.forward_began, functools.partial(self._loop.forward_ended, number))
            # An armed round holds parameters; a model that is dropped meanwhile must be free to go.
            self._finalizers.append(weakref.finalize(module, self._release))
            self._finalizers[-1].atexit = False
        self._hooks.on_optimizers(self._loop.step_began, self._loop.step_ended)
        if self.url is not None:
            say(logger, logging.INFO, "serving metrics at %s", self.url)

    def _release(self) -> None:
        """Lets go of everything that keeps a parameter alive. A boundary: the garbage collector calls this."""
        for action in (self._capture.release, self._loop.count_only.release):
            self._errors.guard("close", action)

    # The user's door

    @property
    def port(self) -> int | None:
        """The port in use, `None` if nothing is served."""
        return None if self._outputs is None or self._closed else self._outputs.port

    @property
    def url(self) -> str | None:
        """The address of the metrics as seen from this host, `None` if nothing is served."""
        return None if self._outputs is None or self._closed else self._outputs.url

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
        whose norm it is.
        """
        values = {"loss": loss, "samples": samples, "tokens": tokens, "epoch": epoch, "grad_norm": grad_norm}
        for name, value in values.items():
            if value is not None and not self._closed:
                try:
                    self._loop.observe(name, value)
                except Exception as error:  # noqa: BLE001 - the boundary: a wrong value must not end the training
                    self._errors.count("observe", error)

    def step(self, number: int | None = None) -> None:
        """Says that an optimizer step is done, where no hook can see it: a patched, wrapped or captured one.

        To be called after the step and before the gradients are cleared. `number` numbers the step, so that ranks
        or restarted runs count alike.
        """
        if not self._closed:
            self._errors.guard("observe", lambda: self._loop.manual_step(number))

    def watch_loader(self, loader: Iterable[_Batch]) -> WatchedLoader[_Batch]:
        """The same loader, with the time that the loop waits for it counted as the phase `data`."""
        return WatchedLoader(loader, self._clock, self._errors)

    def collect(self) -> list[Family]:
        """All metrics as of now, as an output gets them; for tests and outputs of one's own. Empty if that fails."""
        try:
            return self._scrape()
        except Exception as error:  # noqa: BLE001 - the boundary: whoever asks may be the training
            self._errors.count("request", error)
            return []

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the history of the run to a file, for `torch-grad-exporter plot`; compressed where its name ends in `.gz`.

        A failure, such as a full disk, is logged: the training goes on.
        """
        try:
            self._view.save(os.fspath(path))
        except Exception as error:  # noqa: BLE001 - the boundary: a picture must not end the training
            self._errors.tell("history", error)

    def watches(self, models: Iterable[torch.nn.Module]) -> bool:
        """Whether this exporter watches one of the models."""
        mine = {id(module) for reference in self._models if (module := reference()) is not None}
        return any(id(model) in mine for model in models)

    @property
    def orphaned(self) -> bool:
        """Whether all models that this exporter watched are gone."""
        return all(reference() is None for reference in self._models)

    def close(self) -> None:
        """Removes every hook, thread, socket and reference. Idempotent, from any thread, never raises."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        if self._ending.state is None:
            self._ending = _Ending("finished")
        for action in (
            self._hooks.close,
            self._loop.close,
            self._capture.close,
            self._host.close,
            lambda: self._view.close(self._ending.error),
            self._close_outlets,
            self._registry.close,
            self._close_instruments,
            self._scrape.close,
            lambda: self._store.close(STORE_SECONDS),
        ):
            self._errors.guard("close", action)
        for finalizer in self._finalizers:
            finalizer.detach()
        living.discard(self)

    def end(self, error: BaseException | None) -> None:
        """Closes at the end of the process, if nobody has; `error`: what has ended it, if an exception has."""
        if not self._closed:
            self._ending = _Ending.by(error)
        self.close()

    def _close_instruments(self) -> None:
        if self._instruments is not None:
            self._instruments.close()

    def _drop_instruments(self) -> None:
        if self._instruments is not None:
            self._instruments.drop()

    def _close_outlets(self) -> None:
        if self._outputs is not None:
            failed = self._ending.state == "failed"
            # The ranks of a run that fails wait for each other, and for the launcher that is to end them.
            hurried = self._ending.interrupted or (failed and self._identity.world_size > 1)
            self._outputs.close(failed=failed, hurried=hurried)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._ending = _Ending.by(error)
        self.close()

    def __repr__(self) -> str:
        where = "closed" if self._closed else self.url or "not serving"
        return f"<Exporter run={self.run!r} rank={self.rank} {where}>"

    def _health(self) -> dict[str, object]:
        return {
            "status": "ok",
            "run": self.run,
            "rank": self.rank,
            "version": __version__,
            "capture_mode": self._capture.mode.value,
            "sampling_interval_steps": self._schedule.interval,
            "sampling_interval_at_cap": self._schedule.capped,
            "errors": sum(self._errors.counts().values()),
        }

    def after_fork_in_child(self) -> None:
        """The forked child is another process: it serves nothing, watches nothing and frees the port."""
        self._closed = True
        self._closing = threading.RLock()
        if self._outputs is not None:
            self._outputs.after_fork_in_child()
        self._drop_instruments()
        self._store.after_fork_in_child()
        self._host.after_fork_in_child()
        self._scrape.after_fork_in_child()
        self._hooks.disconnect()
        self._loop.count_only.release()


def _kinds(index: LayerIndex, models: Iterable[weakref.ref[torch.nn.Module]]) -> frozenset[str]:
    """Kinds of devices that gradients will be on; none where a parameter is yet to be made, or to get a device."""
    every = [parameter for reference in models if (module := reference()) is not None for parameter in module.parameters()]
    if any(is_lazy(parameter) or parameter.is_meta for parameter in every):
        return frozenset()
    return frozenset(parameter.device.type for parameter in index.table.parameters() or ())


def _info(identity: distributed.Identity, loop: TrainingLoop, expected: frozenset[str]) -> dict[str, str] | None:
    """The labels of `torch_train_info`, `None` as long as they are not known: a series that changed its name would be two.

    `expected`: the kinds of devices that the parameters were on at the start. They count until gradients are somewhere else.
    """
    devices = loop.devices if loop.devices - expected else expected
    if not devices:
        return None
    return {
        "torch_version": str(torch.__version__),
        "exporter_version": __version__,
        "python_version": platform.python_version(),
        "host": distributed.hostname(),
        "local_rank": str(identity.local_rank),
        "devices": ",".join(sorted(devices)),
    }
