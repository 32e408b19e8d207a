"""Which copy a Rollback goes back to, when, and how often, by the numbers of a run that a test chooses."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import pytest
import torch

from tests.support.acting import World
from torch_grad_exporter.actions import Rollback

SAMPLE, NONFINITE = "torch_grad_sample_step", "torch_grad_nonfinite_steps_total"
COUNTS = {"losses": "torch_train_loss_nonfinite_total", "spikes": "torch_train_loss_spikes_total"}
NORMS = "torch_grad_global_norm_spikes_total"


class Run(World):
    """A training whose only parameter is the number of its step, and that is judged after each step."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(()))
        super().__init__(model=torch.nn.ParameterList([self.weight]))
        self.counts = dict.fromkeys((NONFINITE, NORMS, *COUNTS.values()), 0.0)

    def train(self, *grown: str, sample: int | None = None) -> float:
        """Train a step, after which these counters have grown; return what the parameter was, and is judged."""
        self.weight.data.fill_(self.step + 1)
        self.step += 1
        self.runner.reported()
        for name in grown:
            self.counts[name] += 1
        rows = {name: {("AdamW", "stepped") if name == NONFINITE else ("AdamW",) if name == NORMS else (): count}
                for name, count in self.counts.items()}  # fmt: skip
        at = float(self.step)
        self.evaluate(at, **{**rows, SAMPLE: {("AdamW",): float(self.step if sample is None else sample)}})
        return self.weight.item()

    def until(self, step: int) -> None:
        """Train up to a step, all of them well."""
        while self.step < step:
            self.train()


@pytest.fixture(name="run")
def _run() -> Iterator[Run]:
    run = Run()
    yield run
    run.act.close()


# A copy is made each ten steps. It is good once the run was well for five.
@pytest.mark.parametrize(("fault", "expected"), [(16, 10), (19, 10), (20, 10), (21, 10), (25, 10), (26, 20), (29, 20)])
def test_it_is_the_latest_good_copy(run: Run, fault: int, expected: int) -> None:
    """It is the latest copy after which the run was well for half of `every` steps, none from after or right before the fault."""
    run.on(Rollback(every=10), None)
    run.until(fault - 1)
    run.train(NONFINITE)
    run.train()
    assert run.weight == expected
    assert run.rollbacks.done["nonfinite_gradients"] == 1
    assert (run.rollbacks.step, run.rollbacks.lost_steps) == (expected, fault + 1 - expected)


def test_a_late_sample_proves_no_copy(run: Run) -> None:
    """A copy of a later step than the last sample is not gone back to, whatever has been judged since."""
    run.on(Rollback(every=10), None)
    run.until(16)
    for _ in range(14):
        run.train(sample=16)
    run.train(NONFINITE)
    run.train()
    assert run.weight == 10


@pytest.mark.parametrize("name", [NORMS, *COUNTS.values()])
@pytest.mark.parametrize(("apart", "goes"), [(2, True), (3, False)])
def test_three_signs_are_needed(run: Run, name: str, apart: int, goes: bool) -> None:
    """Three spikes or losses that are not finite count if they come within half of `every` steps."""
    run.on(Rollback(every=10), None)
    run.until(27)
    for _ in range(3):
        run.train(name)
        for _ in range(apart - 1):
            run.train()
    run.train()
    assert sum(run.rollbacks.done.values()) == goes
    assert (run.rollbacks.step == 20) == goes


def test_a_copy_between_signs_is_not_used(run: Run) -> None:
    """A copy made after the first of three spikes is not gone back to."""
    run.on(Rollback(every=10), None)
    run.until(28)
    for grown in (NORMS, "", NORMS, "", NORMS):  # the copy of step 30 is between them
        run.train(*filter(None, (grown,)))
    run.train()
    assert run.weight == 20


def test_an_earlier_copy_is_better_than_none(run: Run) -> None:
    """If no copy is good any more, it is the latest from before the first sign."""
    run.on(Rollback(every=10), None)
    run.until(13)
    run.train(NONFINITE)
    run.train()
    assert run.weight == 10


def test_without_a_copy_nothing_happens(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Before the first copy a fault is said once, and the training goes on."""
    run.on(Rollback(every=10), None)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            run.train(NONFINITE)
        run.until(25)
    assert run.weight == 25
    assert caplog.text.count("all copies are from after it; every=10 may be too small") == 1
    assert not any(run.errors.counts().values())


def test_a_given_cause_acts_when_it_begins(run: Run) -> None:
    """A condition that goes on holding takes the training back once, and again only after it has ceased to hold."""
    bad = False
    run.on(lambda m: bad, Rollback(every=10), cooldown=0)
    run.until(28)
    bad = True
    run.train()
    assert run.train() == 20
    for step in range(31, 45):
        assert run.train() == step
    bad = False
    run.train()
    bad = True
    run.train()
    assert run.train() < 46
    assert run.rollbacks.done == {"condition": 2}


def test_it_gives_up_without_progress(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """After `most` times to the same copy the loop is asked to end, and nothing goes back any more."""
    run.on(Rollback(every=10, most=2), None)
    run.until(18)
    for _ in range(20):
        run.train()
        run.train(NONFINITE)
    assert run.stopped
    assert run.rollbacks.done["nonfinite_gradients"] == 2
    assert "after going back 2 times to the same step: should_stop is true" in caplog.text


def test_progress_begins_the_count_again(run: Run) -> None:
    """A run that gets further each time goes back as often as it takes."""
    run.on(Rollback(every=10, most=1), None)
    for fault in itertools.accumulate([37, *[40] * 5]):
        run.until(fault)
        run.train(NONFINITE)
        assert run.train() < fault
    assert run.rollbacks.done["nonfinite_gradients"] == 6
    assert not run.stopped


def test_another_copy_begins_the_count_again(run: Run) -> None:
    """Going back to an older copy does not count for a later one."""
    run.on(Rollback(every=10, most=2), None)
    for well in (18, 38, 1):  # to the copy of step 10, then twice to a later one
        run.until(max(well, run.step + 1))
        run.train(NONFINITE)
        run.train()
    assert run.rollbacks.done["nonfinite_gradients"] == 3
    assert not run.stopped
    run.train()
    run.train(NONFINITE)
    run.train()
    assert run.stopped


def test_late_news_of_the_fault_do_not_count(run: Run) -> None:
    """What was measured before going back, and is known only afterwards, does not make it go back again."""
    action = Rollback(every=10)
    run.on(action, None)
    run.until(27)
    run.train(NONFINITE)
    run.step += 1
    run.runner.reported()
    assert run.rollbacks.step == 20
    assert action.choose(None, ()) is None  # an evaluation may have begun before
    for _ in range(3):
        run.train(NONFINITE, NORMS, sample=29)
    run.until(40)
    assert run.rollbacks.done == {"nonfinite_gradients": 1, "nonfinite_loss": 0, "loss_spikes": 0, "norm_spikes": 0}


def test_copies_are_forgotten_at_the_end(run: Run) -> None:
    """After `remove` nothing is copied, and the action can be used again with copies of its own."""
    action = Rollback(every=10)
    handle = run.on(action, None)
    run.until(18)
    handle.remove()
    run.until(30)
    assert run.rollbacks.copies == 1
    run.on(action, None)
    run.until(31)
    run.train(NONFINITE)
    run.train()
    assert run.weight == run.step
