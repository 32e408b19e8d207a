"""Durations of steps, the slowest step, phases and the exporter's own time, compared with clocks of the loop."""

from __future__ import annotations

import itertools
import time

import pytest

from tests.capture.scenes import (
    DURATION,
    REGIMES,
    Loop,
    each_regime,
    watching,
)
from tests.support.scrape import value
from torch_grad_exporter import Exporter

OVERHEAD = "torch_grad_exporter_overhead_seconds_total"
RATIO = "torch_grad_exporter_overhead_ratio"
STARTUP = "torch_grad_exporter_startup_overhead_ratio"
SLOWEST = "torch_train_slowest_step_seconds"
SLOW = 0.05
"""Seconds."""


class TimedLoop(Loop):
    """A loop that notes the time before and after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: list[tuple[float, float]] = []

    def step(self, *, pause: float = 0.0) -> None:  # type: ignore[override]
        """Train once; `pause`: wait before the optimizer's step."""
        self.backward()
        time.sleep(pause)
        before = time.perf_counter()
        self.optimizer.step()
        self.moments.append((before, time.perf_counter()))
        self.steps += 1

    def is_slowest(self, seconds: float | None) -> bool:
        """Return whether that may be the longest of the last 128 times from step to step."""
        times = [(now[0] - then[1], now[1] - then[0]) for then, now in itertools.pairwise(self.moments)][-128:]
        least, most = (max(bounds) for bounds in zip(*times, strict=True))
        return seconds is not None and least <= seconds <= most

    def durations_are_right(self, exporter: Exporter) -> bool:
        """Return whether there is a duration for each two steps, and their sum is the time between the first and the last."""
        first, last = self.moments[0], self.moments[-1]
        total = value(exporter, f"{DURATION}_sum") or 0.0
        return value(exporter, f"{DURATION}_count") == self.steps - 1 and last[0] - first[1] <= total <= last[1] - first[0]


@pytest.mark.slow
@pytest.mark.parametrize(("regime", "after"), [("sampled", 128), ("counted", 127), ("counted", 128)])
def test_durations_go_from_step_to_step(regime: str, after: int) -> None:
    """Durations add up to the time of the loop, and a step of 0.3 s is the slowest of the 128 from it on, and not after that."""
    loop = TimedLoop()
    with watching(loop.model, **REGIMES[regime]) as exporter:
        loop.warm_up(exporter, regime)
        loop.step(pause=0.3)
        for _ in range(after):
            loop.step()
        exporter.close()
        assert loop.is_slowest(value(exporter, SLOWEST))
        assert loop.durations_are_right(exporter)


class Slow(float):
    """A number whose conversion takes 50 ms."""

    def __float__(self) -> float:
        time.sleep(SLOW)
        return 1.0


@pytest.mark.slow
@each_regime
def test_slow_observations_are_overhead_once(regime: str) -> None:
    """Calls of `observe` that take 50 ms each are in the overhead, all of them and each once."""
    loop = Loop()
    with watching(loop.model, **REGIMES[regime]) as exporter:
        loop.warm_up(exporter, regime)
        before, start = value(exporter, OVERHEAD), time.perf_counter()
        for _ in range(5):
            exporter.observe(loss=Slow(1.0))
            for _ in range(7):
                loop.step()
        loop.go_on(regime)
        overhead, elapsed = value(exporter, OVERHEAD) - before, time.perf_counter() - start
        assert 5 * SLOW <= overhead < elapsed  # twice would be more than all the time that there was


@pytest.mark.slow
def test_the_first_samples_are_paid_back() -> None:
    """What the first samples took is a part of the overhead until all of it together is within the budget."""
    loop = TimedLoop()
    with watching(loop.model, every="auto", overhead_budget=0.1) as exporter:
        for _ in range(4):
            loop.step()
        assert 0 < value(exporter, STARTUP) <= value(exporter, RATIO)
        while value(exporter, STARTUP) != 0:
            loop.step(pause=0.01)
        assert 0 < value(exporter, RATIO) <= 0.1
