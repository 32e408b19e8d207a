"""Robust baselines: whether a value is unusual against the same quantity's own recent past.

For positive quantities that vary by factors, gradient norms above all, the logarithm is judged: on raw
norms a healthy run gives hundreds of false alarms. The scale is the median absolute deviation, times 1.4826
so that it estimates a normal distribution's standard deviation (Hampel, 1974; Rousseeuw and Croux, 1993).
"""

from __future__ import annotations

import bisect
import copy
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from torch_grad_exporter.metrics.families import BoolArray, FloatArray, IntArray
from torch_grad_exporter.store.histograms import Records, moved

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
    """One baseline per row over the last `WINDOW` accepted values: of their logarithms, and a spike is upwards by `FACTOR` too."""

    def __init__(self, rows: int = 0) -> None:
        self._rows = _empty(rows)

    def moved(self, index: IntArray) -> Baselines:
        """Those of the rows with these numbers, in this order; -1 is a new one, which is empty."""
        found = copy.copy(self)
        found._rows = moved(self._rows, index, _empty(1))
        return found

    def judge(self, rows: IntArray, samples: FloatArray) -> tuple[FloatArray, BoolArray]:
        """Judges one sample for each of `rows` and then takes in those that are finite and no spike.

        Gives the z-score of each, NaN where there is none, and whether it is a spike. A zero has no logarithm: it gets no verdict
        and enters no baseline.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # differences of values near the limit of float64
            return self._judge(rows, samples)

    def _judge(self, rows: IntArray, samples: FloatArray) -> tuple[FloatArray, BoolArray]:
        usable = np.isfinite(samples) & (samples > 0)
        enough = self._rows["count"][rows] >= ENOUGH
        if usable.all() and enough.all():  # as most often: nothing is to be picked out
            values = np.log(samples)
            zscore, spike = self._compare(rows, values)
            self._take_in(rows, values, spike)
            return zscore, spike
        values = np.log(np.where(usable, samples, 1.0))
        zscore = np.full(len(rows), np.nan)
        spike = np.zeros(len(rows), dtype=np.bool_)
        judged = np.flatnonzero(usable & enough)
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
        all_rows = self._rows
        in_a_row = all_rows["spikes_in_a_row"]
        if spike.any():
            in_a_row[rows] = np.where(spike, in_a_row[rows] + 1, 0)
            renewed = rows[in_a_row[rows] >= NEW_LEVEL]
            if renewed.size:
                all_rows[renewed] = _empty(len(renewed))
            rows, values = rows[~spike], values[~spike]
        in_a_row[rows] = 0
        count = all_rows["count"][rows]
        all_rows["past"][rows, count % WINDOW] = values
        all_rows["count"][rows] = count + 1


class Baseline:
    """The baseline of one quantity of which each step has a value.

    `log` judges logarithms, of which `floor` is the smallest sigma, and a spike is upwards by `factor` too; otherwise the values
    themselves. Its past is kept in order as well: what a value costs is time of the training, since one thread at a time runs
    Python.
    """

    def __init__(self, *, log: bool = True, factor: float = FACTOR, floor: float = LOG_FLOOR) -> None:
        self._past: deque[float] = deque()
        self._ordered: list[float] = []
        self._spikes_in_a_row = 0
        self._log = log
        self._least = math.log(factor) if log else -math.inf
        self._floor = floor

    def is_spike(self, sample: float) -> bool:
        """Judges a finite sample and takes it in, unless it is a spike or has no logarithm."""
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
        """The median of the distances from the median, counted from the nearest one on."""
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


@dataclass(slots=True)
class LossBaseline:
    """Whether a loss is unusual: by its logarithm while the last `WINDOW` and this one are positive, else as it is.

    The losses of small batches vary by factors, too: taken as they are, those of a healthy run with a spread like that of a
    lognormal distribution of sigma 2 are spikes in one of five. Where they hardly vary both ways are the same.
    """

    _logarithms: Baseline = field(default_factory=lambda: Baseline(factor=1.0, floor=RELATIVE_FLOOR))
    _values: Baseline = field(default_factory=lambda: Baseline(log=False))
    _positive: int = WINDOW

    def is_spike(self, loss: float) -> bool:
        """Judges a finite loss and takes it in, unless it is a spike."""
        self._positive = self._positive + 1 if loss > 0 else 0
        by_logarithm, by_value = self._logarithms.is_spike(loss), self._values.is_spike(loss)
        return by_logarithm if self._positive > WINDOW else by_value


def _medians(values: FloatArray, count: IntArray) -> FloatArray:
    """The median of the first `count` values of each row once sorted; NaN sorts behind every number."""
    ordered = np.sort(values, axis=1)
    row = np.arange(len(ordered))
    return np.asarray(ordered[row, (count - 1) // 2] / 2 + ordered[row, count // 2] / 2)
