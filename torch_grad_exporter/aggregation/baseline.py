"""Robust baselines: whether a value is unusual against the same quantity's own recent past.

For positive quantities that vary by factors, gradient norms above all, the logarithm is judged: on raw
norms a healthy run gives hundreds of false alarms. The scale is the median absolute deviation, times 1.4826
so that it estimates a normal distribution's standard deviation (Hampel, 1974; Rousseeuw and Croux, 1993).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from torch_grad_exporter.metrics.families import BoolArray, FloatArray, IntArray

WINDOW = 128
"""Samples that a baseline remembers."""

ENOUGH = 20
"""Samples before which there is no verdict."""

SIGMAS = 6.0
FACTOR = 3.0
"""A spike lies beyond 6 sigmas and 3 times the median."""

LOG_FLOOR = 0.1
"""Smallest sigma of a logarithm: a quantity that hardly moves must not alarm at a change of some percent."""

RELATIVE_FLOOR = 0.01
"""The same of a value that is judged as it is, as a share of the median."""

NEW_LEVEL = 32
"""Spikes in a row after which they are the new normal and the baseline starts again from them."""


@dataclass(slots=True)
class Verdict:
    """Judgement of one sample per row: `zscore` is NaN where there is none; shape (rows,)."""

    zscore: FloatArray
    spike: BoolArray


@dataclass(slots=True)
class Baselines:
    """One baseline per row over the last `WINDOW` accepted values; rows are added as they appear.

    `log` judges logarithms, of which `floor` is the smallest sigma, and a spike is upwards by `factor` too; otherwise the values
    themselves.
    """

    log: bool = True
    factor: float = FACTOR
    floor: float = LOG_FLOOR
    _values: FloatArray = field(default_factory=lambda: np.full((0, WINDOW), np.nan))
    _count: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    _row_of_spikes: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def grow(self, rows: int) -> None:
        """Grows to `rows` rows; new ones are empty."""
        more = rows - len(self._count)
        if more > 0:
            self._values = np.concatenate([self._values, np.full((more, WINDOW), np.nan)])
            self._count = np.concatenate([self._count, np.zeros(more, dtype=np.int64)])
            self._row_of_spikes = np.concatenate([self._row_of_spikes, np.zeros(more, dtype=np.int64)])

    def forget(self, rows: IntArray) -> None:
        """Empties rows, which are assigned to something else."""
        self._values[rows], self._count[rows], self._row_of_spikes[rows] = np.nan, 0, 0

    def judge(self, rows: IntArray, samples: FloatArray) -> Verdict:
        """Judges one sample for each of `rows` and then takes in those that are finite and no spike.

        A zero has no logarithm: it gets no verdict and enters no logarithmic baseline.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # differences of values near the limit of float64
            return self._judge(rows, samples)

    def _judge(self, rows: IntArray, samples: FloatArray) -> Verdict:
        usable = np.isfinite(samples) & ((samples > 0) if self.log else True)
        values = np.where(usable, samples, 1.0)
        if self.log:
            values = np.log(values)
        zscore = np.full(len(rows), np.nan)
        spike = np.zeros(len(rows), dtype=np.bool_)
        judged = np.flatnonzero(usable & (self._count[rows] >= ENOUGH))
        if judged.size:
            zscore[judged], spike[judged] = self._compare(rows[judged], values[judged])
        self._take_in(rows[usable], values[usable], spike[usable])
        return Verdict(zscore, spike)

    def _compare(self, rows: IntArray, values: FloatArray) -> tuple[FloatArray, BoolArray]:
        past, count = self._values[rows], np.minimum(self._count[rows], WINDOW)
        median = _medians(past, count)
        deviation = 1.4826 * _medians(np.abs(past - median[:, None]), count)
        floor = self.floor if self.log else np.maximum(RELATIVE_FLOOR * np.abs(median), 1e-12)
        zscore = (values - median) / np.maximum(deviation, floor)
        spike = zscore > SIGMAS
        if self.log:
            spike &= values - median > np.log(self.factor)
        return np.where(np.isfinite(zscore), zscore, np.nan), spike

    def _take_in(self, rows: IntArray, values: FloatArray, spike: BoolArray) -> None:
        self._row_of_spikes[rows] = np.where(spike, self._row_of_spikes[rows] + 1, 0)
        renewed = rows[self._row_of_spikes[rows] >= NEW_LEVEL]
        self._values[renewed] = np.nan
        self._count[renewed] = 0
        self._row_of_spikes[renewed] = 0
        kept = rows[~spike]
        self._values[kept, self._count[kept] % WINDOW] = values[~spike]
        self._count[kept] += 1


@dataclass(slots=True)
class LossBaseline:
    """Whether a loss is unusual: by its logarithm while the last `WINDOW` and this one are positive, else as it is.

    The losses of small batches vary by factors, too: taken as they are, those of a healthy run with a spread like that of a
    lognormal distribution of sigma 2 are spikes in one of five. Where they hardly vary both ways are the same.
    """

    _logarithms: Baselines = field(default_factory=lambda: Baselines(factor=1.0, floor=RELATIVE_FLOOR))
    _values: Baselines = field(default_factory=lambda: Baselines(log=False))
    _positive: int = WINDOW

    def is_spike(self, loss: float) -> bool:
        """Judges a finite loss and takes it in, unless it is a spike."""
        self._positive = self._positive + 1 if loss > 0 else 0
        found = []
        for baseline in (self._logarithms, self._values):
            baseline.grow(1)
            found.append(bool(baseline.judge(np.zeros(1, dtype=np.int64), np.array([loss])).spike[0]))
        return found[0] if self._positive > WINDOW else found[1]


def _medians(values: FloatArray, count: IntArray) -> FloatArray:
    """The median of the first `count` values of each row once sorted; NaN sorts behind every number."""
    ordered = np.sort(values, axis=1)
    row = np.arange(len(ordered))
    return np.asarray(ordered[row, (count - 1) // 2] / 2 + ordered[row, count // 2] / 2)
