"""What became of the steps whose gradients or norms are not finite, and steps that raise, are left out or never come."""

from __future__ import annotations

import math
import time

import pytest
import torch

from tests.capture.scenes import (
    ACCUMULATED,
    CAPTURES,
    COUNTED,
    LAYER_CAPTURES,
    NORM,
    SKIPPED,
    STEPS,
    Loop,
    clearing,
    loss_of,
    watching,
    whole,
)
from tests.support.models import Perceptron, sgd
from tests.support.scrape import outcomes, value

DISTRIBUTION = "torch_grad_global_norm_distribution_count"
ELEMENTS = "torch_grad_nonfinite_elements_total"

# Norms that the user observes, in rounds that are only counted: that of a sampled round has the outcome of the sample


@pytest.mark.slow
@pytest.mark.parametrize("step_first", [True, False])
def test_an_observed_norm_has_its_own_outcome(step_first: bool) -> None:
    """A NaN given by `observe(grad_norm=)` has the outcome of its round, observed before or after the step."""
    loop = Loop()

    def observed(norm: float = 1.0, *, skip: bool = False) -> None:
        loop.backward()
        if step_first and not skip:
            loop.optimizer.step()
        exporter.observe(grad_norm=norm)
        if not step_first and not skip:
            loop.optimizer.step()
        loop.steps += not skip

    with watching(loop.model, **COUNTED) as exporter:
        loop.warm_up(exporter, "counted", observed)
        for skips, expected in (("this", [1, None]), ("the next", [1, 1]), ("none", [1, 2])):
            observed(math.nan, skip=skips == "this")
            observed(skip=skips == "the next")
            loop.go_on("counted", observed)
            assert [outcomes(exporter).get(outcome) for outcome in ("skipped", "stepped")] == expected
        assert value(exporter, SKIPPED) == 2
        assert value(exporter, STEPS, optimizer="SGD") == loop.steps


@pytest.mark.slow
@pytest.mark.parametrize("step_first", [True, False])
def test_norms_observed_in_each_round_count_once(step_first: bool) -> None:
    """Of 200 NaN norms each is counted once, wherever rounds are sampled or only counted."""
    loop = Loop()
    with watching(loop.model, every=64, overhead_budget=0.0001) as exporter:

        def step() -> None:
            loop.backward()
            total = torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
            if step_first:
                loop.optimizer.step()
            exporter.observe(grad_norm=total)
            if not step_first:
                loop.optimizer.step()
            loop.steps += 1

        for _ in range(60):
            step()
        with torch.no_grad():
            loop.model.second.weight.fill_(math.nan)
        for _ in range(200):
            step()
    assert outcomes(exporter) == {"stepped": 200}


def test_a_norm_whose_step_never_comes() -> None:
    """A NaN that was observed before `close`, and whose step never came, counts once as that of a skipped step."""
    loop = Loop()
    with watching(loop.model, every=4096) as exporter:
        for _ in range(3):
            loop.step()
        loop.backward()
        exporter.observe(grad_norm=math.nan)
        for _ in range(2):
            exporter.close()
            assert outcomes(exporter) == {"skipped": 1}


# Samples that are not finite


@pytest.mark.process
def test_a_slow_round_is_shown_whole_and_once() -> None:
    """However long a round takes, norms, histograms and sums are those of whole rounds, each once."""
    loop, squares = Loop(), 0.0
    with watching(loop.model) as exporter:
        for rounds, backwards in enumerate((4, 1, 3), start=1):
            before = value(exporter, NORM)
            loop.optimizer.zero_grad()
            for number in range(backwards):
                loop.add()
                if backwards == 3 and number == 0:
                    time.sleep(1.1)  # a pending sample with a NaN would be counted by now
                assert value(exporter, NORM) == before
            seen = whole(loop.model)
            squares += seen**2
            loop.optimizer.step()
            assert value(exporter, NORM) == pytest.approx(seen, rel=1e-5)
            added = sum(value(exporter, ACCUMULATED, layer=layer) or 0.0 for layer in ("first", "second"))
            assert added == pytest.approx(squares, rel=1e-5)
            assert value(exporter, CAPTURES) == value(exporter, DISTRIBUTION) == rounds


@pytest.mark.parametrize("more", [0, 1])
@clearing
def test_a_nan_after_a_cleared_backward(more: int, set_to_none: bool) -> None:
    """The first round begins again, its second backward has a NaN, others may follow: the step counts once as stepped."""
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
        assert value(exporter, LAYER_CAPTURES, layer="first") == 1
        assert value(exporter, ELEMENTS, layer="second", kind="nan") == 27
        assert value(exporter, STEPS, optimizer="SGD") == 1


def test_a_nan_before_a_cleared_backward() -> None:
    """A NaN whose gradients were cleared counts once as skipped, and what follows in that round once as stepped."""
    loop = Loop()
    with watching(loop.model) as exporter:
        loss_of(loop.model, nan=True).backward()
        loop.backward()
        loop.add()
        seen = whole(loop.model)
        loop.optimizer.step()
        assert outcomes(exporter) == {"skipped": 1}
        assert value(exporter, NORM) == pytest.approx(seen)
        for _ in range(2):
            loop.step()
        assert outcomes(exporter) == {"skipped": 1}
        assert value(exporter, SKIPPED) == 1


def test_a_nan_in_the_second_of_two_passes() -> None:
    """Where each step takes two passes with a clearing in between (SAM), the NaN of a second pass is that of one step."""
    model = Perceptron()
    optimizer = sgd(model, lr=0.0)
    with watching(model) as exporter:
        for step in range(8):
            for second in (False, True):
                optimizer.zero_grad()
                loss_of(model, nan=second and step in (0, 2)).backward()
            seen = whole(model)
            optimizer.step()
            assert value(exporter, NORM) == pytest.approx(seen, nan_ok=True)
            with torch.no_grad():  # lr=0 times NaN is NaN
                for parameter in model.parameters():
                    parameter.nan_to_num_(0.1)
        assert outcomes(exporter) == {"stepped": 2}
        assert value(exporter, SKIPPED) == 0
        assert value(exporter, LAYER_CAPTURES, layer="first") == value(exporter, CAPTURES) == 8


# Steps that a scaler leaves out, or that one of two optimizers takes


@pytest.mark.parametrize("place", ["last", "amid"])
@pytest.mark.parametrize("every", [1, 1000])
def test_a_step_that_a_fused_optimizer_left_out(every: int, place: str) -> None:
    """A step that a gradient scaler leaves out is skipped and not counted, also as the last one before the end."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with watching(model, every=every) as exporter:
        for step in range(4 if place == "last" else 8):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, nan=step == 3)).backward()
            scaler.step(optimizer)
            scaler.update()
        exporter.close()
        assert value(exporter, SKIPPED) == 1
        assert value(exporter, STEPS, optimizer="SGD") == step
        assert outcomes(exporter) == ({"skipped": 1} if every == 1 else {})


def test_a_step_of_one_of_two_optimizers() -> None:
    """A round in which one of two optimizers has stepped on a NaN has the outcome of that step, whatever the other does."""
    model = Perceptron()
    first, second = sgd(model.first), torch.optim.Adam(model.second.parameters())
    start = [parameter.detach().clone() for parameter in model.parameters()]
    with watching(model) as exporter:
        for nan in (True, False):
            first.zero_grad()
            second.zero_grad()
            loss_of(model, nan=nan).backward()
            first.step()
            with torch.no_grad():
                for parameter, value_before in zip(model.parameters(), start, strict=True):
                    parameter.copy_(value_before)
        assert outcomes(exporter) == {"stepped": 1}
