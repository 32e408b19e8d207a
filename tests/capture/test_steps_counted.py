"""Steps and backwards are exact whether rounds are sampled or only counted, and the training does not notice."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

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
    all_regimes,
    each_regime,
    outcomes,
    watching,
)
from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import key, lost, value, values
from tests.support.tools import eventually
from tests.support.torch_hooks import all_hooks


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
                time.sleep(0.001)
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


# Rounds that differ


@pytest.mark.slow
@each_regime
def test_a_longer_accumulation_skips_nothing(regime: str) -> None:
    """A loop that begins to add up two backwards to a step has skipped no step."""
    loop = Loop()
    with watching(loop.model, **REGIMES[regime]) as exporter:
        loop.warm_up(exporter, regime)
        short = loop.steps
        for _ in range(20):
            loop.accumulated(2)
        loop.go_on(regime, lambda: loop.accumulated(2))
        assert value(exporter, SKIPPED) == 0
        assert value(exporter, BACKWARDS) == short + 2 * (loop.steps - short)
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps


@pytest.mark.slow
@each_regime
def test_a_shorter_round_is_counted_as_it_is(regime: str) -> None:
    """An accumulation that ends early, at the end of an epoch, counts the backwards that it had."""
    loop = Loop()
    with watching(loop.model, **REGIMES[regime]) as exporter:
        loop.warm_up(exporter, regime, lambda: loop.accumulated(4))
        before = loop.steps
        loop.accumulated(2)
        loop.go_on(regime, lambda: loop.accumulated(4))
        assert value(exporter, BACKWARDS) == 4 * before + 2 + 4 * (loop.steps - before - 1)
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps
        assert value(exporter, SKIPPED) == 0


@pytest.mark.slow
def test_one_backward_more_now_and_then_skips_nothing() -> None:
    """A penalty that every 20th round adds, by a backward of its own, is part of that round."""
    loop = Loop(set_to_none=False)
    with watching(loop.model, **COUNTED) as exporter:
        loop.warm_up(exporter, "counted")
        for step in range(200):
            loop.accumulated(2 if step % 20 == 7 else 1)
        loop.go_on("counted")
        assert value(exporter, SKIPPED) == 0
        assert value(exporter, BACKWARDS) == loop.steps + 10


@pytest.mark.slow
@each_regime
def test_a_layer_in_two_checkpoints(regime: str) -> None:
    """A layer that two reentrant checkpoints share receives two gradients in each backward; no step is skipped."""

    class Shared(Perceptron):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            for _ in range(2):
                x = checkpoint(self.first, x, use_reentrant=True)
            return self.second(x)

    model = Shared(inputs=8)
    optimizer = sgd(model)
    steps = 20 if regime == "sampled" else 300
    with watching(model, **REGIMES[regime]) as exporter:
        for _ in range(steps):
            optimizer.zero_grad()
            model(batch(inputs=8)).square().mean().backward()
            optimizer.step()
        assert value(exporter, SKIPPED) == 0
        assert value(exporter, BACKWARDS) == value(exporter, STEPS, optimizer="SGD") == steps


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


@pytest.mark.slow
@each_regime
def test_close_counts_all_and_leaves_no_hook(regime: str) -> None:
    """`close`, from another thread and again, counts the steps so far and removes every hook."""
    loop = Loop()
    before = all_hooks(loop.model, loop.optimizer)
    with watching(loop.model, **REGIMES[regime]) as exporter:
        loop.warm_up(exporter, regime)
        thread = threading.Thread(target=exporter.close)
        thread.start()
        thread.join()
        exporter.close()
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps
        assert value(exporter, f"{DURATION}_count") == loop.steps - 1
    assert all_hooks(loop.model, loop.optimizer) == before


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


@pytest.mark.slow
@all_regimes
def test_training_is_unchanged(regime: str) -> None:
    """Losses and parameters of many clipped steps are the same in every bit with and without an exporter."""
    steps = 60 if regime == "sampled" else 300

    def trained(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        loop, losses = Loop(), []
        with watching(loop.model, **REGIMES[regime]) if watched else contextlib.nullcontext():
            for _ in range(steps):
                loop.optimizer.zero_grad()
                loss = loop.model(batch()).square().mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.05)
                loop.optimizer.step()
                losses.append(loss.detach())
        return [torch.stack(losses), *loop.model.parameters()]

    assert all(map(torch.equal, trained(watched=True), trained(watched=False)))
