"""Rounds, captures and their outcomes in cases where a careless change goes unnoticed elsewhere.

Everything here is seen from outside: a training loop, the user's calls and a scrape. Numbers are compared with the loop's own
float64 record, or with what the test counts by hand.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.models import Perceptron, batch, sgd
from tests.support.record import norm
from tests.support.scrape import errors, lost, mode, value
from torch_grad_exporter import Exporter, start_exporter

BACKWARDS = "torch_train_backward_passes_total"
CAPTURES = "torch_grad_exporter_captures_total"
MISSING = "torch_grad_missing_parameters"
NONFINITE = "torch_grad_nonfinite_steps_total"
SAMPLES = "torch_train_samples_total"
SKIPPED = "torch_train_skipped_steps_total"
STEPS = "torch_train_steps_total"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@contextlib.contextmanager
def watching(model: torch.nn.Module | Mapping[str, torch.nn.Module], **options: object) -> Iterator[Exporter]:
    """An exporter that samples every round, serves nothing and has no failure of its own."""
    off = dict.fromkeys(("cuda_memory", "gpu", "process", "host", "container", "whole_run"), False)  # scrapes are many here
    with start_exporter(model, port=None, **{"every": 1, "collectors": off, **options}) as exporter:
        yield exporter
        assert not errors(exporter)


def outcomes(exporter: Exporter) -> dict[str, float]:
    """How many steps with a gradient that is not finite had which outcome; those that are 0 are left out."""
    found = {outcome: value(exporter, NONFINITE, outcome=outcome) for outcome in ("stepped", "skipped", "unknown")}
    return {outcome: count for outcome, count in found.items() if count}


def loss_of(model: torch.nn.Module, *, nan: bool = False) -> torch.Tensor:
    """A loss over a random batch; `nan`: one whose gradients are all NaN."""
    return model(batch()).square().mean() * (math.nan if nan else 1.0)


# The way of the backward changes


@pytest.mark.parametrize("changed", [1, 10, 70])
def test_a_backward_that_goes_another_way_is_noticed_at_once(changed: int) -> None:
    """A second backward that begins at submodules, from some step on, is counted and read from the first sampled round on."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model) as exporter:
        for step in range(changed + 8):
            optimizer.zero_grad()
            loss_of(model).backward()
            if step >= changed:
                (model.second(torch.randn(5, 8)).square().mean() + model.first(batch()).square().mean()).backward()
            seen = norm(p.grad.double() for p in model.first.parameters())
            optimizer.step()
            assert mode(exporter) == ("output" if step < changed else "parameter")
            assert value(exporter, "torch_grad_norm", layer="first") == pytest.approx(seen)
        assert value(exporter, BACKWARDS) == changed + 16
        assert value(exporter, STEPS, optimizer="SGD") == changed + 8
        assert value(exporter, SKIPPED) == 0
        assert lost(exporter) == {}


def test_hooked_nodes_change_nothing_where_the_root_sees_all() -> None:
    """After 130 ordinary steps the rung is still `output` and each round was captured once."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model) as exporter:
        for _ in range(130):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
        assert mode(exporter) == "output"
        assert value(exporter, CAPTURES) == value(exporter, BACKWARDS) == 130
        assert lost(exporter) == {}


def test_two_missed_backwards_in_a_row_change_the_rung_and_single_ones_do_not() -> None:
    """Where no nodes are hooked, a step whose backward went around the root changes nothing; two such steps in a row do."""
    model = Perceptron()
    optimizer = sgd(model)

    def step(*, around: bool) -> None:
        optimizer.zero_grad()
        output = model.second(model.first(batch()).relu()) if around else model(batch())
        output.square().mean().backward()
        optimizer.step()

    with watching(model, every=1000) as exporter:
        for _ in range(4):
            for _ in range(3):
                step(around=False)
            step(around=True)
        assert mode(exporter) == "output"
        assert value(exporter, BACKWARDS) == 12
        step(around=True)
        assert mode(exporter) == "parameter"
        assert value(exporter, STEPS, optimizer="SGD") == 17


# Samples


def clip(model: Perceptron) -> None:
    """Clips the gradients."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def remove(model: Perceptron) -> None:
    """Throws a gradient away."""
    model.first.bias.grad = None


