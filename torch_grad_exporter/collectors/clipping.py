"""The metrics of clipping that the collector `gradients` shows, and the reports of `clip=` on their way from the device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import BoolArray, Family, FloatArray, LabelledRows, LabelRows
from torch_grad_exporter.store.host_transfer import Ticket

if TYPE_CHECKING:
    from torch_grad_exporter.store.histograms import Records
    from torch_grad_exporter.store.snapshots import GradientSnapshot

CLIPPING = Section("Clipping")

GRAD_GLOBAL_NORM_AFTER_CLIP = CLIPPING.gauge(
    "torch_grad_global_norm_after_clip",
    "L2 norm over all tracked parameters as the optimizer saw it at the last sampled step: unscaled, after clipping.",
    "optimizer",
)
GRAD_CLIP_COEFFICIENT = CLIPPING.gauge(
    "torch_grad_clip_coefficient",
    "Global norm after clipping over the global norm before it at the last sampled step; 1 if nothing was clipped, absent if the factor may be that of a division.",
    "optimizer",
)
GRAD_CLIPPED_STEPS = CLIPPING.counter(
    "torch_grad_clipped_steps_total",
    "Steps whose gradients were clipped, over sampled steps; absent while that is unknown of any.",
    "optimizer",
)
GRAD_CLIP_THRESHOLD = CLIPPING.gauge(
    "torch_grad_clip_threshold",
    "Largest norm, or element, that a policy of clip= or dry_run= leaves alone at a recent step; by layer if each has its own, the smallest of its units or of what is folded into its row; absent while no norm is too large.",
    "layer",
    "policy",
    "optimizer",
    opt_in="clip",
)
GRAD_LAYER_CLIP_COEFFICIENT = CLIPPING.gauge(
    "torch_grad_layer_clip_coefficient",
    "L2 norm of the layer's gradient after clipping over the norm before it at the last sampled step; of this rank's part if the gradient is sharded.",
    "layer",
    opt_in="clip",
)
GRAD_LAYER_CLIPPED_STEPS = CLIPPING.counter(
    "torch_grad_layer_clipped_steps_total",
    "Steps that made the layer's gradient smaller by clipping, over sampled steps.",
    "layer",
    opt_in="clip",
)
GRAD_CLIP_POLICY_STEPS = CLIPPING.counter(
    "torch_grad_clip_policy_steps_total",
    "Steps that each policy of clip= clipped or skipped, over all steps; one that several would skip counts for the first; absent for MaxValue.",
    "policy",
    opt_in="clip",
)
GRAD_CLIP_CANDIDATES = CLIPPING.counter(
    "torch_grad_clip_candidates_total",
    "Steps that a policy of dry_run= would have clipped or skipped, over all steps.",
    "policy",
    opt_in="dry_run",
)


UNDER_WAY = 4  # reports of one optimizer, at most


@dataclass(frozen=True, slots=True, eq=False)
class ClipReport:
    """The policies of one optimizer after a step.

    Attributes:
        optimizer: The optimizer's name.
        thresholds: Policy and layer of each threshold; the layer is empty if the policy has one for all.
        active: The policies of `clip=` whose steps are counted.
        candidates: The policies of `dry_run=`.
        ticket: The thresholds, then for each of these policies the steps that it clipped or would have clipped.
    """

    optimizer: str
    thresholds: tuple[tuple[str, str], ...]
    active: tuple[str, ...]
    candidates: tuple[str, ...]
    ticket: Ticket


class ClipReports:
    """The latest report of each optimizer. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._reports: dict[str, deque[ClipReport]] = {}

    def put(self, report: ClipReport) -> None:
        """Add a report, which replaces the earlier ones as soon as it has arrived."""
        with self._lock:
            self._reports.setdefault(report.optimizer, deque(maxlen=UNDER_WAY)).append(report)

    def latest(self) -> list[tuple[ClipReport, FloatArray]]:
        """Return the last report of each optimizer that has arrived, with its values."""
        with self._lock:
            return [latest for reports in self._reports.values() if (latest := _latest(reports)) is not None]

    def after_fork_in_child(self) -> None:
        """Replace the lock: the threads that may hold it are not in the child."""
        self._lock = threading.RLock()


def _latest(reports: deque[ClipReport]) -> tuple[ClipReport, FloatArray] | None:
    for place in reversed(range(len(reports))):
        values = reports[place].ticket.ready()
        if values is not None:
            for _ in range(place):
                reports.popleft()
            return reports[0], values
    return None


def clip_families(totals: Records, rows: LabelRows, whole: BoolArray) -> Iterator[Family]:
    """Yield what the optimizers saw of their gradients. `whole`: the optimizers whose whole gradients this rank has."""
    yield Family(GRAD_GLOBAL_NORM_AFTER_CLIP, totals["after_clip"], rows, totals["after_known"] & whole)
    yield Family(GRAD_CLIP_COEFFICIENT, totals["coefficient"], rows, totals["clip_known"] & whole)
    # A rank with a part of the gradients does not know what was clipped of the others.
    yield Family(GRAD_CLIPPED_STEPS, totals["clipped"], rows, ~totals["undecided"] & (whole | (totals["clipped"] > 0)))


class ClipFamilies:
    """The families of `clip=` and `dry_run=`."""

    def __init__(self, reports: ClipReports) -> None:
        self._reports = reports
        self._thresholds, self._active, self._candidates = LabelledRows(), LabelledRows(), LabelledRows()

    def of_layers(self, last: Records, layers: LabelRows, counted: Records, counted_layers: LabelRows) -> Iterator[Family]:
        """Yield the last values of the layers, and their counters."""
        coefficients = last["coefficient"]
        yield Family(GRAD_LAYER_CLIP_COEFFICIENT, coefficients, layers, ~np.isnan(coefficients))
        yield Family(GRAD_LAYER_CLIPPED_STEPS, counted["clipped"], counted_layers)

    def of_policies(self, snapshot: GradientSnapshot) -> Iterator[Family]:
        """Yield thresholds and counts of the policies, for the layers that are shown."""
        table = snapshot.table
        row_of = {tracked.layer: table.layers[row] for tracked, row in zip(table.tracked, table.layer_of.tolist(), strict=True)}
        row_of[""] = ""
        reports = self._reports.latest()
        thresholds: dict[tuple[str, ...], float] = {}
        active: dict[tuple[str, ...], float] = {}
        candidates: dict[tuple[str, ...], float] = {}
        for report, values in reports:
            optimizer = report.optimizer if len(reports) > 1 else ""
            split = len(report.thresholds)
            for (policy, layer), value in zip(report.thresholds, values[:split].tolist(), strict=True):
                if layer in row_of and np.isfinite(value):
                    key = row_of[layer], policy, "" if layer else optimizer
                    thresholds[key] = min(value, thresholds.get(key, np.inf))
            counts = iter(values[split:].tolist())
            for policies, totals in ((report.active, active), (report.candidates, candidates)):
                for policy in policies:
                    totals[policy,] = totals.get((policy,), 0.0) + next(counts)
        yield self._thresholds.family(GRAD_CLIP_THRESHOLD, thresholds)
        yield self._active.family(GRAD_CLIP_POLICY_STEPS, active)
        yield self._candidates.family(GRAD_CLIP_CANDIDATES, candidates)
