"""Rounds that are only counted: what is still exact, what ends the counting, and that the loop never notices."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.utils.checkpoint
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tests.support.loops import PlainLoop
from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import errors, lost, value
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.capture.count_only import counting as count_only
from torch_grad_exporter.capture.count_only.budget import CountingBudget

NONFINITE = "torch_grad_nonfinite_steps_total"
STEPS = "torch_train_steps_total"
BACKWARDS = "torch_train_backward_passes_total"
SKIPPED = "torch_train_skipped_steps_total"
SAMPLES = "torch_train_samples_total"
DURATIONS = "torch_train_step_duration_seconds_count"
CAPTURES = "torch_grad_exporter_captures_total"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@contextlib.contextmanager
def watching(model: torch.nn.Module, **options: object) -> Iterator[Exporter]:
    """An exporter whose budget is so small that nearly all rounds are only counted."""
    with start_exporter(model, port=None, **{"every": 128, "overhead_budget": 0.0001, **options}) as exporter:
        yield exporter
        assert not errors(exporter)


class Loop(PlainLoop):
    """A plain loop: `step` trains once; `rest` trains on until rounds are only counted."""

    def rest(self, exporter: Exporter, rounds: int = 3, one: Callable[[], None] | None = None) -> None:
        """Trains until at least so many rounds in a row were only counted, and more will be."""
        for _ in range(1000):
            (one or self.step)()
            counting = exporter._training.capture._count_only._counting
            if counting is not None and len(counting.moments) >= rounds:
                return
        pytest.fail("no round was only counted")


def resting(exporter: Exporter) -> bool:
    """Whether rounds are only counted now."""
    return exporter._training.capture._count_only._counting is not None


def test_steps_backwards_durations_and_samples_are_exact() -> None:
    """Over a thousand short steps nearly all are only counted, and every count is that of the loop."""
    loop = Loop()
    with watching(loop.model) as exporter:
        for _ in range(1000):
            loop.step()
            if loop.steps % 100 == 0:
                assert value(exporter, STEPS, optimizer="SGD") == loop.steps
                assert value(exporter, BACKWARDS) == loop.steps
                assert value(exporter, SAMPLES) == 5 * loop.steps
                assert value(exporter, DURATIONS) == loop.steps - 1
        assert value(exporter, "torch_grad_exporter_timing_interval_steps") > 20
        loop.rest(exporter)
        assert resting(exporter)
        assert value(exporter, DURATIONS) == loop.steps - 1
        exporter._training.capture._count_only.settle()
        assert value(exporter, DURATIONS) == loop.steps - 1
        elapsed = value(exporter, "torch_train_step_duration_seconds_sum")
        assert sum(value(exporter, "torch_train_phase_seconds_total", phase=p) for p in ("forward", "backward")) < 0.2 * elapsed


def test_the_rounds_that_are_sampled_are_the_same_ones() -> None:
    """Counting ends before a round that is to be sampled: one of each interval is, as without them."""
    loop = Loop()
    with watching(loop.model, every=50) as exporter:
        for _ in range(1000):
            loop.step()
        assert value(exporter, CAPTURES) == 20
        assert lost(exporter) == {}


def test_hooks_rest_in_counted_rounds() -> None:
    """In counted rounds the model's forward has no hook of ours and the optimizer's step one that counts; then all are back."""
    loop = Loop()
    with watching(loop.model) as exporter:
        before = list(loop.model._forward_pre_hooks.values()), list(_global_optimizer_post_hooks.values())
        loop.rest(exporter)
        assert not loop.model._forward_pre_hooks
        assert not loop.model._forward_hooks
        exporter._training.capture._count_only.settle()
        assert (list(loop.model._forward_pre_hooks.values()), list(_global_optimizer_post_hooks.values())) == before


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_skipped_step_is_seen(set_to_none: bool) -> None:
    """A backward that no step followed is counted as skipped, also when several come in a row; the next round is sampled."""
    loop = Loop()
    with watching(loop.model) as exporter:
        loop.rest(exporter, one=lambda: loop.step(set_to_none=set_to_none))
        captures = value(exporter, CAPTURES)
        for _ in range(3):
            loop.backward(set_to_none=set_to_none)
        for _ in range(2):
            loop.step(set_to_none=set_to_none)
        assert value(exporter, SKIPPED) == 3
        assert value(exporter, CAPTURES) == captures + 1
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps
        assert value(exporter, BACKWARDS) == loop.steps + 3


def test_a_longer_accumulation_is_no_skipped_step() -> None:
    """Where a loop begins to add up two backwards to a step, nothing is called skipped, and all backwards are counted."""
    loop = Loop()

    def accumulated() -> None:
        loop.backward()
        loop.add()
        loop.optimizer.step()
        loop.steps += 1

    with watching(loop.model) as exporter:
        loop.rest(exporter)
        short = loop.steps
        for _ in range(20):
            accumulated()
        loop.rest(exporter, one=accumulated)
        assert value(exporter, SKIPPED) == 0
        assert value(exporter, BACKWARDS) == short + 2 * (loop.steps - short)
        assert value(exporter, SAMPLES) == 5 * value(exporter, BACKWARDS)
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps


@pytest.mark.parametrize("step_first", [True, False])
@pytest.mark.parametrize("skips", [True, False])
def test_an_observed_norm_has_the_outcome_of_its_own_step(step_first: bool, skips: bool) -> None:
    """A NaN given by `observe(grad_norm=)` in counted rounds has the outcome of its round, observed before or after the step."""
    loop = Loop()

    def observed(norm: float = 1.0, *, skip: bool = False) -> None:
        loop.backward()
        if step_first and not skip:
            loop.optimizer.step()
        exporter.observe(grad_norm=norm)
        if not step_first and not skip:
            loop.optimizer.step()
        loop.steps += not skip

    with watching(loop.model) as exporter:
        loop.rest(exporter, one=observed)
        observed(math.nan, skip=skips)
        for _ in range(4):
            observed()
        exporter._training.capture._count_only.settle()
        assert value(exporter, NONFINITE, outcome="stepped") == (not skips)
        assert value(exporter, NONFINITE, outcome="skipped") == skips
        assert value(exporter, NONFINITE, outcome="unknown") == 0
        assert value(exporter, SKIPPED) == skips
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps


@pytest.mark.parametrize("skips", [True, False])
def test_a_norm_keeps_its_outcome_when_the_counting_ends_before_it(skips: bool) -> None:
    """A NaN observed while counting that ends before its round is over has the outcome of that round, as if followed closely."""
    loop = Loop()
    with watching(loop.model) as exporter:
        loop.rest(exporter)
        loop.backward()
        exporter.observe(grad_norm=math.nan)
        exporter._training.capture._count_only.settle()
        if not skips:
            loop.optimizer.step()
        for _ in range(3):
            loop.step()
        loop.rest(exporter)
        exporter._training.capture._count_only.settle()
        assert value(exporter, NONFINITE, outcome="stepped") == (not skips)
        assert value(exporter, NONFINITE, outcome="skipped") == skips
        assert value(exporter, SKIPPED) == skips


@pytest.mark.parametrize("early", [True, False])
def test_divisors_that_are_told_end_no_counting(early: bool) -> None:
    """Told in each step, before the backward or after it, they reach the sampled rounds, and the others are only counted."""
    loop = Loop()

    def told() -> None:
        tokens = 20 + loop.steps % 7
        if early:
            exporter.observe(grad_divisor=tokens)
        loop.optimizer.zero_grad()
        (loop.model(batch()).square().mean() * tokens).backward()
        if not early:
            exporter.observe(grad_divisor=tokens)
        for parameter in loop.model.parameters():
            parameter.grad.div_(tokens)
        norms.append(math.hypot(*(float(p.grad.double().norm()) for p in loop.model.parameters())))
        loop.optimizer.step()
        loop.steps += 1

    norms: list[float] = []
    with watching(loop.model) as exporter:
        for _ in range(4):
            loop.rest(exporter, one=told)
            was = resting(exporter)
            exporter.observe(grad_divisor=3)
            assert resting(exporter) == was
            while loop.steps % 128:
                told()
            step = value(exporter, "torch_grad_sample_step")
            assert value(exporter, "torch_grad_global_norm") == pytest.approx(norms[int(step) - 1], rel=1e-5)
        assert value(exporter, "torch_grad_clipped_steps_total") == 0
        assert value(exporter, "torch_grad_exporter_timing_interval_steps") > 2


def test_another_optimizer_ends_the_counting() -> None:
    """An optimizer that steps for the first time in counted rounds is counted from that step on."""
    loop = Loop()
    second = torch.optim.Adam(loop.model.second.parameters())
    with watching(loop.model) as exporter:
        loop.rest(exporter)
        for _ in range(5):
            loop.step()
            second.step()
        assert not resting(exporter)
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps
        assert value(exporter, STEPS, optimizer="Adam") == 5


def test_an_optimizer_of_others_changes_nothing() -> None:
    """An optimizer of another model may step in between; its steps are not counted."""
    loop = Loop()
    other = sgd(Perceptron())
    with watching(loop.model) as exporter:
        for _ in range(300):
            loop.step()
            other.step()
        assert value(exporter, STEPS, optimizer="SGD") == 300


def test_a_step_that_the_user_numbers_is_counted_once() -> None:
    """`exporter.step(number)` after each step neither counts twice nor loses the number."""
    loop = Loop()
    with watching(loop.model) as exporter:
        loop.rest(exporter)
        for _ in range(300):
            loop.step()
            exporter.step(loop.steps)
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps
        assert exporter._training.capture._parts.rounds.current.number == loop.steps


def test_a_witness_that_is_not_used_costs_no_backward() -> None:
    """Where the parameter that tells of backwards has no part in some of them, they are counted all the same."""

    class Sometimes(Perceptron):
        used = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if self.used else self.second(torch.zeros(len(x), 8))

    loop = Loop(Sometimes())
    with watching(loop.model) as exporter:
        loop.rest(exporter)
        for step in range(300):
            loop.model.used = step % 10 != 5
            loop.step()
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps
        assert value(exporter, BACKWARDS) == loop.steps
        assert value(exporter, SKIPPED) == 0


def test_a_witness_that_fires_twice_is_none() -> None:
    """A layer that two reentrant checkpoints share receives its gradient twice in each backward; no step is called skipped."""

    class Shared(Perceptron):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=True)
            return self.second(x)

    loop = Loop(Shared(inputs=8))
    with watching(loop.model) as exporter:
        for _ in range(600):
            loop.optimizer.zero_grad()
            loop.model(batch(inputs=8)).square().mean().backward()
            loop.optimizer.step()
        exporter._training.capture._count_only.settle()
        assert value(exporter, SKIPPED) == 0
        assert value(exporter, BACKWARDS) == value(exporter, STEPS, optimizer="SGD") == 600


@pytest.mark.parametrize("set_to_none", [True, False])
def test_one_backward_more_now_and_then_is_no_skipped_step(set_to_none: bool) -> None:
    """A penalty that is added in every 20th round, by a backward of its own, is part of that round."""
    loop = Loop()
    with watching(loop.model) as exporter:
        loop.rest(exporter, one=lambda: loop.step(set_to_none=set_to_none))
        for step in range(800):
            loop.backward(set_to_none=set_to_none)
            if step % 20 == 7:
                loop.add()
            loop.optimizer.step()
        exporter._training.capture._count_only.settle()
        assert value(exporter, SKIPPED) == 0


def test_a_shorter_round_is_what_it_is() -> None:
    """An accumulation that ends early, at the end of an epoch, is counted with the backwards that it had."""
    loop = Loop()
    with watching(loop.model) as exporter:
        loop.rest(exporter, one=lambda: loop.accumulated(4))
        whole = loop.steps
        loop.accumulated(2)
        loop.accumulated(4)
        exporter._training.capture._count_only.settle()
        assert value(exporter, BACKWARDS) == 4 * whole + 2 + 4
        assert value(exporter, SKIPPED) == 0


def test_a_skipped_step_before_a_stall_is_seen() -> None:
    """A step is skipped, the loop stands still, the hooks come back, and the next forward finds the gradients cleared."""
    loop = Loop()
    with watching(loop.model) as exporter:
        loop.rest(exporter)
        loop.backward()
        exporter._training.hooks.wake_modules()
        for _ in range(3):
            loop.step()
        assert value(exporter, SKIPPED) == 1
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps


def test_samples_do_not_alias_with_the_epoch() -> None:
    """With a short last batch in each epoch, whatever its length, the samples come out right within a few percent."""
    loop, samples = Loop(), 0
    with watching(loop.model) as exporter:
        for step in range(4000):
            size = 1 if step % 20 == 19 else 20
            loop.step(size)
            samples += size
        assert value(exporter, "torch_grad_exporter_timing_interval_steps") > 5
        assert value(exporter, SAMPLES) == pytest.approx(samples, rel=0.1)


def test_the_counting_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that become slow do not stay in a counting that was meant for fast ones."""
    loop = Loop()
    with watching(loop.model) as exporter:
        monkeypatch.setattr(count_only, "COUNTING_SECONDS", 0.0)
        began = 0
        for _ in range(300):
            loop.step()
            assert not resting(exporter) or len(exporter._training.capture._count_only._counting.moments) == 0
            began += resting(exporter)
        assert began > 10
        assert value(exporter, STEPS, optimizer="SGD") == 300


