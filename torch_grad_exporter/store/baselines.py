"""Robust baselines: whether a value is unusual against the same quantity's own recent past.

For positive quantities that vary by factors, gradient norms above all, the logarithm is judged: on raw
norms a healthy run gives hundreds of false alarms. The scale is the median absolute deviation, times 1.4826
so that it estimates a normal distribution's standard deviation (Hampel, 1974; Rousseeuw and Croux, 1993).
"""

from __future__ import annotations

import bisect
import math
from collections import deque

import numpy as np

from torch_grad_exporter.metrics.families import BoolArray, FloatArray, IntArray
from torch_grad_exporter.store.histograms import Records, moved

WINDOW, ENOUGH = 128, 20
"""Samples that a baseline remembers, and before which there is no verdict."""

SIGMAS, FACTOR = 6.0, 3.0
"""A spike lies beyond 6 sigmas and 3 times the median."""

LOG_FLOOR, RELATIVE_FLOOR = 0.1, 0.01
"""Smallest sigma of a logarithm, and of a value as a share of the median: a change of some percent must not alarm."""

NEW_LEVEL = 32
"""Spikes in a row after which they are the new normal and the baseline starts again from them."""

ROW = np.dtype([("past", np.float64, (WINDOW,)), ("count", np.int64), ("spikes_in_a_row", np.int64)])


class Baselines:
    """A baseline of logarithms per row over the last `WINDOW` accepted values."""

    def __init__(self, rows: int = 0) -> None:
        self._rows: Records = np.zeros(rows, dtype=ROW)
        self._rows["past"] = np.nan

    def moved(self, index: IntArray) -> Baselines:
        """Return those of the rows with these numbers, in this order; -1 is a new one, which is empty."""
        baselines = Baselines()
        baselines._rows = moved(self._rows, index, Baselines(1)._rows)
        return baselines

    def judge(self, rows: IntArray, samples: FloatArray) -> tuple[FloatArray, BoolArray]:
        """Judge one sample for each of `rows`, and then take in those that are finite and no spike.

        Returns:
            The z-score of each, NaN where there is none, and whether it is a spike. A zero has no logarithm: it gets
            no verdict and enters no baseline.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # differences of values near the limit of float64
            usable = np.isfinite(samples) & (samples > 0)
            values = np.log(np.where(usable, samples, 1.0))
            zscore, spike = np.full(len(rows), np.nan), np.zeros(len(rows), dtype=np.bool_)
            judged = np.flatnonzero(usable & (self._rows["count"][rows] >= ENOUGH))
            if judged.size:
                zscore[judged], spike[judged] = self._compare(rows[judged], values[judged])
            self._take_in(rows[usable], values[usable], spike[usable])
            return zscore, spike

    def _compare(self, rows: IntArray, values: FloatArray) -> tuple[FloatArray, BoolArray]:
        past, count = self._rows["past"][rows], np.minimum(self._rows["count"][rows], WINDOW)
        median = _medians(past, count)
        deviation = 1.4826 * _medians(np.abs(past - median[:, None]), count)
        zscore = (values - median) / np.maximum(deviation, LOG_FLOOR)
        spike = (zscore > SIGMAS) & (values - median > np.log(FACTOR))
        return np.where(np.isfinite(zscore), zscore, np.nan), spike

    def _take_in(self, rows: IntArray, values: FloatArray, spike: BoolArray) -> None:
        in_a_row = self._rows["spikes_in_a_row"]
        if spike.any():
            in_a_row[rows] = np.where(spike, in_a_row[rows] + 1, 0)
            renewed = rows[in_a_row[rows] >= NEW_LEVEL]
            self._rows[renewed] = Baselines(len(renewed))._rows
            rows, values = rows[~spike], values[~spike]
        in_a_row[rows] = 0
        count = self._rows["count"][rows]
        self._rows["past"][rows, count % WINDOW] = values
        self._rows["count"][rows] = count + 1


class Baseline:
    """The baseline of one quantity of which each step has a value.

    `log` judges logarithms, of which `floor` is the smallest sigma, and a spike is upwards by `factor` too; otherwise
    the values themselves. The past is kept in order as well, since a value must cost little time.
    """

    def __init__(self, *, log: bool = True, factor: float = FACTOR, floor: float = LOG_FLOOR) -> None:
        self._past: deque[float] = deque()
        self._ordered: list[float] = []
        self._spikes_in_a_row = 0
        self._log = log
        self._least = math.log(factor) if log else -math.inf
        self._floor = floor

    def is_spike(self, sample: float) -> bool:
        """Judge a finite sample and take it in, unless it is a spike or has no logarithm."""
        if self._log and sample <= 0:
            return False
        value = math.log(sample) if self._log else sample
        if len(self._past) >= ENOUGH and self._compare(value):
            self._spikes_in_a_row += 1
            if self._spikes_in_a_row >= NEW_LEVEL:
                self._past.clear()
                self._ordered.clear()
                self._spikes_in_a_row = 0
            return True
        self._spikes_in_a_row = 0
        if len(self._past) == WINDOW:
            del self._ordered[bisect.bisect_left(self._ordered, self._past.popleft())]
        self._past.append(value)
        bisect.insort(self._ordered, value)
        return False

    def _compare(self, value: float) -> bool:
        ordered, count = self._ordered, len(self._ordered)
        median = ordered[(count - 1) // 2] / 2 + ordered[count // 2] / 2
        above = value - median
        floor = self._floor if self._log else max(RELATIVE_FLOOR * abs(median), 1e-12)
        if not (above > self._least and above / floor > SIGMAS):  # as most: only others need the deviation
            return False
        return above / max(1.4826 * self._deviation(median), floor) > SIGMAS

    def _deviation(self, median: float) -> float:
        """Return the median of the distances from the median, counted from the nearest one on."""
        ordered, count = self._ordered, len(self._ordered)
        right = bisect.bisect_left(ordered, median)
        left, nearest = right - 1, [0.0, 0.0]
        for _ in range(count // 2 + 1):
            below = median - ordered[left] if left >= 0 else math.inf
            beyond = ordered[right] - median if right < count else math.inf
            if below <= beyond:
                left, distance = left - 1, below
            else:
                right, distance = right + 1, beyond
            nearest = [nearest[1], distance]
        return nearest[count % 2] / 2 + nearest[1] / 2


class LossBaseline:
    """Whether a loss is unusual: by its logarithm while the last `WINDOW` and this one are positive, else as it is.

    The losses of small batches vary by factors, too: taken as they are, one in five of a healthy run with a lognormal
    distribution of sigma 2 is a spike. Where they hardly vary both ways are the same.
    """

    def __init__(self) -> None:
        self._logarithms, self._values = Baseline(factor=1.0, floor=RELATIVE_FLOOR), Baseline(log=False)
        self._positive = WINDOW

    def is_spike(self, loss: float) -> bool:
        """Judge a finite loss and take it in, unless it is a spike."""
        self._positive = self._positive + 1 if loss > 0 else 0
        by_logarithm, by_value = self._logarithms.is_spike(loss), self._values.is_spike(loss)
        return by_logarithm if self._positive > WINDOW else by_value


def _medians(values: FloatArray, count: IntArray) -> FloatArray:
    """Return the median of the first `count` values of each row once sorted; NaN sorts behind every number."""
    ordered = np.sort(values, axis=1)
    row = np.arange(len(ordered))
    return np.asarray(ordered[row, (count - 1) // 2] / 2 + ordered[row, count // 2] / 2)