@pytest.mark.parametrize("edit", [clip, remove])
def test_a_sample_that_is_lost_is_counted_once(edit: Callable[[Perceptron], None]) -> None:
    """A round with fewer backwards than the others, whose gradients were edited before it could be read, is one lost sample."""
    model = Perceptron()
    optimizers = [torch.optim.SGD(model.first.parameters(), lr=0.01), torch.optim.Adam(model.second.parameters(), lr=0.01)]
    with watching(model) as exporter:
        for backwards in (2, 2, 2, 1, 2, 2):
            model.zero_grad()
            for _ in range(backwards):
                loss_of(model).backward()
            edit(model)
            for optimizer in optimizers:
                optimizer.step()
        assert lost(exporter) == {"edited": 1}
        assert value(exporter, "torch_grad_captures_total", layer="first") == 5


def test_a_skipped_step_that_was_sampled_asks_for_no_more_samples() -> None:
    """With every fifth round sampled, and the steps of just those skipped, there is one sample to each five rounds as before."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model, every=5) as exporter:
        skipped = 0
        for step in range(40):
            before = value(exporter, CAPTURES) or 0
            optimizer.zero_grad()
            loss_of(model).backward()
            if step > 5 and value(exporter, CAPTURES) > before:
                skipped += 1
            else:
                optimizer.step()
        assert skipped == 7
        assert value(exporter, CAPTURES) == 8
        assert value(exporter, SKIPPED) == skipped - (value(exporter, STEPS, optimizer="SGD") + skipped < 40)


def test_a_hook_for_a_single_step_does_not_stay() -> None:
    """Beside a hook of the user's on the optimizer there is none of ours after a step, however many were sampled."""
    model = Perceptron()
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(lambda *_: None)
    with watching(model) as exporter:
        for step in range(1, 6):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            assert len(optimizer._optimizer_step_pre_hooks) == 1
            assert value(exporter, CAPTURES) == step


# Steps that raise


class Fallible(torch.optim.SGD):
    """An optimizer whose step raises while `broken` is set."""

    broken = False

    def step(self, closure: object = None) -> None:
        """Steps, or raises after a given closure has run."""
        if closure is not None:
            closure()
        if self.broken:
            raise RuntimeError("the user's own")
        super().step()


@pytest.mark.parametrize("found", [1.0, 0.0])
@pytest.mark.parametrize("forward_first", [True, False])
def test_a_fused_step_that_raises_leaves_nothing_to_the_next(found: float, forward_first: bool) -> None:
    """What a gradient scaler told of a step that raised says nothing about the next step, which has no scaler and takes place."""
    model = Perceptron()
    optimizer = Fallible(model.parameters(), lr=0.01)
    with watching(model) as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
        loss_of(model).backward()
        optimizer.found_inf, optimizer.broken = torch.tensor([found]), True
        with pytest.raises(RuntimeError, match="the user's own"):
            optimizer.step()
        del optimizer.found_inf
        optimizer.broken = False
        steps = 3
        if not forward_first:  # the same round again
            optimizer.step()
            steps += 1
        for _ in range(4):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            steps += 1
            assert value(exporter, STEPS, optimizer="Fallible") == steps
        assert value(exporter, SKIPPED) == (1 if forward_first else 0)


def test_a_step_with_a_closure_that_raises_leaves_nothing_to_the_next() -> None:
    """After a step with a closure that raised, an ordinary step is measured before it happens, and norms are right."""
    model = Perceptron()
    optimizer = Fallible(model.parameters(), lr=0.01)

    def closure() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()

    with watching(model) as exporter:
        for _ in range(3):
            optimizer.step(closure)
        optimizer.broken = True
        with pytest.raises(RuntimeError, match="the user's own"):
            optimizer.step(closure)
        optimizer.broken = False
        for done in range(4, 10):
            optimizer.zero_grad()
            loss_of(model).backward()
            before = norm(p.grad.double() for p in model.parameters())
            torch.nn.utils.clip_grad_norm_(model.second.parameters(), 0.5 * norm(p.grad for p in model.second.parameters()))
            after = norm(p.grad.double() for p in model.parameters())
            optimizer.step()
            for parameter in model.parameters():
                parameter.grad.mul_(3)  # the gradients are not read any more
            assert value(exporter, STEPS, optimizer="Fallible") == done
            assert value(exporter, "torch_grad_global_norm") == pytest.approx(before)
            clipped = value(exporter, "torch_grad_clip_coefficient")
            assert clipped == pytest.approx(after / before, rel=1e-3)


