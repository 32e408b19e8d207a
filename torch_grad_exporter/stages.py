"""The stages of an exporter, in the order of the data, each made from what the user chose; the composition root owns them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import fields

import torch

from torch_grad_exporter.actions.act.act import Act, Sources
from torch_grad_exporter.actions.act.between_steps import Training
from torch_grad_exporter.actions.act.steps import BetweenTheSteps, JobOfRanks
from torch_grad_exporter.actions.act.trigger import Failures
from torch_grad_exporter.actions.clip.at_steps import ClipAtSteps
from torch_grad_exporter.actions.freeze.layers import FrozenLayers
from torch_grad_exporter.actions.freeze.norms import LayerNorms
from torch_grad_exporter.actions.notify import notify
from torch_grad_exporter.actions.notify.job import Job
from torch_grad_exporter.capture.build import Capture
from torch_grad_exporter.capture.cost import DeviceTimer, SampleCost
from torch_grad_exporter.capture.device_events import EventPool
from torch_grad_exporter.capture.parts import Parts
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.reader import GradientReader
from torch_grad_exporter.capture.schedule import SamplingSchedule
from torch_grad_exporter.capture.torch_hooks import Hooks
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.clip_reports import ClipReports
from torch_grad_exporter.collectors.context import CollectorContext, Snapshots
from torch_grad_exporter.collectors.frozen_layers import FrozenLabels
from torch_grad_exporter.collectors.of_sample import OfSample
from torch_grad_exporter.collectors.outcomes import ActionTotals, NotifyTotals
from torch_grad_exporter.collectors.scrape import Scrape
from torch_grad_exporter.collectors.training import device_kinds
from torch_grad_exporter.config.checked import Checked
from torch_grad_exporter.distributed.identity import LateGroup
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.inspection.activation_totals import ActivationTotals
from torch_grad_exporter.inspection.activations import Activations
from torch_grad_exporter.inspection.layer_timer import LayerTimer
from torch_grad_exporter.inspection.layer_times import LayerTimes
from torch_grad_exporter.inspection.local_norms import LocalNormTotals
from torch_grad_exporter.inspection.nan_origin.origins import OriginPlaces, Origins
from torch_grad_exporter.inspection.nan_origin.watch import NanOrigin
from torch_grad_exporter.inspection.watch import Watch
from torch_grad_exporter.inspection.watch_totals import WatchTotals
from torch_grad_exporter.inspection.weight_totals import WeightTotals
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.outputs.live.live import Judged
from torch_grad_exporter.requests import Requests
from torch_grad_exporter.resources.devices import DeviceMemory
from torch_grad_exporter.rules import Problem
from torch_grad_exporter.statistics.declared import chosen
from torch_grad_exporter.statistics.eager import EagerStatistics
from torch_grad_exporter.statistics.kernels.choice import Implementation, Kernels
from torch_grad_exporter.statistics.layout import Layout
from torch_grad_exporter.store.host_transfer import HostTransfer
from torch_grad_exporter.store.mailbox import Mailbox
from torch_grad_exporter.store.worker import DRAIN_SECONDS, Worker

ORIGIN_SECONDS = 0.2
"""Between two drains of the worker where the origin of a NaN is looked for: it shows in the next rounds only."""

SOURCES = (
    "forward_hook", "backward_hook", "optimizer_hook", "capture", "reduction", "weights", "observe", "worker", "request", "close",
    "devices", "discovery", "textfile", "web_config", "otlp", "history", "notify", "action", "clip",
    "clip_dry_run", "clip_report", "activations", "watch", "nan_origin", "integration", "timing", "layer_times", "kernels",
)  # fmt: skip
"""Every boundary at which a failure of ours can be counted, but for the collectors."""


class TrainingSide:
    """What belongs to the training thread. `layout`: what is measured."""

    def __init__(self, checked: Checked, errors: ErrorLog) -> None:
        settings = checked.settings
        self.mailbox = Mailbox()
        self.layout = Layout.of(chosen({field.name: getattr(settings, field.name) is True for field in fields(settings)}))
        self.events = events = EventPool(errors.boundary("timing"))
        self.hooks, self.clock = Hooks(errors), StepClock(self.mailbox, events=events)
        self.schedule = SamplingSchedule(settings.every, settings.overhead_budget)
        self.optimizers = Optimizers(checked.index, checked.arguments.optimizers)
        self.frozen, self.origins = FrozenLabels(), OriginPlaces()
        self.local_norms, self.weights = LocalNormTotals(), WeightTotals()
        cost = SampleCost(self.clock, self.schedule, DeviceTimer(events))
        by_programs = settings.statistics is Implementation.AUTO
        kernels = Kernels(self.layout, errors.boundary("kernels"), HostTransfer(ring=1).post) if by_programs else None
        reader = GradientReader(
            index=checked.index,
            optimizers=self.optimizers,
            statistics=EagerStatistics(settings.dead_window, self.layout, kernels=kernels),
            clock=self.clock,
            cost=cost,
            mailbox=self.mailbox,
            errors=errors,
            scaler=checked.arguments.grad_scaler,
        )
        self.memory = DeviceMemory(used=lambda: reader.devices)
        self._look = errors.boundary("devices")
        parts = Parts(
            index=checked.index,
            optimizers=self.optimizers,
            cost=cost,
            reader=reader,
            schedule=self.schedule,
            clock=self.clock,
            mailbox=self.mailbox,
            hooks=self.hooks,
            errors=errors,
            options=checked.capture,
            periodic=self._look_at_devices if REGISTRY.reads_devices(settings.collectors) else None,
        )
        self.capture = Capture(parts)
        self.cost, self.reader = cost, reader
        self.requests = Requests()
        if settings.nan_origin:
            self._look_for_origins(checked, parts)

    def _look_for_origins(self, checked: Checked, parts: Parts) -> None:
        """Adds what looks for the place where a value became non-finite."""
        inspection = NanOrigin(
            parts.hooks,
            parts.cost,
            parts.clock,
            parts.mailbox,
            models=checked.models,
            requests=self.requests,
            steps=self.steps,
            scaled=lambda: parts.reader.knows_scaler,
            always=checked.settings.nan_origin == "always",
        )
        self.capture.inspect(inspection, parts.errors.boundary("nan_origin"))

    def _look_at_devices(self) -> None:
        self._look(self.memory.refresh)

    def steps(self) -> int:
        """The number of the last step of the optimizer that took the most, in the whole training."""
        return self.clock.number


def host_side(checked: Checked, training: TrainingSide, errors: ErrorLog) -> Worker:
    """The worker and what it adds up."""
    origins = Origins(training.origins, training.steps, training.requests) if checked.settings.nan_origin else None
    worker = Worker(
        training.mailbox,
        checked.index.table,
        errors,
        layout=training.layout,
        exponential=checked.push is not None and checked.push.exponential,
        clipped=checked.clip is not None,
        drain_seconds=DRAIN_SECONDS if origins is None else ORIGIN_SECONDS,
        periodic=training.capture.look,
        counting=training.clock.counting,
    )
    if origins is not None:
        worker.register("nan_origin", origins)
        worker.listen(origins)
    worker.register("local_norms", training.local_norms)
    worker.listen(training.local_norms)
    worker.register("weights", training.weights)
    return worker


def scrape(
    checked: Checked,
    training: TrainingSide,
    host: Worker,
    errors: ErrorLog,
    *,
    ended: Callable[[], str | None],
    notified: NotifyTotals | None,
    acted: ActionTotals,
    clip: ClipReports | None,
    activations: ActivationTotals | None = None,
    layer_times: LayerTimes | None = None,
    watched: WatchTotals | None = None,
) -> tuple[Scrape, OfSample]:
    """The collectors over these parts, at scrapes and at samples. `ended` and all after it: as of `CollectorContext`."""
    settings, snapshots = checked.settings, Snapshots(host.snapshot, training.clock.counts)
    group = LateGroup(checked.identity, checked.rank)

    def prepare() -> None:
        snapshots.renew()
        group.check()

    context = CollectorContext(
        snapshots=snapshots,
        clock=training.clock,
        optimizers=training.optimizers.names,
        capture=training.capture,
        schedule=training.schedule,
        memory=training.memory,
        errors=errors,
        identity=checked.identity,
        rank=checked.rank,
        store=checked.store,
        expected_devices=device_kinds(checked.index, checked.models.values()),
        ended=ended,
        dead_window=settings.dead_window,
        moments=settings.moments,
        weights=training.weights if settings.weights else None,
        local_norms=training.local_norms,
        notified=notified,
        acted=acted,
        clip=clip,
        frozen=training.frozen,
        activations=activations,
        watched=watched or WatchTotals(),
        origins=training.origins,
        layer_times=layer_times,
    )
    made = REGISTRY.made(settings.collectors, context)
    return Scrape(made, errors, prepare, not_judged=REGISTRY.not_judged), OfSample(REGISTRY, settings.collectors, context)


def notifying(
    checked: Checked, training: TrainingSide, problems: Callable[[bool], Iterable[Problem]], errors: ErrorLog
) -> notify.Notify | None:
    """What tells of problems, if the user wants it. `problems`: judges the run now; its argument says whether it is over."""
    notifiers, ranks = checked.arguments.alerts, checked.identity.world_size
    if not notifiers:
        return None
    origin = notify.Origin(checked.run, checked.rank, training.steps)
    job = Job(checked.store, checked.rank, ranks) if ranks > 1 else None
    return notify.Notify(notifiers, problems, origin, notify.totals(notifiers), errors, job=job)


def acting(
    checked: Checked,
    training: TrainingSide,
    host: Worker,
    errors: ErrorLog,
    *,
    judge: Callable[[bool], Judged],
    stop: Callable[[], None],
) -> Act:
    """What `Exporter.on` hands actions to. `judge`: judges the run now; `stop`: what `Stop()` does."""
    optimizers, ranks = training.optimizers, checked.identity.world_size

    def known() -> list[torch.optim.Optimizer]:
        return [optimizer for _, optimizer in optimizers.numbered()]

    layers = FrozenLayers(checked.index, known, training.frozen)
    steps = BetweenTheSteps(
        training=Training(known, stop, layers, functools.partial(LayerNorms, host)),
        concerns=optimizers.concerns,
        errors=errors,
        failures=Failures(errors),
        job=JobOfRanks(checked.store, checked.run, checked.identity.rank, ranks) if ranks > 1 else None,
        spent=training.clock.spent,
        steps=training.steps,
    )
    sources = Sources(judge=judge, fed=bool(checked.arguments.alerts), metrics=lambda: REGISTRY.catalogue, step=training.steps)
    return Act(sources, steps, ActionTotals(), errors)


def activations(checked: Checked, training: TrainingSide, worker: Worker, errors: ErrorLog) -> ActivationTotals | None:
    """What looks at the outputs of inner modules, if the user wants it."""
    if checked.modules is None:
        return None
    totals = ActivationTotals(checked.settings.max_layers)
    watch = Activations(
        modules=checked.modules,
        hooks=training.hooks,
        reader=training.reader,
        cost=training.cost,
        mailbox=training.mailbox,
        totals=totals,
    )
    training.capture.inspect(watch, errors.boundary("activations"))
    worker.register("activations", totals)
    return totals


def layer_times(checked: Checked, training: TrainingSide, worker: Worker, errors: ErrorLog) -> LayerTimes | None:
    """What times layers, if the user wants it. Before other inspections: then these are not in the times."""
    if checked.timed is None:
        return None
    times = LayerTimes(checked.settings.max_layers)
    watch = LayerTimer(
        modules=checked.timed,
        hooks=training.hooks,
        events=training.events,
        clock=training.clock,
        cost=training.cost,
        mailbox=training.mailbox,
        times=times,
    )
    training.capture.inspect(watch, errors.boundary("layer_times"))
    worker.register("layer_times", times)
    return times


def watching(training: TrainingSide, totals: WatchTotals, errors: ErrorLog) -> Watch:
    """What watches the gradients of single tensors, from the first one on."""
    watch = Watch(
        hooks=training.hooks,
        reader=training.reader,
        cost=training.cost,
        mailbox=training.mailbox,
        totals=totals,
        errors=errors,
        sampled=training.capture.is_sampled,
    )
    training.capture.inspect(watch, errors.boundary("watch"))
    return watch


def clipping(checked: Checked, training: TrainingSide, errors: ErrorLog) -> ClipAtSteps | None:
    """What clips before each step, if the user wants it."""
    if checked.clip is None:
        return None
    looking = errors.boundary("capture", "gradients after clipping")
    return ClipAtSteps(
        checked.clip,
        checked.models,
        errors,
        named=checked.arguments.optimizers,
        clipped=lambda optimizer, skip: looking(training.capture.clipped, optimizer, skip),
    )
