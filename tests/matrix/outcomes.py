"""Outcomes: backwards whose step does not take place, and exceptions in a loop that goes on."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch

from tests.matrix.harness import Run, regime
from tests.support.models import Perceptron, batch, sgd


class Failure(Exception):
    """What the user's own code raises in these loops."""


# Steps that are skipped


@regime(set_to_none=[True, False])
def nan_and_a_skipped_step(run: Run, set_to_none: bool) -> None:
    """A loop that does not step where the loss is not finite: that NaN counts once, as skipped."""
    model = Perceptron()
    for step in run.rounds(model, 8, set_to_none=set_to_none):
        loss = model(batch()).square().mean() * (math.nan if step in (2, 4) else 1.0)
        run.backward(loss)
        if not loss.isfinite():
            run.skipped()


@regime(set_to_none=[True, False])
def steps_skipped_in_a_row(run: Run, set_to_none: bool) -> None:
    """Three, then five skipped steps in a row, of finite gradients, are as many skipped steps and as many samples."""
    model = Perceptron()
    for step in run.rounds(model, 14, set_to_none=set_to_none):
        run.backward(model(batch()).square().mean())
        if step in (2, 3, 4, 7, 8, 9, 10, 11):
            run.skipped()


@regime()
def steps_skipped_at_the_start(run: Run) -> None:
    """Before the first step three are skipped, for overflows as under a loss scale that is yet too large: shown after two steps.

    Until then these rounds may be an accumulation, so that they are one sample for the units as well.
    """
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(7):
            optimizer.zero_grad()
            run.backward(model(batch()).square().mean() * (math.inf if step < 3 else 1.0))
            if step < 3:
                run.skipped()
            else:
                run.step(optimizer)
                run.check(without=["torch_train_skipped_steps_total", "torch_grad_dead_ratio"] if step < 5 else [])


@regime(set_to_none=[True, False])
def accumulation_that_is_skipped(run: Run, set_to_none: bool) -> None:
    """A NaN in the second of three micro-batches, after which the round has no step: one skipped step, one sample."""
    model = Perceptron()
    for step in run.rounds(model, 8, set_to_none=set_to_none):
        for micro_batch in range(3):
            run.backward(model(batch()).square().mean() * (math.nan if step in (3, 5) and micro_batch == 1 else 1.0))
        if step in (3, 5):
            run.skipped()


@regime()
def accumulation_that_is_broken_off(run: Run) -> None:
    """A NaN in the first of three micro-batches, after which the loop clears and begins again, is one lost sample."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(8):
            optimizer.zero_grad()
            if step == 3:  # until then each round had three backwards, so nothing is read after the first
                (model(batch()).square().mean() * math.nan).backward()
                if run.record is not None:
                    run.record.backwards += 1
                    run.record.skips += 1
                continue
            if step in (5, 6):
                run.backward(model(batch()).square().mean() * math.nan)
                run.skipped()
                continue
            for _ in range(3):
                run.backward(model(batch()).square().mean())
            run.step(optimizer)
            run.check()
            run.shows(float(step > 3), "torch_grad_exporter_captures_skipped_total", reason="edited")


@regime()
def skipped_without_clearing(run: Run) -> None:
    """A loop that skips a step and leaves the gradients goes on to accumulate: that is one round with two backwards."""
    model = Perceptron()
    for step in run.rounds(model, 9, clear="after"):
        run.backward(model(batch()).square().mean())
        run.skips = step % 3 == 1


class Branches(torch.nn.Module):
    """Two branches, one of which each forward takes."""

    def __init__(self) -> None:
        super().__init__()
        self.left = torch.nn.Linear(6, 3)
        self.right = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, *, right: bool) -> torch.Tensor:
        return self.right(x) if right else self.left(x)


@regime()
def nan_and_a_step(run: Run) -> None:
    """A NaN that is stepped with counts as stepped, and so does each that follows from it, until a checkpoint is loaded."""
    model = Perceptron()
    good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for step in run.rounds(model, 8):
        if step == 6:
            model.load_state_dict(good)
        run.backward(model(batch()).square().mean() * (math.nan if step == 3 else 1.0))


@regime()
def a_step_without_gradients(run: Run) -> None:
    """A step after `zero_grad`, with nothing to step with, is a step and no sample."""
    model = Perceptron()
    optimizer = sgd(model)
    for step in run.rounds(model, 9, optimizer):
        if step % 3 == 2:
            again(run, optimizer)
        run.backward(model(batch()).square().mean())


def again(run: Run, optimizer: torch.optim.Optimizer) -> None:
    """A step that follows a step."""
    if run.record is not None:
        run.record.skipped("stepped")  # the round with the backward is over
    run.step(optimizer)


# Exceptions that are caught


@contextlib.contextmanager
def failing(parameter: torch.nn.Parameter, kind: type[BaseException] = Failure) -> Iterator[None]:
    """A backward that reaches this parameter raises, and that is caught."""

    def fail(_gradient: torch.Tensor) -> None:
        raise kind

    handle = parameter.register_hook(fail)
    with contextlib.suppress(kind):
        yield
    handle.remove()


@regime(kind=[Failure, KeyboardInterrupt])
def a_backward_that_raises(run: Run, kind: type[BaseException]) -> None:
    """A backward that raises half way and is caught is none; the rounds after it are right."""
    model = Perceptron()
    for step in run.rounds(model, 8):
        loss = model(batch()).square().mean()
        if step in (1, 4, 5):
            run.skips = True
            with failing(model.first.weight, kind):
                loss.backward()
        else:
            run.backward(loss)


@regime()
def a_backward_that_raises_and_is_not_cleared(run: Run) -> None:
    """What a backward left that raised half way is part of the next round's gradient if it is not cleared."""
    model = Perceptron()
    for step in run.rounds(model, 8, clear="after"):
        loss = model(batch()).square().mean()
        if step in (1, 4):
            run.skips = True
            with failing(model.first.weight):
                loss.backward()
        else:
            run.backward(loss)


@regime()
def a_backward_that_is_tried_again(run: Run) -> None:
    """A backward that raised, as for want of memory, is run again with a smaller batch."""
    model = Perceptron()
    optimizer = sgd(model)
    for step in run.rounds(model, 6, optimizer):
        if step in (1, 4):
            with failing(model.second.bias):
                model(batch(8)).square().mean().backward()
            optimizer.zero_grad()
        run.backward(model(batch(4)).square().mean())


class FailsToStep(torch.optim.SGD):
    """An optimizer whose step raises on request."""

    fails = False

    def step(self, closure: object = None) -> object:
        if self.fails:
            raise Failure
        return super().step(closure)


@regime()
def a_step_that_raises(run: Run) -> None:
    """A step that raises has not taken place: its backward counts as one that no step followed."""
    model = Perceptron()
    optimizer = FailsToStep(model.parameters(), lr=0.05)
    for step in run.rounds(model, 8, optimizer):
        run.backward(model(batch()).square().mean())
        optimizer.fails = step in (2, 5)
        if optimizer.fails:
            with contextlib.suppress(Failure):
                optimizer.step()
            run.skipped()
