"""Rounds that are only counted: what they cost, what ends them, and norms that are observed in them, seen from outside.

That a round is only counted shows in a scrape: its phases are not timed.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.loops import PlainLoop
from tests.support.models import Perceptron, sgd
from tests.support.scrape import errors, key, value, values
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.capture.count_only import budget, counting

BACKWARDS = "torch_train_backward_passes_total"
CAPTURES = "torch_grad_exporter_captures_total"
DURATION = "torch_train_step_duration_seconds"
NONFINITE = "torch_grad_nonfinite_steps_total"
OVERHEAD = "torch_grad_exporter_overhead_seconds_total"
PHASE = "torch_train_phase_seconds_total"
SAMPLES = "torch_train_samples_total"
SKIPPED = "torch_train_skipped_steps_total"
STEPS = "torch_train_steps_total"

SLOW = 0.1
"""Seconds."""


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting ends by rounds and not by time, however busy the machine."""
    torch.manual_seed(0)
    for module in (budget, counting):
        monkeypatch.setattr(module, "COUNTING_SECONDS", 3600.0)


@contextlib.contextmanager
def watching(model: torch.nn.Module, **options: object) -> Iterator[Exporter]:
    """An exporter whose budget is so small that nearly all rounds are only counted."""
    off = dict.fromkeys(("cuda_memory", "gpu", "process", "host", "container", "whole_run"), False)  # scrapes are many here
    with start_exporter(model, port=None, **{"every": 128, "overhead_budget": 0.0001, "collectors": off, **options}) as exporter:
        yield exporter
        assert not errors(exporter)


