"""The composition root: `start_exporter` checks everything, builds the stages and wires them together.

`Exporter` owns every handle; `close()` gives all of them back. Nothing is global but the set of exporters
that are not closed, for the process' fork and exit handlers, which are registered at the first start.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import platform
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self, TypeVar

import prometheus_client
import torch

from torch_grad_exporter import checks, distributed
from torch_grad_exporter.capture import GradientCapture
from torch_grad_exporter.catalogue import CATALOGUE
from torch_grad_exporter.collectors.exporter import ExporterCollector
from torch_grad_exporter.collectors.gradients import GradientCollector
from torch_grad_exporter.collectors.training import TrainingCollector
from torch_grad_exporter.cost import SampleCost
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.events import Hints, mailbox
from torch_grad_exporter.exposition.listener import candidate_ports
from torch_grad_exporter.exposition.registry import RegistryCollector
from torch_grad_exporter.exposition.server import MetricsServer
from torch_grad_exporter.exposition.text import Renderer
from torch_grad_exporter.families import Collector, Family
from torch_grad_exporter.hooks import Hooks
from torch_grad_exporter.host import HostSide, Snapshot
from torch_grad_exporter.layers import LayerIndex
from torch_grad_exporter.ledger import GradientLedger
from torch_grad_exporter.loop import Number, TrainingLoop, WatchedLoader
from torch_grad_exporter.optimizers import Optimizers
from torch_grad_exporter.progress import StepClock
from torch_grad_exporter.reader import GradientReader, Scaler
from torch_grad_exporter.schedule import SamplingSchedule
from torch_grad_exporter.scrape import Scrape
from torch_grad_exporter.settings import UNSET, Settings, Unset, resolve
from torch_grad_exporter.statistics.eager import EagerStatistics
from torch_grad_exporter.totals import TrainingTotals
from torch_grad_exporter.version import __version__
from torch_grad_exporter.weights import WeightProbe

logger = logging.getLogger("torch_grad_exporter")

SOURCES = (
    "forward_hook", "backward_hook", "optimizer_hook", "capture", "weights", "observe", "worker", "request", "close",
    "collector_gradients", "collector_training", "collector_exporter",
)  # fmt: skip
"""Every boundary at which a failure of ours can be counted."""

Models = torch.nn.Module | Mapping[str, torch.nn.Module]
_Batch = TypeVar("_Batch")


def start_exporter(
    model: Models,
    port: int | Unset | None = UNSET,
    *,
    addr: str | Unset = UNSET,
    every: Literal["auto"] | int | Unset = UNSET,
    overhead_budget: float | Unset = UNSET,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer] | None = None,
    grad_scaler: Scaler | None = None,
    include: str | Sequence[str] | Unset = UNSET,
    exclude: str | Sequence[str] | Unset = UNSET,
    max_layers: int | Unset = UNSET,
    dead_window: int | Unset = UNSET,
    moments: bool | Unset = UNSET,
    weights: bool | Unset = UNSET,
    run: str | Unset = UNSET,
    rank: int | Unset = UNSET,
    labels: Mapping[str, str] | Unset = UNSET,
    registry: prometheus_client.CollectorRegistry | None = None,
) -> Exporter:
    """Watches the training of `model` and serves its metrics at `http://<host>:<port>/metrics`.

    Every argument but the model, the optimizers, the scaler and the registry can also be given as an
    environment variable, `TORCH_GRAD_EXPORTER_PORT` for `port` and so on; an argument wins.

    - `model`: a module, or a mapping of names to modules, whose names become the first part of the layer labels.
    - `port`: 9100 plus the local rank by default; the next free one if it is taken; 0 for any free one; `None`
      serves nothing. `addr`: the address to listen on, by default all interfaces.
    - `every`: "auto" adapts the interval between samples to `overhead_budget`, the share of training time that
      sampling may take (default 0.01); a number samples every so many rounds of optimizer steps.
    - `optimizers`: only needed to give them names, or where they are not known before their first step.
    - `grad_scaler`: the `torch.amp.GradScaler` in use; the norms are divided by its scale.
    - `include`, `exclude`: regular expressions, searched in layer names. `max_layers` (default 300): beyond it,
      layers are folded by module depth.
    - `dead_window` (default 100): samples of exactly zero gradient after which an output unit counts as dead.
    - `moments`, `weights`: metrics of the gradient's moments, and of weights and their updates.
    - `run`, `rank`: on every series; by default from the launcher, else a new name and 0. `labels`: more of them.
    - `registry`: a `prometheus_client` registry in which the metrics are to appear as well.

    Starting again on a model replaces the exporter that was there. Raises `TypeError` or `ValueError` before
    anything is registered if an argument is wrong; later, nothing is ever raised into the training.
    """
    chosen = {
        "port": port, "addr": addr, "every": every, "overhead_budget": overhead_budget, "include": include,
        "exclude": exclude, "max_layers": max_layers, "dead_window": dead_window, "moments": moments,
        "weights": weights, "run": run, "rank": rank, "labels": labels,
    }  # fmt: skip
    settings = resolve(chosen, os.environ)
    identity = distributed.identity(os.environ)
    models = checks.checked_models(model)
    named = checks.checked_optimizers(optimizers)
    checks.check_scaler(grad_scaler)
    if registry is not None and not hasattr(registry, "register"):
        raise TypeError(f"registry={registry!r}: expected a prometheus_client.CollectorRegistry")
    index = checks.checked_index(models, settings, chosen)
    checks.check_ownership(index, named)
    for other in list(_live):
        # A notebook cell that is run again makes its model anew, too: then the old one is gone.
        if other.watches(models.values()) or other.orphaned:
            logger.info("a new exporter replaces one on the same model, or on a model that is gone")
            other.close()
    exporter = Exporter(models, index, settings, identity, optimizers=named, grad_scaler=grad_scaler, registry=registry)
    _register(exporter)
    return exporter


@dataclass(frozen=True, slots=True)
class _Ending:
    """How the run ended, for `torch_train_state`."""

    state: str | None = None


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
    ) -> None:
        self.settings = settings
        self.run = settings.run or identity.run or distributed.new_run_name(time.time())
        self.rank = identity.rank if settings.rank is None else settings.rank
        self._identity = identity
        self._models = [weakref.ref(module) for module in models.values()]
        self._index = index
        self._errors = ErrorLog(SOURCES)
        self._closed = False
        self._closing = threading.Lock()
        self._ending = _Ending()
        self._finalizers: list[weakref.finalize[[], torch.nn.Module]] = []
        self._build(optimizers, grad_scaler)
        self._labels = {"run": self.run, "rank": str(self.rank), **settings.labels}
        self._registry = RegistryCollector(self._scrape, self._labels, CATALOGUE.values(), on_error=self._errors.count)
        if registry is not None:
            self._registry.register(registry)
        self._host.start()
        self._server = self._serve()
        self._install(models)

    # Building

    def _build(self, optimizers: Mapping[str, torch.optim.Optimizer], grad_scaler: Scaler | None) -> None:
        """The stages from left to right."""
        settings, index = self.settings, self._index
        post = mailbox()
        hints = Hints()
        self._hooks = Hooks(self._errors)
        self._clock = StepClock(post)
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
        )
        ledger = GradientLedger(settings.dead_window, hints)
        ledger.use(index.plan)
        self._host = HostSide(post, ledger, TrainingTotals(), self._errors, beside=self._loop.stretches.look)
        self._snapshot = self._host.snapshot()
        self._scrape = Scrape(self._collectors(), self._errors, self._take_snapshot)

    def _collectors(self) -> list[Collector]:
        def latest() -> Snapshot:
            return self._snapshot

        return [
            GradientCollector(
                lambda: latest().gradients,
                self._optimizers.names,
                dead_window=self.settings.dead_window,
                moments=self.settings.moments,
                weights=self.settings.weights,
            ),
            TrainingCollector(
                lambda: latest().totals,
                self._clock,
                self._optimizers.names,
                info=functools.partial(_info, self._identity, self._loop),
                world_size=self._identity.world_size,
                ended=lambda: self._ending.state,
                phases=lambda: self._loop.devices <= {"cpu"},
            ),
            ExporterCollector(latest, self._capture, self._schedule, self._errors, lambda: self._scrape.series),
        ]

    def _take_snapshot(self) -> None:
        self._snapshot = self._host.snapshot()

    def _serve(self) -> MetricsServer | None:
        port, identity = self.settings.port, self._identity
        if port is None:
            return None
        try:
            return MetricsServer(
                self._scrape,
                Renderer(self._labels),
                addr=self.settings.addr,
                ports=candidate_ports(port, identity.local_rank, identity.local_world_size),
                on_error=self._errors.count,
                health=self._health,
                version=__version__,
            )
        except OSError as error:
            where = self.settings.addr or "all interfaces"
            logger.warning("no metrics are served, training goes on: cannot listen on %s, port %d and on: %s", where, port, error)
            return None

    def _install(self, models: Mapping[str, torch.nn.Module]) -> None:
        """Registers the hooks; from here on the training is watched."""
        for number, module in enumerate(models.values()):
            self._hooks.on_module(module, self._loop.forward_began, functools.partial(self._loop.forward_ended, number))
            # An armed round holds parameters; a model that is dropped meanwhile must be free to go.
            self._finalizers.append(weakref.finalize(module, self._release))
            self._finalizers[-1].atexit = False
        self._hooks.on_optimizers(self._loop.step_began, self._loop.step_ended)
        if self.url is not None:
            logger.info("serving metrics at %s", self.url)

    def _release(self) -> None:
        """Lets go of everything that keeps a parameter alive."""
        self._capture.release()
        self._loop.stretches.release()

    # The user's door

    @property
    def port(self) -> int | None:
        """The port in use, `None` if nothing is served."""
        return None if self._server is None or self._closed else self._server.port

    @property
    def url(self) -> str | None:
        """The address of the metrics as seen from this host, `None` if nothing is served."""
        addr = self.settings.addr
        host = "localhost" if addr in ("", "0.0.0.0", "::") else f"[{addr}]" if ":" in addr else addr  # noqa: S104
        return None if self.port is None else f"http://{host}:{self.port}/metrics"

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
        return self._loop.watch(loader)

    def collect(self) -> Iterator[Family]:
        """All metrics as of now, as an output gets them; for tests and outputs of one's own."""
        return self._scrape()

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
            self._registry.close,
            *((self._server.close,) if self._server is not None else ()),
        ):
            self._errors.guard("close", action)
        for finalizer in self._finalizers:
            finalizer.detach()
        _live.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._ending = _Ending("finished" if kind is None else "failed")
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
        if self._server is not None:
            self._server.after_fork_in_child()
        self._host.after_fork_in_child()
        self._hooks.disconnect()
        self._loop.stretches.release()


def _info(identity: distributed.Identity, loop: TrainingLoop) -> dict[str, str]:
    return {
        "torch_version": str(torch.__version__),
        "exporter_version": __version__,
        "python_version": platform.python_version(),
        "host": distributed.hostname(),
        "local_rank": str(identity.local_rank),
        "devices": ",".join(sorted(loop.devices)),
    }


# The process' fork and exit

_live: set[Exporter] = set()
"""Exporters that nobody has closed: they live on, like their hooks, though nobody holds them."""

_registered = False


def _register(exporter: Exporter) -> None:
    """Remembers a live exporter for the handlers, which the first start registers."""
    global _registered  # noqa: PLW0603 - the process has one set of handlers, and no way to take them back
    _live.add(exporter)
    if not _registered:
        _registered = True
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_after_fork_in_child)
        atexit.register(_at_exit)


def _after_fork_in_child() -> None:
    for exporter in list(_live):
        exporter.after_fork_in_child()
    _live.clear()


def _at_exit() -> None:
    for exporter in list(_live):
        exporter.close()
