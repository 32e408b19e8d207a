"""OptimizerTable: what samples add up to over the parameters of each optimizer, and the global norms that are observed."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from torch_grad_exporter.metrics.buckets import HALF_DECADES
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.statistics.combine import length
from torch_grad_exporter.store.baselines import Baseline
from torch_grad_exporter.store.cursors import Cursor, Peaks
from torch_grad_exporter.store.histograms import Counts, ExponentialCounts, Records, enter_norms, moved
from torch_grad_exporter.store.pending_samples import CountedSample
from torch_grad_exporter.store.records import UNOWNED, Outcome

OBSERVED = -2
"""The row of norms that the user computed before clipping and gave to `observe(grad_norm=)`."""

OPTIMIZER = np.dtype(
    [(name, np.float64) for name in (
        "norm", "after_clip", "coefficient", "sample_step", "spikes", "clipped", "bucket_sum",
        *(f"nonfinite_{outcome.value}" for outcome in Outcome),
    )]
    + [("buckets", np.float64, (len(HALF_DECADES) + 1,))]
    + [(name, np.bool_) for name in ("seen", "sized", "clip_known", "after_known")]
)  # fmt: skip
"""The values over all parameters of one optimizer. `seen`: there was a sample; `sized`: as in a layer's record."""

OF_NORMS = ("norm", "sized", "buckets", "bucket_sum", "spikes")
"""What an observed norm is the source of."""

BOUNDS = np.array(HALF_DECADES)
NOTHING = np.array([np.nan])


