"""A step that is skipped right before the end is a skipped step, as any other."""

from __future__ import annotations

import pytest

from tests.capture.recorded_loop import RecordedLoop
from tests.capture.scenes import BACKWARDS, REGIMES, all_regimes, watching
from tests.support.scrape import value


@pytest.mark.slow
@all_regimes
@pytest.mark.parametrize("skipped", [0, 1, 3])
@pytest.mark.parametrize("clears", [True, False])
def test_skipped_steps_before_the_end(skipped: int, clears: bool, regime: str) -> None:
    """After `close()` the skipped steps at the end are counted, whether the last gradients were cleared or not."""
    loop = RecordedLoop()
    with watching(loop.model, **REGIMES[regime]) as exporter:
        loop.warm_up(exporter, regime)
        for _ in range(skipped):
            loop.backward()
            loop.skipped += 1
        if clears:
            loop.optimizer.zero_grad()
    loop.check_counts(exporter)
    assert value(exporter, BACKWARDS) == loop.steps + skipped
