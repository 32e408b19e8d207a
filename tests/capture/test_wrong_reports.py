"""Reports with wrong arguments of what a loop reports: counted as errors, and the training is sampled as before."""

from __future__ import annotations

from typing import Any

import pytest

from tests.capture.recorded_loop import RecordedLoop
from tests.capture.scenes import CAPTURES, COUNTED, REGIMES, all_regimes
from tests.support.scrape import OFF, errors, lost, value
from torch_grad_exporter import start_exporter

ROUNDS = 30


@pytest.mark.slow
@all_regimes
@pytest.mark.parametrize("number", ["abc", "7", [1], float("nan")])
def test_a_step_with_a_wrong_number(number: Any, regime: str) -> None:  # noqa: ANN401 - it is to be anything
    """Each call counts as an error, also before the first step, no step is added, and the loop is followed as before."""
    loop = RecordedLoop()
    with start_exporter(loop.model, port=None, collectors=OFF, **REGIMES[regime]) as exporter:
        exporter.step(number)
        loop.warm_up(exporter, regime)
        for _ in range(ROUNDS):
            loop.step()
            exporter.step(number)
        loop.go_on(regime)
        loop.check(exporter)
        assert errors(exporter).keys() == {"observe"}
        if regime == "sampled":
            assert lost(exporter) == {}
            assert value(exporter, CAPTURES) == loop.steps


@pytest.mark.slow
def test_it_costs_no_counted_round() -> None:
    """Rounds that were only counted are only counted afterwards."""
    loop = RecordedLoop()
    with start_exporter(loop.model, port=None, collectors=OFF, **COUNTED) as exporter:
        loop.until_counted(exporter)
        exporter.step("abc")  # type: ignore[arg-type]
        loop.until_counted(exporter)
        loop.go_on("counted")
        loop.check(exporter)