class OptimizerTable:
    """One row per optimizer, and one for observed norms. `cursors`: consumers of peaks."""

    def __init__(self, cursors: Collection[Cursor], *, exponential: bool) -> None:
        self._cursors = cursors
        self._exponential = ExponentialCounts(enabled=exponential)
        self._row_of: dict[int, int] = {}
        self._values: Records = np.zeros(0, dtype=OPTIMIZER)
        self._baselines: list[Baseline] = []
        self._clipped: dict[int, int] = {}  # by optimizer, the last sample that was counted as clipped
        self._open = False  # the last observed norm was not finite, and the outcome of its step is unknown yet

    def count(self, counted: CountedSample) -> None:
        """Show a sample as the last one of the stepping optimizers, and count what of it is new."""
        self._open = False  # the sample itself shows whether the gradients of the step were finite
        # What no optimizer owns is in no optimizer's totals, unless none is known yet.
        known = (counted.shown | set(self._row_of)) - {UNOWNED, OBSERVED}
        for optimizer in sorted(counted.shown & known if known else counted.shown):
            mine = (counted.owners == optimizer) & counted.sample.present
            if mine.any():
                norm = np.array([length(counted.sample.norms[mine])])
                self._count_one(counted, optimizer, norm, nonfinite=counted.sample.nonfinite(mine))

    def _count_one(self, counted: CountedSample, optimizer: int, norm: FloatArray, *, nonfinite: bool) -> None:
        outcome, row = counted.outcome(optimizer), self._row(optimizer)
        values = self._values[row : row + 1]
        values["norm"], values["seen"], values["sized"] = norm, True, counted.sample.sized
        if optimizer in counted.ended.steps:
            values["sample_step"] = counted.ended.steps[optimizer]
        clip = None if optimizer in counted.left_out else counted.clippings.get(optimizer)
        values["clip_known"] = clip is not None and clip.coefficient is not None
        values["after_known"] = clip is not None and clip.after is not None
        after = NOTHING
        if clip is not None and clip.coefficient is not None:
            values["coefficient"] = clip.coefficient
        if clip is not None and clip.after is not None:
            values["after_clip"] = clip.after
            after = np.array([clip.after])
        if outcome is not Outcome.UNKNOWN and clip is not None and clip.clipped and self._clipped.get(optimizer) != counted.number:
            self._clipped[optimizer] = counted.number  # a sample may come again when more optimizers have stepped
            values["clipped"] += 1
        self._enter(row, norm, after, fresh=optimizer in counted.newly_sized)
        if optimizer in counted.new:
            values[f"nonfinite_{outcome.value}"] += nonfinite

    def observe(self, norm: float, step: int | None = None) -> None:
        """Take an observed norm of a step; it becomes the source of norms, as far as it is known whose it is."""
        norms = np.array([norm if norm >= 0 else np.nan])  # DeepSpeed says -1 where the norm is NaN or Inf
        self._open = not np.isfinite(norms[0])
        row = self._row(OBSERVED)
        self._values["norm"][row], self._values["sized"][row] = norms[0], True
        # With several optimizers it is unknown whose norm it is; what is not finite counts with the outcome.
        single = step if len(self._row_of) < 3 and not self._open else None
        self._enter(row, norms, NOTHING, fresh=True, step=single)

    def resolve(self, outcome: Outcome) -> None:
        """Take what became of the step whose norm was observed last."""
        if self._open:
            self._values[f"nonfinite_{outcome.value}"][self._row(OBSERVED)] += 1
            self._open = False

    def _enter(self, row: int, norm: FloatArray, after: FloatArray, *, fresh: bool, step: int | None = None) -> None:
        """Enter a norm. `fresh`: that of this round was not known before; `step`: for consumers of single values."""
        rows = np.array([row])
        for cursor in self._cursors:
            if cursor.singles is None or not cursor.singles.enter("norm", step, float(norm[0])):
                cursor.optimizers.enter(rows, norm if fresh else NOTHING, after)
        if fresh:
            entered, norms = enter_norms(self._values, rows, norm, BOUNDS)
            self._exponential.observe(entered.tolist(), norms)
            self._values["spikes"][row] += math.isfinite(norm[0]) and self._baselines[row].is_spike(float(norm[0]))

    def _row(self, optimizer: int) -> int:
        """Return the row of an optimizer; the first one takes over that of samples from before any was known."""
        if optimizer not in self._row_of:
            if UNOWNED in self._row_of and optimizer != OBSERVED:
                self._row_of[optimizer] = self._row_of.pop(UNOWNED)
            else:
                index = np.append(np.arange(len(self._values)), -1)
                values = moved(self._values, index, np.zeros(1, dtype=OPTIMIZER))
                for cursor in self._cursors:
                    cursor.optimizers = cursor.optimizers.moved(index)
                self._values, self._row_of[optimizer] = values, len(index) - 1
                self._baselines.append(Baseline())
        return self._row_of[optimizer]

    # Reading

    def values(self) -> tuple[tuple[int, ...], Records, bool, tuple[Counts, ...] | None]:
        """Return the optimizers' numbers, a record for each, whether the norms are observed ones, and exponential counts.

        With several optimizers it is unknown whose norm was observed, and those of samples are shown: both are
        counted, since a second optimizer may come at any time.
        """
        rows = {optimizer: row for optimizer, row in self._row_of.items() if optimizer != OBSERVED}
        values = self._values[list(rows.values())]
        if OBSERVED not in self._row_of or len(rows) > 1:
            return tuple(rows), values, False, self._exponential.of(rows.values())
        if not rows:
            values = np.zeros(1, dtype=OPTIMIZER)
        row = self._row_of[OBSERVED]
        for name in OF_NORMS:
            values[name] = self._values[name][row]
        for outcome in Outcome:
            values[f"nonfinite_{outcome.value}"] += self._values[f"nonfinite_{outcome.value}"][row]
        return tuple(rows) or (UNOWNED,), values, True, self._exponential.of([row])

    def follow(self, cursor: Cursor) -> None:
        """Begin with a consumer of peaks."""
        cursor.optimizers = Peaks(len(self._values))

    def take_peaks(self, cursor: Cursor, optimizers: Sequence[int], *, norm_observed: bool) -> FloatArray:
        """Return the largest norms, and norms after clipping, that are new to a consumer, shape (2, optimizers)."""
        by_row, peaks = cursor.optimizers.take(), np.full((2, len(optimizers)), np.nan)
        for place, optimizer in enumerate(optimizers):
            if optimizer in self._row_of:
                peaks[:, place] = by_row[:, self._row_of[optimizer]]
        if norm_observed:
            peaks[0] = by_row[0, self._row_of[OBSERVED]]
        return peaks