def test_a_step_with_a_closure_that_raises_was_skipped() -> None:
    """Of steps with a closure one raises after its backward: the next one's closure clears, and one step was skipped."""
    model = Perceptron()
    optimizer = Fallible(model.parameters(), lr=0.01)

    def closure() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()

    with watching(model) as exporter:
        for step in range(8):
            optimizer.broken = step == 4
            with pytest.raises(RuntimeError, match="the user's own") if optimizer.broken else contextlib.nullcontext():
                optimizer.step(closure)
        assert value(exporter, STEPS, optimizer="Fallible") == 7
        assert value(exporter, BACKWARDS) == 8
        assert value(exporter, SKIPPED) == 1


# Gradients that were cleared before the step


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_nan_after_a_cleared_backward_is_counted_once(more: int, set_to_none: bool) -> None:
    """The first round begins again, the second capture has a NaN, others may follow, and the step is counted once as stepped."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model) as exporter:
        loss_of(model).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, nan=True).backward()
        for _ in range(more):
            loss_of(model).backward()
        optimizer.step()
        assert outcomes(exporter) == {"stepped": 1}
        assert value(exporter, "torch_grad_captures_total", layer="first") == 1
        assert value(exporter, "torch_grad_nonfinite_elements_total", layer="second", kind="nan") == 27
        assert value(exporter, STEPS, optimizer="SGD") == 1


def test_two_passes_to_each_step_with_a_nan_in_the_second() -> None:
    """Where each step takes two passes with a clearing in between (SAM), the NaN of a second pass is that of one step."""
    model = Perceptron()
    optimizer = sgd(model, lr=0.0)
    with watching(model) as exporter:
        for step in range(8):
            for second in (False, True):
                optimizer.zero_grad()
                loss_of(model, nan=second and step in (0, 2)).backward()
            seen = norm(p.grad.double() for p in model.parameters())
            optimizer.step()
            assert value(exporter, "torch_grad_global_norm") == pytest.approx(seen, nan_ok=True)
            if step == 2:  # lr=0 times NaN is NaN: mend the parameters
                assert outcomes(exporter) == {"stepped": 2}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.nan_to_num_(0.1)
        assert outcomes(exporter) == {"stepped": 2}
        assert value(exporter, SKIPPED) == 0
        assert value(exporter, "torch_grad_captures_total", layer="first") == 8


def test_a_nan_before_a_cleared_backward_is_a_skipped_step() -> None:
    """A NaN whose gradients were cleared is counted once as skipped, and what follows in that round once as stepped."""
    model = Perceptron()
    optimizer = sgd(model, lr=0.0)
    with watching(model) as exporter:
        loss_of(model, nan=True).backward()
        optimizer.zero_grad()
        loss_of(model).backward()
        loss_of(model).backward()
        seen = norm(p.grad.double() for p in model.parameters())
        optimizer.step()
        assert outcomes(exporter) == {"skipped": 1}
        assert value(exporter, "torch_grad_global_norm") == pytest.approx(seen)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
        assert outcomes(exporter) == {"skipped": 1}
        assert value(exporter, SKIPPED) == 1


class Headed(Perceptron):
    """A model whose backward stops at its head while `head_only` is set."""

    head_only = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        return self.second(hidden.detach() if self.head_only else hidden)


def test_a_cleared_backward_that_reached_more_is_forgotten() -> None:
    """With two passes to a step, a layer that only the first one reached, before the gradients were zeroed, has no gradient."""
    model = Headed()
    optimizer = sgd(model)
    with watching(model) as exporter:
        for step in range(1, 5):  # after four such steps two passes are taken for an accumulation
            optimizer.zero_grad(set_to_none=step == 1)
            model.head_only = False
            loss_of(model).backward()
            optimizer.zero_grad(set_to_none=step == 1)
            model.head_only = True
            loss_of(model).backward()
            seen = norm(p.grad.double() for p in model.second.parameters())
            optimizer.step()
            assert value(exporter, "torch_grad_norm", layer="second") == pytest.approx(seen)
            assert value(exporter, "torch_grad_captures_total", layer="second") == step
            assert value(exporter, MISSING, layer="first") == 2
            assert not value(exporter, "torch_grad_captures_total", layer="first")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_cleared_backward_that_reached_more_is_forgotten_on_the_rung_of_parameters(set_to_none: bool) -> None:
    """Where backwards are seen by the parameters alone, a layer that only a cleared backward reached has no gradient either."""
    model = Perceptron()
    optimizer = sgd(model)

    def backward(*, head_only: bool = False) -> None:
        hidden = model.first(batch()).relu()
        model.second(hidden.detach() if head_only else hidden).square().mean().backward()

    with watching(model) as exporter:
        for _ in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            backward()
            optimizer.step()
        assert mode(exporter) == "parameter"
        assert value(exporter, MISSING, layer="first") == 0
        for skipped in range(1, 4):
            optimizer.zero_grad(set_to_none=set_to_none)
            backward()
            optimizer.zero_grad(set_to_none=set_to_none)
            backward(head_only=True)
            seen = norm(p.grad.double() for p in model.second.parameters())
            optimizer.step()
            assert value(exporter, SKIPPED) == skipped
            assert value(exporter, MISSING, layer="first") == 2
            assert value(exporter, "torch_grad_norm", layer="second") == pytest.approx(seen)


def test_skipped_steps_are_counted_at_once_when_training_is_known() -> None:
    """After steps with nothing cleared before them, a clearing is a skipped step at once, also right after another one."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model) as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
        for skipped in range(1, 4):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.zero_grad()
            loss_of(model).backward()
            assert value(exporter, SKIPPED) == skipped
            optimizer.step()


