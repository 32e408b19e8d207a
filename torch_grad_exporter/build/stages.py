"""The stages of an exporter: built in the order of the data, and started from its end."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Protocol

import torch

from torch_grad_exporter.actions.act.act import Act
from torch_grad_exporter.actions.act.decisions import JobOfRanks
from torch_grad_exporter.actions.act.reports import SOURCE, ActionReports
from torch_grad_exporter.actions.act.runner import StepActionRunner
from torch_grad_exporter.actions.act.sample_feed import SampleFeed
from torch_grad_exporter.actions.act.step_actions import Training
from torch_grad_exporter.actions.clip.at_steps import ClipAtSteps
from torch_grad_exporter.actions.freeze.layers import FrozenLayers
from torch_grad_exporter.actions.notify.job import Job
from torch_grad_exporter.actions.notify.notify import Notify, Origin
from torch_grad_exporter.actions.notify.notify import totals as notify_totals
from torch_grad_exporter.capture.capture import Capture
from torch_grad_exporter.capture.cost import DeviceTimer, SampleCost
from torch_grad_exporter.capture.device_events import EventPool
from torch_grad_exporter.capture.loss_scale import LossScale
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.reader import GradientReader
from torch_grad_exporter.capture.schedule import SamplingSchedule
from torch_grad_exporter.capture.torch_hooks import Hooks
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.clipping import ClipReports
from torch_grad_exporter.collectors.context import CollectorContext, Snapshots
from torch_grad_exporter.collectors.frozen_layers import FrozenLabels
from torch_grad_exporter.collectors.gradients import GradientCollector, dead_from
from torch_grad_exporter.collectors.of_sample import OfSample
from torch_grad_exporter.collectors.outcomes import ActionTotals
from torch_grad_exporter.collectors.process import STANDARD
from torch_grad_exporter.collectors.scrape import Scrape
from torch_grad_exporter.config.checked import Checked
from torch_grad_exporter.distributed.identity import LateGroup, hostname
from torch_grad_exporter.errors import ErrorLog, say
from torch_grad_exporter.inspection.activation_totals import ActivationTotals
from torch_grad_exporter.inspection.activations import Activations
from torch_grad_exporter.inspection.layer_timer import LayerTimer
from torch_grad_exporter.inspection.layer_times import LayerTimes
from torch_grad_exporter.inspection.local_gradients import LocalGradients
from torch_grad_exporter.inspection.local_norms import LocalNormTotals
from torch_grad_exporter.inspection.nan_origin.inspection import NanOrigin
from torch_grad_exporter.inspection.nan_origin.origins import Origins
from torch_grad_exporter.inspection.reduction_waits import ReductionWaits
from torch_grad_exporter.inspection.round_loss import RoundLoss
from torch_grad_exporter.inspection.watch import WatchedTensors
from torch_grad_exporter.inspection.watch_totals import WatchTotals
from torch_grad_exporter.inspection.weight_totals import WeightTotals
from torch_grad_exporter.inspection.weights import WeightProbe
from torch_grad_exporter.lifecycle import THREAD_TIME, Ending
from torch_grad_exporter.model.layers import device_kinds
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.model.watched import WatchedModels
from torch_grad_exporter.outputs.announcement import Announcement, Rank
from torch_grad_exporter.outputs.live.live import Run
from torch_grad_exporter.outputs.live.view import View
from torch_grad_exporter.outputs.otlp.instruments import Instruments
from torch_grad_exporter.outputs.outputs import OutputOptions, Outputs
from torch_grad_exporter.outputs.prometheus.registry import RegistryCollector
from torch_grad_exporter.requests import Requests
from torch_grad_exporter.resources.devices import DeviceMemory
from torch_grad_exporter.rules import Problem
from torch_grad_exporter.statistics.declared import chosen
from torch_grad_exporter.statistics.eager import EagerStatistics
from torch_grad_exporter.statistics.kernels.choice import Kernels
from torch_grad_exporter.statistics.layout import Layout
from torch_grad_exporter.store.host_transfer import HostTransfer
from torch_grad_exporter.store.mailbox import Mailbox
from torch_grad_exporter.store.worker import DRAIN_SECONDS, Worker
from torch_grad_exporter.torch_compat import lost
from torch_grad_exporter.version import __version__

logger = logging.getLogger("torch_grad_exporter")

# Every boundary at which a failure of ours can be counted, but for the collectors.
ORIGIN_SECONDS = 0.2
"""Between two drains of the worker if the origin of a NaN is looked for, which shows only in the next rounds."""

SOURCES = (
    "forward_hook", "backward_hook", "optimizer_hook", "capture", "reduction", "weights", "observe",
    "worker", "request", "close", "devices", "discovery", "textfile", "web_config", "otlp",
    "history", "notify", "action", "clip", "clip_dry_run", "clip_report", "activations", "watch", "nan_origin",
    "integration", "timing", "layer_times", "kernels",
)  # fmt: skip

# The end waits at most this long for the job's store.
STORE_SECONDS = 0.4


class _Forked(Protocol):
    def after_fork_in_child(self) -> None:
        """Gives up what belongs to the parent process."""


class Stages:
    """Everything between the hooks in PyTorch and what leaves the process, for one exporter.

    The constructor registers, opens and starts nothing; `start` does, and `close` takes all of it
    back, also after a `start` that raised. Neither keeps `checked`, which holds optimizers and with
    them the parameters of a model that may be dropped.

    Args:
        models: The models to watch, by name.
        checked: The user's choices, valid.
        ending: How and when the run ends.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module], checked: Checked, ending: Ending) -> None:  # noqa: C901, PLR0915 - read from top to bottom
        settings, arguments, identity = checked.settings, checked.arguments, checked.identity
        several = identity.world_size > 1
        self._ending, self._store = ending, checked.store
        self._run, self._rank = checked.run, checked.rank
        self.errors = errors = ErrorLog((*SOURCES, *REGISTRY.sources))
        self._closing, self._guard = contextlib.ExitStack(), errors.boundary("close", limit=None)

        # Capture, on the thread that trains: hooks, rounds, sampling, and the gradients' numbers.
        self._mailbox = mailbox = Mailbox()
        enabled = {field.name: getattr(settings, field.name) is True for field in fields(settings)}
        layout = Layout(chosen(enabled))
        events = EventPool(errors.boundary("timing"))
        self._hooks = hooks = Hooks(errors)
        self.clock = clock = StepClock(mailbox, events=events)
        self._schedule = schedule = SamplingSchedule(settings.interval, settings.overhead_budget, THREAD_TIME)
        self._cost = cost = SampleCost(clock, schedule, DeviceTimer(events))
        self.optimizers = optimizers = Optimizers(checked.index, arguments.optimizers)
        kernels = None
        if settings.statistics.by_programs:
            kernels = Kernels(layout, errors.boundary("kernels"), HostTransfer(ring=1).post)
        self._loss_scale = loss_scale = LossScale(arguments.grad_scaler)
        reader = GradientReader(
            optimizers=optimizers,
            statistics=EagerStatistics(settings.dead_window, layout, kernels=kernels), clock=clock,
            cost=cost, mailbox=mailbox, errors=errors, loss_scale=loss_scale,
        )  # fmt: skip
        self._memory = memory = DeviceMemory(used=lambda: reader.devices)
        devices_guard = errors.boundary("devices")

        def refresh_memory() -> None:
            devices_guard(memory.refresh)

        requests = Requests()
        self.capture = capture = Capture(
            index=checked.index, optimizers=optimizers, clock=clock, cost=cost, schedule=schedule,
            reader=reader, loss_scale=loss_scale, hooks=hooks, mailbox=mailbox, requests=requests, errors=errors,
            periodic=refresh_memory if REGISTRY.reads_devices(settings.enabled_collectors) else None,
        )  # fmt: skip

        # Inspections, which the capture calls in the rounds that it follows.
        waits = ReductionWaits(hooks, clock, capture.reductions, reader)
        capture.inspect(waits, errors.boundary("reduction", "waits for other ranks"))
        if settings.local_norm:
            local = LocalGradients(
                hooks=hooks, mailbox=mailbox, cost=cost, clock=clock, reductions=capture.reductions,
                detection=capture.detection,
            )  # fmt: skip
            capture.inspect(local, errors.boundary("reduction", "gradients of this rank"))
        if settings.weights:
            weights = WeightProbe(optimizers, cost, mailbox)
            capture.inspect(weights, errors.boundary("weights"))
        losses = RoundLoss(
            rounds=capture.rounds, detection=capture.detection, clock=clock, index=checked.index,
            observations=capture.observations, errors=errors,
        )  # fmt: skip
        capture.inspect(losses, errors.boundary("forward_hook", "losses in outputs"))
        if settings.nan_origin:
            nan_origin = NanOrigin(
                hooks=hooks, cost=cost, clock=clock, mailbox=mailbox, loss_scale=loss_scale, models=models,
                always=settings.nan_origin == "always",
            )  # fmt: skip
            capture.inspect(nan_origin, errors.boundary("nan_origin"))
        layer_times = None
        if checked.timed is not None:
            # Before other inspections, whose time is then not counted as that of layers.
            layer_times = LayerTimes(settings.max_layers)
            timer = LayerTimer(
                modules=checked.timed, hooks=hooks, events=events, clock=clock, cost=cost,
                mailbox=mailbox, times=layer_times,
            )  # fmt: skip
            capture.inspect(timer, errors.boundary("layer_times"))
        activations = None
        if checked.modules is not None:
            activations = ActivationTotals(settings.max_layers)
            watch = Activations(
                modules=checked.modules, hooks=hooks, loss_scale=loss_scale, cost=cost, mailbox=mailbox,
                totals=activations,
            )  # fmt: skip
            capture.inspect(watch, errors.boundary("activations"))
        self._watched_totals = WatchTotals()
        self._watch: WatchedTensors | None = None

        # Clipping, right before each step and after the gradients were read.
        self.clip = None
        if checked.clip is not None:
            self.clip = ClipAtSteps(checked.clip, models, errors, named=arguments.optimizers, capture=capture)

        # The worker, in the background: takes records from the mailbox and adds them up.
        self._host = host = Worker(
            mailbox, checked.index.table, errors, layout=layout,
            exponential=checked.push is not None and checked.push.exponential,
            clipped=checked.clip is not None,
            drain_seconds=ORIGIN_SECONDS if settings.nan_origin else DRAIN_SECONDS,
            periodic=capture.look,
        )  # fmt: skip
        origins = None
        if settings.nan_origin:
            origins = Origins(clock, requests)
            host.register("nan_origin", origins)
            host.listen(origins)
        local_norms, weight_totals = LocalNormTotals(), WeightTotals()
        host.register("local_norms", local_norms)
        host.listen(local_norms)
        host.register("weights", weight_totals)
        host.register("watch", self._watched_totals)
        if activations is not None:
            host.register("activations", activations)
        if layer_times is not None:
            host.register("layer_times", layer_times)

        # Collectors, run by a scrape over one snapshot.
        frozen, acted = FrozenLabels(), ActionTotals()
        notified = notify_totals(arguments.alerts) if arguments.alerts else None
        snapshots = Snapshots(host.snapshot, clock.counts)
        context = CollectorContext(
            snapshots=snapshots, clock=clock, optimizers=optimizers.names, capture=capture,
            schedule=schedule, memory=memory, errors=errors, identity=identity,
            expected_devices=device_kinds(checked.index, models.values()),
            waits=waits, ended=lambda: ending.state, dead_window=settings.dead_window, moments=settings.moments,
            weights=weight_totals if settings.weights else None, local_norms=local_norms,
            notified=notified, acted=acted,
            clip=None if self.clip is None else self.clip.reports, frozen=frozen,
            activations=activations, watched=self._watched_totals, origins=origins,
            layer_times=layer_times,
        )  # fmt: skip
        group = LateGroup(identity, checked.rank)

        def prepare() -> None:
            snapshots.renew()
            group.check()

        self.scrape = scrape = Scrape(
            REGISTRY.made(settings.enabled_collectors, context), errors, prepare,
            not_judged=REGISTRY.not_judged,
        )  # fmt: skip

        # The history of the run, and what is wrong by it.
        self._announcement = Announcement(
            rank=Rank(checked.run, checked.rank, identity, checked.labels), store=checked.store,
            errors=errors, addr=settings.addr, advertise=settings.advertise, sd_dir=settings.sd_dir,
            labels=settings.labels,
        )  # fmt: skip
        self.view = view = View(
            Run(checked.run, checked.rank, identity.world_size, hostname(), __version__), host,
            self.steps, scrape, for_rules=scrape.for_rules, targets=self._announcement.body,
            happened=acted.happened.latest,
            of_sample=OfSample(REGISTRY, settings.enabled_collectors, context),
            dead_from=dead_from(settings.dead_window), moments=settings.moments, now=time.time,
            on_error=functools.partial(errors.count, "history"),
            activations=None if activations is None else activations.snapshot,
        )  # fmt: skip

        # Actions, which the rules or the user's conditions ask for.
        self.stop_requested = threading.Event()
        job = JobOfRanks(checked.store, checked.run, identity.rank, identity.world_size)
        feed = None
        if "gradients" in settings.enabled_collectors:
            of_samples = GradientCollector(
                snapshots, optimizers.names, dead_window=settings.dead_window,
                moments=settings.moments, local_norms=local_norms,
                clip=None if checked.clip is None else ClipReports(),
            )  # fmt: skip
            feed = SampleFeed(host, of_samples, errors.boundary(SOURCE, "reading samples", limit=None))
        reports = ActionReports(errors, acted, self.steps)
        layers = FrozenLayers(checked.index, optimizers, frozen)
        training = Training(optimizers, self.stop_requested, layers, host)
        runner = StepActionRunner(training, reports, job if several else None, spent=clock.spent)
        self.act = Act(view.live, runner, reports, fed=bool(arguments.alerts), samples=feed)
        self._notify = None
        if notified is not None:
            self._notify = Notify(
                arguments.alerts, self._problems, Origin(checked.run, checked.rank, self.steps),
                notified, errors,
                job=Job(checked.store, checked.rank, identity.world_size) if several else None,
            )  # fmt: skip

        # These are made by `start`: others can see them from their first moment on.
        self._instruments: Instruments | None = None
        self.outputs: Outputs | None = None

    def start(self, models: Mapping[str, torch.nn.Module], checked: Checked) -> None:
        """Start to show values, and last to watch the training.

        A stage is there before the one that feeds it. `close` goes the other way: first no more
        values come in, then each stage hands on what it still has.

        Raises:
            ValueError: The registry has a metric with one of our names already.
        """
        settings, errors, ending, scrape = checked.settings, self.errors, self._ending, self.scrape
        # An armed round references parameters; a model that is dropped meanwhile must be freed.
        self.models = WatchedModels(models.values(), gone=self._release_parameters)
        self.at_end(self.models.close)
        self.at_end(functools.partial(self._store.close, STORE_SECONDS))

        if (registry := checked.arguments.registry) is not None:
            registered = RegistryCollector(
                scrape, checked.labels, REGISTRY.catalogue.values(), common=STANDARD.specs,
                errors=errors,
            )  # fmt: skip
            self.at_end(registered.close)
            registered.register(registry)
        self.at_end(scrape.close)
        scrape.start()
        if (provider := checked.arguments.meter_provider) is not None:
            on_error = functools.partial(errors.count, "request")
            self._instruments = Instruments(provider, scrape, checked.labels, on_error=on_error)
            self.at_end(self._instruments.close)
        self.outputs = outputs = Outputs(
            scrape,
            self._announcement.rank,
            OutputOptions(
                port=settings.port,
                addr=settings.addr,
                textfile_dir=settings.textfile_dir,
                web_config_file=settings.web_config_file,
                linger=settings.linger,
            ),
            errors,
            health=self._health,
            announcement=self._announcement,
            web_config=checked.web_config,
            push=checked.push,
            page=self.view.page,
        )
        self.at_end(lambda: outputs.close(failed=ending.error is not None, hurried=ending.hurried))

        self.at_end(lambda: self.act.close(hurried=ending.hurried))
        if (notify := self._notify) is not None:
            self.at_end(lambda: notify.close(hurried=ending.hurried))
            errors.boundary("notify", limit=None)(notify.start)
        self.at_end(lambda: self.view.close(ending.error))
        errors.boundary("history", limit=None)(self.view.start)
        self.at_end(self._host.close)
        # Without its thread, scrapes drain the mailbox.
        errors.boundary("worker", limit=None)(self._host.start)

        if REGISTRY.reads_devices(settings.enabled_collectors):
            # So their counters are there before the first step.
            errors.boundary("devices", limit=None)(self._memory.refresh_now)
        self.at_end(lambda: self.capture.close(failed=ending.error is not None))
        self.at_end(lambda: self.capture.settle(failed=ending.error is not None))
        self.at_end(self._hooks.close)
        self.capture.watch(models.values())
        self.at_end(self._close_watch)
        if self.clip is not None:
            self.at_end(self.clip.close)
            # After the capture, which reads gradients before they are clipped.
            self.clip.start()
        lost.tell()
        if outputs.url is not None:
            say(logger, logging.INFO, "serving metrics at %s", outputs.url)

    def at_end(self, action: Callable[[], object]) -> None:
        """Let `close` call this before all that was added until now; a failure is counted."""
        self._closing.callback(self._guard, action)

    def close(self) -> None:
        """Give back what `start` took, in the order of the data.

        What is raised in the middle, as by Ctrl-C, is raised at the end.
        """
        self._closing.close()

    def abort(self) -> None:
        """End a start that failed: its run has no last values."""
        if self._instruments is not None:
            self._instruments.drop()
        if self._ending.close():
            self.close()

    def after_fork_in_child(self) -> None:
        """Free the port, and serve and watch nothing: the forked child is another process."""
        if self._instruments is not None:
            self._instruments.drop()
        stages: tuple[_Forked | None, ...] = (
            self.outputs, self._store, self._host, self._notify, self.act, self.clip, self.scrape,
        )  # fmt: skip
        for stage in stages:
            if stage is not None:
                stage.after_fork_in_child()
        self._close_watch()
        self._hooks.disconnect()
        self.capture.release_witness()

    def steps(self) -> int:
        """Return the steps so far, of the optimizer that took the most."""
        return self.clock.number

    def watch(self, name: str, tensor: torch.Tensor, max_norm: float | None) -> torch.Tensor:
        """Measure the gradient of a tensor; see `Exporter.watch`."""
        if self._watch is None:
            # Not before the first call: an inspection costs each round.
            self._watch = WatchedTensors(
                hooks=self._hooks, loss_scale=self._loss_scale, cost=self._cost, mailbox=self._mailbox,
                totals=self._watched_totals, errors=self.errors, sampled=self.capture.is_sampled,
            )  # fmt: skip
            self.capture.inspect(self._watch, self.errors.boundary("watch"))
        return self._watch.watch(name, tensor, max_norm)

    def _close_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def _release_parameters(self) -> None:
        # The garbage collector calls this, so nothing may be raised.
        self._guard(self.capture.release)
        self._guard(self.capture.release_witness)

    def _problems(self, last: bool) -> list[Problem]:
        """Judge for `Notify`, and for `Act` too; that one judges by itself at its own end."""
        judged = self.view.live.judged(last=last)
        if not last:
            self.act.take(judged)
        return judged.problems

    def _health(self) -> dict[str, object]:
        return {
            "status": "ok",
            "run": self._run,
            "rank": self._rank,
            "version": __version__,
            "capture_mode": self.capture.mode.value,
            "sampling_interval_steps": self._schedule.shown_interval,
            "sampling_interval_at_cap": self._schedule.capped,
            "errors": sum(self.errors.counts().values()),
        }
