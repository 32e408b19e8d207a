"""What shows the totals: collectors and the history of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from torch_grad_exporter.actions.clip.at_steps import ClipAtSteps
from torch_grad_exporter.actions.notify.notify import totals as notify_totals
from torch_grad_exporter.build.capturing import CaptureStage
from torch_grad_exporter.build.inspecting import InspectionTotals
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.context import CollectorContext, Snapshots
from torch_grad_exporter.collectors.frozen_layers import FrozenLabels
from torch_grad_exporter.collectors.gradients import dead_from
from torch_grad_exporter.collectors.outcomes import ActionTotals, NotifyTotals
from torch_grad_exporter.collectors.rollbacks import RollbackTotals
from torch_grad_exporter.collectors.sample_families import SampleFamilies
from torch_grad_exporter.collectors.scrape import Scrape
from torch_grad_exporter.config.checked import Checked
from torch_grad_exporter.config.settings import Settings
from torch_grad_exporter.distributed.identity import LateGroup, hostname
from torch_grad_exporter.errors import warn
from torch_grad_exporter.lifecycle import Ending
from torch_grad_exporter.model.layers import LayerIndex, device_kinds
from torch_grad_exporter.outputs.announcement import Announcement, Rank
from torch_grad_exporter.outputs.live.live import Run
from torch_grad_exporter.outputs.live.view import View
from torch_grad_exporter.outputs.otlp.push_settings import Signal
from torch_grad_exporter.resources.peak_flops import peak_of
from torch_grad_exporter.store.journal import Journal
from torch_grad_exporter.store.worker import Worker
from torch_grad_exporter.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeStage:
    """What shows the totals: collectors, run by a scrape over one snapshot, and the history of the run."""

    worker: Worker
    context: CollectorContext
    frozen: FrozenLabels
    acted: ActionTotals
    rollbacks: RollbackTotals
    notified: NotifyTotals | None
    scrape: Scrape
    announcement: Announcement
    view: View
    journal: Journal | None


def _peak(settings: Settings, index: LayerIndex, clock: StepClock) -> Callable[[], float | None]:
    """Return what this rank's devices can do together, in operations per second; None if it is not known or not asked for."""
    if settings.flops_per_step is None or settings.peak_flops is not None:
        return lambda: settings.peak_flops

    known: list[float | None] = []

    def peak() -> float | None:
        # A model may move to its devices after the start; while FSDP has gathered its parameters, there are none to look at.
        if not known and clock.phases.device is not None and clock.phases.device.type == "cuda":
            devices = {parameter.device for parameter in index.table.parameters() or () if parameter.is_cuda}
            known.extend([_together([torch.cuda.get_device_name(device) for device in devices])] if devices else ())
        return known[0] if known else None

    return peak


def _together(names: Sequence[str]) -> float | None:
    peaks = {name: peak_of(name) for name in names}
    if unknown := [name for name, peak in peaks.items() if peak is None]:
        warn("flops_per_step: the peak of %s is not known, nor is the MFU; pass peak_flops=", unknown[0])
        return None
    return sum(peaks[name] or 0.0 for name in names)


def build_scrape(
    stage: CaptureStage,
    totals: InspectionTotals,
    worker: Worker,
    clip: ClipAtSteps | None,
    *,
    models: Mapping[str, torch.nn.Module],
    checked: Checked,
    ending: Ending,
) -> ScrapeStage:
    """Make the collectors and the history, by which rules judge."""
    settings, errors, identity = checked.settings, stage.errors, checked.identity
    journal = Journal() if any(push.signal is Signal.LOGS for push in checked.push) else None
    frozen, acted, rollbacks = FrozenLabels(), ActionTotals(journal), RollbackTotals()
    notified = notify_totals(checked.arguments.alerts) if checked.arguments.alerts else None
    snapshots = Snapshots(worker.snapshot, stage.clock.counts)
    context = CollectorContext(
        snapshots=snapshots, clock=stage.clock, optimizers=stage.optimizers.names, capture=stage.capture,
        schedule=stage.schedule, memory=stage.memory, errors=errors, identity=identity,
        expected_devices=device_kinds(checked.index, models.values()),
        times=totals.times, state=totals.state, waits=totals.waits, ending=ending,
        flops_per_step=settings.flops_per_step, peak_flops=_peak(settings, checked.index, stage.clock),
        dead_window=settings.dead_window, moments=settings.moments,
        weights=totals.weights if settings.weights else None, optimizer_state=totals.optimizer_state,
        local_norms=totals.local_norms,
        notified=notified, acted=acted, rollbacks=rollbacks, clip=None if clip is None else clip.reports, frozen=frozen,
        activations=totals.activations, watched=totals.watched, logged=totals.logged, extra=checked.extra, origins=totals.origins,
        layer_times=totals.layer_times, attention=totals.attention, routers=totals.routers, replicas=totals.replicas,
    )  # fmt: skip
    group = LateGroup(identity, checked.rank)

    def prepare() -> None:
        snapshots.renew()
        group.check()

    scrape = Scrape(REGISTRY.made(settings.enabled_collectors, context), errors, prepare, not_judged=REGISTRY.not_judged)
    announcement = Announcement(
        rank=Rank(checked.run, checked.rank, identity, checked.labels), store=checked.store, errors=errors,
        addr=settings.addr, advertise=settings.advertise, sd_dir=settings.sd_dir, labels=settings.labels,
    )  # fmt: skip
    view = View(
        Run(checked.run, checked.rank, identity.world_size, hostname(), __version__), worker,
        stage.clock, scrape, targets=announcement.body, marks=acted.marks,
        sample_families=SampleFamilies(REGISTRY, settings.enabled_collectors, context),
        dead_from=dead_from(settings.dead_window), moments=settings.moments, errors=errors,
        activations=totals.activations, logged=totals.logged, journal=journal,
    )  # fmt: skip
    return ScrapeStage(
        worker=worker, context=context, frozen=frozen, acted=acted, rollbacks=rollbacks, notified=notified, scrape=scrape,
        announcement=announcement, view=view, journal=journal,
    )  # fmt: skip
