"""The values and windows that a condition reads, compared with numpy over the same values."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from tests.support.acting import CPU, LOSS, METRICS, NORM, Rows, values
from torch_grad_exporter.actions.act.measurements import MOST_WINDOWS, ConditionError, Measurements

SAMPLE = "torch_grad_sample_step"


def fed(*moments: tuple[float, dict[str, float | Rows]]) -> Measurements:
    """Return measurements that saw these moments."""
    measurements = Measurements(METRICS)
    for at, numbers in moments:
        measurements.begin(values(numbers), at)
    return measurements


def test_windows_in_seconds_are_those_of_numpy() -> None:
    """Mean, largest and smallest value and increase over 10 s at uneven times are those of numpy in float64."""
    generator = random.Random(1)
    now, at, seen = Measurements(METRICS), 0.0, list[tuple[float, float]]()
    compared = 0
    for _ in range(200):
        at += generator.uniform(0.5, 2.0)
        seen.append((at, generator.gauss(0.0, 1.0)))
        now.begin(values({LOSS: seen[-1][1]}), at)
        found = [one(LOSS, seconds=10) for one in (now.mean, now.max, now.min, now.increase)]
        before = [value for then, value in seen if then <= at - 10]
        if not before:
            assert all(map(math.isnan, found))
            continue
        inside = np.array([value for then, value in seen if then > at - 10], dtype=np.float64)
        assert found == pytest.approx([inside.mean(), inside.max(), inside.min(), inside[-1] - before[-1]], rel=1e-12)
        compared += 1
    assert compared > 150


def test_windows_of_samples_are_full_at_their_number() -> None:
    """A window of three samples is NaN before the third, then that of the last three; a sample counts once."""
    now, means = Measurements(METRICS), []
    for step, norm in enumerate((1.0, 2.0, 6.0, 6.0, 10.0)):
        for _ in range(2):
            now.begin(values({NORM: norm, SAMPLE: float(step)}), float(step))
            found = now.mean(NORM, samples=3), now.increase(NORM, samples=3)
        means.append(found)
    assert all(map(math.isnan, (*means[0], *means[1], means[2][1])))
    assert (means[2][0], *means[3], *means[4]) == pytest.approx((3.0, 14 / 3, 5.0, 22 / 3, 8.0), rel=1e-12)


def test_numbers_that_are_not_finite_stay_so() -> None:
    """An infinite value makes the mean infinite, NaN makes all NaN, and the largest finite numbers do not overflow."""
    now = Measurements(METRICS)
    found = []
    for at, loss in enumerate((1e308, 1.7e308, math.inf, math.nan)):
        now.begin(values({LOSS: loss}), float(at))
        found.append([one(LOSS, samples=2) for one in (now.mean, now.max, now.min)])
    assert found[1] == [pytest.approx(1.35e308), 1.7e308, 1e308]
    assert found[2] == [math.inf, math.inf, 1.7e308]
    assert all(map(math.isnan, found[3]))


def test_labels_choose_a_series() -> None:
    """A series is chosen by its labels, and one that does not exist is NaN."""
    now = fed((0.0, {"torch_grad_norm": {("a",): 1.0, ("b",): 2.0}}))
    assert now.last("torch_grad_norm", layer="b") == 2.0
    assert math.isnan(now.last("torch_grad_norm", layer="c"))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda m: m.last("torch_grad_global_nrm"), "no metric 'torch_grad_global_nrm'; did you mean torch_grad_global_norm"),
        (lambda m: m.last("torch_grad_norm"), "2 series here; choose one by layer="),
        (lambda m: m.last("torch_grad_norm", lawyer="a"), "no label 'lawyer'; it has layer"),
        (lambda m: m.last("torch_grad_norm_distribution", layer="a"), "histogram"),
        (lambda m: m.mean(CPU), "one of both"),
        (lambda m: m.mean(CPU, seconds=0), "seconds=0"),
        (lambda m: m.mean(CPU, samples=1.5), "samples=1.5"),
        (lambda m: [m.mean(CPU, seconds=1 + n) for n in range(MOST_WINDOWS + 1)], "more than 1000 windows"),
    ],
)
def test_what_can_never_be_there_raises(ask: object, message: str) -> None:
    """A wrong question raises with what to ask instead."""
    now = fed((0.0, {CPU: 0.5, "torch_grad_norm": {("a",): 1.0, ("b",): 2.0}}))
    assert callable(ask)
    with pytest.raises(ConditionError, match=message):
        ask(now)


def test_what_was_read_is_known() -> None:
    """The values of this evaluation are known by the call that read them."""
    now = fed((0.0, {CPU: 0.5}))
    now.last(CPU)
    now.begin(values({CPU: 0.75, "torch_grad_norm": {("a",): 1.0}}), 1.0)
    now.last("torch_grad_norm", layer="a")
    now.mean(CPU, samples=1)
    assert now.read == {"last(torch_grad_norm, layer=a)": 1.0, f"mean({CPU}, samples=1)": 0.75}
