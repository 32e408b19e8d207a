"""OptimizerTotals: what samples add up to over the parameters of each optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from torch_grad_exporter.aggregation.baseline import Baselines
from torch_grad_exporter.aggregation.cursor import Cursor
from torch_grad_exporter.aggregation.exponential import Counts, ExponentialCounts
from torch_grad_exporter.aggregation.observed_norm import ObservedNorm
from torch_grad_exporter.aggregation.peaks import Peaks
from torch_grad_exporter.aggregation.samples import Groups
from torch_grad_exporter.aggregation.settlement import Settled
from torch_grad_exporter.aggregation.tables import OPTIMIZER, UNOWNED, Records, enter_global_norm
from torch_grad_exporter.metrics.families import BoolArray, FloatArray
from torch_grad_exporter.transfer.events import Outcome


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerValues:
    """A copy: the optimizers' numbers, a record for each, and whether the norms in the only one are observed ones."""

    optimizers: tuple[int, ...]
    totals: Records
    norm_observed: bool
    exponential: tuple[Counts, ...] | None = None


@dataclass(slots=True)
class OptimizerTotals:
    """One row per optimizer. `exponential`: counts the norms by exponential bucket, too, if it is given."""

    observed: ObservedNorm
    exponential: ExponentialCounts | None = None
    _row_of: dict[int, int] = field(default_factory=dict)
    _totals: Records = field(default_factory=lambda: np.zeros(0, dtype=OPTIMIZER))
    _baseline: Baselines = field(default_factory=Baselines)
    _peaks: Peaks = field(default_factory=Peaks)

    def publish(self, settled: Settled) -> None:
        """Makes a sample the last one of what the stepping optimizers own, and counts what of it is new."""
        # What no optimizer owns is in no optimizer's totals, unless none is known yet.
        known = (settled.shown | set(self._row_of)) - {UNOWNED}
        for optimizer in sorted(settled.shown & known if known else settled.shown):
            mine = settled.gradients_of(optimizer)
            if mine.any():
                self._publish_one(settled, optimizer, mine)

    def _publish_one(self, settled: Settled, optimizer: int, mine: BoolArray) -> None:
        sample, outcome = settled.sample, settled.outcome(optimizer)
        row = self._row(optimizer)
        one = self._totals[row : row + 1]
        norm = Groups.of(sample, mine, together=True).norms()
        if optimizer in settled.closed.steps:
            one["sample_step"] = settled.closed.steps[optimizer]
        clip = None if optimizer in settled.left_out else settled.clippings.get(optimizer)
        one["clip_known"] = clip is not None and clip.coefficient is not None
        if clip is not None and clip.coefficient is not None:
            one["coefficient"] = clip.coefficient
            one["after_clip"] = clip.coefficient * norm
        if outcome is not Outcome.UNKNOWN:  # until then it is not known whether it was clipped
            one["clipped"] += clip is not None and clip.clipped
        one["norm"], one["seen"], one["sized"] = norm, True, sample.sized
        self._enter_norm(row, norm, fresh=optimizer in settled.unmeasured)
        if optimizer in settled.uncounted:
            one[f"nonfinite_{outcome.value}"] += sample.nonfinite(mine)

    def _enter_norm(self, row: int, norm: FloatArray, *, fresh: bool) -> None:
        """`fresh`: the norm of this round was not known before."""
        one = self._totals[row : row + 1]
        after = np.where(one["clip_known"], one["after_clip"], np.nan)
        self._peaks.enter([row], norm if fresh else np.array([np.nan]), after)
        if fresh:
            entered = enter_global_norm(one, self._baseline, row, norm)
            if self.exponential is not None:
                self.exponential.observe(np.full(len(entered), row), entered)

    def _row(self, optimizer: int) -> int:
        """The row of an optimizer; the first one takes over the row of samples from before any optimizer was known."""
        if optimizer not in self._row_of:
            if UNOWNED in self._row_of:
                self._row_of = {optimizer if o == UNOWNED else o: row for o, row in self._row_of.items()}
            else:
                self._row_of[optimizer] = len(self._totals)
                self._totals = np.concatenate([self._totals, np.zeros(1, dtype=OPTIMIZER)])
                self._baseline.grow(len(self._totals))
                self._peaks.grow(len(self._totals))
        return self._row_of[optimizer]

    def snapshot(self) -> OptimizerValues:
        """The values as of now; observed norms take the place of captured ones.

        With several optimizers it is not known whose norm was observed, and the captured ones are shown: both are counted,
        since a second optimizer may come at any time.
        """
        optimizers, totals = tuple(self._row_of), self._totals.copy()
        if not self.observed.there or len(optimizers) > 1:
            return OptimizerValues(optimizers, totals, norm_observed=False, exponential=self._counts(optimizers))
        if not optimizers:
            optimizers, totals = (UNOWNED,), np.zeros(1, dtype=OPTIMIZER)
        self.observed.replace_norms(totals)
        counts = None if self.exponential is None else self.observed.counts()
        return OptimizerValues(optimizers, totals, norm_observed=True, exponential=counts)

    def _counts(self, optimizers: Iterable[int]) -> tuple[Counts, ...] | None:
        return None if self.exponential is None else self.exponential.snapshot(self._row_of.get(o, -1) for o in optimizers)

    def follow(self, cursor: Cursor) -> None:
        """Begins with a consumer of peaks."""
        self._peaks.follow(cursor)
        self.observed.follow(cursor)

    def take_peaks(self, cursor: Cursor, optimizers: Sequence[int], *, norm_observed: bool) -> FloatArray:
        """The largest norms and norms after clipping that are new to a consumer, shape (2, optimizers)."""
        found = self._peaks.take(cursor, [self._row_of.get(number, -1) for number in optimizers])
        observed = self.observed.take_peak(cursor)
        if norm_observed:
            found[0] = observed[0]
        return found
