"""Robust baselines: whether a value is unusual against the same quantity's own recent past.

For positive quantities that vary by factors, gradient norms above all, the logarithm is judged: on raw
norms a healthy run gives hundreds of false alarms. The scale is the median absolute deviation, times 1.4826
so that it estimates a normal distribution's standard deviation (Hampel, 1974; Rousseeuw and Croux, 1993).

The logarithms of norms have tails that no deviation shows. So a norm beyond 6 sigmas and 3 times the median is unusual, and is
not remembered; a spike is one that also exceeds 5 times the median and twice the largest that is remembered. Where norms vary
so much that 6 sigmas are out of reach, ten times the largest is unusual as well.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Callable

import numpy as np

from torch_grad_exporter.metrics.families import BoolArray, FloatArray, IntArray
from torch_grad_exporter.store.histograms import Records

WINDOW, ENOUGH = 128, 20  # samples that a baseline remembers, and before which there is no verdict
SIGMAS, FACTOR = 6.0, 3.0  # an unusual norm lies beyond 6 sigmas and 3 times the median
OF_MEDIAN, OF_LARGEST = 5.0, 2.0  # a spike is an unusual norm beyond 5 times the median and twice the largest remembered
FAR_OF_LARGEST = 10.0  # a norm beyond 10 times the largest remembered is unusual, whatever the deviation
ESTIMATES_SIGMA = 1.4826  # a median absolute deviation, times this
NEW_LEVEL = 32  # unusual values in a row after which they are the new normal: the baseline starts again

# Smallest sigma of a norm's logarithm, and of a loss as a share of its median: a change of some percent must not alarm.
LOG_FLOOR, RELATIVE_FLOOR = 0.1, 0.01

ROW = np.dtype([("past", np.float64, (WINDOW,)), ("count", np.int64), ("unusual_in_a_row", np.int64)])


class Baselines:
    """A baseline of logarithms per row over the last `WINDOW` accepted values."""

    def __init__(self, rows: int = 0) -> None:
        self._rows: Records = np.zeros(rows, dtype=ROW)
        self._rows["past"] = np.nan

    def moved(self, index: IntArray) -> Baselines:
        """Return those of the rows with these numbers, in this order; -1 is a new one, which is empty."""
        baselines = Baselines()
        baselines._rows = np.concatenate([self._rows, Baselines(1)._rows])[index]
        return baselines

    def judge(self, rows: IntArray, samples: FloatArray) -> tuple[FloatArray, BoolArray]:
        """Judge one sample for each of `rows`, and then take in those that are finite and not unusual.

        Returns:
            The z-score of each, NaN where there is none, and whether it is a spike. A zero has no logarithm: it gets
            no verdict and enters no baseline.
        """
        in_a_row, zscore = self._rows["unusual_in_a_row"], np.full(len(rows), np.nan)
        unusual, spike = np.zeros((2, len(rows)), dtype=np.bool_)
        with np.errstate(over="ignore", invalid="ignore"):  # differences of values near the limit of float64
            usable = np.isfinite(samples) & (samples > 0)
            values = np.log(np.where(usable, samples, 1.0))
            judged = np.flatnonzero(usable & (self._rows["count"][rows] >= ENOUGH))
            if judged.size:
                past, count = self._rows["past"][rows[judged]], np.minimum(self._rows["count"][rows[judged]], WINDOW)
                median = _medians(past, count)
                deviation = ESTIMATES_SIGMA * _medians(np.abs(past - median[:, None]), count)
                above = values[judged] - median
                sigmas = above / np.maximum(deviation, LOG_FLOOR)
                largest = np.fmax.reduce(past, axis=1) - median
                far = (sigmas > SIGMAS) | (above > largest + np.log(FAR_OF_LARGEST))
                unusual[judged] = far & (above > np.log(FACTOR))
                spike[judged] = unusual[judged] & (above > np.log(OF_MEDIAN)) & (above > largest + np.log(OF_LARGEST))
                zscore[judged] = np.where(np.isfinite(sigmas), sigmas, np.nan)
        if unusual.any():
            in_a_row[rows[unusual]] += 1
            renewed = rows[in_a_row[rows] >= NEW_LEVEL]
            self._rows[renewed] = Baselines(len(renewed))._rows
        accepted = usable & ~unusual
        rows, values = rows[accepted], values[accepted]
        in_a_row[rows] = 0
        count = self._rows["count"][rows]
        self._rows["past"][rows, count % WINDOW] = values
        self._rows["count"][rows] = count + 1
        return zscore, spike


class Baseline:
    """The baseline of one quantity of which each step has a value, so that one must cost little time.

    Norms are judged like those of a row of `Baselines`. Losses (`loss`) have no factors, and are judged by their logarithm
    while the last `WINDOW` and this one are positive, else as they are: those of small batches vary by factors, too, and
    as they are one in five of a healthy run with a lognormal distribution of sigma 2 is a spike.
    """

    def __init__(self, *, loss: bool = False) -> None:
        self._past: deque[float] = deque()
        self._ordered: list[float] = []  # the same in order
        self._unusual_in_a_row = 0
        self._loss, self._positive_in_a_row = loss, WINDOW

    def is_spike(self, sample: float) -> bool:
        """Judge a finite sample and take it in, unless it is unusual or a norm of 0."""
        self._positive_in_a_row = self._positive_in_a_row + 1 if sample > 0 else 0
        log = self._positive_in_a_row > WINDOW if self._loss else True
        if log and self._ordered and self._ordered[0] <= 0:  # older than those in a row, as some were spikes
            self._past = deque(value for value in self._past if value > 0)
            self._ordered = sorted(self._past)
        if not (self._loss or sample > 0):
            return False
        if len(self._past) >= ENOUGH and self._is_far(sample, math.log if log else float):
            spike = self._loss or self._stands_out(sample)
            self._unusual_in_a_row += 1
            if self._unusual_in_a_row >= NEW_LEVEL:
                self._past, self._ordered, self._unusual_in_a_row = deque(), [], 0
            return spike
        self._unusual_in_a_row = 0
        if len(self._past) == WINDOW:
            del self._ordered[bisect.bisect_left(self._ordered, self._past.popleft())]
        self._past.append(sample)
        bisect.insort(self._ordered, sample)
        return False

    def _stands_out(self, sample: float) -> bool:
        least = max(self._median(math.log) + math.log(OF_MEDIAN), math.log(self._ordered[-1]) + math.log(OF_LARGEST))
        return math.log(sample) > least

    def _median(self, key: Callable[[float], float]) -> float:
        ordered, count = self._ordered, len(self._ordered)
        return key(ordered[(count - 1) // 2]) / 2 + key(ordered[count // 2]) / 2

    def _is_far(self, sample: float, key: Callable[[float], float]) -> bool:
        ordered, count, median = self._ordered, len(self._ordered), self._median(key)
        above, floor = key(sample) - median, RELATIVE_FLOOR if self._loss else LOG_FLOOR
        if key is float:
            floor = max(floor * abs(median), 1e-12)
        if not (above / floor > SIGMAS and (self._loss or above > math.log(FACTOR))):
            return False
        if not self._loss and math.log(sample) > math.log(ordered[-1]) + math.log(FAR_OF_LARGEST):
            return True
        # The deviation is that small if more than half of the values are this close to the median: two searches, no sorting.
        near = above / SIGMAS / ESTIMATES_SIGMA
        closer = bisect.bisect_left(ordered, median + near, key=key) - bisect.bisect_right(ordered, median - near, key=key)
        if 2 * closer == count:
            distances = sorted(abs(key(value) - median) for value in ordered)
            return distances[closer - 1] / 2 + distances[closer] / 2 < near
        return 2 * closer > count


def _medians(values: FloatArray, count: IntArray) -> FloatArray:
    """Return the median of the first `count` values of each row once sorted; NaN sorts behind every number."""
    ordered = np.sort(values, axis=1)
    row = np.arange(len(ordered))
    return np.asarray(ordered[row, (count - 1) // 2] / 2 + ordered[row, count // 2] / 2)
