"""Robust baselines: whether a value is unusual against the same quantity's own recent past.

For positive quantities that vary by factors, gradient norms above all, the logarithm is judged: on raw
norms a healthy run gives hundreds of false alarms. The scale is the median absolute deviation, times 1.4826
so that it estimates a normal distribution's standard deviation (Hampel, 1974; Rousseeuw and Croux, 1993).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np

from torch_grad_exporter.aggregation.tables import Records, moved
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


_ROW = np.dtype([("past", np.float64, (WINDOW,)), ("count", np.int64), ("spikes_in_a_row", np.int64)])


def _empty(rows: int) -> Records:
    found = np.zeros(rows, dtype=_ROW)
    found["past"] = np.nan
    return found


class Baselines:
    """One baseline per row over the last `WINDOW` accepted values.

    `log` judges logarithms, of which `floor` is the smallest sigma, and a spike is upwards by `factor` too; otherwise the values
    themselves.
    """

    def __init__(self, rows: int = 0, *, log: bool = True, factor: float = FACTOR, floor: float = LOG_FLOOR) -> None:
        self._rows = _empty(rows)
        self._log = log
        self._factor = factor
        self._floor = floor

    def moved(self, index: IntArray) -> Baselines:
        """Those of the rows with these numbers, in this order; -1 is a new one, which is empty."""
        found = copy.copy(self)
        found._rows = moved(self._rows, index, _empty(1))
        return found

    def judge(self, rows: IntArray, samples: FloatArray) -> tuple[FloatArray, BoolArray]:
        """Judges one sample for each of `rows` and then takes in those that are finite and no spike.

        Gives the z-score of each, NaN where there is none, and whether it is a spike. A zero has no logarithm: it gets no verdict
        and enters no logarithmic baseline.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # differences of values near the limit of float64
            return self._judge(rows, samples)

    def _judge(self, rows: IntArray, samples: FloatArray) -> tuple[FloatArray, BoolArray]:
        usable = np.isfinite(samples) & ((samples > 0) if self._log else True)
        values = np.where(usable, samples, 1.0)
        if self._log:
            values = np.log(values)
        zscore = np.full(len(rows), np.nan)
        spike = np.zeros(len(rows), dtype=np.bool_)
        judged = np.flatnonzero(usable & (self._rows["count"][rows] >= ENOUGH))
        if judged.size:
            zscore[judged], spike[judged] = self._compare(rows[judged], values[judged])
        self._take_in(rows[usable], values[usable], spike[usable])
        return zscore, spike

    def _compare(self, rows: IntArray, values: FloatArray) -> tuple[FloatArray, BoolArray]:
        past, count = self._rows["past"][rows], np.minimum(self._rows["count"][rows], WINDOW)
        median = _medians(past, count)
        deviation = 1.4826 * _medians(np.abs(past - median[:, None]), count)
        floor = self._floor if self._log else np.maximum(RELATIVE_FLOOR * np.abs(median), 1e-12)
        zscore = (values - median) / np.maximum(deviation, floor)
        spike = zscore > SIGMAS
        if self._log:
            spike &= values - median > np.log(self._factor)
        return np.where(np.isfinite(zscore), zscore, np.nan), spike

    def _take_in(self, rows: IntArray, values: FloatArray, spike: BoolArray) -> None:
        all_rows = self._rows
        in_a_row = all_rows["spikes_in_a_row"]
        in_a_row[rows] = np.where(spike, in_a_row[rows] + 1, 0)
        renewed = rows[in_a_row[rows] >= NEW_LEVEL]
        if renewed.size:
            all_rows[renewed] = _empty(len(renewed))
        kept = rows[~spike]
        all_rows["past"][kept, all_rows["count"][kept] % WINDOW] = values[~spike]
        all_rows["count"][kept] += 1


@dataclass(slots=True)
class LossBaseline:
    """Whether a loss is unusual: by its logarithm while the last `WINDOW` and this one are positive, else as it is.

    The losses of small batches vary by factors, too: taken as they are, those of a healthy run with a spread like that of a
    lognormal distribution of sigma 2 are spikes in one of five. Where they hardly vary both ways are the same.
    """

    _logarithms: Baselines = field(default_factory=lambda: Baselines(1, factor=1.0, floor=RELATIVE_FLOOR))
    _values: Baselines = field(default_factory=lambda: Baselines(1, log=False))
    _positive: int = WINDOW

    def is_spike(self, loss: float) -> bool:
        """Judges a finite loss and takes it in, unless it is a spike."""
        self._positive = self._positive + 1 if loss > 0 else 0
        row, value = np.zeros(1, dtype=np.int64), np.array([loss])
        by_logarithm, by_value = (bool(one.judge(row, value)[1][0]) for one in (self._logarithms, self._values))
        return by_logarithm if self._positive > WINDOW else by_value


def _medians(values: FloatArray, count: IntArray) -> FloatArray:
    """The median of the first `count` values of each row once sorted; NaN sorts behind every number."""
    ordered = np.sort(values, axis=1)
    row = np.arange(len(ordered))
    return np.asarray(ordered[row, (count - 1) // 2] / 2 + ordered[row, count // 2] / 2)