def test_clearings_before_the_first_step_are_held_back() -> None:
    """Before any step clearings may be passes of one step; the first step without a clearing shows that they were skipped steps."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model) as exporter:
        shown = []
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model).backward()
            shown.append(value(exporter, SKIPPED) or 0)
            if step >= 5:
                optimizer.step()
        assert shown == [0] * 7 + [5]


@pytest.mark.parametrize("tasks", [2, 5, 9])
def test_surgery_on_the_gradients_of_several_tasks_skips_nothing(tasks: int) -> None:
    """One backward for each task, whose gradients are taken away and written back together: one step, from the first one on."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model) as exporter:
        for step in range(12):
            taken = [torch.zeros_like(parameter) for parameter in model.parameters()]
            for _ in range(tasks):
                optimizer.zero_grad()
                loss_of(model).backward()
                seen = norm(p.grad.double() for p in model.parameters())
                for one, parameter in zip(taken, model.parameters(), strict=True):
                    one.add_(parameter.grad)
            for one, parameter in zip(taken, model.parameters(), strict=True):
                parameter.grad = one
            optimizer.step()
            assert value(exporter, SKIPPED) == 0
            assert value(exporter, STEPS, optimizer="SGD") == step + 1
            assert value(exporter, "torch_grad_global_norm") == pytest.approx(seen)  # the last pass, as the docs say
        assert value(exporter, BACKWARDS) == 12 * tasks


def test_a_step_ends_an_evaluation_also_without_a_forward_of_the_root() -> None:
    """After an evaluation training goes on by way of submodules: the state is `training` again with the first step."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model) as exporter:
        for _ in range(3):
            model.eval()
            with torch.no_grad():
                model(batch())
            assert value(exporter, "torch_train_state", state="evaluating") == 1
            model.train()
            optimizer.zero_grad()
            model.second(model.first(batch()).relu()).square().mean().backward()
            optimizer.step()
            assert value(exporter, "torch_train_state", state="training") == 1
            assert value(exporter, "torch_train_state", state="evaluating") == 0


# The end


def test_a_nan_norm_whose_step_never_comes_is_told_at_the_end() -> None:
    """A NaN that was observed in a round which is not sampled, and then nothing but `close`: counted once, as unknown."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model, every=1000) as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
        loss_of(model).backward()
        exporter.observe(grad_norm=math.nan)
        assert not outcomes(exporter)
        exporter.close()
        assert outcomes(exporter) == {"unknown": 1}
        exporter.close()
        assert outcomes(exporter) == {"unknown": 1}


