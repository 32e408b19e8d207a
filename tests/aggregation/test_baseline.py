"""Robust baselines against loops with `statistics.median`."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

import numpy as np
import pytest

from torch_grad_exporter.aggregation.baseline import ENOUGH, NEW_LEVEL, WINDOW, Baseline, Baselines, LossBaseline

ROW = np.zeros(1, dtype=np.int64)


def judged(baselines: Baselines, series: Iterable[float]) -> list[tuple[float, bool]]:
    """The z-score and the verdict on each sample of one row."""
    baselines = baselines.moved(np.array([-1]))
    found = []
    for sample in series:
        zscore, spike = baselines.judge(ROW, np.array([sample]))
        found.append((float(zscore[0]), bool(spike[0])))
    return found


def verdicts(baseline: Baseline | LossBaseline, series: Iterable[float]) -> list[bool]:
    """The verdict on each sample of one quantity that is finite."""
    return [math.isfinite(sample) and baseline.is_spike(sample) for sample in series]


def judged_by_hand(
    series: Iterable[float], *, log: bool = True, least: float = 0.1, factor: float = 3.0
) -> list[tuple[float, bool]]:
    """The same from the definition: median and MAD of the last 128 accepted values, no verdict before 20."""
    past: deque[float] = deque(maxlen=128)
    found = []
    in_a_row = 0
    for sample in series:
        if not math.isfinite(sample) or (log and sample <= 0):
            found.append((math.nan, False))
            continue
        value = math.log(sample) if log else sample
        zscore, spike = math.nan, False
        if len(past) >= 20:
            middle = statistics.median(past)
            floor = least if log else max(0.01 * abs(middle), 1e-12)
            zscore = (value - middle) / max(1.4826 * statistics.median(abs(p - middle) for p in past), floor)
            spike = zscore > 6 and (not log or value - middle > math.log(factor))
        found.append((zscore, spike))
        in_a_row = in_a_row + 1 if spike else 0
        if in_a_row == 32:
            past.clear()
            in_a_row = 0
        elif not spike:
            past.append(value)
    return found


def assert_same(found: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    """Equal verdicts, and z-scores to nine digits."""
    assert [spike for _, spike in found] == [spike for _, spike in expected]
    assert [z for z, _ in found] == pytest.approx([z for z, _ in expected], rel=1e-9, abs=1e-9, nan_ok=True)


def noisy(length: int, seed: int, sigma: float = 0.4) -> list[float]:
    """Log-normal values around 1."""
    return np.exp(np.random.default_rng(seed).normal(0.0, sigma, length)).tolist()


@pytest.mark.parametrize("length", [19, 20, 21, 127, 128, 129, 400])
def test_the_zscore_is_that_of_the_definition(length: int) -> None:
    """Over series shorter and longer than the window, z-scores are those of a loop over medians."""
    series = noisy(length + 1, seed=length)
    assert_same(judged(Baselines(), series), judged_by_hand(series))


def test_a_series_of_everything() -> None:
    """Spikes, drops, zeros, NaN, Inf and a change of level: every verdict is that of the loop."""
    series = noisy(700, seed=1)
    for place, value in ((5, 0.0), (30, math.nan), (31, 50.0), (60, 1e-9), (61, math.inf), (90, 0.0), (91, 1e30), (140, -math.inf)):
        series[place] = value
    series[300:] = [1000 * value for value in series[300:]]
    expected = judged_by_hand(series)
    assert_same(judged(Baselines(), series), expected)
    assert [n for n, (_, spike) in enumerate(expected) if spike] == [31, 91, *range(300, 332)]


def test_there_is_no_verdict_before_twenty_samples() -> None:
    """The first z-score is that of the 21st sample, and no earlier one is a spike, whatever it is."""
    series = [1.0] * ENOUGH
    series[10] = 1e9
    found = judged(Baselines(), [*series, 1.0])
    assert [math.isnan(z) for z, _ in found] == [True] * 20 + [False]
    assert not any(spike for _, spike in found)


def test_samples_that_are_not_finite_or_zero_do_not_count_towards_the_twenty() -> None:
    """NaN, Inf and zero get no verdict, feed nothing and do not bring the first verdict nearer."""
    found = judged(Baselines(), [1.0, math.nan, math.inf, 0.0, -1.0] * 19 + [1.0, 1.0])
    assert [math.isnan(z) for z, _ in found] == [True] * 96 + [False]


@pytest.mark.parametrize(("sample", "spike"), [(2.9, False), (3.1, True), (1 / 3.1, False), (1e-30, False)])
def test_a_spike_is_three_times_the_median(sample: float, spike: bool) -> None:
    """On a series that hardly moves, where 6 sigmas are a factor of 1.8, a spike begins at 3 times the median."""
    assert judged(Baselines(), [*([1.0, 1.001] * 20), sample])[-1][1] is spike


@pytest.mark.parametrize(("sigmas", "spike"), [(5.5, False), (6.5, True), (-6.5, False)])
def test_a_spike_is_six_sigmas(sigmas: float, spike: bool) -> None:
    """On a series that varies by factors, 3 times the median is nothing and a spike begins at 6 sigmas."""
    logs = [math.log(sample) for sample in noisy(60, seed=2, sigma=1.0)]
    middle = statistics.median(logs)
    sigma = 1.4826 * statistics.median(abs(value - middle) for value in logs)
    found = judged(Baselines(), [math.exp(value) for value in (*logs, middle + sigmas * sigma)])
    assert not any(spike for _, spike in found[:-1])
    assert found[-1][0] == pytest.approx(sigmas, rel=1e-9)
    assert found[-1][1] is spike


def test_a_spike_does_not_feed_its_own_baseline() -> None:
    """After a burst of spikes the z-score of an ordinary sample is what it was without them."""
    series = noisy(60, seed=3)
    quiet = judged(Baselines(), [*series, 2.0])[-1]
    assert judged(Baselines(), [*series, *([1e6] * (NEW_LEVEL - 1)), 2.0])[-1] == quiet


def test_a_new_level_is_accepted() -> None:
    """After 32 spikes in a row the baseline starts anew, and 20 samples later the new level is the usual one."""
    found = judged(Baselines(), [*noisy(60, seed=4), *(1e6 * value for value in noisy(NEW_LEVEL + ENOUGH + 40, seed=5))])[60:]
    assert [spike for _, spike in found] == [True] * NEW_LEVEL + [False] * (ENOUGH + 40)
    assert all(math.isnan(z) for z, _ in found[NEW_LEVEL : NEW_LEVEL + ENOUGH])
    assert all(abs(z) < 6 for z, _ in found[NEW_LEVEL + ENOUGH :])


def test_only_spikes_in_a_row_make_a_new_level() -> None:
    """An ordinary sample between spikes starts their count anew."""
    series = [*noisy(60, seed=6)]
    for _ in range(5):
        series += [1e6] * (NEW_LEVEL - 1) + [1.0]
    assert sum(spike for _, spike in judged(Baselines(), series)) == 5 * (NEW_LEVEL - 1)


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_series_gives_no_false_alarm(seed: int) -> None:
    """Norms of 1,500 healthy steps, log-normal around a level that falls by a factor of ten, give no spike at all."""
    generator = np.random.default_rng(seed)
    level = np.linspace(0.0, -np.log(10), 1500)
    series = np.exp(level + generator.normal(0.0, 0.8, 1500)).tolist()
    assert sum(spike for _, spike in judged(Baselines(), series)) == 0
    raw = judged_by_hand(series, log=False)
    assert sum(spike for _, spike in raw) > 5  # what judging the norms themselves would give


def test_rows_do_not_touch_each_other() -> None:
    """Rows judged together, a varying part of them at a time, get the verdicts that each would get alone."""
    generator = np.random.default_rng(7)
    baselines = Baselines(3)
    alone: list[list[float]] = [[] for _ in range(6)]
    found: list[list[tuple[float, bool]]] = [[] for _ in range(6)]
    for step in range(300):
        if step == 50:
            baselines = baselines.moved(np.array([0, 1, 2, -1, -1, -1]))
        rows = np.flatnonzero(generator.random(6 if step >= 50 else 3) < 0.7)
        samples = np.exp(generator.normal(0.0, 0.5, len(rows))) * 100.0**rows * np.where(generator.random(len(rows)) < 0.02, 1e4, 1)
        for row, sample, zscore, spike in zip(rows, samples, *baselines.judge(rows, samples), strict=True):
            alone[row].append(float(sample))
            found[row].append((float(zscore), bool(spike)))
    for row in range(6):
        assert_same(found[row], judged_by_hand(alone[row]))
    assert sum(spike for row in found for _, spike in row) > 5


def test_the_values_themselves_can_be_judged() -> None:
    """Without logarithms, as for a loss, negative values and zeros are values, and 6 sigmas upwards are a spike."""
    series = [*np.random.default_rng(8).normal(0.0, 1.0, 200).tolist(), 0.0, -50.0, 50.0, math.nan, 0.5]
    expected = [spike for _, spike in judged_by_hand(series, log=False)]
    assert verdicts(Baseline(log=False), series) == expected
    assert [n for n, spike in enumerate(expected) if spike] == [202]


def test_a_constant_series_has_a_smallest_sigma() -> None:
    """A series that never moves does not alarm at a change of half a percent, nor divides by zero."""
    assert verdicts(Baseline(log=False), [*[2.0] * 50, 2.01, 2.119, 2.121])[-3:] == [False, False, True]
    assert judged(Baselines(), [2.0] * 50 + [2.01])[-1] == (pytest.approx(math.log(1.005) / 0.1), False)


def spikes(losses: Iterable[float]) -> list[int]:
    """The places of the losses that are spikes."""
    return [place for place, spike in enumerate(verdicts(LossBaseline(), losses)) if spike]


@pytest.mark.parametrize("draw", ["lognormal", "exponential", "gamma"])
def test_losses_of_small_batches_are_no_spikes(draw: str) -> None:
    """Losses that vary by factors leave a healthy run silent, though as they are many of them lie beyond 6 sigmas."""
    generator = np.random.default_rng(3)
    drawn = {
        "lognormal": generator.lognormal(0.0, 2.0, 5000),
        "exponential": generator.exponential(1.0, 5000),
        "gamma": generator.gamma(0.3, 1.0, 5000),
    }[draw].tolist()
    assert sum(verdicts(Baseline(log=False), drawn)) > 20
    assert spikes(drawn) == []


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_one_quantity_is_judged_as_defined(seed: int, log: bool) -> None:
    """Values that repeat, that vary a lot or hardly, that jump to a new level and fall: as by `statistics.median`."""
    generator = np.random.default_rng(seed)
    parts = [
        generator.lognormal(0.0, generator.choice([0.01, 0.3, 2.0]), 300),
        generator.choice([0.0, 1.0, 1.0, 2.0, 100.0], 200),
        5000 + generator.normal(0.0, 1.0, 200),
        np.round(np.exp(-np.arange(300) / 100), 2),
        generator.choice([1e300, 1e-300, 5.0, 5.0], 200),
    ]
    series = np.concatenate([parts[place] for place in generator.permutation(len(parts))]).tolist()
    expected = [spike for _, spike in judged_by_hand(series, log=log)]
    assert any(expected)
    assert verdicts(Baseline(log=log), series) == expected


def test_a_positive_loss_is_judged_by_its_logarithm() -> None:
    """As by the definition; of losses around 2.3 that vary by 5 %, one that is twice as high is a spike."""
    losses = np.random.default_rng(4).normal(2.3, 0.115, 600)
    losses[[19, 20, 100, 300, 301]] *= [2, 2, 2, 1.2, 2]
    expected = judged_by_hand(losses.tolist(), least=0.01, factor=1.0)
    assert spikes(losses.tolist()) == [place for place, (_, spike) in enumerate(expected) if spike] == [20, 100, 301]


def test_losses_that_may_be_negative_are_judged_as_they_are() -> None:
    """From one that is not positive until 128 more were."""
    generator = np.random.default_rng(5)
    losses = [*generator.normal(0.0, 1.0, 200), 50.0, *generator.lognormal(0.0, 2.0, 5000)]
    as_they_are = [place for place, (_, spike) in enumerate(judged_by_hand(losses, log=False)) if spike]
    assert as_they_are[0] == 200
    last = max(place for place in range(201) if losses[place] <= 0)
    assert spikes(losses) == [place for place in as_they_are if place < last + 128]
    assert as_they_are[-1] > last + 128


def test_the_window_forgets() -> None:
    """Values older than the window have no say."""
    late = noisy(WINDOW, seed=9)
    assert judged(Baselines(), [*noisy(50, seed=10), *late, 2.0])[-1] == judged(Baselines(), [*late, 2.0])[-1]
