"""OptimizerTotals: what samples add up to over the parameters of each optimizer, and the global norms that the user observes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from torch_grad_exporter.aggregation.baseline import Baseline
from torch_grad_exporter.aggregation.cursor import Cursor, Peaks
from torch_grad_exporter.aggregation.exponential import Counts, ExponentialCounts
from torch_grad_exporter.aggregation.settlement import Settled
from torch_grad_exporter.aggregation.tables import HALF_DECADE_BOUNDS, OPTIMIZER, UNOWNED, Records, enter_norms, moved
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.statistics.combine import length
from torch_grad_exporter.transfer.events import Outcome

OBSERVED = -2
"""The number under which norms are counted that the user computed before clipping and gave to `observe(grad_norm=)`."""

_OF_NORMS = ("norm", "sized", "buckets", "bucket_sum", "spikes")
"""What an observed norm is the source of."""


class OptimizerTotals:
    """One row per optimizer, and one for observed norms. `cursors`: the consumers of peaks."""

    def __init__(self, cursors: Collection[Cursor], exponential: ExponentialCounts) -> None:
        self._cursors = cursors
        self._exponential = exponential
        self._row_of: dict[int, int] = {}
        self._totals: Records = np.zeros(0, dtype=OPTIMIZER)
        self._baselines: list[Baseline] = []
        self._clipped: dict[int, int] = {}
        """By optimizer, the number of the last sample that was counted as clipped."""
        self._untold = False
        """Whether the last observed norm was not finite, and the outcome of its step is not known yet."""

    def publish(self, settled: Settled) -> None:
        """Makes a sample the last one of what the stepping optimizers own, and counts what of it is new."""
        self._untold = False  # the sample itself shows whether the gradients of the step were finite
        # What no optimizer owns is in no optimizer's totals, unless none is known yet.
        known = (settled.shown | set(self._row_of)) - {UNOWNED, OBSERVED}
        for optimizer in sorted(settled.shown & known if known else settled.shown):
            self._publish_one(settled, optimizer)

    def _publish_one(self, settled: Settled, optimizer: int) -> None:
        sample, outcome = settled.sample, settled.outcome(optimizer)
        mine = (settled.closed.owners == optimizer) & sample.present
        if not mine.any():
            return
        row = self._row(optimizer)
        one = self._totals[row : row + 1]
        norm = np.array([length(sample.norms[mine])])
        if optimizer in settled.closed.steps:
            one["sample_step"] = settled.closed.steps[optimizer]
        clip = None if optimizer in settled.left_out else settled.clippings.get(optimizer)
        after = np.array([np.nan])
        one["clip_known"], one["after_known"] = False, False
        if clip is not None and clip.coefficient is not None:
            one["clip_known"], one["coefficient"] = True, clip.coefficient
        if clip is not None and clip.after is not None:
            one["after_known"], one["after_clip"] = True, clip.after
            after = np.array([clip.after])
        if outcome is not Outcome.UNKNOWN and clip is not None and clip.clipped and self._clipped.get(optimizer) != settled.number:
            self._clipped[optimizer] = settled.number  # a sample may be published again when more is known of its step
            one["clipped"] += 1
        one["norm"], one["seen"], one["sized"] = norm, True, sample.sized
        self._enter(row, norm, after, fresh=optimizer in settled.unmeasured)
        if optimizer in settled.uncounted:
            one[f"nonfinite_{outcome.value}"] += sample.nonfinite(mine)

    def observe(self, norm: float, step: int | None = None) -> None:
        """Takes an observed norm of a step; from then on it is the source of norms, as far as it is known whose it is."""
        found = np.array([norm if norm >= 0 else np.nan])  # DeepSpeed says -1 where the norm is NaN or Inf
        self._untold = not np.isfinite(found[0])
        row = self._row(OBSERVED)
        self._totals["norm"][row], self._totals["sized"][row] = found[0], True
        # With several optimizers it is not known whose norm it is; of one that is not finite the outcome tells.
        single = step if len(self._row_of) < 3 and not self._untold else None
        self._enter(row, found, np.array([np.nan]), fresh=True, step=single)

    def resolve(self, outcome: Outcome) -> None:
        """Says what became of the step whose norm was observed last."""
        if self._untold:
            self._totals[f"nonfinite_{outcome.value}"][self._row(OBSERVED)] += 1
            self._untold = False

    def _enter(self, row: int, norm: FloatArray, after: FloatArray, *, fresh: bool, step: int | None = None) -> None:
        """`fresh`: the norm of this round was not known before. `step`: that of a norm for those who want each by itself."""
        rows = np.array([row])
        for cursor in self._cursors:
            if cursor.singles is not None and cursor.singles.enter("norm", step, float(norm[0])):
                continue
            cursor.optimizers.enter(rows, norm if fresh else np.array([np.nan]), after)
        if fresh:
            entered, norms = enter_norms(self._totals, rows, norm, HALF_DECADE_BOUNDS)
            self._exponential.observe(entered.tolist(), norms)
            self._totals["spikes"][row] += math.isfinite(norm[0]) and self._baselines[row].is_spike(float(norm[0]))

    def _row(self, optimizer: int) -> int:
        """The row of an optimizer; the first one takes over the row of samples from before any optimizer was known."""
        if optimizer not in self._row_of:
            if UNOWNED in self._row_of and optimizer != OBSERVED:
                self._row_of[optimizer] = self._row_of.pop(UNOWNED)
            else:
                index = np.append(np.arange(len(self._totals)), -1)
                totals = moved(self._totals, index, np.zeros(1, dtype=OPTIMIZER))
                for cursor in self._cursors:
                    cursor.optimizers = cursor.optimizers.moved(index)
                self._totals, self._row_of[optimizer] = totals, len(index) - 1
                self._baselines.append(Baseline())
        return self._row_of[optimizer]

    def snapshot(self) -> tuple[tuple[int, ...], Records, bool, tuple[Counts, ...] | None]:
        """The optimizers' numbers, a record for each, whether the norms in the only one are observed ones, and exponential counts.

        With several optimizers it is not known whose norm was observed, and the captured ones are shown: both are counted,
        since a second optimizer may come at any time.
        """
        rows = {optimizer: row for optimizer, row in self._row_of.items() if optimizer != OBSERVED}
        totals = self._totals[list(rows.values())]
        if OBSERVED not in self._row_of or len(rows) > 1:
            return tuple(rows), totals, False, self._exponential.of(rows.values())
        if not rows:
            totals = np.zeros(1, dtype=OPTIMIZER)
        row = self._row_of[OBSERVED]
        for name in _OF_NORMS:
            totals[name] = self._totals[name][row]
        for outcome in Outcome:
            totals[f"nonfinite_{outcome.value}"] += self._totals[f"nonfinite_{outcome.value}"][row]
        return tuple(rows) or (UNOWNED,), totals, True, self._exponential.of([row])

    def follow(self, cursor: Cursor) -> None:
        """Begins with a consumer of peaks."""
        cursor.optimizers = Peaks(len(self._totals))

    def take_peaks(self, cursor: Cursor, optimizers: Sequence[int], *, norm_observed: bool) -> FloatArray:
        """The largest norms and norms after clipping that are new to a consumer, shape (2, optimizers)."""
        found, peaks = cursor.optimizers.take(), np.full((2, len(optimizers)), np.nan)
        for place, optimizer in enumerate(optimizers):
            if optimizer in self._row_of:
                peaks[:, place] = found[:, self._row_of[optimizer]]
        if norm_observed:
            peaks[0] = found[0, self._row_of[OBSERVED]]
        return peaks
