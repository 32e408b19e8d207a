"""Robust baselines against the definition: median and deviation of the last 128 accepted values, no verdict before 20."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.properties import no_timeout_in_a_soak
from torch_grad_exporter.store.baselines import Baseline, Baselines

pytestmark = no_timeout_in_a_soak

ROW = np.zeros(1, dtype=np.int64)


def judged(series: Iterable[float]) -> list[tuple[float, bool]]:
    """Return the z-score and the verdict on each norm of a series."""
    baselines, found = Baselines(1), []
    for sample in series:
        zscore, spike = baselines.judge(ROW, np.array([sample]))
        found.append((float(zscore[0]), bool(spike[0])))
    return found


def verdicts(baseline: Baseline, series: Iterable[float]) -> list[bool]:
    """Return the verdict on each finite value of one quantity."""
    return [math.isfinite(sample) and baseline.is_spike(sample) for sample in series]


def by_definition(
    series: Iterable[float], *, log: bool = True, least: float = 0.1, factor: float = 3.0
) -> list[tuple[float, bool]]:
    """Return the same from a loop over medians."""
    past: deque[float] = deque(maxlen=128)
    found = []
    in_a_row = 0
    for sample in series:
        if not math.isfinite(sample) or (log and sample <= 0):
            found.append((math.nan, False))
            continue
        value = math.log(sample) if log else sample
        zscore, unusual, spike = math.nan, False, False
        if len(past) >= 20:
            middle = statistics.median(past)
            floor = least if log else max(0.01 * abs(middle), 1e-12)
            zscore = (value - middle) / max(1.4826 * statistics.median(abs(p - middle) for p in past), floor)
            loss = not log or factor == 1.0
            far = zscore > 6 or (not loss and value > max(past) + math.log(10))
            unusual = far and (not log or value - middle > math.log(factor))
            spike = unusual and (loss or value > max(middle + math.log(5), max(past) + math.log(2)))
        found.append((zscore, spike))
        in_a_row = in_a_row + 1 if unusual else 0
        if in_a_row == 32:
            past.clear()
            in_a_row = 0
        elif not unusual:
            past.append(value)
    return found


def assert_same(found: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    """Assert equal verdicts, and z-scores to nine digits."""
    assert [spike for _, spike in found] == [spike for _, spike in expected]
    assert [z for z, _ in found] == pytest.approx([z for z, _ in expected], rel=1e-9, abs=1e-9, nan_ok=True)


def noisy(length: int, seed: int, sigma: float = 0.4) -> list[float]:
    """Return log-normal values around 1."""
    return np.exp(np.random.default_rng(seed).normal(0.0, sigma, length)).tolist()


# Norms


@pytest.mark.parametrize(("sample", "spike"), [(4.9, False), (5.1, True), (1e-30, False)])
def test_a_spike_is_five_times_the_median(sample: float, spike: bool) -> None:
    """On a series that hardly moves, where 6 sigmas are a factor of 1.8, a spike begins at 5 times the median."""
    assert judged([*([1.0, 1.001] * 20), sample])[-1][1] is spike


@pytest.mark.parametrize(("sigmas", "spike"), [(4.0, False), (6.5, True), (-6.5, False)])
def test_a_spike_is_far_above_those_before(sigmas: float, spike: bool) -> None:
    """On a series that varies by factors, 5 times the median is nothing: a spike lies beyond 6 sigmas or ten times the largest."""
    logs = [math.log(sample) for sample in noisy(60, seed=2, sigma=1.0)]
    middle = statistics.median(logs)
    sigma = 1.4826 * statistics.median(abs(value - middle) for value in logs)
    found = judged([math.exp(value) for value in (*logs, middle + sigmas * sigma)])
    assert not any(spike for _, spike in found[:-1])
    assert found[-1] == (pytest.approx(sigmas, rel=1e-9), spike)


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
        assert_same(found[row], by_definition(alone[row]))
    assert sum(spike for row in found for _, spike in row) > 5


# Any values


@st.composite
def series(draw: st.DrawFn, usual: st.SearchStrategy[float], other: st.SearchStrategy[float]) -> list[float]:
    """Draw usual values, some of any kind, and perhaps many of one value."""
    usually = draw(st.lists(usual, min_size=18, max_size=24)) + draw(st.lists(usual | other, max_size=20))
    return usually + [draw(other)] * draw(st.sampled_from([0, 1, 31, 32, 33, 60]))


@pytest.mark.slow
@given(series(st.floats(0.5, 2), st.floats()))
def test_any_norms_are_judged_as_defined(norms: list[float]) -> None:
    """After any values verdicts are those of the loop, and no z-score is infinite."""
    expected = by_definition(norms)
    assume(all(math.isnan(z) or abs(z - 6) > 1e-6 * abs(z) for z, _ in expected))
    found = judged(norms)
    assert_same(found, expected)
    assert not any(math.isinf(z) for z, _ in found)


@pytest.mark.slow
@pytest.mark.parametrize("log", [True, False])
@given(st.data())
def test_any_quantity_is_judged_as_defined(log: bool, data: st.DataObject) -> None:
    """Verdicts on one quantity are those of the loop, whatever finite values come."""
    usual = st.floats(0.5, 2) if log else st.sampled_from([0.0, 1e150, -1e150, 1e-300]) | st.floats(-2, 2)
    values = data.draw(series(usual, st.floats(-1e300, 1e300)))
    if not log:
        values = [-1.0, *values]  # losses are judged as they are after one that is not positive
    expected = by_definition(values, log=log)
    assume(all(math.isnan(z) or abs(z - 6) > 1e-6 * abs(z) for z, _ in expected))
    assert verdicts(Baseline(loss=not log), values) == [spike for _, spike in expected]


# Losses


def spikes(losses: Iterable[float]) -> list[int]:
    """Return the places of the losses that are spikes."""
    return [place for place, spike in enumerate(verdicts(Baseline(loss=True), losses)) if spike]


@pytest.mark.slow
def test_losses_of_small_batches_are_not_spikes() -> None:
    """Losses that vary by factors leave a healthy run silent, though as they are many of them lie beyond 6 sigmas."""
    losses = np.random.default_rng(3).gamma(0.3, 1.0, 5000).tolist()
    assert sum(spike for _, spike in by_definition(losses, log=False)) > 20
    assert spikes(losses) == []


def test_a_positive_loss_is_judged_by_its_logarithm() -> None:
    """Of losses around 2.3 that vary by 5 %, one that is twice as high is a spike."""
    losses = np.random.default_rng(4).normal(2.3, 0.115, 600)
    losses[[19, 20, 100, 300, 301]] *= [2, 2, 2, 1.2, 2]
    expected = by_definition(losses.tolist(), least=0.01, factor=1.0)
    assert spikes(losses.tolist()) == [place for place, (_, spike) in enumerate(expected) if spike] == [20, 100, 301]


@pytest.mark.slow
def test_a_loss_that_may_be_negative_is_judged_as_is() -> None:
    """From a loss that is not positive until 128 more were positive, losses are judged without the logarithm."""
    generator = np.random.default_rng(5)
    losses = [*generator.normal(0.0, 1.0, 200), 50.0, *generator.lognormal(0.0, 2.0, 5000)]
    as_they_are = [place for place, (_, spike) in enumerate(by_definition(losses, log=False)) if spike]
    assert as_they_are[0] == 200
    last = max(place for place in range(201) if losses[place] <= 0)
    assert spikes(losses) == [place for place in as_they_are if place < last + 128]
    assert as_they_are[-1] > last + 128


def test_tails_are_no_spikes_and_explosions_are() -> None:
    """Norms with tails up to 4.5 times the median are silent; explosions, also those that rise slowly, are found."""
    generator = np.random.default_rng(3)
    norms = np.exp(generator.normal(0.0, 0.15, 8_000)) * np.where(generator.random(8_000) < 0.003, 3.0, 1.0)
    assert sum(spike for _, spike in judged(norms.tolist())) <= 2
    for factors in ([10.0], [10.0] * 5, [100.0], [10_000.0] * 5, [2.0, 4.0, 8.0, 16.0], [1.2**n for n in range(20)]):
        start = int(generator.integers(200, 7_900))
        exploding = [*norms[start - 200 : start], *norms[start : start + len(factors)] * np.array(factors)]
        assert any(spike for _, spike in judged(exploding)[200:]), factors