@pytest.mark.parametrize("every", [1, 1000])
def test_a_last_step_that_a_fused_optimizer_left_out_was_skipped(every: int) -> None:
    """The last step before the end is one that a gradient scaler has left out; it is counted as skipped, and only so."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with watching(model, every=every) as exporter:
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, nan=step == 3)).backward()
            scaler.step(optimizer)
            scaler.update()
        exporter.close()
        assert value(exporter, SKIPPED) == 1
        assert value(exporter, STEPS, optimizer="SGD") == 3


# Optimizers that step within the backward


def test_an_optimizer_that_no_longer_steps_within_the_backward_is_no_longer_counted() -> None:
    """Of two optimizers that step within the backward one stops: only the other one's steps are counted from then on."""
    model = Headed()
    optimizers = {"SGD": torch.optim.SGD(model.first.parameters()), "Adam": torch.optim.Adam(model.second.parameters())}
    with watching(model) as exporter:

        def stepping(optimizer: torch.optim.Optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        model.first.bias.register_post_accumulate_grad_hook(lambda _: stepping(optimizers["SGD"]))
        model.second.bias.register_post_accumulate_grad_hook(lambda _: stepping(optimizers["Adam"]))
        for step in range(8):
            model.head_only = step >= 5
            loss_of(model).backward()
        assert value(exporter, STEPS, optimizer="SGD") == 5
        assert value(exporter, STEPS, optimizer="Adam") == 8
        assert value(exporter, BACKWARDS) == 8


# Parameters that are frozen meanwhile


@pytest.mark.parametrize("reached", [True, False])
def test_a_parameter_frozen_within_a_round_is_not_missing(reached: bool) -> None:
    """A parameter that is frozen after the round has begun, and before it is read, is neither missing nor a failure.

    `reached`: it has a gradient by then, which the optimizer will use.
    """
    model = Headed()
    optimizer = sgd(model)
    with watching(model) as exporter:
        for _ in range(3):  # two backwards to a step: gradients are read after the second
            optimizer.zero_grad()
            loss_of(model).backward()
            loss_of(model).backward()
            optimizer.step()
        optimizer.zero_grad()
        model.head_only = not reached
        loss_of(model).backward()
        model.head_only = False
        model.first.weight.requires_grad_(False)
        loss_of(model).backward()
        weight = [model.first.weight.grad.double()] if reached else []
        seen = norm([model.first.bias.grad.double(), *weight])
        optimizer.step()
        assert value(exporter, "torch_grad_captures_total", layer="first") == 4
        assert value(exporter, MISSING, layer="first") == 0
        assert value(exporter, MISSING, layer="second") == 0
        assert value(exporter, "torch_grad_norm", layer="first") == pytest.approx(seen)
        optimizer.zero_grad()
        loss_of(model).backward()
        loss_of(model).backward()
        seen = norm([model.first.bias.grad.double()])
        optimizer.step()
        assert value(exporter, "torch_grad_captures_total", layer="first") == 5
        assert value(exporter, MISSING, layer="first") == 0
        assert value(exporter, "torch_grad_norm", layer="first") == pytest.approx(seen)


def test_a_parameter_frozen_before_the_first_forward_is_no_failure() -> None:
    """A layer that is frozen between the start and the first forward is not read, not missing, and not shown after a step."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model) as exporter:
        model.first.requires_grad_(False)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            assert value(exporter, MISSING, layer="first") is None
            assert value(exporter, MISSING, layer="second") == 0
            assert value(exporter, "torch_grad_norm", layer="first") is None
        assert value(exporter, CAPTURES) == value(exporter, BACKWARDS) == 3


# Checkpoints of the root


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("every", [1, 3])
def test_a_root_that_is_checkpointed_after_plain_steps(reentrant: bool, every: int) -> None:
    """Steps with and without a checkpoint around the root in turn: the examples of each are counted, and each once."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model, every=every) as exporter:
        for step in range(1, 9):
            optimizer.zero_grad()
            inputs = batch().requires_grad_()
            output = checkpoint(model, inputs, use_reentrant=reentrant) if step % 2 == 0 else model(inputs)
            output.square().mean().backward()
            optimizer.step()
            assert value(exporter, SAMPLES) == 5 * step
            assert value(exporter, STEPS, optimizer="SGD") == step
        assert value(exporter, SKIPPED) == 0


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("every", [1, 3])
def test_a_root_that_is_checkpointed_twice_in_one_backward(reentrant: bool, every: int) -> None:
    """A root that two checkpoints run again within one backward: norms, steps and examples are those of the loop."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model, every=every) as exporter:
        for step in range(1, 13):
            optimizer.zero_grad()
            inputs = [batch().requires_grad_() for _ in range(2)]
            sum(checkpoint(model, one, use_reentrant=reentrant).square().mean() for one in inputs).backward()
            before = value(exporter, CAPTURES)
            seen = norm(p.grad.double() for p in model.first.parameters())
            optimizer.step()
            assert value(exporter, STEPS, optimizer="SGD") == step
            assert value(exporter, SAMPLES) == 10 * step
            if every == 1 and step > 1:
                assert value(exporter, CAPTURES) == step - reentrant
            if value(exporter, CAPTURES) > before or (every == 1 and step > 1):
                assert value(exporter, "torch_grad_norm", layer="first") == pytest.approx(seen)
                assert value(exporter, MISSING, layer="first") == 0
            if not reentrant:
                assert value(exporter, BACKWARDS) == step
        assert value(exporter, CAPTURES) >= 12 // every - 1
        assert value(exporter, SKIPPED) == 0
        assert lost(exporter) == {}
        assert mode(exporter) == ("parameter" if reentrant else "output")
