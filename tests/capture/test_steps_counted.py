"""Steps and backwards are exact whether rounds are sampled or only counted, and the training does not notice."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

from tests.capture.scenes import (
    BACKWARDS,
    CAPTURES,
    COUNTED,
    DURATION,
    REGIMES,
    SAMPLES,
    SKIPPED,
    STATE,
    STEPS,
    Loop,
    each_regime,
    watching,
)
from tests.support.models import batch
from tests.support.scrape import key, lost, outcomes, value, values
from tests.support.tools import eventually


@pytest.mark.slow
@pytest.mark.parametrize(("regime", "backwards"), [("sampled", 3), ("counted", 1), ("counted", 3)])
def test_counts_are_exact(regime: str, backwards: int) -> None:
    """Each scrape shows the steps, backwards and durations of the loop so far, and one round of each interval is sampled."""
    loop = Loop()
    every = 1 if regime == "sampled" else 64
    with watching(loop.model, every=every, overhead_budget=0.0001) as exporter:
        while loop.steps < (40 if regime == "sampled" else 256):
            loop.accumulated(backwards)
            if loop.steps < 20 or loop.steps > 192:
                shown = values(exporter)
                assert shown[key(STEPS, optimizer="SGD")] == loop.steps
                assert shown[key(BACKWARDS)] == backwards * loop.steps
                assert shown[key(f"{DURATION}_count")] == loop.steps - 1
                assert shown[key(SKIPPED)] == 0
        assert value(exporter, CAPTURES) == loop.steps / every
        assert lost(exporter) == {}
        assert outcomes(exporter) == {}
        if every == 1:
            assert value(exporter, SAMPLES) == 5 * backwards * loop.steps


@pytest.mark.slow
def test_counts_are_exact_where_the_budget_pays() -> None:
    """Where steps are so long that the budget pays for all hooks, the counts of a long run are exact, too."""
    loop = Loop()
    with watching(loop.model, every=512, overhead_budget=0.9) as exporter:
        for steps, skipped in ((700, 0), (90, 3)):
            for _ in range(skipped):
                loop.backward()
            for _ in range(steps):
                loop.step()
            assert value(exporter, STEPS, optimizer="SGD") == loop.steps
            assert value(exporter, BACKWARDS) == loop.steps + skipped
            assert value(exporter, f"{DURATION}_count") == loop.steps - 1
            assert value(exporter, SKIPPED) == skipped


@pytest.mark.slow
def test_examples_of_counted_rounds_are_estimated() -> None:
    """With a short last batch in each epoch the examples of counted rounds are right within 10 %."""
    loop, examples = Loop(), 0
    with watching(loop.model, every=128, overhead_budget=0.0001) as exporter:
        for step in range(700):
            size = 1 if step % 20 == 19 else 20
            loop.step(size)
            examples += size
        assert value(exporter, SAMPLES) == pytest.approx(examples, rel=0.1)


@pytest.mark.slow
def test_the_budget_does_not_choose_the_rounds() -> None:
    """The same rounds are sampled whether the others are only counted or not, also after skipped steps."""

    def sampled(budget: float) -> list[int]:
        loop, captures = Loop(), [1.0]
        with watching(loop.model, every=8, overhead_budget=budget) as exporter:
            for step in range(120):
                if step == 60:
                    loop.backward()
                    loop.backward()
                loop.step()
                captures.append((value(exporter, CAPTURES) or 0) if step % 60 > 20 else captures[-1])
        return [step for step in range(120) if step % 60 > 21 and captures[step + 1] > captures[step]]

    expected = sampled(0.9)
    assert len(expected) > 7
    assert sampled(0.0001) == expected


@pytest.mark.slow
def test_a_pause_and_an_evaluation() -> None:
    """When no step has come for a while an evaluation shows, and a step that was skipped before is counted."""
    loop = Loop()
    with watching(loop.model, **COUNTED) as exporter:
        loop.until_counted(exporter)
        loop.backward()
        loop.model.eval()

        def is_evaluating() -> bool:
            with torch.no_grad():
                loop.model(batch())
            return value(exporter, STATE, state="evaluating") == 1

        assert eventually(is_evaluating)
        loop.model.train()
        for _ in range(3):
            loop.step()
        assert value(exporter, STATE, state="training") == 1
        assert value(exporter, SKIPPED) == 1
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps


@pytest.mark.process
@each_regime
def test_a_forked_child_can_train(regime: str) -> None:
    """A child of `fork` trains on, and the parent counts only its own steps."""
    loop = Loop()
    with watching(loop.model, **REGIMES[regime]) as exporter:
        loop.warm_up(exporter, regime)
        child = os.fork()
        if not child:
            code = 1
            with contextlib.suppress(BaseException):
                loop.go_on(regime)
                code = 0
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        loop.go_on(regime)
        assert value(exporter, STEPS, optimizer="SGD") == value(exporter, BACKWARDS) == loop.steps
