"""The context of collectors: one object, from which each takes what it needs when it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

# Types alone: each collector imports this file, and what they read from is most of the package.
if TYPE_CHECKING:
    from torch_grad_exporter.capture.capture import Capture
    from torch_grad_exporter.capture.progress import Counts, StepClock
    from torch_grad_exporter.capture.schedule import SamplingSchedule
    from torch_grad_exporter.collectors.clipping import ClipReports
    from torch_grad_exporter.collectors.extra import ExtraRegistries
    from torch_grad_exporter.collectors.frozen_layers import FrozenLabels
    from torch_grad_exporter.collectors.outcomes import ActionTotals, NotifyTotals
    from torch_grad_exporter.collectors.rollbacks import RollbackTotals
    from torch_grad_exporter.distributed.identity import Identity
    from torch_grad_exporter.errors import ErrorLog
    from torch_grad_exporter.inspection.activations import ActivationTotals
    from torch_grad_exporter.inspection.attention import AttentionTotals
    from torch_grad_exporter.inspection.layer_times import LayerTimeTotals
    from torch_grad_exporter.inspection.local_norms import LocalNormTotals
    from torch_grad_exporter.inspection.nan_origin.origins import Origins
    from torch_grad_exporter.inspection.optimizer_state import StateTotals
    from torch_grad_exporter.inspection.reduction_waits import ReductionWaits
    from torch_grad_exporter.inspection.replica_comparison import ReplicaComparison
    from torch_grad_exporter.inspection.router_loads import RouterTotals
    from torch_grad_exporter.inspection.run_state import RunState
    from torch_grad_exporter.inspection.time_by_cause import TimeByCause
    from torch_grad_exporter.inspection.watch import WatchTotals
    from torch_grad_exporter.inspection.weights import WeightTotals
    from torch_grad_exporter.lifecycle import Ending
    from torch_grad_exporter.resources.devices import DeviceMemory
    from torch_grad_exporter.store.logged_values import LoggedValues
    from torch_grad_exporter.store.snapshots import Snapshot


class Snapshots:
    """The values of the host's side. From any thread.

    `fresh` returns those of now and raises `BusyError` if they do not come in time. `latest` are those of the current scrape,
    whose collectors all show the same moment. `counts`: the counts of the training thread right before, so that `latest` has the
    durations of all those steps.
    """

    def __init__(self, take: Callable[[], Snapshot], counts: Callable[[], Counts]) -> None:
        self.fresh = take
        self._count = counts
        self.counts = counts()
        self.latest = take()

    def renew(self) -> None:
        """Begin a scrape: take new values. Raises what `fresh` raises, and then the latest stay."""
        self.counts = self._count()
        self.latest = self.fresh()


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorContext:
    """The parts of a running exporter that collectors read from; they change none of them. An option that is off is None.

    Attributes:
        snapshots: The values of the host's side.
        clock: Counts and times of the training thread.
        optimizers: The optimizers' names by number; more may come.
        capture: Modes, devices and numbers of samples.
        schedule: The sampling interval.
        memory: The allocators' numbers.
        errors: Counts failures.
        identity: The place of this process in its job.
        expected_devices: The kinds of devices that the parameters were on at the start.
        ending: How the run has ended, if it has.
        dead_window: The option.
        moments: The option.
        weights: Norms and updates of weights.
        optimizer_state: Moments of optimizers.
        local_norms: Norms of this rank alone.
        times: Where the time went.
        state: The earlier processes of the run.
        flops_per_step: The option.
        peak_flops: Returns the operations that the devices can do in a second.
        waits: Waits for other ranks.
        notified: Outcomes of notifications.
        acted: Outcomes of actions.
        rollbacks: What went back to a copy.
        clip: Thresholds and counts of `clip=`.
        frozen: The layers that actions freeze.
        activations: Outputs of inner modules.
        attention: Logits and entropies of attention.
        layer_times: Times of layers.
        watched: Gradients of watched tensors.
        routers: Loads of experts.
        extra: The user's registries.
        logged: Values that the user logs.
        origins: Places where values have become non-finite.
        replicas: Copies of the model on other ranks.
    """

    snapshots: Snapshots
    clock: StepClock
    optimizers: Sequence[str]
    capture: Capture
    schedule: SamplingSchedule
    memory: DeviceMemory
    errors: ErrorLog
    identity: Identity
    expected_devices: frozenset[str]
    ending: Ending
    dead_window: int
    moments: bool
    weights: WeightTotals | None
    optimizer_state: StateTotals | None
    local_norms: LocalNormTotals
    times: TimeByCause
    state: RunState | None
    flops_per_step: float | None
    peak_flops: Callable[[], float | None]
    waits: ReductionWaits
    notified: NotifyTotals | None
    acted: ActionTotals
    rollbacks: RollbackTotals
    clip: ClipReports | None
    frozen: FrozenLabels
    activations: ActivationTotals | None
    attention: AttentionTotals | None
    layer_times: LayerTimeTotals | None
    watched: WatchTotals
    routers: RouterTotals
    logged: LoggedValues
    extra: ExtraRegistries
    origins: Origins | None
    replicas: ReplicaComparison | None
