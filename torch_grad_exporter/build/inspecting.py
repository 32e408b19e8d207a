"""The inspections of followed rounds, and the worker that adds up what they and the capture send."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torch_grad_exporter.build.capturing import CaptureStage
from torch_grad_exporter.config.checked import Checked
from torch_grad_exporter.errors import warn
from torch_grad_exporter.files import file_name
from torch_grad_exporter.inspection.activations import Activations, ActivationTotals
from torch_grad_exporter.inspection.layer_times import LayerTimer, LayerTimeTotals
from torch_grad_exporter.inspection.local_gradients import LocalGradients
from torch_grad_exporter.inspection.local_norms import LocalNormTotals
from torch_grad_exporter.inspection.micro_batches import MicroBatches
from torch_grad_exporter.inspection.modules import InnerModules, ModuleKind
from torch_grad_exporter.inspection.nan_origin.origins import NanOrigin, Origins
from torch_grad_exporter.inspection.optimizer_state import StateProbe, StateTotals
from torch_grad_exporter.inspection.reduction_waits import ReductionWaits
from torch_grad_exporter.inspection.round_loss import RoundLoss
from torch_grad_exporter.inspection.router_loads import RouterTotals
from torch_grad_exporter.inspection.routers import SOURCE as ROUTERS
from torch_grad_exporter.inspection.routers import Counting, Routers, routers_in
from torch_grad_exporter.inspection.run_state import RunState
from torch_grad_exporter.inspection.time_by_cause import TimeByCause
from torch_grad_exporter.inspection.watch import WatchedTensors, WatchTotals
from torch_grad_exporter.inspection.weights import WeightProbe, WeightTotals
from torch_grad_exporter.lifecycle import Ending
from torch_grad_exporter.model.names import LayerFilter
from torch_grad_exporter.store.logged_values import SOURCE as LOG
from torch_grad_exporter.store.logged_values import LoggedValues
from torch_grad_exporter.store.worker import DRAIN_SECONDS, Worker

if TYPE_CHECKING:
    from torch_grad_exporter.inspection.attention import AttentionTotals
    from torch_grad_exporter.inspection.replica_comparison import ReplicaComparison

# Between two drains of the worker if the origin of a NaN is looked for, which shows only in the next rounds, or its batch.
ORIGIN_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionTotals:
    """What inspections have measured and the user has logged, for collectors; None where the user did not ask for it."""

    times: TimeByCause
    state: RunState | None
    waits: ReductionWaits
    local_norms: LocalNormTotals
    weights: WeightTotals
    optimizer_state: StateTotals | None
    watched: WatchTotals
    routers: RouterTotals
    logged: LoggedValues
    layer_times: LayerTimeTotals | None
    activations: ActivationTotals | None
    attention: AttentionTotals | None
    origins: Origins | None
    replicas: ReplicaComparison | None


def add_inspections(
    stage: CaptureStage, models: Mapping[str, torch.nn.Module], checked: Checked, ending: Ending
) -> InspectionTotals:
    """Make the inspections, which the capture calls in the rounds that it follows."""
    settings, capture, errors = checked.settings, stage.capture, stage.errors
    clock, context = stage.clock, stage.context
    waits = ReductionWaits(context, capture.reductions, stage.reader)
    # Without other ranks there is nothing to wait for.
    waiting = functools.partial(capture.inspections.add, waits, errors.boundary("reduction", "waits for other ranks"))
    capture.reductions.on_wrapper = waiting
    if settings.local_norm:
        local = LocalGradients(context, capture.reductions, capture.detection)
        capture.inspections.add(local, errors.boundary("reduction", "gradients of this rank"))
        if not checked.index.replicas.by_loop:  # else the loop takes the mean over ranks of what is accumulated
            micro_batches = MicroBatches(context, capture.rounds, capture.reductions, capture.detection)
            capture.inspections.add(micro_batches, errors.boundary("reduction", "gradients of micro-batches"))
    if settings.weights:
        capture.inspections.add(WeightProbe(context, stage.optimizers), errors.boundary("weights"))
    optimizer_state = None
    if settings.optimizer_state:
        optimizer_state = StateTotals()
        state = StateProbe(context, stage.optimizers, capture.rounds, clips=checked.clip is not None)
        capture.inspections.add(state, errors.boundary("optimizer_state"))
    replicas = _replicas(stage, models, checked) if settings.replicas else None
    losses = RoundLoss(
        rounds=capture.rounds, detection=capture.detection, clock=clock, index=checked.index,
        observations=capture.observations, errors=errors,
    )  # fmt: skip
    capture.inspections.add(losses, errors.boundary("forward_hook", "losses in outputs"))
    if settings.nan_origin:
        nan_origin = NanOrigin(context, models, always=settings.nan_origin == "always")
        capture.inspections.add(nan_origin, errors.boundary("nan_origin"))
    layer_times = None
    if checked.timed is not None:
        # Before other inspections, whose time is then not counted as that of layers.
        layer_times = LayerTimeTotals(settings.max_layers)
        timer = LayerTimer(context, checked.timed, stage.events, layer_times)
        capture.inspections.add(timer, errors.boundary("layer_times"))
    activations = None
    if checked.modules is not None:
        activations = ActivationTotals(settings.max_layers)
        capture.inspections.add(Activations(context, checked.modules, activations), errors.boundary("activations"))
    attention = _attention(stage, models, checked) if settings.attention else None
    times = TimeByCause(clock, clock.interruptions)
    return InspectionTotals(
        times=times, state=_state(stage, times, checked, ending),
        waits=waits, local_norms=LocalNormTotals(), weights=WeightTotals(), watched=WatchTotals(), routers=RouterTotals(),
        logged=LoggedValues(), optimizer_state=optimizer_state, layer_times=layer_times, activations=activations,
        attention=attention, origins=Origins(stage.requests) if settings.nan_origin else None, replicas=replicas,
    )  # fmt: skip


def _state(stage: CaptureStage, times: TimeByCause, checked: Checked, ending: Ending) -> RunState | None:
    """Return the state of the run, with what earlier processes have left; None without a folder for it."""
    folder = checked.settings.state_dir
    if not folder:
        return None
    path = Path(folder) / file_name(checked.run, checked.rank, ".json")
    return RunState(path, run=checked.run, clock=stage.clock, times=times, ending=ending, errors=stage.errors)


def _attention(stage: CaptureStage, models: Mapping[str, torch.nn.Module], checked: Checked) -> AttentionTotals:
    """Make the inspection of attention, and return what it adds up to."""
    # Here, since most runs do without.
    from torch_grad_exporter.inspection.attention import AttentionProbe, AttentionTotals  # noqa: PLC0415

    layers = LayerFilter(checked.settings.include, checked.settings.exclude)
    stage.capture.inspections.add(AttentionProbe(stage.context, models, layers), stage.errors.boundary("attention"))
    return AttentionTotals(checked.settings.max_layers)


def _replicas(stage: CaptureStage, models: Mapping[str, torch.nn.Module], checked: Checked) -> ReplicaComparison | None:
    """Make the inspection that compares ranks, and return what compares them; None where there are no others."""
    settings, identity, errors = checked.settings, checked.identity, stage.errors
    if identity.world_size == 1:
        warn("replicas: there is nothing to compare, since no other rank is known; start the exporter after init_process_group")
        return None
    # Here, since most runs do without.
    from torch_grad_exporter.inspection.replica_comparison import ReplicaComparison  # noqa: PLC0415
    from torch_grad_exporter.inspection.replica_probe import ReplicaProbe  # noqa: PLC0415

    probe = ReplicaProbe(
        stage.context, models, LayerFilter(settings.include, settings.exclude), max_layers=settings.max_layers,
        optimizers=stage.optimizers, reductions=stage.capture.reductions,
    )  # fmt: skip
    stage.capture.inspections.add(probe, errors.boundary("replicas"))
    comparison = errors.boundary("replicas", "comparison", limit=None)
    return ReplicaComparison(checked.store, checked.run, identity.rank, identity.world_size, comparison)


class WatchStage:
    """The inspection of `Exporter.watch`, made at its first call: each inspection costs each round."""

    def __init__(self, stage: CaptureStage, totals: WatchTotals) -> None:
        self._stage = stage
        self._totals = totals
        self._watch: WatchedTensors | None = None

    def watch(self, name: str, tensor: torch.Tensor, max_norm: float | None) -> torch.Tensor:
        """Measure the gradient of a tensor; see `Exporter.watch`."""
        if self._watch is None:
            stage = self._stage
            sampled = stage.capture.rounds.next_is_sampled
            self._watch = WatchedTensors(stage.context, self._totals, stage.errors, sampled=sampled)
            stage.capture.inspections.add(self._watch, stage.errors.boundary("watch"))
        return self._watch.watch(name, tensor, max_norm)

    def close(self) -> None:
        """Remove its hooks."""
        if self._watch is not None:
            self._watch.close()


class RouterStage:
    """The inspection of routers, made at the first call of `Exporter.router` unless the option asks for it."""

    def __init__(self, stage: CaptureStage, models: Mapping[str, torch.nn.Module], checked: Checked) -> None:
        self._stage = stage
        self._lock = threading.Lock()
        self._routers: Routers | None = None
        settings = checked.settings
        if settings.routers:
            modules, counting = routers_in(models, LayerFilter(settings.include, settings.exclude), settings.max_layers)
            self._routers = self._made(modules, counting)

    @property
    def used(self) -> bool:
        """Whether a call of the user was right, so that the next one must not raise into the training."""
        return self._routers is not None and self._routers.used

    def take(self, name: str, given: torch.Tensor, experts: int | None) -> None:
        """Take counts or indices; see `Exporter.router`."""
        if self._routers is None:
            with self._lock:
                self._routers = self._routers or self._made(InnerModules({}, LayerFilter(), ModuleKind.ROUTERS, 1), [])
        self._routers.take(name, given, experts)

    def _made(self, modules: InnerModules, counting: list[Counting]) -> Routers:
        stage = self._stage
        routers = Routers(stage.context, modules, counting, sampled=stage.capture.rounds.next_is_sampled)
        stage.capture.inspections.add(routers, stage.errors.boundary(ROUTERS))
        return routers


def build_worker(stage: CaptureStage, totals: InspectionTotals, checked: Checked) -> Worker:
    """Make the worker, which takes records from the mailbox in the background and adds them up."""

    def periodic() -> float:
        stage.compile_events.attach()  # what imports the compiler may come later, and so may a reset of it
        return stage.capture.look()

    worker = Worker(
        stage.mailbox, checked.index.table, stage.errors, stage.requests, layout=stage.layout,
        clipped=checked.clip is not None,
        drain_seconds=ORIGIN_SECONDS if checked.settings.nan_origin or checked.settings.black_box else DRAIN_SECONDS,
        periodic=periodic,
    )  # fmt: skip
    if totals.origins is not None:
        worker.register("nan_origin", totals.origins)
        worker.listen(totals.origins)
    timing = stage.errors.boundary("timing", "time by cause")
    worker.follow_steps(lambda moments: timing(totals.times.take, moments))
    worker.register("local_norms", totals.local_norms)
    worker.listen(totals.local_norms)
    worker.register("weights", totals.weights)
    if totals.optimizer_state is not None:
        worker.register("optimizer_state", totals.optimizer_state)
    worker.register("watch", totals.watched)
    worker.register(ROUTERS, totals.routers)
    worker.register(LOG, totals.logged)
    if totals.activations is not None:
        worker.register("activations", totals.activations)
    if totals.attention is not None:
        worker.register("attention", totals.attention)
    if totals.replicas is not None:
        worker.register("replicas", totals.replicas)
    if totals.layer_times is not None:
        worker.register("layer_times", totals.layer_times)
    return worker
