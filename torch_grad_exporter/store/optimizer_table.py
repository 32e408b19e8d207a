"""OptimizerTable: what samples add up to over the parameters of each optimizer, and the global norms that are observed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np

from torch_grad_exporter.metrics.buckets import HALF_DECADES
from torch_grad_exporter.metrics.exponential import Exponential
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.statistics.combine import length
from torch_grad_exporter.store.baselines import Baseline
from torch_grad_exporter.store.clip_detection import REMEMBERED, ClipVerdict
from torch_grad_exporter.store.cursors import Cursor, entered
from torch_grad_exporter.store.histograms import NormRows, Records
from torch_grad_exporter.store.pending_samples import CountedSample
from torch_grad_exporter.store.records import UNOWNED, Outcome
from torch_grad_exporter.store.surprises import Surprises

NEVER = 0  # stands for samples that stay undecided
OBSERVED = -2  # stands for an optimizer: that of norms that the user computed before clipping and gave to `observe(grad_norm=)`

# The values over all parameters of one optimizer.
#   seen: there was a sample; sized: its loss scale is known
#   undecided: of some sample it is unknown whether it was clipped
OPTIMIZER = np.dtype(
    [(name, np.float64) for name in (
        "norm", "after_clip", "coefficient", "sample_step", "spikes", "clipped", "bucket_sum",
        *(f"nonfinite_{outcome.value}" for outcome in Outcome),
    )]
    + [("buckets", np.float64, (len(HALF_DECADES) + 1,))]
    + [(name, np.bool_) for name in ("seen", "sized", "clip_known", "after_known", "undecided")]
)  # fmt: skip
OF_NORMS = ("norm", "sized", "buckets", "bucket_sum", "spikes")  # what an observed norm is the source of


class OptimizerTable:
    """One row per optimizer, and one for observed norms. `cursors`: consumers of single values; `surprises`: of bad norms."""

    def __init__(self, cursors: Collection[Cursor], surprises: Surprises) -> None:
        self._cursors, self._surprises = cursors, surprises
        self.rows = NormRows(np.zeros(1, dtype=OPTIMIZER), HALF_DECADES)
        self._row_of: dict[int, int] = {}
        self._undecided: defaultdict[int, set[int]] = defaultdict(set)  # by row, samples that may have been clipped
        self._baselines: list[Baseline] = []
        self._open = False  # the last observed norm was not finite, and the outcome of its step is unknown yet

    def count(self, counted: CountedSample) -> None:
        """Show a sample as the last one of the stepping optimizers, and count what of it is new."""
        self._open = False  # the sample itself shows whether the gradients of the step were finite
        # What no optimizer owns is in no optimizer's totals, unless none is known yet.
        known = (counted.shown | set(self._row_of)) - {UNOWNED, OBSERVED}
        for optimizer in sorted(counted.shown & known if known else counted.shown):
            mine = counted.owned(frozenset({optimizer})) & counted.sample.present
            if not mine.any():
                continue
            norm, outcome, row = length(counted.sample.norms[mine]), counted.outcome(optimizer), self._row(optimizer)
            values = self.rows.values[row : row + 1]
            values["norm"], values["seen"], values["sized"] = norm, True, counted.sample.sized
            if optimizer in counted.ended.steps:
                values["sample_step"] = counted.ended.steps[optimizer]
            clip = None if optimizer in counted.left_out else counted.clippings.get(optimizer)
            coefficient, after = (None, None) if clip is None else (clip.coefficient, clip.after)
            values["clip_known"], values["after_known"] = coefficient is not None, after is not None
            if coefficient is not None:
                values["coefficient"] = coefficient
            if after is not None:
                values["after_clip"] = after
            nonfinite = counted.sample.nonfinite(mine)
            if optimizer in counted.new:
                values[f"nonfinite_{outcome.value}"] += nonfinite
                if nonfinite and outcome is Outcome.STEPPED:  # a scaler's search makes it skip steps
                    self._surprises.seen()
            clip = clip or (ClipVerdict(None) if nonfinite else None)  # such gradients are not clipped, whatever is left of them
            # Where nothing reports steps, the outcome of each is unknown.
            if outcome is Outcome.STEPPED or (outcome is Outcome.UNKNOWN and optimizer == UNOWNED):
                self._count_clipped(row, counted.number, clip, new=optimizer in counted.new)
            self._enter(row, norm, math.nan if after is None else after, fresh=optimizer in counted.newly_sized)

    def _count_clipped(self, row: int, sample: int, clip: ClipVerdict | None, *, new: bool) -> None:
        """Count a sample if it was clipped, and earlier ones of which that is known now. `clip`: None if nothing is known."""
        undecided, values = self._undecided[row], self.rows.values[row : row + 1]
        new |= sample in undecided  # it was judged before its round was over
        undecided.discard(sample)
        clipped = None if clip is None else clip.clipped
        if clip is not None:
            values["clipped"] += len(clip.earlier & undecided)
            undecided -= clip.earlier
        if new and clipped is None:  # one that is remembered no longer is never decided
            undecided.add(sample if len(undecided) <= REMEMBERED else NEVER)
        values["clipped"] += new and bool(clipped)
        values["undecided"] = bool(undecided)

    def observe(self, norm: float, step: int | None = None) -> None:
        """Take an observed norm of a step; it becomes the source of norms, as far as it is known whose it is."""
        norm = norm if norm >= 0 else math.nan  # DeepSpeed says -1 where the norm is NaN or Inf
        self._open = not math.isfinite(norm)
        row = self._row(OBSERVED)
        self.rows.values["norm"][row], self.rows.values["sized"][row] = norm, True
        # With several optimizers it is unknown whose norm it is; what is not finite counts with the outcome.
        single = step if len(self._row_of) < 3 and not self._open else None
        self._enter(row, norm, math.nan, fresh=True, step=single)

    def resolve(self, outcome: Outcome) -> None:
        """Take what became of the step whose norm was observed last."""
        if self._open:
            self.rows.values[f"nonfinite_{outcome.value}"][self._row(OBSERVED)] += 1
            if outcome is Outcome.STEPPED:
                self._surprises.seen()
            self._open = False

    def _enter(self, row: int, norm: float, after: float, *, fresh: bool, step: int | None = None) -> None:
        """Enter a norm. `fresh`: that of this round was not known before; `step`: for consumers of single values."""
        rows, norms = np.array([row]), np.array([norm])
        single = entered(self._cursors, "norm", step, norm)
        self.rows.note(rows, norms if fresh else np.array([np.nan]), np.array([after]), np.isfinite(norms), single)
        if fresh:
            self.rows.enter(rows, norms)
            self.rows.values["spikes"][row] += math.isfinite(norm) and self._baselines[row].is_spike(norm)

    def _row(self, optimizer: int) -> int:
        """Return the row of an optimizer; the first one takes over that of samples from before any was known."""
        if optimizer not in self._row_of:
            if UNOWNED in self._row_of and optimizer != OBSERVED:
                self._row_of[optimizer] = self._row_of.pop(UNOWNED)
            else:
                rows = len(self.rows.values)
                self.rows.arrange(np.append(np.arange(rows), -1))
                self._row_of[optimizer] = rows
                self._baselines.append(Baseline())
        return self._row_of[optimizer]

    # Reading

    def values(self) -> tuple[tuple[int, ...], Records, bool, Exponential]:
        """Return the optimizers' numbers, a record for each, whether the norms are observed ones, and exponential counts.

        With several optimizers it is unknown whose norm was observed, and those of samples are shown: both are
        counted, since a second optimizer may come at any time.
        """
        rows = {optimizer: row for optimizer, row in self._row_of.items() if optimizer != OBSERVED}
        values = self.rows.values[list(rows.values())]
        if OBSERVED not in self._row_of or len(rows) > 1:
            return tuple(rows), values, False, self.rows.exponential.of([*rows.values()])
        if not rows:
            values = np.zeros(1, dtype=OPTIMIZER)
        row = self._row_of[OBSERVED]
        for name in OF_NORMS:
            values[name] = self.rows.values[name][row]
        for outcome in Outcome:
            values[f"nonfinite_{outcome.value}"] += self.rows.values[f"nonfinite_{outcome.value}"][row]
        return tuple(rows) or (UNOWNED,), values, True, self.rows.exponential.of([row])

    def peaks(self, new: FloatArray, optimizers: Sequence[int], *, norm_observed: bool) -> FloatArray:
        """Return the largest norms, and norms after clipping, of what is `new` by row; shape (2, optimizers)."""
        peaks = np.full((2, len(optimizers)), np.nan)
        for place, optimizer in enumerate(optimizers):
            if optimizer in self._row_of:
                peaks[:, place] = new[:2, self._row_of[optimizer]]
        if norm_observed:
            peaks[0] = new[0, self._row_of[OBSERVED]]
        return peaks