def test_what_the_user_observes_is_not_charged_to_one_round() -> None:
    """Values observed in each counted round cost what they cost, and no round that is followed is charged with them."""
    loop = Loop()
    with watching(loop.model) as exporter:
        for _ in range(600):
            loop.step()
            exporter.observe(loss=torch.zeros(()))
        assert value(exporter, "torch_grad_exporter_timing_interval_steps") > 5
        floors = sorted(exporter._training.schedule.counting._floors)
        assert floors[3 * len(floors) // 4] < 20 * floors[0]  # a round that is interrupted by another process costs more
        assert min(exporter._training.schedule._steps) > 0


def test_hooks_of_others_keep_their_places() -> None:
    """With another hook on the model nothing is only counted; a hook that comes in counted rounds stays behind ours."""
    loop = Loop()
    with watching(loop.model) as exporter:
        loop.rest(exporter)
        seen: list[str] = []
        loop.model.register_forward_pre_hook(lambda *_: seen.append("before"))
        loop.model.register_forward_hook(lambda *_: seen.append("after"))
        exporter._training.hooks.wake_modules()
        assert len(loop.model._forward_hooks) == 1
        exporter._training.capture._count_only.settle()
        assert [type(hook).__name__ for hook in loop.model._forward_pre_hooks.values()] == ["GuardedHook", "function"]
        assert [type(hook).__name__ for hook in loop.model._forward_hooks.values()] == ["GuardedHook", "function"]
        for _ in range(600):
            loop.step()
            assert not resting(exporter)
        assert len(seen) == 1200


def test_an_interrupt_at_the_wrong_moment_leaves_no_hook_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KeyboardInterrupt between two lines of the beginning or the end of the counting is mended by the next forward."""
    loop = Loop()

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with watching(loop.model) as exporter:
        loop.rest(exporter)
        with monkeypatch.context() as patch:
            patch.setattr(type(exporter._training.hooks), "_put_back", interrupted)
            with pytest.raises(KeyboardInterrupt):
                exporter._training.capture._count_only.settle()
        for _ in range(5):
            loop.step()
        exporter._training.capture._count_only.settle()
        assert loop.model._forward_hooks
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps


def test_where_no_counting_is_possible_the_schedule_knows() -> None:
    """With two optimizers every round is followed: the gauge says so, and samples get what that leaves of the budget."""
    loop = Loop()
    second = torch.optim.Adam(loop.model.second.parameters())
    with watching(loop.model, overhead_budget=0.01) as exporter:
        for _ in range(300):
            loop.step()
            second.step()
        schedule = exporter._training.schedule
        assert value(exporter, "torch_grad_exporter_timing_interval_steps") == 1
        assert schedule._available() == pytest.approx(0.0025)


def test_an_evaluation_after_counted_rounds_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """When no step comes for a while the worker puts the forward's hooks back, and an evaluation is seen."""
    loop = Loop()
    with watching(loop.model) as exporter:
        loop.rest(exporter)
        monkeypatch.setattr(count_only, "STILL_SECONDS", 0.0)
        exporter._training.capture._count_only.look()
        loop.model.eval()
        with torch.no_grad():
            loop.model(batch())
        assert value(exporter, "torch_train_state", state="evaluating") == 1
        loop.model.train()
        monkeypatch.undo()
        loop.step()
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps
        assert value(exporter, SAMPLES) == 5 * loop.steps


def test_the_worker_is_told_when_steps_may_have_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second after the last step, so that it need not look more often; where rounds are followed there is nothing to look for."""
    loop = Loop()
    with watching(loop.model) as exporter:
        capture, clock = exporter._training.capture, exporter._training.clock
        assert capture.look() == count_only.STILL_SECONDS
        loop.rest(exporter)
        last = clock.last_moment
        monkeypatch.setattr(clock, "clock", lambda: last + 0.25)
        assert capture.look() == pytest.approx(count_only.STILL_SECONDS - 0.25)
        monkeypatch.setattr(clock, "clock", lambda: last + 1.5)
        assert capture.look() == count_only.STILL_SECONDS


def test_the_last_step_is_told_at_once() -> None:
    """The time of the last step moves with each counted step, not only at its end."""
    loop = Loop()
    with watching(loop.model) as exporter:
        loop.rest(exporter)
        before = value(exporter, "torch_train_last_step_timestamp_seconds")
        loop.step()
        assert resting(exporter)
        assert value(exporter, "torch_train_last_step_timestamp_seconds") > before
        assert value(exporter, "torch_train_last_activity_timestamp_seconds") > before


@pytest.mark.parametrize("elsewhere", [True, False])
def test_closing_in_counted_rounds_loses_nothing_and_leaves_nothing(elsewhere: bool) -> None:
    """`close` in counted rounds, from any thread, counts their steps and removes every hook."""
    loop = Loop()
    hooks = dict(_global_optimizer_pre_hooks), dict(_global_optimizer_post_hooks)
    with watching(loop.model) as exporter:
        loop.rest(exporter)
        if elsewhere:
            thread = threading.Thread(target=exporter.close)
            thread.start()
            thread.join()
        exporter.close()
        exporter._host.snapshot()
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps
    assert (dict(_global_optimizer_pre_hooks), dict(_global_optimizer_post_hooks)) == hooks
    assert not loop.model._forward_pre_hooks
    assert not loop.model._forward_hooks
    assert not any(p._post_accumulate_grad_hooks for p in loop.model.parameters())


def test_a_forked_child_counts_nothing() -> None:
    """What a child of `fork` inherits in counted rounds neither counts nor grows."""
    loop = Loop()
    with watching(loop.model) as exporter:
        loop.rest(exporter)
        counting = exporter._training.capture._count_only._counting
        exporter.after_fork_in_child()
        seen = len(counting.moments), len(counting.backwards)
        for _ in range(10):
            loop.step()
        assert (len(counting.moments), len(counting.backwards)) == seen
        assert set(counting.backwards) == {None}
        exporter._ending.closed = False


def test_the_model_stays_ordinary() -> None:
    """In counted rounds the model can be copied, pickled and dropped; nothing of ours keeps it alive."""
    loop = Loop()
    with start_exporter(loop.model, port=None, every=128, overhead_budget=0.0001) as exporter:
        loop.rest(exporter)
        twin = copy.deepcopy(loop.model)
        again = pickle.loads(pickle.dumps(loop.model))  # noqa: S301 - our own bytes
        assert torch.equal(twin.first.weight, again.first.weight)
        assert not any(p._post_accumulate_grad_hooks for p in (*twin.parameters(), *again.parameters()))
        before = value(exporter, BACKWARDS), value(exporter, SAMPLES)
        gone = weakref.ref(loop.model)
        loop.model = loop.optimizer = None
        gc.collect()
        assert gone() is None
        assert (value(exporter, BACKWARDS), value(exporter, SAMPLES)) == before


@pytest.mark.parametrize("clips", [True, False])
def test_training_is_unchanged(clips: bool) -> None:
    """Losses and parameters of a thousand steps are the same in every bit, with counted rounds and without an exporter."""

    def trained(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        loop, losses = Loop(), []
        with watching(loop.model) if watched else contextlib.nullcontext():
            for _ in range(1000):
                loop.optimizer.zero_grad()
                loss = loop.model(batch()).square().mean()
                loss.backward()
                if clips:
                    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.05)
                loop.optimizer.step()
                losses.append(loss.detach())
        return [torch.stack(losses), *loop.model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(trained(watched=True), trained(watched=False), strict=True))


def test_steps_that_are_long_enough_are_all_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a budget that pays for the hooks of each round no round is only counted."""
    followed = CountingBudget.followed
    # Another process that interrupts a hook makes it as dear as a step: not in this test.
    monkeypatch.setattr(CountingBudget, "followed", lambda budget, own: followed(budget, min(own, 50e-6)))
    loop = Loop(Perceptron(inputs=6, hidden=2000))
    with watching(loop.model, overhead_budget=0.99) as exporter:
        for _ in range(100):
            loop.step(size=500)
            assert not resting(exporter)
        assert value(exporter, "torch_grad_exporter_timing_interval_steps") == 1


@pytest.mark.parametrize("part", ["whole", "inner"])
def test_nothing_is_compiled_again(part: str) -> None:
    """A compiled model, or a compiled part of one, is compiled once, though hooks come and go."""
    compiled = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., object]:
        compiled.append(graph)
        return graph.forward

    torch.compiler.reset()
    loop = Loop()
    model = loop.model
    if part == "inner":
        model.first = torch.compile(model.first, backend=backend)
    else:
        loop.model = torch.compile(model, backend=backend)
    with watching(model) as exporter:
        for _ in range(3):
            loop.rest(exporter)
            exporter._training.capture._count_only.settle()
    assert len(compiled) == 1