class Loop(PlainLoop):
    """A plain loop: `step` trains once."""

    def is_counted(self, exporter: Exporter, one: Callable[[], None] | None = None) -> bool:
        """Trains once; whether that round was only counted, as its backward was not timed."""
        before = value(exporter, PHASE, phase="backward")
        (one or self.step)()
        return before is not None and value(exporter, PHASE, phase="backward") == before

    def until_counted(self, exporter: Exporter, one: Callable[[], None] | None = None) -> None:
        """Trains until a round was only counted, and so was the one after it."""
        for _ in range(200):
            for _ in range(4):
                (one or self.step)()
            if self.is_counted(exporter, one) and self.is_counted(exporter, one):
                return
        pytest.fail("no round was only counted")

    def is_ever_counted(self, exporter: Exporter, rounds: int) -> bool:
        """Trains for so many rounds; whether of each five the last one was only counted. In a row there are always more."""
        counted = False
        for _ in range(rounds // 5):
            for _ in range(4):
                self.step()
            counted |= self.is_counted(exporter)
        return counted


class Slow(float):
    """A number whose conversion takes 100 ms."""

    def __float__(self) -> float:
        time.sleep(SLOW)
        return 1.0


def test_what_is_observed_in_counted_rounds_is_counted_once() -> None:
    """Calls of `observe` that take 100 ms each are in the overhead, all of them and each once, wherever a round is counted."""
    loop = Loop()
    with watching(loop.model) as exporter:
        loop.until_counted(exporter)
        before, start = value(exporter, OVERHEAD), time.perf_counter()
        for _ in range(8):
            exporter.observe(loss=Slow(1.0))
            for _ in range(7):
                loop.step()
        for _ in range(200):  # whatever was counted has come to its end
            loop.step()
        overhead, elapsed = value(exporter, OVERHEAD) - before, time.perf_counter() - start
        assert overhead >= 8 * SLOW
        assert overhead < elapsed  # twice would be more than all the time that there was


@pytest.mark.parametrize("surprise", ["skipped", "longer", "longer twice"])
def test_after_a_surprise_rounds_are_followed_for_a_while(surprise: str) -> None:
    """After a skipped step, and after a round with more backwards than the others, the next 250 rounds are all timed."""
    loop = Loop()
    with watching(loop.model) as exporter:
        loop.until_counted(exporter)
        loop.backward()
        if surprise != "skipped":
            loop.add()
            loop.optimizer.step()
            loop.steps += 1
        if surprise == "longer twice":
            loop.step()
        loop.step()
        loop.step()
        assert value(exporter, SKIPPED) == (surprise == "skipped")
        assert not loop.is_ever_counted(exporter, 245)
        loop.until_counted(exporter)
        assert value(exporter, SKIPPED) == (surprise == "skipped")
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps
        assert value(exporter, BACKWARDS) == loop.steps + 1
        assert value(exporter, SAMPLES) == 5 * value(exporter, BACKWARDS)


def test_a_surprise_while_rounds_are_followed_makes_it_longer() -> None:
    """A step that is skipped 200 rounds after another surprise keeps the next 250 rounds from being only counted."""
    loop = Loop()
    with watching(loop.model) as exporter:
        loop.until_counted(exporter)
        loop.backward()
        loop.add()
        loop.optimizer.step()
        loop.steps += 1
        assert not loop.is_ever_counted(exporter, 200)
        loop.backward()
        loop.step()
        loop.step()
        assert not loop.is_ever_counted(exporter, 245)
        loop.until_counted(exporter)
        assert value(exporter, SKIPPED) == 1
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps


def test_a_skipped_step_in_a_counted_round_asks_for_one_sample() -> None:
    """After a step that was skipped while rounds were only counted one of the next rounds is sampled, and no more of them."""
    loop = Loop()
    with watching(loop.model, every=4096) as exporter:
        loop.until_counted(exporter)
        assert value(exporter, CAPTURES) == 1
        loop.backward()
        for _ in range(60):
            loop.step()
        assert value(exporter, CAPTURES) == 2
        assert value(exporter, SKIPPED) == 1


def test_the_same_rounds_are_sampled_as_if_all_were_followed() -> None:
    """Which rounds are sampled does not change with how many are only counted, also after steps that were skipped."""

    def sampled(budget: float) -> list[int]:
        loop, captures = Loop(), [1.0]
        with watching(loop.model, every=16, overhead_budget=budget) as exporter:
            for one in range(600):
                if one == 300:
                    loop.backward()
                    loop.backward()
                loop.step()
                captures.append((value(exporter, CAPTURES) or 0) if one % 300 > 30 else captures[-1])
        return [one for one in range(600) if one % 300 > 31 and captures[one + 1] > captures[one]]

    followed = sampled(0.9)
    assert len(followed) > 25
    assert sampled(0.0001) == followed


def test_a_round_that_is_interrupted_goes_on() -> None:
    """With two backwards to a step, another model's optimizer steps between them while rounds are only counted: none is skipped."""
    loop = Loop()
    other = sgd(Perceptron())

    def one(*, interrupted: bool = False) -> None:
        loop.backward()
        if interrupted:
            other.step()
        loop.add()
        loop.optimizer.step()
        loop.steps += 1

    with watching(loop.model) as exporter:
        for _ in range(3):
            loop.until_counted(exporter, one)
            one(interrupted=True)
            one()
            assert value(exporter, SKIPPED) == 0
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps
        assert value(exporter, BACKWARDS) == 2 * loop.steps


def test_durations_add_up_to_the_time_that_there_was() -> None:
    """Of 500 steps, most of them only counted, there are 499 durations, which together are no longer than the whole loop."""
    loop, start = Loop(), time.perf_counter()
    with watching(loop.model) as exporter:
        for _ in range(500):
            loop.step()
        exporter.close()
        elapsed = time.perf_counter() - start
        assert value(exporter, "torch_grad_exporter_timing_interval_steps") > 2
        assert value(exporter, f"{DURATION}_count") == 499
        assert value(exporter, f"{DURATION}_sum") <= elapsed
        assert value(exporter, "torch_train_slowest_step_seconds") <= elapsed / 2


def test_where_each_round_is_interrupted_counting_is_not_tried_in_each() -> None:
    """With a call of `step` after each step no round can be only counted: the model's hooks do not come and go all the time."""
    loop = Loop()
    with watching(loop.model) as exporter:
        for _ in range(200):
            loop.step()
        gone = 0
        for _ in range(400):
            loop.step()
            gone += not loop.model._forward_pre_hooks
            exporter.step()
        assert gone <= 4
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps


@pytest.mark.parametrize("every", [4096, 128])
@pytest.mark.parametrize("when", ["before the step", "after the step"])
def test_a_nan_norm_observed_in_each_round_is_counted_once(when: str, every: int) -> None:
    """With NaN gradients and their norm observed in each of 1000 rounds, wherever rounds begin and end to be only counted."""
    loop = Loop()
    with watching(loop.model, every=every) as exporter:

        def one() -> None:
            loop.backward()
            norm = torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
            if when == "before the step":
                exporter.observe(grad_norm=norm)
            loop.optimizer.step()
            if when == "after the step":
                exporter.observe(grad_norm=norm)
            loop.steps += 1

        loop.until_counted(exporter, one)
        with torch.no_grad():
            loop.model.second.weight.fill_(math.nan)
        begun = loop.steps
        for _ in range(1000):
            one()
            if loop.steps % 50 == 0:
                shown = value(exporter, NONFINITE, outcome="stepped")
                assert loop.steps - begun - shown in ((0, 1) if when == "before the step" else (0,))
        assert value(exporter, NONFINITE, outcome="skipped") == value(exporter, NONFINITE, outcome="unknown") == 0
    assert value(exporter, NONFINITE, outcome="stepped") == 1000


@pytest.mark.parametrize("skips", [True, False])
def test_a_nan_norm_waits_while_another_optimizer_steps(skips: bool) -> None:
    """An optimizer of another model steps between the observed norm and the step: the outcome is that of its own round."""
    loop = Loop()
    other = sgd(Perceptron())
    with watching(loop.model, every=4096) as exporter:
        for times in range(1, 4):
            loop.until_counted(exporter)
            loop.backward()
            exporter.observe(grad_norm=math.nan)
            other.step()
            if not skips:
                loop.optimizer.step()
                loop.steps += 1
            for _ in range(3):
                loop.step()
            while loop.is_counted(exporter):  # what is told last when counting ends
                other.step()
            assert value(exporter, NONFINITE, outcome="skipped") == (times if skips else 0)
            assert value(exporter, NONFINITE, outcome="stepped") == (0 if skips else times)
            assert value(exporter, NONFINITE, outcome="unknown") == 0
        assert value(exporter, SKIPPED) == (3 if skips else 0)
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps


def test_an_optimizer_of_another_model_does_not_end_the_counting() -> None:
    """Rounds are only counted though another model's optimizer steps in each of them, and its steps are none of ours."""
    loop, other = Loop(), sgd(Perceptron())

    def both() -> None:
        loop.step()
        other.step()

    with watching(loop.model, every=4096) as exporter:
        loop.until_counted(exporter, both)
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps
        assert value(exporter, SKIPPED) == 0


def test_a_nan_norm_after_a_step_is_not_that_of_the_skipped_one_after_it() -> None:
    """A NaN observed after a counted round's step has that step's outcome, though the next step is skipped."""
    loop = Loop()
    with watching(loop.model, every=4096) as exporter:
        loop.until_counted(exporter)
        loop.step()
        exporter.observe(grad_norm=math.nan)
        loop.backward()
        for _ in range(3):
            loop.step()
        assert value(exporter, NONFINITE, outcome="stepped") == 1
        assert value(exporter, NONFINITE, outcome="skipped") == value(exporter, NONFINITE, outcome="unknown") == 0
        assert value(exporter, SKIPPED) == 1


def test_counts_are_exact_at_every_border() -> None:
    """At each of 200 rounds, only counted or followed, steps, backwards and examples are those of the loop."""
    loop = Loop()
    with watching(loop.model) as exporter:
        loop.until_counted(exporter)
        for _ in range(200):
            loop.step()
            shown = values(exporter)
            assert shown[key(STEPS, optimizer="SGD")] == shown[key(BACKWARDS)] == loop.steps
            assert shown[key(SAMPLES)] == 5 * loop.steps
            assert shown[key(SKIPPED)] == 0
